"""Bound of out and LSE that holds with probability 1 − 1e-6: equations B21–B28."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from attncheck.core.conditions import Conditions, ScoreModError, kept_step
from attncheck.core.declared_arithmetic import Arithmetic
from attncheck.judge import deterministic_bound, score_errors
from attncheck.judge.score_errors import ScoreError
from attncheck.judge.sum_roundings import (
    half_ulp,
    steps_with_keys,
    sum_accumulator,
    sum_bias,
    sum_roundings,
    tiles_passed,
)
from attncheck.judge.weight_errors import WeightErrors, log_sum_base, weight_errors

# Weights that agree to this many unit roundoffs of fp32 may have equal rounding errors.
_ALIKE = 16

# Float64 numbers gathered at a time: 128 MiB on a CPU, 512 MiB on a GPU.
_CPU_NUMBERS, _GPU_NUMBERS = 2**24, 2**26

MISSED = 1e-6  # Probability that any element of a right kernel exceeds its probabilistic bound.


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ProbabilisticBound:
    """Bounds of |error| with probability 1 − ``MISSED``, and the predicted error; float64."""

    out: Tensor  # ``(heads, rows, value_dim)``; never above the deterministic bound
    lse: Tensor  # ``(heads, rows)``
    sd_out: Tensor  # predicted root mean square of the error of out
    sd_lse: Tensor  # predicted root mean square of the error of LSE
    certain: deterministic_bound.DeterministicBound


def sigmas_needed(elements: int) -> float:
    """Return the sigmas that all ``elements`` errors keep to with chance 1 − ``MISSED`` (B21)."""
    return math.sqrt(2 * math.log(2 * max(1, elements) / MISSED))


def probabilistic_bound(
    conditions: Conditions,
    arithmetic: Arithmetic,
    scores: ScoreError,
    mod: ScoreModError | None = None,
    *,
    elements: int,
) -> ProbabilisticBound:
    """Bound errors, assuming that all roundings are independent except those that may be equal.

    Source: B21–B28 in ``docs/explanation/bounds.md``.
    """
    # Hoeffding's inequality, and a union bound over all outputs of the Problem.
    sigmas = sigmas_needed(elements)
    errors = score_errors.exponent_errors(conditions, arithmetic, scores, mod)
    moved = weight_errors(conditions, arithmetic, errors)
    certain = deterministic_bound.bound_of_weights(conditions, arithmetic, errors, moved)
    statistics = _score_statistics(conditions, arithmetic, scores, mod, sigmas)
    out_statistics = _softmax_statistics if conditions.given_scores else _out_statistics
    random, steady = out_statistics(conditions, arithmetic, statistics, moved)
    independent = torch.ones_like(conditions.lse, dtype=torch.bool)
    if mod is not None:  # at a jump the errors of a row's weights are not independent
        independent = ~(mod.jump & conditions.seen).any(-1)
    steady = steady + certain.out_terms["underflow"]
    out = sigmas * random + steady
    out = out + half_ulp(conditions.out.abs() + out, arithmetic.output)
    lse_random, lse_steady = _lse_statistics(conditions, arithmetic, statistics, moved)
    lse = sigmas * lse_random + lse_steady
    # The error of rounding to nearest is uniform over one ulp.
    last = 2 * half_ulp(conditions.out.abs(), arithmetic.output) / math.sqrt(12)
    sd_out = (random.square() + last.square() + (steady / 2).square()).sqrt()
    sd_lse = (lse_random.square() + (lse_steady / 2).square()).sqrt()
    return ProbabilisticBound(
        out=_least_bound(out, certain.out, independent[..., None], certain.out),
        lse=_least_bound(lse, certain.lse, independent, certain.lse),
        sd_out=_least_bound(sd_out, certain.out, independent[..., None]),
        sd_lse=_least_bound(sd_lse, certain.lse, independent),
        certain=certain,
    )


def _least_bound(
    estimate: Tensor, certain: Tensor, known: Tensor, otherwise: Tensor | None = None
) -> Tensor:
    """Return the lesser of ``estimate`` and the ``certain`` bound; infinite where that is.

    Where the estimate is not ``known``, return ``otherwise``, or infinity without it.
    """
    other = torch.full_like(certain, math.inf) if otherwise is None else otherwise
    return torch.where(
        torch.isfinite(certain), torch.where(known, torch.fmin(estimate, certain), other), certain
    )


def _lse_statistics(
    conditions: Conditions, arithmetic: Arithmetic, scores: _ScoreStatistics, moved: WeightErrors
) -> tuple[Tensor, Tensor]:
    """Return B27: the standard deviation and the systematic part of LSE's error."""
    exact = moved.exact
    sd = sum_accumulator(arithmetic).sd(sum_roundings(conditions, arithmetic))[..., 0]
    variance = (exact * scores.deviation).square().sum(-1) + sd.square() + scores.common
    steady = log_sum_base(conditions, arithmetic, torch.zeros_like(sd))
    for direction in scores.steady:
        steady = steady + (exact * direction).sum(-1).abs()
    if not conditions.given_scores:
        variance = variance + _operand_variance(conditions, arithmetic, exact * scores.slope)
    if arithmetic.truncates and not conditions.given_scores:
        size = (exact * scores.slope * conditions.products).abs().nan_to_num(0.0).sum(-1)
        steady = steady + arithmetic.operand_error * size
    if arithmetic.sums_rounded_weights and arithmetic.weights_error:
        variance = variance + moved.rounded.square().sum(-1) / 3
        steady = steady + arithmetic.weights_error - torch.log1p(-moved.lost.sum(-1).clamp(max=1))
    steady = steady - torch.log1p(-sum_bias(conditions, arithmetic)[..., 0])
    return variance.sqrt(), steady


def _operand_variance(conditions: Conditions, arithmetic: Arithmetic, moves: Tensor) -> Tensor:
    """Return B27's variance of LSE by operands that are rounded once more.

    Rounding q moves all scores of a row together; rounding k moves the scores of equal keys. A
    score's error moves LSE by ``moves`` times it: its weight times the slope of the score mod.
    """
    q, k, u, scaled = conditions.q, conditions.k, arithmetic.operand_error, arithmetic.scaled_query
    # One rounding of q is in all scores of its row: it does not average out in LSE.
    variance = torch.zeros_like(conditions.lse)
    if not score_errors.rounds_operands(arithmetic):
        return variance
    mean = moves @ k
    of_query = u**2 + (0.0 if scaled is None else scaled.unit_roundoff**2)
    variance = variance + conditions.scale**2 * of_query * (q * mean).square().sum(-1)
    if u:
        keys = (moves.abs() * (q.square() @ k.square().mT).sqrt()).sum(-1).square()
        variance = variance + (conditions.scale * u) ** 2 * keys
    if scaled is not None:  # below its normal range
        variance = variance + (scaled.subnormal_spacing / 2) ** 2 * mean.square().sum(-1)
    return variance / 3


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _ScoreStatistics:
    """Errors of the exponents, float64 ``(heads, rows, kv)``, 0 where not seen."""

    # Standard deviation of a weight's relative error, enlarged so that λ of them bound its growth.
    deviation: Tensor
    # Signed systematic errors with one common factor in [−1, 1] per row: of the constant
    # scale · log2 e, and of truncation.
    steady: list[Tensor]
    slope: Tensor  # signed slope of the score mod; 1 without a mod
    # Variance common to the whole row, ``(heads, rows)``: it cancels in out but not in LSE.
    common: Tensor
    sigmas: float  # λ


@kept_step
def _score_statistics(
    conditions: Conditions,
    arithmetic: Arithmetic,
    scores: ScoreError,
    mod: ScoreModError | None,
    sigmas: float,
) -> _ScoreStatistics:
    """Return the statistics of these rows; ``sigmas`` is λ of the bound."""
    seen, unit = conditions.seen, arithmetic.unit
    slope, own = _slope(scores, mod, sigmas)
    maximum = conditions.maximum[..., None]
    below = torch.where(seen, conditions.scores - maximum, 0.0)
    each = 2 * arithmetic.exp2_ulps + 1
    # The running maximum rises in at most about 2 ln T of T tiles in random order (B22).
    tiles = tiles_passed(conditions, arithmetic)
    records = torch.minimum(tiles - 1, 3 + 2 * torch.log(tiles))
    exponent = (
        conditions.scores.square()
        + maximum.square()
        + ((score_errors.factor_roundings(arithmetic) + 1) * below).square()
        + each**2 * (1 + records)
    )
    variance = slope.square() * scores.variance + own.square() / 3 + unit**2 / 3 * exponent
    # The exponential is not linear: λ deviations of an exponent grow a weight by more than λ times.
    deviation = torch.expm1(sigmas * variance.sqrt()) / sigmas
    if mod is not None and mod.falls is not None:
        slope = torch.where(mod.falls, -slope, slope)
    slope = torch.where(seen, slope, 0.0)
    steady = [score_errors.factor_roundings(arithmetic) * unit * below]
    if scores.bias is not None:
        steady.append(slope * scores.bias)
    return _ScoreStatistics(
        deviation=torch.where(seen, deviation, 0.0),
        steady=steady,
        slope=slope,
        common=unit**2 / 3 * (maximum.square() + each**2 * records)[..., 0],
        sigmas=sigmas,
    )


def _slope(scores: ScoreError, mod: ScoreModError | None, sigmas: float) -> tuple[Tensor, Tensor]:
    """Return the slope with which a score mod propagates an error, and the mod's own error."""
    if mod is None:
        return torch.ones_like(scores.radius), torch.zeros_like(scores.radius)
    if mod.likely is None:
        reach, radius = scores.radius, mod.radius
    else:
        reach, radius = score_errors.likely_radius(scores, sigmas), mod.likely
    carried = (radius - mod.own).clamp_min(0)
    return torch.where(reach > 0, carried / reach, 0.0), mod.own


def _out_statistics(
    conditions: Conditions, arithmetic: Arithmetic, scores: _ScoreStatistics, moved: WeightErrors
) -> tuple[Tensor, Tensor]:
    """Return the standard deviation and the systematic part of out's error before rounding."""
    exact, out = moved.exact, conditions.out
    values, _ = deterministic_bound.finite_values(conditions, arithmetic)
    of_scores = _exponent_variance(conditions, arithmetic, scores.deviation, exact)
    # B23: rounding P to its format, where nearly equal weights round alike, and V to tf32.
    of_rounding = torch.zeros_like(out)
    steady = torch.zeros_like(out)
    if arithmetic.operand_error:
        of_values = exact.square() @ values.square()
        of_rounding = of_rounding + arithmetic.operand_error**2 / 3 * of_values
    if arithmetic.weights_error:
        center = out if arithmetic.sums_rounded_weights else None
        of_rounding = of_rounding + _rounding_variance(conditions, arithmetic, moved) / 3
        # B25: all weights below half the least number of P's format may become 0. If the row sum
        # adds up rounded weights, it lacks them too, and out is a mean over the other keys.
        steady = _systematic_error(
            moved.lost, values, torch.zeros_like(out) if center is None else center
        )
    # B24: adding up, rescaling and dividing.
    sd = sum_accumulator(arithmetic).sd(sum_roundings(conditions, arithmetic))
    of_sums = (sd * (exact @ values.abs())).square()
    of_sums = of_sums + (sd.square() + 12 * arithmetic.unit**2) * out.square()
    for direction in scores.steady:
        steady = steady + _systematic_error(exact * direction, values, out)
    if arithmetic.operand_error and arithmetic.truncates:
        steady = steady + 2 * arithmetic.operand_error * (exact @ values.abs())
    if arithmetic.values.block is not None:
        # B26: truncation takes a share of the running sum, whose size a random walk bounds.
        walk = scores.sigmas * (exact.square() @ values.square()).sqrt()
        share = arithmetic.values.bias(
            conditions.count, steps_with_keys(conditions, arithmetic.values)
        )
        limit = deterministic_bound.accumulation_error(conditions, arithmetic, moved, values)
        of_values = torch.minimum(share * (out.abs() + walk), limit)
        # A truncated row sum makes out larger, a truncated sum of values makes it smaller: the
        # errors have opposite signs, and either may occur alone.
        of_sum = sum_bias(conditions, arithmetic) * out.abs()
        steady = steady + torch.maximum(of_sum, of_values)
    return (of_scores + of_rounding + of_sums).sqrt(), steady


@kept_step
def _exponent_variance(
    conditions: Conditions, arithmetic: Arithmetic, deviation: Tensor, exact: Tensor
) -> Tensor:
    """Return B22: the variance of out by errors of the exponents."""
    values, _ = deterministic_bound.finite_values(conditions, arithmetic)
    alike, weight = _ALIKE * arithmetic.unit, exact * deviation
    return quadrature(weight, conditions.scores, values, conditions.out, alike)


@kept_step
def _rounding_variance(
    conditions: Conditions, arithmetic: Arithmetic, moved: WeightErrors
) -> Tensor:
    """Return B23: three times the variance of out by the rounding of P."""
    values, _ = deterministic_bound.finite_values(conditions, arithmetic)
    center = conditions.out if arithmetic.sums_rounded_weights else None
    log = conditions.scores - conditions.maximum[..., None]
    widths = (arithmetic.weights_error / 2, _ALIKE * arithmetic.unit)
    return torch.maximum(
        *(quadrature(moved.rounded, log, values, center, width) for width in widths)
    )


def _systematic_error(weight: Tensor, values: Tensor, center: Tensor) -> Tensor:
    """Return |Σ weight_j (v_j − center)|: the error of out by systematic errors of weights."""
    return (weight @ values - center * weight.sum(-1, keepdim=True)).abs()


def _softmax_statistics(
    conditions: Conditions, arithmetic: Arithmetic, scores: _ScoreStatistics, moved: WeightErrors
) -> tuple[Tensor, Tensor]:
    """Return B28: deviation and systematic error of a softmax's out, which is P itself."""
    exact = moved.exact
    share = (exact * scores.deviation).square()
    other_variance = (share.sum(-1, keepdim=True) - share).clamp_min(0)
    # A weight's own error also enters the row sum, which cancels the share of the weight in it.
    own_variance = (exact * scores.deviation * (1 - exact)).square()
    sd = sum_accumulator(arithmetic).sd(sum_roundings(conditions, arithmetic))
    of_sum = (sd.square() + 12 * arithmetic.unit**2) * exact.square()
    variance = own_variance + exact.square() * other_variance + of_sum
    direction = scores.steady[0]
    mean = (exact * direction).sum(-1, keepdim=True)
    return variance.sqrt(), (exact * (direction - mean)).abs()


def quadrature(
    weight: Tensor, log: Tensor, values: Tensor, center: Tensor | None, width: float
) -> Tensor:
    """Return Σ over groups of (Σ in a group of weight_j · (v_j − center))².

    If it is more, the sum with every key as a group of its own is returned: errors in a group may
    be equal, and then cancel where the sum does, or independent. ``(heads, rows, value_dim)``.

    Args:
        weight: ``(heads, rows, kv)``, not negative; keys of weight 0 are in no group.
        log: Logarithm of P up to a constant per row, same shape: keys for which it lies in the same
            interval of ``width`` form a group.
        values: ``(heads, kv, value_dim)``.
        center: ``(heads, rows, value_dim)``; None for 0.
    """
    excess = _excess(weight, log, values, center, width)
    return (_centered_squares(weight, values, center) + excess.clamp_min(0)).clamp_min(0)


def _centered_squares(weight: Tensor, values: Tensor, center: Tensor | None) -> Tensor:
    """Return Σ (weight_j · (v_j − center))², ``(heads, rows, value_dim)``; may be just below 0."""
    square = weight.square()
    total: Tensor = square @ values.square()
    if center is None:
        return total
    return total - 2 * center * (square @ values) + center.square() * square.sum(-1, keepdim=True)


def _excess(
    weight: Tensor, log: Tensor, values: Tensor, center: Tensor | None, width: float
) -> Tensor:
    """Return what groups of several keys add to Σ (weight · (v − center))²."""
    heads, rows, keys = weight.shape
    # Weights whose logarithms lie in one interval may be rounded by the same amount.
    interval = torch.where(weight > 0, (log / width).floor(), -torch.inf)
    ordered, by_interval = interval.sort(-1)
    same = (ordered[..., 1:] == ordered[..., :-1]) & torch.isfinite(ordered[..., 1:])
    none = torch.zeros_like(same[..., :1])
    with_previous = torch.cat([none, same], -1)
    several = with_previous | torch.cat([same, none], -1)
    first = several & ~with_previous
    # Keys that share a group with another, in order of row and group.
    head, row, place = several.nonzero(as_tuple=True)
    key = by_interval[head, row, place]
    shared, at_row, at_key = weight[head, row, key], head * rows + row, head * keys + key
    alone = torch.zeros_like(weight).index_put_((head, row, key), shared)
    squares = -_centered_squares(alone, values, center).flatten(0, 1)
    # Positions where groups begin; at the end of each row, numbers of keys and groups so far.
    begins = first[head, row, place].nonzero()[:, 0]
    counted = torch.stack([several, first]).sum(-1).flatten(1).cumsum(-1)
    ends = {0: 0, **dict(counted.T.tolist())}
    # Whole rows at a time. Groups have at least two keys, so there are at most half as many sums.
    most = 2 * (_CPU_NUMBERS if values.device.type == "cpu" else _GPU_NUMBERS) // values.shape[-1]
    for part in _whole_rows(list(ends), most):
        begin = begins[ends[part.start] : ends[part.stop]]
        bags = {"offsets": begin - part.start, "mode": "sum"}
        sums = embedding_bag(
            at_key[part], values.flatten(0, 1), per_sample_weights=shared[part], **bags
        )
        of_group = at_row[begin]
        if center is not None:
            number = torch.arange(part.stop - part.start, device=values.device)
            weight_sum = embedding_bag(number, shared[part, None], **bags)
            sums.addcmul_(center.flatten(0, 1)[of_group], weight_sum, value=-1)
        squares.index_add_(0, of_group, sums.square_())
    return squares.view(heads, rows, -1)


def _whole_rows(ends: list[int], most: int) -> Iterator[slice]:
    """Yield slices of whole rows, which end at ``ends``, of at most ``most`` items or one row."""
    start = 0
    while start < ends[-1]:
        fit = bisect.bisect_right(ends, start + most) - 1
        stop = max(ends[fit], ends[bisect.bisect_right(ends, start)])
        yield slice(start, stop)
        start = stop
