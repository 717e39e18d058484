"""One Record → one row of a page: cells with their looks, and what must be said aloud."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attncheck.reporting import figures
from attncheck.reporting.cells import Cell
from attncheck.reporting.gradients import ERRORS, SHARES, gradient_cells, gradients_of
from attncheck.reporting.verdicts import JUDGED, STATUSES, verdict_cells, verdict_remarks
from attncheck.reporting.yardsticks import error_cell, ideal_cell, soundness

if TYPE_CHECKING:
    from attncheck.records.record import LseErrors, OutErrors, Record

__all__ = ["COLUMNS", "DAGGER", "HEADINGS", "Row", "row"]

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

_BEHIND = {"lse_share": SHARES, "lse": ERRORS}

HEADINGS = {
    name: heading
    for key in COLUMNS
    for name, heading in ({key: COLUMNS[key]} | _BEHIND.get(key, {})).items()
}
"""The same with those of gradients behind LSE's; each is shown only where it was measured."""

DAGGER = "†"


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
    cells = verdict_cells(record, note) | _out_cells(record.out) | gradient_cells(record)
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
        "rmse": error_cell(out.rmse),
        "floor": Cell(figures.ratio(out.rmse, out.floor_rmse), soundness(out.rmse)),
        "ideal": ideal_cell(out.rmse, out.ideal_rmse),
        "inputs": Cell(figures.scientific(out.input_rmse), "dim"),
        "max": error_cell(out.max_error),
        "at": Cell(figures.place(out.max_at), "dim"),
        "bias": error_cell(out.bias, signed=True),
    }


def _lse_cell(lse: LseErrors | None) -> Cell:
    # Without a place, as where no row sees a key, nothing was compared.
    if lse is None or lse.max_at is None:
        return Cell(figures.NOTHING, "dim")
    return error_cell(lse.max_error)


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
    broken += [
        f"{found.nonfinite} of {found.elements} elements of {name}"
        for name, found in gradients_of(record).items()
        if found.nonfinite
    ]
    if out and out.dead_rows_wrong:
        dead.append(f"out is not 0 in {out.dead_rows_wrong} of {out.dead_rows}")
    if lse and lse.dead_rows_wrong:
        dead.append(f"LSE is not −inf in {lse.dead_rows_wrong}")
    empty = ["nothing to compare: no row sees a key"] if out and out.elements == 0 else []
    said = {"NaN or infinite": broken, "rows that see no key": dead}
    wrong = (f"{what}: {', '.join(facts)}" for what, facts in said.items() if facts)
    return tuple(Cell(text, "bad") for text in (*empty, *wrong))
