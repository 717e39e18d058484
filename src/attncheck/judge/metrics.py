"""How far an array is from the truth."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

__all__ = ["RESOLUTION", "Errors", "errors"]

# Where one key takes all the weight, the float64 truth is (w · v) / w: a product, a sum with what
# is negligible, and a quotient, each rounded once. What is nearer to it than that may be exact.
RESOLUTION = 3 * 2.0**-53


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Errors over the elements counted.

    Attributes:
        rmse: Root mean square error; infinite when an element is not finite.
        max_error: Largest absolute error; infinite when an element is not finite.
        max_at: Index of the largest error, of the first element that is not finite if there is
            one; None when no element is counted.
        bias: Mean signed error; NaN when an element is not finite.
        elements: How many were counted.
        nonfinite: How many are NaN or infinite.
    """

    rmse: float
    max_error: float
    max_at: tuple[int, ...] | None
    bias: float
    elements: int
    nonfinite: int


def errors(values: torch.Tensor, truth: torch.Tensor, counted: torch.Tensor) -> Errors:
    """Errors of ``values`` against the finite ``truth`` where ``counted``.

    Args:
        values: Any floating dtype, any shape; promoted to float64 without loss.
        truth: float64, same shape.
        counted: bool, broadcastable to that shape; rows that see no key are left out by it.

    An error within the truth's own ``RESOLUTION``, relative to the element, is 0: a kernel that
    returns the one value a row sees is exact. A value that is not finite makes every statistic say
    so: an error that is NaN would compare as "not larger" with anything.
    """
    counted = counted.expand_as(truth)
    elements = int(counted.sum())
    if elements == 0:
        return Errors(rmse=0.0, max_error=0.0, max_at=None, bias=0.0, elements=0, nonfinite=0)
    error = values.to(torch.float64) - truth
    error = torch.where(counted & ~(error.abs() <= RESOLUTION * truth.abs()), error, 0.0)
    broken = ~torch.isfinite(error)
    nonfinite = int(broken.sum())
    if nonfinite:
        return Errors(
            rmse=math.inf,
            max_error=math.inf,
            max_at=_place(broken.to(torch.int8)),
            bias=math.nan,
            elements=elements,
            nonfinite=nonfinite,
        )
    size = error.abs()
    return Errors(
        rmse=_root_mean_square(error, elements),
        max_error=float(size.max()),
        max_at=_place(size if bool(size.any()) else counted.to(torch.int8)),
        bias=float(error.sum()) / elements,
        elements=elements,
        nonfinite=0,
    )


def _place(weights: torch.Tensor) -> tuple[int, ...]:
    """Index of the first largest element."""
    flat = int(weights.reshape(-1).argmax())
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), weights.shape))


def _root_mean_square(error: torch.Tensor, elements: int) -> float:
    """Scaled by the largest, so that squares of tiny or huge errors neither vanish nor overflow."""
    largest = float(error.abs().max())
    if largest == 0.0:
        return 0.0
    return largest * math.sqrt(float((error / largest).square().sum()) / elements)
