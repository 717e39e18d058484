"""Random and systematic errors of out: equations B22–B26 and B28 of the manual."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.judge.additions import additions, sum_accumulator, sum_bias, taken
from attncheck.judge.aligned_values import accumulation
from attncheck.judge.shared_errors import quadrature
from attncheck.judge.value_bounds import finite_values

if TYPE_CHECKING:
    from attncheck.conditions import Conditions
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.judge.score_statistics import ScoreStatistics
    from attncheck.judge.weights import Weights

__all__ = ["out_statistics", "softmax_statistics"]

# Weights that agree to this many units of fp32 may round alike.
_ALIKE = 16


def out_statistics(
    conditions: Conditions, arithmetic: Arithmetic, scores: ScoreStatistics, moved: Weights
) -> tuple[torch.Tensor, torch.Tensor]:
    """Standard deviation of out's error before it is rounded, and what is systematic of it."""
    values, _ = finite_values(conditions)
    variance = (
        _of_scores(conditions, arithmetic, scores, moved, values)
        + _of_rounding(conditions, arithmetic, moved, values)
        + _of_sums(conditions, arithmetic, moved, values)
    )
    steady = _lost(conditions, arithmetic, moved, values)
    for direction in scores.steady:
        steady = steady + linear(moved.exact * direction, values, conditions.out)
    if arithmetic.operand_error and arithmetic.truncates:
        steady = steady + 2 * arithmetic.operand_error * (moved.exact @ values.abs())
    if arithmetic.values.block is not None:
        # A row sum that is too small makes out larger: one of the two may be without the other.
        of_sum = sum_bias(conditions, arithmetic) * conditions.out.abs()
        of_values = _running_bias(conditions, arithmetic, scores, moved, values)
        steady = steady + torch.maximum(of_sum, of_values)
    return variance.sqrt(), steady


def linear(weight: torch.Tensor, values: torch.Tensor, center: torch.Tensor) -> torch.Tensor:
    """|Σ weight_j (v_j − center)|: what a steady error of the exponents makes of out."""
    return (weight @ values - center * weight.sum(-1, keepdim=True)).abs()


def _of_scores(
    conditions: Conditions,
    arithmetic: Arithmetic,
    scores: ScoreStatistics,
    moved: Weights,
    values: torch.Tensor,
) -> torch.Tensor:
    """B22: of the exponents."""
    weight = moved.exact * scores.deviation
    alike = _ALIKE * arithmetic.unit
    return quadrature(weight, conditions.scores, values, conditions.out, alike)


def _of_rounding(
    conditions: Conditions, arithmetic: Arithmetic, moved: Weights, values: torch.Tensor
) -> torch.Tensor:
    """B23: of P rounded to its format, where nearly equal weights round alike, and of V to tf32."""
    variance = torch.zeros_like(conditions.out)
    if arithmetic.operand_error:
        of_values = moved.exact.square() @ values.square()
        variance = variance + arithmetic.operand_error**2 / 3 * of_values
    if not arithmetic.weights_error:
        return variance
    center = conditions.out if arithmetic.sums_rounded_weights else None
    log = conditions.scores - conditions.maximum[..., None]
    found = [
        quadrature(moved.rounded, log, values, center, width)
        for width in (arithmetic.weights_error / 2, _ALIKE * arithmetic.unit)
    ]
    return variance + torch.maximum(*found) / 3


def _of_sums(
    conditions: Conditions, arithmetic: Arithmetic, moved: Weights, values: torch.Tensor
) -> torch.Tensor:
    """B24: of adding up, rescaling and dividing."""
    sd = sum_accumulator(arithmetic).sd(additions(conditions, arithmetic))
    of_values = (sd * (moved.exact @ values.abs())).square()
    return of_values + (sd.square() + 12 * arithmetic.unit**2) * conditions.out.square()


def _lost(
    conditions: Conditions, arithmetic: Arithmetic, moved: Weights, values: torch.Tensor
) -> torch.Tensor:
    """B25: weights below half the smallest number of P's format are lost, all of them."""
    if not arithmetic.weights_error:
        return torch.zeros_like(conditions.out)
    # Where they are missing in the row sum too, out is a mean of the others.
    center = conditions.out if arithmetic.sums_rounded_weights else torch.zeros_like(conditions.out)
    return linear(moved.lost, values, center)


def _running_bias(
    conditions: Conditions,
    arithmetic: Arithmetic,
    scores: ScoreStatistics,
    moved: Weights,
    values: torch.Tensor,
) -> torch.Tensor:
    """B26: truncation takes a share of the running sum, whose size a random walk bounds."""
    walk = scores.sigmas * (moved.exact.square() @ values.square()).sqrt()
    count = conditions.seen.sum(-1, keepdim=True).to(torch.float64)
    share = arithmetic.values.bias(count, taken(conditions, arithmetic.values))
    bias = share * (conditions.out.abs() + walk)
    return torch.minimum(bias, accumulation(conditions, arithmetic, moved, values))


def softmax_statistics(
    conditions: Conditions, arithmetic: Arithmetic, scores: ScoreStatistics, moved: Weights
) -> tuple[torch.Tensor, torch.Tensor]:
    """B28: of the operation softmax, whose out is P: of each weight, and of the row sum."""
    exact = moved.exact
    share = (exact * scores.deviation).square()
    others = (share.sum(-1, keepdim=True) - share).clamp_min(0)
    own = (exact * scores.deviation * (1 - exact)).square()
    sd = sum_accumulator(arithmetic).sd(additions(conditions, arithmetic))
    of_sum = (sd.square() + 12 * arithmetic.unit**2) * exact.square()
    variance = own + exact.square() * others + of_sum
    direction = scores.steady[0]
    mean = (exact * direction).sum(-1, keepdim=True)
    return variance.sqrt(), (exact * (direction - mean)).abs()
