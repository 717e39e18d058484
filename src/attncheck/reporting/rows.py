"""One Record → one row of a page: cells with their looks, and what must be said aloud."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attncheck.reporting import figures
from attncheck.reporting.cells import Cell, Look
from attncheck.reporting.verdicts import JUDGED, STATUSES, verdict_cells, verdict_remarks

if TYPE_CHECKING:
    from attncheck.record import LseErrors, OutErrors, Record

__all__ = ["COLUMNS", "DAGGER", "Row", "row"]

COLUMNS = {
    "verdict": "verdict",
    "share": "err/bound",
    "lse_share": "LSE/bound",
    "rmse": "RMSE",
    "floor": "×floor",
    "ideal": "×ideal",
    "inputs": "inputs",
    "max": "max error",
    "at": "at b,h,q,d",
    "bias": "bias",
    "lse": "LSE error",
    "time": "time",
    "environment": "env",
}
"""Headings by key, in reading order; ``environment`` is shown only where there are several."""

DAGGER = "†"

# Where a reader's eye is drawn; the judge reads neither.
_NOTABLE = 2.0
_BAD = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A kernel on one Case.

    Attributes:
        kernel: Its name, as foreign as it came.
        cells: By column; empty where nothing was measured.
        mark: ``unsupported ¹`` or ``error ²`` instead of cells.
        remarks: What the numbers alone would hide.
    """

    kernel: str
    cells: dict[str, Cell] = field(default_factory=dict)
    mark: Cell | None = None
    remarks: tuple[Cell, ...] = ()


def row(record: Record, *, note: int, environment: str) -> Row:
    """The row of ``record``.

    Args:
        record: What was measured.
        note: Number of the footnote that holds its reason; 0 where there is none.
        environment: Letter of its environment.
    """
    if record.status not in JUDGED:
        mark = Cell(f"{record.status} {figures.superscript(note)}", STATUSES[record.status])
        return Row(kernel=record.kernel, mark=mark)
    cells = verdict_cells(record, note) | _out_cells(record.out)
    cells["lse"] = _lse_cell(record.lse)
    cells["time"] = _time_cell(record.seconds, interpreted=record.interpreted)
    cells["environment"] = Cell(environment, "dim")
    return Row(
        kernel=record.kernel,
        cells=cells,
        remarks=_remarks(record) + verdict_remarks(record.judgement),
    )


def _out_cells(out: OutErrors | None) -> dict[str, Cell]:
    names = ("rmse", "floor", "ideal", "inputs", "max", "at", "bias")
    if out is None or out.elements == 0:
        return dict.fromkeys(names, Cell(figures.NOTHING, "dim"))
    return {
        "rmse": _error_cell(out.rmse),
        "floor": Cell(figures.ratio(out.rmse, out.floor_rmse), _soundness(out.rmse)),
        "ideal": _ideal_cell(out),
        "inputs": Cell(figures.scientific(out.input_rmse), "dim"),
        "max": _error_cell(out.max_error),
        "at": Cell(figures.place(out.max_at), "dim"),
        "bias": _error_cell(out.bias, signed=True),
    }


def _soundness(number: float) -> Look:
    return "plain" if math.isfinite(number) else "bad"


def _error_cell(number: float, *, signed: bool = False) -> Cell:
    return Cell(figures.scientific(number, signed=signed), _soundness(number))


def _ideal_cell(out: OutErrors) -> Cell:
    text = figures.ratio(out.rmse, out.ideal_rmse)
    value = figures.quotient(out.rmse, out.ideal_rmse)
    if value is None:
        # Wrong where the ideal kernel is exact stands out more than any ratio.
        return Cell(text, "plain" if out.rmse == 0 else "bad")
    if not value < _BAD:
        return Cell(text, "bad")
    return Cell(text, "notable" if value >= _NOTABLE else "plain")


def _lse_cell(lse: LseErrors | None) -> Cell:
    # Without a place, as where no row sees a key, nothing was compared.
    if lse is None or lse.max_at is None:
        return Cell(figures.NOTHING, "dim")
    return _error_cell(lse.max_error)


def _time_cell(seconds: float | None, *, interpreted: bool) -> Cell:
    text = figures.duration(seconds)
    if text == figures.NOTHING:
        return Cell(text, "dim")
    if not interpreted:
        return Cell(text)
    # Behind the unit, before what keeps units in line.
    return Cell((text.rstrip() + DAGGER).ljust(len(text) + 1), "dim")


def _remarks(record: Record) -> tuple[Cell, ...]:
    out, lse = record.out, record.lse
    broken, dead = [], []
    if out and out.nonfinite:
        broken.append(f"{out.nonfinite} of {out.elements} elements of out")
    if lse and lse.nonfinite:
        broken.append(f"LSE of {lse.nonfinite} rows")
    if out and out.dead_rows_wrong:
        dead.append(f"out is not 0 in {out.dead_rows_wrong} of {out.dead_rows}")
    if lse and lse.dead_rows_wrong:
        dead.append(f"LSE is not −inf in {lse.dead_rows_wrong}")
    empty = ["nothing to compare: no row sees a key"] if out and out.elements == 0 else []
    said = {"NaN or infinite": broken, "rows that see no key": dead}
    wrong = (f"{what}: {', '.join(facts)}" for what, facts in said.items() if facts)
    return tuple(Cell(text, "bad") for text in (*empty, *wrong))
