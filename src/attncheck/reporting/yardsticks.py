"""An error as a cell, alone and beside the ideal kernel's."""

from __future__ import annotations

import math

from attncheck.reporting import figures
from attncheck.reporting.cells import Cell, Look

__all__ = ["error_cell", "ideal_cell", "soundness"]

# Where a reader's eye is drawn; the judge reads neither.
_NOTABLE = 2.0
_BAD = 10.0


def soundness(number: float) -> Look:
    """How an error looks: bad where it is no number."""
    return "plain" if math.isfinite(number) else "bad"


def error_cell(number: float, *, signed: bool = False) -> Cell:
    """An error."""
    return Cell(figures.scientific(number, signed=signed), soundness(number))


def ideal_cell(rmse: float, ideal: float) -> Cell:
    """An RMSE ÷ that of the ideal kernel."""
    text, value = figures.ratio(rmse, ideal), figures.quotient(rmse, ideal)
    if value is None:
        # Wrong where the ideal kernel is exact stands out more than any ratio.
        return Cell(text, "plain" if rmse == 0 else "bad")
    if not value < _BAD:
        return Cell(text, "bad")
    return Cell(text, "notable" if value >= _NOTABLE else "plain")
