"""Measures of error: RMSE, ulps, cosine, and errors relative to those of ideal kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attncheck.core.formats import Format, round_to, spacing

# Where one key takes all the weight, the float64 truth is (w · v) / w: a product, a sum with what
# is negligible, and a quotient, each rounded once. What is nearer to it than that may be exact.
RESOLUTION = 3 * 2.0**-53


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorMeasures:
    """Errors over the elements counted."""

    rmse: float  # root mean square error; infinite when an element is not finite
    max_error: float  # largest absolute error; infinite when an element is not finite
    # Index of the largest error, of the first element that is not finite if there is one; None
    # when no element is counted.
    max_at: tuple[int, ...] | None
    bias: float  # mean signed error; NaN when an element is not finite
    elements: int
    nonfinite: int  # how many are NaN or infinite


def measure_errors(values: Tensor, truth: Tensor, counted: Tensor) -> ErrorMeasures:
    """Measure the errors of ``values`` against the finite ``truth`` where ``counted``.

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
        return ErrorMeasures(
            rmse=0.0, max_error=0.0, max_at=None, bias=0.0, elements=0, nonfinite=0
        )
    error = _beyond_resolution(values.to(torch.float64) - truth, truth, counted)
    size = error.abs()
    # Before any statistic: a single NaN or infinity makes all of them meaningless.
    largest = float(size.max())
    if not math.isfinite(largest):
        broken = ~torch.isfinite(error)
        return ErrorMeasures(
            rmse=math.inf,
            max_error=math.inf,
            max_at=_largest_at(broken.to(torch.int8)),
            bias=math.nan,
            elements=elements,
            nonfinite=int(broken.sum()),
        )
    return ErrorMeasures(
        rmse=_root_mean_square(error, largest, elements),
        max_error=largest,
        max_at=_largest_at(size if largest else counted.to(torch.int8)),
        bias=float(error.sum()) / elements,
        elements=elements,
        nonfinite=0,
    )


def _beyond_resolution(error: Tensor, truth: Tensor, counted: Tensor) -> Tensor:
    """``error`` where it is counted and not within the truth's own resolution, else 0."""
    return torch.where(counted & ~(error.abs() <= RESOLUTION * truth.abs()), error, 0.0)


def _largest_at(weights: Tensor) -> tuple[int, ...]:
    """Index of the first largest element."""
    flat = int(weights.reshape(-1).argmax())
    return tuple(int(i) for i in np.unravel_index(flat, weights.shape))


def _root_mean_square(values: Tensor, largest: float, elements: int) -> float:
    """In units of the ``largest`` size squares of tiny or huge ones neither vanish nor overflow."""
    if largest == 0.0:
        return 0.0
    return largest * math.sqrt(float((values / largest).square().sum()) / elements)


def head_rmse(values: Tensor, truth: Tensor, counted: Tensor) -> Tensor:
    """RMSE of every head, ``(batch, heads)`` float64; 0 where no element of it is counted.

    Args:
        values: ``(batch, heads, query, dim)``, any floating dtype.
        truth: float64, same shape.
        counted: bool, broadcastable to that shape.

    Infinite where an element is not finite, as in ``measure_errors``; what is within the truth's
    own ``RESOLUTION`` is no error.
    """
    counted = counted.expand_as(truth)
    error = _beyond_resolution((values.to(torch.float64) - truth).abs(), truth, counted)
    error = torch.where(error.isfinite(), error, math.inf)
    largest = error.amax((-2, -1), keepdim=True)
    # In units of the largest error squares of tiny ones do not vanish.
    unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    elements = counted.sum((-2, -1)).clamp_min(1)
    mean = (error / unit).square().sum((-2, -1)) / elements
    return unit[..., 0, 0] * mean.sqrt()


def rounding_floor(truth: Tensor, counted: Tensor, output: Format) -> float:
    """RMSE of the exact result correctly rounded to the output format.

    Args:
        truth: float64, any shape.
        counted: bool, broadcastable to that shape.

    No kernel with this output format has a smaller RMSE on these inputs: the nearest
    representable number minimises every element's error.
    """
    return measure_errors(round_to(truth, output), truth, counted).rmse


def rmse_over_ideal(rmse: Tensor, ideal: Iterable[Tensor], lost: Tensor | None = None) -> Tensor:
    """RMSE of a kernel ÷ the largest of an ensemble of ideal kernels', head by head.

    Args:
        rmse: The kernel's, ``(batch, heads)``.
        ideal: The same of ideal kernels that differ in tile sizes, in the order of their tiles and
            in when they rescale: what their errors differ by is nobody's fault.
        lost: What a kernel's errors may be where it takes numbers below the normal range for 0,
            likewise; an ideal kernel may keep them.

    0 where every ideal kernel is exact, since their errors measure nothing then; a NaN is infinite.
    """
    largest = torch.zeros_like(rmse)
    for one in ideal:
        largest = torch.maximum(largest, one)
    usual = largest if lost is None else torch.maximum(largest, lost)
    ratio = torch.where(largest > 0, rmse / usual, 0.0)
    return torch.where(ratio.isnan(), math.inf, ratio)


def frobenius(error: Tensor, truth: Tensor) -> float:
    """‖error‖ ÷ ‖truth‖ of float64 arrays; 0 of no error, infinite where only the truth is 0."""
    size = float(torch.linalg.vector_norm(error))
    if size == 0.0:
        return 0.0
    whole = float(torch.linalg.vector_norm(truth))
    return size / whole if whole and math.isfinite(size) else math.inf


def cosine(values: Tensor, truth: Tensor) -> float:
    """Cosine of the angle between two float64 arrays; 1 of two zeros, 0 of one or of a NaN."""
    lengths = [float(torch.linalg.vector_norm(array)) for array in (values, truth)]
    if not all(map(math.isfinite, lengths)):
        return 0.0
    if 0.0 in lengths:
        return float(lengths[0] == lengths[1])
    product = float(((values / lengths[0]) * (truth / lengths[1])).sum())
    return max(-1.0, min(1.0, product))


def slope(error: Tensor, truth: Tensor) -> float:
    """Least-squares slope of float64 ``error`` on ``truth``: −0.5 of an output half as large.

    0 where the truth is 0; NaN where an error is not finite.
    """
    largest = float(truth.abs().max()) if truth.numel() else 0.0
    if largest == 0.0:
        return 0.0
    # Squares of the exact values themselves could underflow to 0.
    scaled = truth / largest
    return float((error / largest * scaled).sum() / scaled.square().sum())


def ulp_percentiles(error: Tensor, truth: Tensor, output: Format) -> tuple[float, float]:
    """50th and 99th percentile of |error| in ulps of ``output``, where |truth| ≥ its rms.

    Where terms cancel an element is small beside what it was added up from, and an ulp of it says
    nothing of the sum; those are left out. By nearest rank, so that each is an error that occurred.
    A NaN counts as infinite. (0, 0) of no elements.
    """
    if truth.numel() == 0:
        return 0.0, 0.0
    rms = _root_mean_square(truth, float(truth.abs().max()), truth.numel())
    chosen = truth.abs() >= rms
    sizes = (error[chosen].abs() / spacing(truth[chosen], output)).nan_to_num(nan=math.inf)
    # Not by kthvalue, which has a single block of a GPU's threads look for it.
    ordered = sizes.sort().values
    p50, p99 = (float(ordered[math.ceil(len(ordered) * share) - 1]) for share in (0.5, 0.99))
    return p50, p99


# Errors in the unit of what ideal kernels err by. In causal attention the first rows see few keys,
# and their errors are the largest: the RMSE over all rows is theirs, and says little of the others.
# In units of its own each row counts the same.


@dataclass(frozen=True, slots=True)
class RelativeError:
    """Errors in units."""

    size: float  # root of the mean over rows of mean square error ÷ square of the unit
    freedom: float  # degrees of freedom of its square, as of a χ² distribution


def row_squares(values: Tensor, truth: Tensor, counted: Tensor) -> Tensor:
    """Mean square error of every row with an element that counts, float64, one after the other.

    A row is all of the last axis; of a tensor with fewer than four axes each element is one. What
    is within the truth's own ``RESOLUTION`` is no error; not finite where a value is not.
    """
    counted = counted.expand_as(truth)
    error = _beyond_resolution((values.to(torch.float64) - truth).abs(), truth, counted)
    if truth.ndim < 4:
        return error.square()[counted]
    elements = counted.sum(-1)
    rows = error.square().sum(-1) / elements.clamp_min(1)
    return rows[elements > 0]


def rounding_squares(truth: Tensor, counted: Tensor, output: Format) -> Tensor:
    """Mean square of one rounding to ``output`` of every row that ``row_squares`` has."""
    counted = counted.expand_as(truth)
    variance = torch.where(counted, spacing(truth, output).square() / 12, 0.0)
    elements = counted.sum(-1)
    return (variance.sum(-1) / elements.clamp_min(1))[elements > 0]


def row_units(ensemble: Sequence[Tensor], least: Tensor | None, *, each: bool) -> Tensor:
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
    unit = mean if least is None else torch.maximum(mean, least)
    return torch.where(unit > 0, unit, 1.0)


def relative_error(rows: Tensor, unit: Tensor, elements: int) -> RelativeError:
    """Return how large the errors of ``row_squares`` are in units, and how well that is known.

    The relative variance of a mean of R independent rows is that of one row ÷ R, and of a χ² with f
    degrees of freedom it is 2 ÷ f. That of one row is measured over rows, with one row more that
    counts as a single element: few rows are not taken to be alike because they happen to be. There
    are never more than ``elements``, the number of those that count.
    """
    ratios = torch.where(rows > 0, rows / unit, 0.0)
    count = ratios.numel()
    mean = float(ratios.mean()) if count else 0.0
    if not mean > 0:  # exact, or not a number
        return RelativeError(mean**0.5 if mean == 0 else mean, 0.0)
    variance = (float((ratios / mean - 1).square().sum()) + 2) / (count + 1)
    return RelativeError(mean**0.5, min(2 * count / variance, elements))
