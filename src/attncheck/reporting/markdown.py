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
)
from attncheck.reporting.terminal import card_text

_LONGEST_LINE = 2000
_NUMBER = re.compile(r"[-+]?[0-9][0-9.,:e+×/µ%-]*( ?[mnµ]?s†?)?")


def markdown_text(document: Document) -> str:
    """``document`` as Markdown; foreign text in it is shown as it is, and does nothing."""
    return "\n".join(_lines(document)) + "\n"


def cut_markdown(text: str, largest: int, more: str) -> str:
    """Return as much of a page as ``largest`` bytes hold, in whole lines, and where the rest is.

    Args:
        more: The last line of what was cut.
    """
    raw = text.encode(errors="backslashreplace")
    if len(raw) <= largest:
        return text
    end = f"\n\n{more}\n"
    # A character that the limit splits is dropped with its line.
    kept = raw[: largest - len(end.encode())].decode(errors="ignore")
    return kept.rpartition("\n")[0] + end


def _lines(document: Document) -> Iterator[str]:
    verdict = document.verdict
    title = f"{verdict.word} {verdict.text}".strip() if verdict else document.title
    yield f"# {for_markdown(title)}"
    if document.command:
        # A code span shows everything as it is but its own fence.
        yield from ("", f"`{shortened(document.command).replace('`', chr(39))}`")
    yield from _listed(map(for_markdown, document.facts))
    for section in document.sections:
        if section.title:
            yield from ("", f"## {for_markdown(section.title)}")
        for several in _together(section.blocks):
            yield from _block(several)
    yield from _listed(for_markdown(note.text) for note in document.notes)
    for note in document.closing:
        text = for_markdown(note.text)
        yield from ("", f"**{text}**" if note.look in {"bad", "notable"} else text)


def _together(blocks: Iterable[Block]) -> list[list[Block]]:
    """``blocks``, but notes that follow each other as one list."""
    groups: list[list[Block]] = []
    for block in blocks:
        if isinstance(block, Note) and groups and isinstance(groups[-1][0], Note):
            groups[-1].append(block)
        else:
            groups.append([block])
    return groups


def _block(several: Sequence[Block]) -> Iterator[str]:
    first = several[0]
    match first:
        case Note():
            yield from _listed(for_markdown(one.text) for one in several if isinstance(one, Note))
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
            yield from _listed(map(for_markdown, lines))
        case Picture():
            yield from ("", for_markdown(first.title), "")
            yield from _fenced(first.lines)
        case Card():
            yield from ("", f"### {markdown_code(first.kernel)}: {for_markdown(first.heading)}", "")
            yield from _fenced(card_text(first))
        # GitHub shows no drawing of ours: the description says what it would show.
        case Chart():
            yield from _listed([for_markdown(first.description)])


def _listed(lines: Iterable[str]) -> Iterator[str]:
    several = [f"- {line}" for line in lines]
    yield from ["", *several] if several else []


def _table(table: Table) -> Iterator[str]:
    """Table in which rows share their common columns, and have their remarks in a last one."""
    remarks = any(row.remarks for row in table.rows)
    words = [True] * len(table.groups) + [column.words for column in table.columns]
    names = [*table.groups, *(column.heading for column in table.columns)]
    if remarks:
        names.append("remark")
        words.append(True)
    yield _joined(map(for_markdown, names))
    yield _joined("---" if word else "---:" for word in words)
    for row in table.rows:
        cells = [for_markdown(part) for part in row.group] + [_cell(cell) for cell in row.cells]
        cells += [""] * (len(table.columns) - len(row.cells))
        remark_text = "; ".join(remark.text for remark in row.remarks)
        yield _joined(cells + [for_markdown(remark_text)] * remarks)


def _cell(cell: Cell) -> str:
    text = cell.text.strip()
    if not _NUMBER.fullmatch(text):  # a number is harmless, and reads better without escapes
        text = markdown_code(text) if cell.code else for_markdown(text)
    return f"**{text}**" if cell.look == "bad" and text else text


def _fenced(lines: Iterable[str]) -> list[str]:
    """A block of code, fenced by more than the text holds: nothing in it can end the block."""
    kept = [line[:_LONGEST_LINE] for line in lines]
    longest = max((len(run) for line in kept for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", *kept, fence]


def _joined(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
