"""A small table of our own: on a terminal and in Markdown, from the same cells."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from attncheck.core.sanitize_text import for_markdown, one_line
from attncheck.reporting.cells import STYLES, Cell

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Line", "Sheet", "least_width", "markdown_lines", "terminal_lines"]

_GAP = "  "
_INDENT = "  "
_LEAST = 14  # columns of words that are still read


@dataclass(frozen=True, slots=True)
class Line:
    """One row: a cell for each column, and what they alone would hide."""

    cells: tuple[Cell, ...]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table under a title.

    Attributes:
        title: What all rows share; may hold foreign text, as every cell and remark may.
        columns: Headings.
        words: How many columns, from the left, hold words; the others hold numbers, which end in
            line.
        cut: How many columns, from the left, may be cut where the page is narrow.
        lines: The rows.
    """

    title: str
    columns: tuple[str, ...]
    words: int = 1
    cut: int = 1
    lines: list[Line] = field(default_factory=list)


def terminal_lines(sheet: Sheet, width: int) -> Iterator[Text]:
    """The title, the headings, the rows, each remark below its row.

    Where the columns are wider than ``width``, the widest of those that may be cut is, as far as it
    can be read, and then the next.
    """
    yield Text(one_line(sheet.title), style="bold")
    widths = _widths(sheet, width)
    headings = tuple(Cell(heading, "dim") for heading in sheet.columns)
    for line in (Line(headings), *sheet.lines):
        yield _row(line, widths, sheet.words)
        for remark in line.remarks:
            yield Text(f"{_INDENT * 2}└ {one_line(remark)}", style="yellow")


def markdown_lines(sheet: Sheet) -> Iterator[str]:
    """A heading and a table; the remarks in a last column of their own."""
    remarks = any(line.remarks for line in sheet.lines)
    yield f"## {for_markdown(sheet.title)}"
    yield ""
    numbers = len(sheet.columns) - sheet.words
    extra = 1 if remarks else 0
    yield _joined([*map(for_markdown, sheet.columns), *["remark"] * extra])
    yield _joined(["---"] * sheet.words + ["---:"] * numbers + ["---"] * extra)
    for line in sheet.lines:
        cells = [for_markdown(cell.text) for cell in line.cells]
        yield _joined(cells + [for_markdown("; ".join(line.remarks))] * extra)


def least_width(sheet: Sheet) -> int:
    """Columns that the rows of ``sheet`` take where everything that may be cut is cut."""
    return _total(_widths(sheet, 0))


def _widths(sheet: Sheet, most: int) -> list[int]:
    widths = [
        max(map(cell_len, [heading, *(one_line(line.cells[i].text) for line in sheet.lines)]))
        for i, heading in enumerate(sheet.columns)
    ]
    for i in sorted(range(sheet.cut), key=lambda i: -widths[i]):
        over = _total(widths) - most
        if over > 0:
            widths[i] = max(min(widths[i], _LEAST), widths[i] - over)
    return widths


def _total(widths: list[int]) -> int:
    return len(_INDENT) + sum(widths) + len(_GAP) * (len(widths) - 1)


def _row(line: Line, widths: list[int], words: int) -> Text:
    row = Text(_INDENT)
    for i, (cell, width) in enumerate(zip(line.cells, widths, strict=True)):
        text = _cut(one_line(cell.text), width)
        padding = " " * (width - cell_len(text))
        row.append(_GAP if i else "")
        row.append(text + padding if i < words else padding + text, style=STYLES[cell.look])
    row.rstrip()
    return row


def _cut(text: str, width: int) -> str:
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def _joined(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
