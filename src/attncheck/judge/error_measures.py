"""Measures of error: RMSE, ulps, cosine, and errors relative to those of ideal kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attncheck.core.formats import Format, round_to, spacing

# Relative error of the float64 truth if one key takes all the weight: it is (w · v) / w, with a
# product, a sum and a quotient, each rounded once. A smaller error than this may be none.
RESOLUTION = 3 * 2.0**-53


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorMeasures:
    """Errors over the elements counted."""

    rmse: float  # root mean square error; infinite when an element is not finite
    max_error: float  # largest absolute error; infinite when an element is not finite
    # Index of the largest error, or of the first element that is not finite; None when no element
    # is counted.
    max_at: tuple[int, ...] | None
    bias: float  # mean signed error; NaN when an element is not finite
    elements: int  # number of elements counted
    nonfinite: int  # number of elements that are NaN or infinite


def measure_errors(values: Tensor, truth: Tensor, counted: Tensor) -> ErrorMeasures:
    """Measure the errors of ``values`` against the finite ``truth`` where ``counted``.

    Args:
        values: Any floating dtype, any shape; promoted to float64 without loss.
        truth: float64, same shape.
        counted: bool, broadcastable to that shape; excludes rows that see no key.

    An error within the truth's own ``RESOLUTION``, relative to the element, is 0: a kernel that
    returns the only value that a row sees is exact. A value that is not finite makes every
    statistic infinite or NaN: an error of NaN would otherwise compare as "not larger".
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
            max_at=_index_of_largest(broken.to(torch.int8)),
            bias=math.nan,
            elements=elements,
            nonfinite=int(broken.sum()),
        )
    return ErrorMeasures(
        rmse=_root_mean_square(error, largest, elements),
        max_error=largest,
        max_at=_index_of_largest(size if largest else counted.to(torch.int8)),
        bias=float(error.sum()) / elements,
        elements=elements,
        nonfinite=0,
    )


def _beyond_resolution(error: Tensor, truth: Tensor, counted: Tensor) -> Tensor:
    """Return ``error`` where it is counted and not within the truth's own resolution, else 0."""
    return torch.where(counted & ~(error.abs() <= RESOLUTION * truth.abs()), error, 0.0)


def _index_of_largest(weights: Tensor) -> tuple[int, ...]:
    """Return the index of the first largest element."""
    flat = int(weights.reshape(-1).argmax())
    return tuple(int(i) for i in np.unravel_index(flat, weights.shape))


def _root_mean_square(values: Tensor, largest: float, elements: int) -> float:
    if largest == 0.0:
        return 0.0
    # In units of the largest magnitude no square vanishes or overflows.
    return largest * math.sqrt(float((values / largest).square().sum()) / elements)


def head_rmse(values: Tensor, truth: Tensor, counted: Tensor) -> Tensor:
    """Return the RMSE of every head, ``(batch, heads)`` float64; 0 if none of it is counted.

    Args:
        values: ``(batch, heads, query, dim)``, any floating dtype.
        truth: float64, same shape.
        counted: bool, broadcastable to that shape.

    Infinite if an element is not finite, as in ``measure_errors``; errors within the truth's own
    ``RESOLUTION`` are 0.
    """
    counted = counted.expand_as(truth)
    error = _beyond_resolution((values.to(torch.float64) - truth).abs(), truth, counted)
    error = torch.where(error.isfinite(), error, math.inf)
    largest = error.amax((-2, -1), keepdim=True)
    # In units of the largest error, squares of tiny errors do not vanish.
    unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    elements = counted.sum((-2, -1)).clamp_min(1)
    mean = (error / unit).square().sum((-2, -1)) / elements
    return unit[..., 0, 0] * mean.sqrt()


def rounding_floor(truth: Tensor, counted: Tensor, output: Format) -> float:
    """Return the RMSE of the exact result correctly rounded to the output format.

    Args:
        truth: float64, any shape.
        counted: bool, broadcastable to that shape.

    No kernel with this output format has a smaller RMSE on these inputs: the nearest
    representable number minimises every element's error.
    """
    return measure_errors(round_to(truth, output), truth, counted).rmse


def rmse_over_ideal(rmse: Tensor, ideal: Iterable[Tensor], lost: Tensor | None = None) -> Tensor:
    """Return the RMSE of a kernel ÷ the largest of an ensemble of ideal kernels, head by head.

    Args:
        rmse: The kernel's RMSE, ``(batch, heads)``.
        ideal: RMSE of ideal kernels, ``(batch, heads)`` each, that differ in tile sizes, in the
            order of tiles and in when they rescale, all of which are right.
        lost: Error of a kernel that flushes numbers below the normal range to 0, ``(batch,
            heads)``; an ideal kernel may keep them.

    0 where every ideal kernel is exact, since the ratio means nothing there; infinite for NaN.
    """
    largest = torch.zeros_like(rmse)
    for one in ideal:
        largest = torch.maximum(largest, one)
    unit = largest if lost is None else torch.maximum(largest, lost)
    ratio = torch.where(largest > 0, rmse / unit, 0.0)
    return torch.where(ratio.isnan(), math.inf, ratio)


def frobenius(error: Tensor, truth: Tensor) -> float:
    """Return ‖error‖ ÷ ‖truth‖ of float64 arrays; 0 without error, infinite if only truth is 0."""
    size = float(torch.linalg.vector_norm(error))
    if size == 0.0:
        return 0.0
    truth_size = float(torch.linalg.vector_norm(truth))
    return size / truth_size if truth_size and math.isfinite(size) else math.inf


def cosine(values: Tensor, truth: Tensor) -> float:
    """Return the cosine between float64 arrays; 1 if both are 0, 0 if one is, or is not finite."""
    lengths = [float(torch.linalg.vector_norm(array)) for array in (values, truth)]
    if not all(map(math.isfinite, lengths)):
        return 0.0
    if 0.0 in lengths:
        return float(lengths[0] == lengths[1])
    product = float(((values / lengths[0]) * (truth / lengths[1])).sum())
    return max(-1.0, min(1.0, product))


def slope(error: Tensor, truth: Tensor) -> float:
    """Return the least-squares slope of ``error`` on ``truth``: −0.5 if an output is half as large.

    0 where the truth is 0; NaN where an error is not finite.
    """
    largest = float(truth.abs().max()) if truth.numel() else 0.0
    if largest == 0.0:
        return 0.0
    # Squares of the exact values themselves could underflow to 0.
    scaled = truth / largest
    return float((error / largest * scaled).sum() / scaled.square().sum())


def ulp_percentiles(error: Tensor, truth: Tensor, output: Format) -> tuple[float, float]:
    """Return 50th and 99th percentile of |error| in ulps of ``output``, where |truth| ≥ its rms.

    Smaller elements are left out: if the terms of a sum cancel, an ulp of the result is small
    against the errors of the terms. Percentiles are by nearest rank, so each is an error that
    occurred. A NaN counts as infinite. Without elements (0, 0).
    """
    if truth.numel() == 0:
        return 0.0, 0.0
    rms = _root_mean_square(truth, float(truth.abs().max()), truth.numel())
    chosen = truth.abs() >= rms
    sizes = (error[chosen].abs() / spacing(truth[chosen], output)).nan_to_num(nan=math.inf)
    # Sorted, since torch's kthvalue uses a single block of GPU threads.
    ordered = sizes.sort().values
    p50, p99 = (float(ordered[math.ceil(len(ordered) * share) - 1]) for share in (0.5, 0.99))
    return p50, p99


# Errors in units of ideal kernels' errors. In causal attention the first rows see few keys and have
# the largest errors, which dominate the RMSE over all rows. In units of its own each row counts
# equally.


@dataclass(frozen=True, slots=True)
class RelativeError:
    """Root mean square error over rows, each in its own unit."""

    size: float  # root of the mean over rows of mean square error ÷ square of the unit
    freedom: float  # degrees of freedom of its square, as of a χ² distribution


def row_squares(values: Tensor, truth: Tensor, counted: Tensor) -> Tensor:
    """Return the mean square error of every row with a counted element, float64, flattened.

    A row is the last axis; in a tensor with fewer than four axes each element is a row. Errors
    within the truth's own ``RESOLUTION`` are 0; results are not finite where a value is not.
    """
    counted = counted.expand_as(truth)
    error = _beyond_resolution((values.to(torch.float64) - truth).abs(), truth, counted)
    if truth.ndim < 4:
        return error.square()[counted]
    elements = counted.sum(-1)
    rows = error.square().sum(-1) / elements.clamp_min(1)
    return rows[elements > 0]


def rounding_squares(truth: Tensor, counted: Tensor, output: Format) -> Tensor:
    """Return the mean square of one rounding to ``output``, for the rows of ``row_squares``."""
    counted = counted.expand_as(truth)
    variance = torch.where(counted, spacing(truth, output).square() / 12, 0.0)
    elements = counted.sum(-1)
    return (variance.sum(-1) / elements.clamp_min(1))[elements > 0]


def row_units(ensemble: Sequence[Tensor], least: Tensor | None, *, each: bool) -> Tensor:
    """Return the square of each row's unit: the mean square error of ideal kernels there.

    Args:
        ensemble: ``row_squares`` of each ideal kernel.
        least: ``rounding_squares``, the least unit: ideal kernels may be exact in a row by chance.
            None if they are not known.
        each: Whether each row has its own unit. All share one if a row is a single element, or
            roundings are not independent.

    1 where ideal kernels are exact and ``least`` is None or 0.
    """
    mean = torch.stack(tuple(ensemble)).mean(0)
    if not each and mean.numel():
        mean = mean.mean().expand_as(mean)
        least = None if least is None else least.mean().expand_as(mean)
    unit = mean if least is None else torch.maximum(mean, least)
    return torch.where(unit > 0, unit, 1.0)


def relative_error(rows: Tensor, unit: Tensor, elements: int) -> RelativeError:
    """Return the size of the errors in ``row_squares`` in units, and its degrees of freedom.

    The relative variance of a mean of R independent rows is that of one row ÷ R; a χ² with f
    degrees of freedom has 2 ÷ f. The variance of one row is estimated over the rows plus a row of a
    single element, so that a few rows that happen to be alike do not make it too small. There are
    never more degrees of freedom than ``elements``, the number of counted elements.
    """
    ratios = torch.where(rows > 0, rows / unit, 0.0)
    count = ratios.numel()
    mean = float(ratios.mean()) if count else 0.0
    if not mean > 0:  # exact, or not a number
        return RelativeError(mean**0.5 if mean == 0 else mean, 0.0)
    variance = (float((ratios / mean - 1).square().sum()) + 2) / (count + 1)
    return RelativeError(mean**0.5, min(2 * count / variance, elements))
