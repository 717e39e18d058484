"""Errors in the unit of what ideal kernels err by, and how many independent ones that makes.

In causal attention the first rows see few keys, and their errors are the largest: the RMSE over all
rows is theirs, and says little of the others. In units of its own each row counts the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.formats import spacing
from attncheck.judge.metrics import RESOLUTION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.formats import Format

__all__ = ["Relative", "relative", "rounding_squares", "row_squares", "units"]


@dataclass(frozen=True, slots=True)
class Relative:
    """Errors in units.

    Attributes:
        size: Root of the mean over rows of mean square error ÷ square of the unit.
        freedom: Degrees of freedom of its square, as of a χ² distribution.
    """

    size: float
    freedom: float


def row_squares(values: torch.Tensor, truth: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Mean square error of every row with an element that counts, float64, one after the other.

    A row is all of the last axis; of a tensor with fewer than four axes each element is one. What
    is within the truth's own ``RESOLUTION`` is no error; not finite where a value is not.
    """
    counted = counted.expand_as(truth)
    error = (values.to(torch.float64) - truth).abs()
    error = torch.where(counted & ~(error <= RESOLUTION * truth.abs()), error, 0.0)
    if truth.ndim < 4:
        return error.square()[counted]
    elements = counted.sum(-1)
    rows = error.square().sum(-1) / elements.clamp_min(1)
    return rows[elements > 0]


def units(
    ensemble: Sequence[torch.Tensor], least: torch.Tensor | None, *, each: bool
) -> torch.Tensor:
    """Square of the unit of every row: what ideal kernels err by there.

    Args:
        ensemble: ``row_squares`` of each.
        least: Of every row what one rounding of its elements costs on the average: a row in which
            ideal kernels happen to be exact is no proof that others are. None where that is not
            known.
        each: Whether each row has its own, or all have one: where a row is a single element, or
            roundings are not independent.

    1 where ideal kernels are exact, and nothing is known besides.
    """
    mean = torch.stack(tuple(ensemble)).mean(0)
    if not each and mean.numel():
        mean = mean.mean().expand_as(mean)
        least = None if least is None else least.mean().expand_as(mean)
    found = mean if least is None else torch.maximum(mean, least)
    return torch.where(found > 0, found, 1.0)


def rounding_squares(truth: torch.Tensor, counted: torch.Tensor, output: Format) -> torch.Tensor:
    """Mean square of one rounding to ``output`` of every row that ``row_squares`` has."""
    counted = counted.expand_as(truth)
    variance = torch.where(counted, spacing(truth, output).square() / 12, 0.0)
    elements = counted.sum(-1)
    return (variance.sum(-1) / elements.clamp_min(1))[elements > 0]


def relative(rows: torch.Tensor, unit: torch.Tensor, elements: int) -> Relative:
    """How large the errors of ``row_squares`` are in units, and how well that is known.

    The relative variance of a mean of R independent rows is that of one row ÷ R, and of a χ² with f
    degrees of freedom it is 2 ÷ f. That of one row is measured over rows, with one row more that
    counts as a single element: few rows are not taken to be alike because they happen to be. There
    are never more than ``elements``, the number of those that count.
    """
    found = torch.where(rows > 0, rows / unit, 0.0)
    count = found.numel()
    mean = float(found.mean()) if count else 0.0
    if not mean > 0:  # exact, or not a number
        return Relative(mean**0.5 if mean == 0 else mean, 0.0)
    variance = (float((found / mean - 1).square().sum()) + 2) / (count + 1)
    return Relative(mean**0.5, min(2 * count / variance, elements))
