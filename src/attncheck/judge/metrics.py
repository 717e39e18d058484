"""How far an array is from the truth."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from attncheck.formats import spacing

if TYPE_CHECKING:
    from attncheck.formats import Format

__all__ = [
    "RESOLUTION",
    "Errors",
    "cosine",
    "errors",
    "frobenius",
    "head_rmse",
    "slope",
    "ulp_percentiles",
]

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
    return tuple(int(i) for i in np.unravel_index(flat, weights.shape))


def _root_mean_square(error: torch.Tensor, elements: int) -> float:
    """Scaled by the largest, so that squares of tiny or huge errors neither vanish nor overflow."""
    largest = float(error.abs().max())
    if largest == 0.0:
        return 0.0
    return largest * math.sqrt(float((error / largest).square().sum()) / elements)


def head_rmse(values: torch.Tensor, truth: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """RMSE of every head, ``(batch, heads)`` float64; 0 where no element of it is counted.

    Args:
        values: ``(batch, heads, query, dim)``, any floating dtype.
        truth: float64, same shape.
        counted: bool, broadcastable to that shape.

    Infinite where an element is not finite, as in ``errors``; what is within the truth's own
    ``RESOLUTION`` is no error.
    """
    counted = counted.expand_as(truth)
    error = (values.to(torch.float64) - truth).abs()
    error = torch.where(counted & ~(error <= RESOLUTION * truth.abs()), error, 0.0)
    error = torch.where(error.isfinite(), error, math.inf)
    largest = error.amax((-2, -1), keepdim=True)
    unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    elements = counted.sum((-2, -1)).clamp_min(1)
    mean = (error / unit).square().sum((-2, -1)) / elements
    return unit[..., 0, 0] * mean.sqrt()


def frobenius(error: torch.Tensor, truth: torch.Tensor) -> float:
    """‖error‖ ÷ ‖truth‖ of float64 arrays; 0 of no error, infinite where only the truth is 0."""
    size = float(torch.linalg.vector_norm(error))
    if size == 0.0:
        return 0.0
    whole = float(torch.linalg.vector_norm(truth))
    return size / whole if whole and math.isfinite(size) else math.inf


def cosine(values: torch.Tensor, truth: torch.Tensor) -> float:
    """Cosine of the angle between two float64 arrays; 1 of two zeros, 0 of one or of a NaN."""
    lengths = [float(torch.linalg.vector_norm(array)) for array in (values, truth)]
    if not all(map(math.isfinite, lengths)):
        return 0.0
    if 0.0 in lengths:
        return float(lengths[0] == lengths[1])
    product = float(((values / lengths[0]) * (truth / lengths[1])).sum())
    return max(-1.0, min(1.0, product))


def slope(error: torch.Tensor, truth: torch.Tensor) -> float:
    """Least-squares slope of float64 ``error`` on ``truth``: −0.5 of an output half as large.

    0 where the truth is 0; NaN where an error is not finite.
    """
    largest = float(truth.abs().max()) if truth.numel() else 0.0
    if largest == 0.0:
        return 0.0
    scaled = truth / largest
    return float((error / largest * scaled).sum() / scaled.square().sum())


def ulp_percentiles(
    error: torch.Tensor, truth: torch.Tensor, output: Format
) -> tuple[float, float]:
    """50th and 99th percentile of |error| in ulps of ``output``, where |truth| ≥ its rms.

    Where terms cancel an element is small beside what it was added up from, and an ulp of it says
    nothing of the sum; those are left out. By nearest rank, so that each is an error that occurred.
    A NaN counts as infinite. (0, 0) of no elements.
    """
    if truth.numel() == 0:
        return 0.0, 0.0
    rms = _root_mean_square(truth, truth.numel())
    chosen = truth.abs() >= rms
    sizes = (error[chosen].abs() / spacing(truth[chosen], output)).nan_to_num(nan=math.inf)
    ranks = (math.ceil(sizes.numel() * share) for share in (0.5, 0.99))
    p50, p99 = (float(sizes.kthvalue(rank).values) for rank in ranks)
    return p50, p99
