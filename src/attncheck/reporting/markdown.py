"""Documents as GitHub-flavoured Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from attncheck.core.sanitize_text import for_markdown, markdown_code, shortened
from attncheck.reporting.document import (
    Block,
    Card,
    Cell,
    Chart,
    Document,
    Facts,
    Note,
    Picture,
    Table,
    card_text,
)

_LONGEST_LINE = 2000
_NUMBER = re.compile(r"[-+]?[0-9][0-9.,:e+×/µ%-]*( ?[mnµ]?s†?)?")


def markdown_text(document: Document) -> str:
    """Return ``document`` as Markdown; its texts are escaped, so that none acts as markup."""
    return "\n".join(_lines(document)) + "\n"


def cut_markdown(text: str, largest: int, more: str) -> str:
    """Return the whole lines of ``text`` that fit into ``largest`` bytes, then ``more`` if cut.

    Args:
        more: The last line of a cut page.
    """
    raw = text.encode(errors="backslashreplace")
    if len(raw) <= largest:
        return text
    end = f"\n\n{more}\n"
    # A character that is split by the limit is dropped with its line.
    head = raw[: largest - len(end.encode())].decode(errors="ignore")
    return head.rpartition("\n")[0] + end


def _lines(document: Document) -> Iterator[str]:
    verdict = document.verdict
    title = f"{verdict.word} {verdict.text}".strip() if verdict else document.title
    yield f"# {for_markdown(title)}"
    if document.command:
        # A code span shows everything literally except backticks, which end it.
        yield from ("", f"`{shortened(document.command).replace('`', chr(39))}`")
    yield from _bullets(map(for_markdown, document.facts))
    for section in document.sections:
        if section.title:
            yield from ("", f"## {for_markdown(section.title)}")
        for group in _group_notes(section.blocks):
            yield from _block(group)
    yield from _bullets(map(for_markdown, document.notes))
    for note in document.closing:
        text = for_markdown(note.text)
        yield from ("", f"**{text}**" if note.look in {"bad", "notable"} else text)


def _group_notes(blocks: Iterable[Block]) -> list[list[Block]]:
    """Return ``blocks`` in groups: successive notes together, other blocks alone."""
    groups: list[list[Block]] = []
    for block in blocks:
        if isinstance(block, Note) and groups and isinstance(groups[-1][0], Note):
            groups[-1].append(block)
        else:
            groups.append([block])
    return groups


def _block(group: Sequence[Block]) -> Iterator[str]:
    first = group[0]
    match first:
        case Note():
            yield from _bullets(for_markdown(one.text) for one in group if isinstance(one, Note))
        case Table():
            yield ""
            yield from _table(first)
        case Facts():
            lines: list[str] = []
            for name, text in first.pairs:
                if name or not lines:
                    lines.append(f"{name}: {text}" if name else text)
                else:
                    lines[-1] += f"; {text}"
            yield from _bullets(map(for_markdown, lines))
        case Picture():
            yield from ("", for_markdown(first.title), "")
            yield from _code_block(first.lines)
        case Card():
            yield from ("", f"### {markdown_code(first.kernel)}: {for_markdown(first.heading)}", "")
            yield from _code_block(card_text(first))
        # GitHub does not show our drawings, so the description stands in for a chart.
        case Chart():
            yield from _bullets([for_markdown(first.description)])


def _bullets(lines: Iterable[str]) -> Iterator[str]:
    several = [f"- {line}" for line in lines]
    yield from ["", *several] if several else []


def _table(table: Table) -> Iterator[str]:
    """Yield the lines of a table, with group texts in first columns and remarks in a last one."""
    remarks = any(row.remarks for row in table.rows)
    words = [True] * len(table.groups) + [column.words for column in table.columns]
    names = [*table.groups, *(column.heading for column in table.columns)]
    if remarks:
        names.append("remark")
        words.append(True)
    yield _table_row(map(for_markdown, names))
    yield _table_row("---" if word else "---:" for word in words)
    for row in table.rows:
        cells = [for_markdown(part) for part in row.group] + [_cell(cell) for cell in row.cells]
        cells += [""] * (len(table.columns) - len(row.cells))
        remark_text = "; ".join(remark.text for remark in row.remarks)
        yield _table_row(cells + [for_markdown(remark_text)] * remarks)


def _cell(cell: Cell) -> str:
    text = cell.text.strip()
    if not _NUMBER.fullmatch(text):  # a number needs no escapes
        text = markdown_code(text) if cell.code else for_markdown(text)
    return f"**{text}**" if cell.look == "bad" and text else text


def _code_block(lines: Iterable[str]) -> list[str]:
    """Return a code block whose fence is longer than any in ``lines``, so that none can end it."""
    cut_lines = [line[:_LONGEST_LINE] for line in lines]
    longest = max((len(run) for line in cut_lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", *cut_lines, fence]


def _table_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
