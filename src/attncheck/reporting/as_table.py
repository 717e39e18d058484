"""The table that a terminal shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from attncheck.core.sanitize_text import one_line, shortened
from attncheck.reporting.cells import STYLES
from attncheck.reporting.content import content
from attncheck.reporting.figures import superscript
from attncheck.reporting.gradients import SHARES
from attncheck.reporting.rows import HEADINGS
from attncheck.reporting.screen import PLAIN_WIDTH, wrapped
from attncheck.reporting.verdicts import STATUSES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.records.record import Report
    from attncheck.reporting.content import Content, Section
    from attncheck.reporting.rows import Row

__all__ = ["as_table", "table_lines"]

_LONGEST_KERNEL, _SHORTEST_KERNEL = 28, 14
_GAP = "  "
_INDENT = "  "
# What a narrow terminal does without, the first to go first. Of gradients RMSE stays longest: the
# verdict says whether they are right, and a footnote which is not.
_SPARED: tuple[tuple[str, ...], ...] = (
    *(("at",), ("bias",), ("inputs",), ("max",), ("lse",), ("time",), ("floor",), ("lse_share",)),
    ("environment",),
    tuple(SHARES),
    ("dsink_ideal", "dsink_rmse", "dcaptured_ideal", "dcaptured_rmse"),
    ("dq_ideal", "dk_ideal", "dv_ideal"),
)
# Where gradients leave no room for them either.
_SPARED_FOR_GRADIENTS = (("ideal",), ("share",))


def as_table(report: Report, *, width: int = PLAIN_WIDTH) -> str:
    """``report`` as plain text of at most ``width`` columns."""
    return "".join(f"{line.plain}\n" for line in table_lines(report, width))


def table_lines(report: Report, width: int) -> Iterator[Text]:
    """``report`` line by line, at most ``width`` columns wide, with the colours it may have."""
    yield from _lines(content(report), width)


class _Grid:
    """Widths of the columns that fit."""

    def __init__(self, page: Content, width: int) -> None:
        rows = [r for s in page.sections for b in s.blocks for r in b.rows]
        names = [cell_len(one_line(r.kernel)) for r in rows]
        self.kernel = min(max([len("kernel"), *names]), _LONGEST_KERNEL) + len(_INDENT)
        self.columns = {key: _column_width(key, rows) for key in page.columns}
        self.left_out = []
        has_gradients = not self.columns.keys().isdisjoint(SHARES)
        for keys in (*_SPARED, *(_SPARED_FOR_GRADIENTS if has_gradients else ())):
            if self.width > width:
                self.left_out += [HEADINGS[key] for key in keys if self.columns.pop(key, None)]
        if self.width > width:
            cut = self.kernel - (self.width - width)
            self.kernel = min(self.kernel, max(cut, _SHORTEST_KERNEL + len(_INDENT)))

    @property
    def width(self) -> int:
        return self.kernel + sum(len(_GAP) + w for w in self.columns.values())


def _column_width(key: str, rows: list[Row]) -> int:
    texts = [r.cells[key].text for r in rows if r.cells]
    return max(map(len, [HEADINGS[key], *texts]))


def _lines(page: Content, width: int) -> Iterator[Text]:
    yield from wrapped(page.command, width, style="bold")
    for line in page.environments:
        yield from wrapped(line, width, style="dim")
    grid = _Grid(page, width)
    for section in page.sections:
        yield Text("")
        yield from _section_lines(section, grid, width)
    yield Text("")
    yield from _below(page, grid, width)


def _section_lines(section: Section, grid: _Grid, width: int) -> Iterator[Text]:
    yield Text(_elided(" · ".join(section.title), width), style="bold cyan")
    heading = "kernel".ljust(grid.kernel)
    for key, size in grid.columns.items():
        heading += _GAP + _aligned(HEADINGS[key], key, size)
    yield Text(heading.rstrip(), style="dim")
    for block in section.blocks:
        title = " · ".join(part for part in (block.variant, block.heads) if part)
        yield Text(_elided(title, width), style="bold")
        for row in block.rows:
            yield _row_line(row, grid)
            for remark in row.remarks:
                style = STYLES[remark.look]
                yield from wrapped(f"└ {remark.text}", width, style=style, indent=_INDENT * 2)
    if section.visible:
        yield from wrapped(section.visible, width, style="dim", indent=_INDENT)


def _row_line(row: Row, grid: _Grid) -> Text:
    line = Text(_INDENT)
    line.append(
        _padded(_elided(row.kernel, grid.kernel - len(_INDENT)), grid.kernel - len(_INDENT))
    )
    if row.mark:
        line.append(_GAP)
        line.append(row.mark.text, style=STYLES[row.mark.look])
        return line
    for key, size in grid.columns.items():
        cell = row.cells[key]
        line.append(_GAP)
        line.append(_aligned(cell.text, key, size), style=STYLES[cell.look])
    line.rstrip()
    return line


def _below(page: Content, grid: _Grid, width: int) -> Iterator[Text]:
    for note in page.notes:
        mark = superscript(note.number)
        style = STYLES[STATUSES[note.status]]
        yield from wrapped(f"{mark} {note.status}: {shortened(note.reason)}", width, style=style)
    for kernel, reason in page.absent:
        line = f"{one_line(kernel)} is absent: {shortened(reason)}"
        yield from wrapped(line, width, style="dim")
    if page.notes or page.absent:
        yield Text("")
    for line in page.profiles:
        yield from wrapped(f"judged as {line}", width, style="dim")
    for line in page.reading if page.sections else ():
        yield from wrapped(line, width, style="dim")
    if grid.left_out:
        columns = ", ".join(grid.left_out)
        yield from wrapped(f"Left out at {width} columns: {columns}.", width, style="dim")
    if page.insensitive:
        yield from wrapped(page.insensitive, width, style="yellow")
    yield Text(page.counts)


def _aligned(text: str, key: str, size: int) -> str:
    """Numbers end in line, and words begin in line."""
    return text.ljust(size) if key == "verdict" else text.rjust(size)


def _elided(text: str, size: int) -> str:
    line = one_line(text)
    return line if cell_len(line) <= size else set_cell_size(line, size - 1) + "…"


def _padded(text: str, size: int) -> str:
    return text + " " * (size - cell_len(text))
