"""What a page shows of gradients: their columns, the cells, and how to read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.core.outputs import GRADIENTS
from attncheck.reporting import figures
from attncheck.reporting.cells import Cell
from attncheck.reporting.verdicts import share_cell
from attncheck.reporting.yardsticks import error_cell, ideal_cell

if TYPE_CHECKING:
    from collections.abc import Iterable

    from attncheck.core.outputs import TensorName
    from attncheck.records.record import GradientErrors, Record

__all__ = [
    "ERRORS",
    "HOW_TO_READ_GRADIENTS",
    "SHARES",
    "gradient_cells",
    "gradient_shares",
    "gradients_of",
    "keys_of",
]

_WRITTEN: dict[TensorName, str] = {
    "dq": "dQ",
    "dk": "dK",
    "dv": "dV",
    "dsink": "dsink",
    "dcaptured": "dcaptured",
}

SHARES = {f"{name}_share": f"{_WRITTEN[name]}/bound" for name in GRADIENTS}
"""Headings of the shares of bounds, by key, in reading order."""

ERRORS = {
    key: heading
    for name in GRADIENTS
    for key, heading in (
        (f"{name}_rmse", f"{_WRITTEN[name]} RMSE"),
        (f"{name}_ideal", f"{_WRITTEN[name]} ×ideal"),
    )
}
"""Headings of the errors, likewise."""

HOW_TO_READ_GRADIENTS = (
    "dQ, dK, dV: RMSE of each gradient; ×ideal and /bound as of out, and the bound is",
    "given the kernel's own out and LSE. time: of forward and backward together.",
)


def gradients_of(record: Record) -> dict[TensorName, GradientErrors]:
    """Its errors of gradients; none without a backward, or where nothing was measured."""
    return record.gradients if isinstance(record.gradients, dict) else {}


def gradient_shares(record: Record) -> dict[TensorName, float]:
    """The largest error ÷ bound of each gradient; none where they were not judged."""
    found = record.judgement.gradients_over_bound if record.judgement else None
    return found if isinstance(found, dict) else {}


def keys_of(records: Iterable[Record]) -> frozenset[str]:
    """Keys of the columns that ``records`` have something for."""
    names = {name for record in records for name in gradients_of(record)}
    return frozenset(f"{name}_{what}" for name in names for what in ("share", "rmse", "ideal"))


def gradient_cells(record: Record) -> dict[str, Cell]:
    """A cell for each key of ``SHARES`` and ``ERRORS``."""
    cells = dict.fromkeys((*SHARES, *ERRORS), Cell(figures.NOTHING, "dim"))
    cells |= {f"{name}_share": share_cell(share) for name, share in gradient_shares(record).items()}
    for name, found in gradients_of(record).items():
        if found.elements:
            cells[f"{name}_rmse"] = error_cell(found.rmse)
            cells[f"{name}_ideal"] = ideal_cell(found.rmse, found.ideal_rmse)
    return cells
