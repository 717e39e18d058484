"""Errors of the scores before any score mod: equations B5–B8 and B29 of the manual."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.judge.aligned_products import truncation_error

if TYPE_CHECKING:
    from attncheck.conditions import Conditions
    from attncheck.formats import Format
    from attncheck.judge.arithmetic import Arithmetic

__all__ = [
    "ScoreError",
    "factor_roundings",
    "likely_radius",
    "maximum_of_keys",
    "overflows",
    "rounds_operands",
    "score_error",
]

# q·√scale and k·√scale, where a kernel of wide products scales them first: two factors, each
# rounded itself and multiplied with one rounding.
_PRESCALED = 4

# A sink in the units of q·k: divided by the scale, or multiplied by what 1 is when divided by it.
_DIVIDED_SINK = 4


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScoreError:
    """Errors of scale · q·k, float64 ``(heads, rows, kv)``; infinite where it may overflow.

    Of a sink, the last key: those of bringing it into the units of the scores.

    Attributes:
        radius: Largest |computed − exact|.
        variance: Of what is random of it.
        bias: Signed: a systematic error is −β · bias with one β in [0, 1] for a whole row
            (truncation); None where nothing truncates.
    """

    radius: torch.Tensor
    variance: torch.Tensor
    bias: torch.Tensor | None = None


def score_error(conditions: Conditions, arithmetic: Arithmetic) -> ScoreError:
    """The error of ``conditions.products`` as a kernel of this arithmetic computes them.

    A softmax is given its scores: their error is 0, but for what may overflow. Source: B5–B8, and
    B29 of a sink, in ``docs/bounds.md``.
    """
    if conditions.given_scores:
        nothing = torch.zeros_like(conditions.products)
        return ScoreError(radius=_or_infinite(conditions, arithmetic, nothing), variance=nothing)
    size = conditions.q.abs() @ conditions.k.abs().mT
    scale = abs(conditions.scale)
    cut = _cut_off(conditions, arithmetic, size)
    operands = _operand_error(arithmetic)
    contracted = scale * (arithmetic.scores.det(_roundings(conditions, arithmetic)) * size)
    if cut is not None:
        contracted = torch.minimum(contracted, scale * cut)
    contracted = contracted * (1 + operands) + operands * scale * size
    radius = _scaled(conditions, arithmetic, contracted, size)
    variance = _variance(conditions, arithmetic, size, cut)
    if conditions.has_sink:
        radius[..., -1], variance[..., -1] = _of_sink(conditions, arithmetic)
    return ScoreError(
        radius=radius, variance=variance, bias=_bias(conditions, arithmetic, size, cut)
    )


def likely_radius(scores: ScoreError, sigmas: float) -> torch.Tensor:
    """What the random part of the error does not pass by ``sigmas`` standard deviations (B22)."""
    return torch.minimum(scores.radius, sigmas * scores.variance.sqrt())


def factor_roundings(arithmetic: Arithmetic) -> int:
    """Roundings in the one factor that scores are multiplied by: scale · log2 e, and descales."""
    return 4 if arithmetic.products.saturates else 2


def rounds_operands(arithmetic: Arithmetic) -> bool:
    """Whether q or k is rounded once more, which moves scores of a row together (B6)."""
    return bool(arithmetic.operand_error) or arithmetic.scaled_query is not None


def maximum_of_keys(conditions: Conditions) -> torch.Tensor:
    """Largest score of a row but for its sink, ``(heads, rows)``; the sink's where it sees no key.

    A kernel that adds the sink last subtracts it.
    """
    if not conditions.has_sink:
        return conditions.maximum
    seen = conditions.seen[..., :-1]
    if seen.shape[-1] == 0:
        return conditions.maximum
    largest = torch.where(seen, conditions.scores[..., :-1], -math.inf).amax(-1)
    return torch.where(seen.any(-1), largest, conditions.maximum)


def _of_sink(conditions: Conditions, arithmetic: Arithmetic) -> tuple[torch.Tensor, torch.Tensor]:
    """B29: radius and variance of a sink's error, ``(heads, rows)``."""
    sink = conditions.scores[..., -1].abs()
    count, fmt = 2 * factor_roundings(arithmetic) + _DIVIDED_SINK, arithmetic.computes
    smallest = 2.0**fmt.min_exponent
    radius = count * arithmetic.unit / (1 - count * arithmetic.unit) * sink
    radius = radius + smallest * 4 * max(1.0, abs(conditions.scale))
    # An exponent is the sink times log2 e, or divided by the scale and multiplied by it again.
    reach = max(1.0, 1.0 / abs(conditions.scale)) if conditions.scale else math.inf
    radius = torch.where(2 * sink * reach > fmt.max, torch.inf, radius)
    return radius, count * (arithmetic.unit * sink).square() / 3


def _roundings(conditions: Conditions, arithmetic: Arithmetic) -> float:
    """Roundings that one term of q·k passes through at most (B5)."""
    terms = float(conditions.q.shape[-1])
    if 2 * arithmetic.products.significand > arithmetic.computes.significand:
        return terms + 1 + _PRESCALED
    return terms + _PRESCALED if arithmetic.products.name == "tf32" else terms


def _operand_error(arithmetic: Arithmetic) -> float:
    """Relative error of a term by operands that are rounded once more: tf32, scaled q (B6)."""
    u = arithmetic.operand_error
    both = 2 * u + u * u
    if arithmetic.scaled_query is None:
        return both
    return (1 + both) * (1 + arithmetic.scaled_query.unit_roundoff) - 1


def _cut_off(
    conditions: Conditions, arithmetic: Arithmetic, size: torch.Tensor
) -> torch.Tensor | None:
    """B7: what a coarse accumulator loses of q·k; None of any other."""
    if not arithmetic.scores.coarse:
        return None
    bits = arithmetic.products.significand
    lost = truncation_error(conditions.q, conditions.k, arithmetic.scores, bits)
    return torch.minimum(lost, arithmetic.scores.det(_roundings(conditions, arithmetic)) * size)


def _scaled(
    conditions: Conditions, arithmetic: Arithmetic, contracted: torch.Tensor, size: torch.Tensor
) -> torch.Tensor:
    """B5: the error after the factor is multiplied by; infinite where fp32 may overflow."""
    exact, fmt = conditions.products.abs(), arithmetic.computes
    roundings = factor_roundings(arithmetic) * arithmetic.unit
    radius = contracted + roundings / (1 - roundings) * (exact + contracted)
    stored = arithmetic.products.max**2 if arithmetic.products.saturates else 0.0
    smallest = 2.0**fmt.min_exponent
    dim = conditions.q.shape[-1]
    radius = radius + smallest * (2 + size + dim * (abs(conditions.scale) + stored + 2))
    if not arithmetic.products.saturates:
        radius = torch.where(size > fmt.max / 2, torch.inf, radius)
    if arithmetic.scaled_query is not None:
        radius = radius + _below_normal(conditions, arithmetic.scaled_query)
    lost = overflows(conditions.q, arithmetic).any(-1)[..., :, None]
    lost = lost | overflows(conditions.k, arithmetic).any(-1)[..., None, :]
    return _or_infinite(conditions, arithmetic, torch.where(lost, torch.inf, radius))


def _or_infinite(
    conditions: Conditions, arithmetic: Arithmetic, radius: torch.Tensor
) -> torch.Tensor:
    """B5: an exponent is a score times log2 e, which may be beyond the largest number."""
    beyond = conditions.products.abs() + radius > arithmetic.computes.max / 2
    return torch.where(beyond, torch.inf, radius)


def _below_normal(conditions: Conditions, fmt: Format) -> torch.Tensor:
    """B6: what rounding scale · q (· log2 e) takes below the normal range of ``fmt``.

    Infinite where it may be beyond the largest number.
    """
    lost = fmt.subnormal_spacing / 2 * conditions.k.abs().sum(-1)[..., None, :]
    scaled = abs(conditions.scale) * math.log2(math.e) * conditions.q.abs()
    return torch.where((scaled > fmt.max).any(-1, keepdim=True), torch.inf, lost)


def overflows(operand: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
    """Which finite numbers a product may read as infinite: rounded to tf32 those near the end."""
    if not arithmetic.operand_error or arithmetic.truncates:
        return torch.zeros_like(operand, dtype=torch.bool)
    return operand.abs() > arithmetic.products.max


def _variance(
    conditions: Conditions, arithmetic: Arithmetic, size: torch.Tensor, cut: torch.Tensor | None
) -> torch.Tensor:
    """B8: variance of the error, roundings taken as independent."""
    scale = abs(conditions.scale)
    sd = arithmetic.scores.sd(_roundings(conditions, arithmetic))
    constant = factor_roundings(arithmetic) * arithmetic.unit
    variance = (scale * sd * size).square() + (constant * conditions.products).square() / 3
    rounded = [2 * arithmetic.operand_error**2]
    if arithmetic.scaled_query is not None:
        rounded.append(arithmetic.scaled_query.unit_roundoff**2)
        below = arithmetic.scaled_query.subnormal_spacing / 2
        variance = variance + below**2 / 3 * conditions.k.square().sum(-1)[..., None, :]
    if any(rounded):
        squares = conditions.q.square() @ conditions.k.square().mT
        variance = variance + scale**2 * sum(rounded) / 3 * squares
    if cut is not None:
        variance = variance + (scale * cut).square() / 3
    return variance


def _bias(
    conditions: Conditions, arithmetic: Arithmetic, size: torch.Tensor, cut: torch.Tensor | None
) -> torch.Tensor | None:
    """B8: what truncation of operands or sums takes from every score, by its own sign."""
    bias = None
    if arithmetic.truncates and arithmetic.operand_error:
        bias = 2 * arithmetic.operand_error * conditions.products
    if arithmetic.scores.block is not None and cut is None:
        lost = arithmetic.scores.bias(_roundings(conditions, arithmetic))
        bias = lost * conditions.products + (0.0 if bias is None else bias)
    if cut is not None:
        share = torch.where(size > 0, cut / size, 0.0)
        bias = share * conditions.products + (0.0 if bias is None else bias)
    return bias
