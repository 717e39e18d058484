"""A BlockReport → table, pictures, JSON."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

from rich.text import Text

from attncheck.core.sanitize_text import shortened
from attncheck.records.survey_reports import BLOCK_SCHEMA, EMPTY, FULL, PARTIAL, BlockReport
from attncheck.reporting import figures, screen, struct_json
from attncheck.reporting.cells import Cell
from attncheck.reporting.sheet import Line, Sheet, terminal_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.records.survey_reports import BlockRecord

__all__ = ["load", "show", "written"]

_INDENT = "  "
_SIGNS = {EMPTY: "·", PARTIAL: "▒", FULL: "█"}
_COLUMNS = ("tile", "tiles", "empty", "partial", "full", "sparsity", "ideal speed-up")


def written(report: BlockReport) -> str:
    """``report`` as JSON."""
    return struct_json.written(report)


def load(text: str) -> BlockReport:
    """The report that ``written`` wrote; raises UsageError for anything else."""
    return struct_json.read(text, BlockReport, BLOCK_SCHEMA)


def show(report: BlockReport, *, as_json: bool, stream: TextIO | None = None) -> None:
    """Write ``report`` to ``stream`` (default: standard output): JSON, or a table and pictures."""
    stream = stream or sys.stdout
    drawn = None if as_json else screen.drawn(lambda width: _lines(report, width), stream)
    screen.put(drawn or written(report), stream)


def _lines(report: BlockReport, width: int) -> Iterator[Text]:
    yield from screen.wrapped(shortened(report.command), width, style="dim")
    yield Text("")
    yield from terminal_lines(_sheet(report), width)
    for record in report.records:
        if record.map:
            yield Text("")
            yield from _picture(record, width)
    yield Text("")
    for line in (
        "Partial: the mask is applied; at a ragged edge also where every element is visible.",
        "Ideal speed-up: all tiles ÷ those that are not empty.",
    ):
        yield from screen.wrapped(line, width, style="dim")


def _sheet(report: BlockReport) -> Sheet:
    ranges = f"B{report.batch} H{report.heads} Q{report.query} K{report.kv}"
    lines = [Line(tuple(map(Cell, _cells(record)))) for record in report.records]
    return Sheet(f"{shortened(report.name)} · {ranges}", _COLUMNS, lines=lines)


def _cells(record: BlockRecord) -> Iterator[str]:
    yield _tile(record)
    yield from map(str, (record.total, record.empty, record.partial, record.full))
    yield f"{record.sparsity:.1%}"
    yield figures.NOTHING if record.speedup is None else f"{record.speedup:.2f}×"


def _tile(record: BlockRecord) -> str:
    return f"{record.block_query}×{record.block_kv}"


def _picture(record: BlockRecord, width: int) -> Iterator[Text]:
    """A row of signs for each query block, cut where the terminal ends."""
    legend = f"{_SIGNS[EMPTY]} empty, {_SIGNS[PARTIAL]} partial, {_SIGNS[FULL]} full"
    yield Text(f"{_tile(record)}, b 0, h 0: {legend}", style="bold")
    blocks, room = len(record.map[0]), max(1, width - len(_INDENT))
    for row in record.map:
        yield Text(_INDENT + "".join(_SIGNS[kind] for kind in row[:room]))
    if blocks > room:
        note = f"{room} of {blocks} key blocks are shown: larger tiles, or --map --json, show all."
        yield from screen.wrapped(note, width, style="yellow", indent=_INDENT)
