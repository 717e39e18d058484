"""The report as GitHub-flavoured Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.core.sanitize_text import for_markdown, markdown_code, shortened
from attncheck.reporting.content import content
from attncheck.reporting.figures import superscript
from attncheck.reporting.rows import HEADINGS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.records.record import Report
    from attncheck.reporting.content import Content, Section
    from attncheck.reporting.rows import Row

__all__ = ["as_markdown"]


def as_markdown(report: Report) -> str:
    """``report`` as Markdown: one table for each dtype, shape and distribution."""
    return "\n".join(_lines(content(report))) + "\n"


def _lines(page: Content) -> Iterator[str]:
    yield "# Distance from exact attention"
    yield ""
    if page.command:
        # A code span shows everything as it is but its own fence.
        command = shortened(page.command).replace("`", "'")
        yield f"`{command}`"
        yield ""
    yield from (f"- {for_markdown(line)}" for line in page.environments)
    for section in page.sections:
        yield ""
        yield "## " + " · ".join(for_markdown(part) for part in section.title)
        yield ""
        yield from _table(section, page.columns)
        if section.visible:
            yield ""
            yield for_markdown(section.visible)
    yield from _below(page)


def _table(section: Section, columns: tuple[str, ...]) -> Iterator[str]:
    remarks = any(row.remarks for block in section.blocks for row in block.rows)
    headings = ["variant", "heads", "kernel", *(HEADINGS[key] for key in columns)]
    rule = ["---"] * 4 + ["---:"] * (len(columns) - 1)  # the verdict is a word too
    if remarks:
        headings.append("remark")
        rule.append("---")
    yield _joined(headings)
    yield _joined(rule)
    for block in section.blocks:
        for row in block.rows:
            cells = [for_markdown(block.variant), for_markdown(block.heads)]
            cells += [markdown_code(row.kernel), *_cells(row, columns)]
            yield _joined(
                cells
                + (
                    ["; ".join(for_markdown(remark.text) for remark in row.remarks)]
                    if remarks
                    else []
                )
            )


def _cells(row: Row, columns: tuple[str, ...]) -> list[str]:
    if row.mark:
        return [row.mark.text] + [""] * (len(columns) - 1)
    cells = [row.cells[key] for key in columns]
    return [f"**{c.text.strip()}**" if c.look == "bad" else c.text.strip() for c in cells]


def _below(page: Content) -> Iterator[str]:
    if page.notes or page.absent:
        yield ""
    for note in page.notes:
        yield f"- {superscript(note.number)} {note.status}: {for_markdown(note.reason)}"
    for kernel, reason in page.absent:
        yield f"- {markdown_code(kernel)} is absent: {for_markdown(reason)}"
    if page.profiles:
        yield ""
        yield "Judged as:"
        yield ""
        yield from (f"- {for_markdown(line)}" for line in page.profiles)
    if page.sections:
        yield ""
        yield "How to read it:"
        yield ""
        yield from (f"- {line}" for line in page.reading)
    yield ""
    if page.insensitive:
        yield f"**{page.insensitive}.**"
        yield ""
    yield page.counts


def _joined(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
