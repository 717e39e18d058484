"""What rounding makes of out and LSE with probability 1 − 1e-6: equations B21–B28."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.judge.additions import additions, sum_accumulator, sum_bias
from attncheck.judge.bounds import Bound, deterministic
from attncheck.judge.exponents import exponents
from attncheck.judge.row_sums import log_sum_base
from attncheck.judge.score_statistics import score_statistics
from attncheck.judge.scores import rounds_operands
from attncheck.judge.spacing import half_ulp
from attncheck.judge.value_statistics import out_statistics, softmax_statistics
from attncheck.judge.weights import weights

if TYPE_CHECKING:
    from attncheck.conditions import Conditions, ScoreModError
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.judge.score_statistics import ScoreStatistics
    from attncheck.judge.scores import ScoreError
    from attncheck.judge.weights import Weights

__all__ = ["MISSED", "Probable", "deviations", "probable"]

MISSED = 1e-6
"""Probability that any element of a right kernel passes its probabilistic bound."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Probable:
    """Bounds of |error| that hold with probability 1 − ``MISSED``, and what to expect; float64.

    Attributes:
        out: ``(heads, rows, value_dim)``; never beyond the deterministic bound.
        lse: ``(heads, rows)``.
        sd_out: Predicted root mean square of the error of out.
        sd_lse: The same of LSE.
        certain: The deterministic bound.
    """

    out: torch.Tensor
    lse: torch.Tensor
    sd_out: torch.Tensor
    sd_lse: torch.Tensor
    certain: Bound


def deviations(elements: int) -> float:
    """Standard deviations that none of ``elements`` errors passes, but for ``MISSED`` (B21)."""
    return math.sqrt(2 * math.log(2 * max(1, elements) / MISSED))


def probable(
    conditions: Conditions,
    arithmetic: Arithmetic,
    scores: ScoreError,
    mod: ScoreModError | None = None,
    *,
    elements: int,
) -> Probable:
    """Bounds that take rounding errors as independent, but for those that are equal.

    Args:
        conditions: Of the rows.
        arithmetic: What the kernel declares.
        scores: ``score_error`` of both.
        mod: Where the Problem has a score mod.
        elements: Of out in the whole Problem.

    Source: B21–B28 in ``docs/bounds.md``.
    """
    certain = deterministic(conditions, arithmetic, scores, mod)
    errors = exponents(conditions, arithmetic, scores, mod)
    moved = weights(conditions, arithmetic, errors)
    statistics = score_statistics(conditions, arithmetic, scores, mod, deviations(elements))
    of_out = softmax_statistics if conditions.given_scores else out_statistics
    random, steady = of_out(conditions, arithmetic, statistics, moved)
    known = torch.ones_like(conditions.lse, dtype=torch.bool)
    if mod is not None:  # at a jump the errors of a row's weights are anything but independent
        known = ~(mod.jump & conditions.seen).any(-1)
    steady = steady + certain.out_terms["underflow"]
    out = deviations(elements) * random + steady
    out = out + half_ulp(conditions.out.abs() + out, arithmetic.output)
    lse_random, lse_steady = _lse(conditions, arithmetic, statistics, moved)
    lse = deviations(elements) * lse_random + lse_steady
    # Rounded to nearest, an error is uniform over an ulp.
    last = 2 * half_ulp(conditions.out.abs(), arithmetic.output) / math.sqrt(12)
    sd_out = (random.square() + last.square() + (steady / 2).square()).sqrt()
    sd_lse = (lse_random.square() + (lse_steady / 2).square()).sqrt()
    return Probable(
        out=_lesser(out, certain.out, known[..., None], certain.out),
        lse=_lesser(lse, certain.lse, known, certain.lse),
        sd_out=_lesser(sd_out, certain.out, known[..., None]),
        sd_lse=_lesser(sd_lse, certain.lse, known),
        certain=certain,
    )


def _lesser(
    found: torch.Tensor,
    certain: torch.Tensor,
    known: torch.Tensor,
    otherwise: torch.Tensor | None = None,
) -> torch.Tensor:
    """``found`` where it is known and less than the proof: 0 in rows that see no key.

    Infinite where there is no proof; where it is not known the proof, or infinite.
    """
    other = torch.full_like(certain, math.inf) if otherwise is None else otherwise
    return torch.where(
        torch.isfinite(certain), torch.where(known, torch.fmin(found, certain), other), certain
    )


def _lse(
    conditions: Conditions,
    arithmetic: Arithmetic,
    scores: ScoreStatistics,
    moved: Weights,
) -> tuple[torch.Tensor, torch.Tensor]:
    """B27: standard deviation of LSE's error, and what is systematic of it."""
    exact = moved.exact
    sd = sum_accumulator(arithmetic).sd(additions(conditions, arithmetic))[..., 0]
    variance = (exact * scores.deviation).square().sum(-1) + sd.square() + scores.common
    steady = log_sum_base(conditions, arithmetic, torch.zeros_like(sd))
    for direction in scores.steady:
        steady = steady + (exact * direction).sum(-1).abs()
    if not conditions.given_scores:
        variance = variance + _rounded_operands(conditions, arithmetic, exact * scores.slope)
    if arithmetic.truncates and not conditions.given_scores:
        size = (exact * scores.slope * conditions.products).abs().nan_to_num(0.0).sum(-1)
        steady = steady + arithmetic.operand_error * size
    if arithmetic.sums_rounded_weights and arithmetic.weights_error:
        variance = variance + moved.rounded.square().sum(-1) / 3
        steady = steady + arithmetic.weights_error - torch.log1p(-moved.lost.sum(-1).clamp(max=1))
    steady = steady - torch.log1p(-sum_bias(conditions, arithmetic)[..., 0])
    return variance.sqrt(), steady


def _rounded_operands(
    conditions: Conditions, arithmetic: Arithmetic, moves: torch.Tensor
) -> torch.Tensor:
    """B27: q rounded once more moves all scores of a row together, k those of equal keys.

    Each score moves LSE by ``moves``: its weight times the slope of the score mod.
    """
    q, k, u, scaled = conditions.q, conditions.k, arithmetic.operand_error, arithmetic.scaled_query
    variance = torch.zeros_like(conditions.lse)
    if not rounds_operands(arithmetic):
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
