"""Errors of scores and of the exponents of softmax weights: equations B5–B9 and B29."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.core.conditions import Conditions, RowTotals, ScoreModError, kept_step
from attncheck.core.declared_arithmetic import Accumulator, Arithmetic
from attncheck.judge.sum_roundings import tiles_passed

# Roundings of q·√scale and k·√scale, if a kernel of wide products scales its operands first: each
# factor is rounded, and so is each product with it.
_PRESCALED = 4

# Roundings of a sink that is divided by the scale, or multiplied by its reciprocal, to have the
# units of q·k.
_DIVIDED_SINK = 4


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScoreError:
    """Errors of scale · q·k, float64 ``(heads, rows, kv)``; infinite where it may overflow.

    For a sink, the last key, errors of its conversion to the units of the scores.
    """

    radius: Tensor  # largest |computed − exact|
    variance: Tensor  # of the random part of the error
    # Signed: the systematic error is −β · bias with one β in [0, 1] per row (truncation); None
    # without truncation.
    bias: Tensor | None = None


@kept_step
def score_error(conditions: Conditions, arithmetic: Arithmetic) -> ScoreError:
    """Return the error of ``conditions.products`` as a kernel of this arithmetic computes them.

    The scores of a softmax are inputs: their error is 0, or infinite where they may overflow.
    Source: B5–B8, and B29 for a sink, in ``docs/explanation/bounds.md``.
    """
    if conditions.given_scores:
        nothing = torch.zeros_like(conditions.products)
        return ScoreError(radius=_or_infinite(conditions, arithmetic, nothing), variance=nothing)
    # Bounds of a sum are relative to the sum of magnitudes, whatever cancels.
    size = conditions.q.abs() @ conditions.k.abs().mT
    scale, terms = abs(conditions.scale), term_roundings(conditions.q.shape[-1], arithmetic)
    added = arithmetic.scores.det(terms) * size
    contracted, cut = scale * added, None
    if arithmetic.scores.coarse:  # B7
        bits = arithmetic.products.significand
        lost = truncation_error(conditions.q, conditions.k, arithmetic.scores, bits)
        cut = torch.minimum(lost, added)
        contracted = torch.minimum(contracted, scale * cut)
    contracted = with_rounded_operands(arithmetic, contracted, scale * size)
    radius = _scaled_error(conditions, arithmetic, contracted, size)
    variance = _variance(conditions, arithmetic, terms, size, cut)
    if conditions.has_sink:
        radius[..., -1], variance[..., -1] = _sink_error(conditions, arithmetic)
    # B8: truncation of operands or sums moves every score toward 0.
    bias = None
    if arithmetic.truncates and arithmetic.operand_error:
        bias = 2 * arithmetic.operand_error * conditions.products
    if arithmetic.scores.block is not None:
        share = torch.full_like(size, arithmetic.scores.bias(terms))
        if cut is not None:
            share = torch.where(size > 0, cut / size, 0.0)
        bias = share * conditions.products + (0.0 if bias is None else bias)
    return ScoreError(radius=radius, variance=variance, bias=bias)


def with_rounded_operands(arithmetic: Arithmetic, contracted: Tensor, size: Tensor) -> Tensor:
    """Return B6: ``contracted``, an error of scale · q·k, enlarged by rounding the operands.

    Operands may be rounded to tf32, and q once it is scaled; ``size`` is scale · Σ_d |q_d k_d|.
    """
    u, scaled = arithmetic.operand_error, arithmetic.scaled_query
    operands = 2 * u + u * u
    if scaled is not None:
        operands = (1 + operands) * (1 + scaled.unit_roundoff) - 1
    return contracted * (1 + operands) + operands * size if operands else contracted


def likely_radius(scores: ScoreError, sigmas: float) -> Tensor:
    """Return ``sigmas`` standard deviations of the error, but at most its radius (B22)."""
    return torch.minimum(scores.radius, sigmas * scores.variance.sqrt())


def factor_roundings(arithmetic: Arithmetic) -> int:
    """Return the roundings of the factor of the scores: scale · log2 e, and descales in fp8."""
    return 4 if arithmetic.products.saturates else 2


def rounds_operands(arithmetic: Arithmetic) -> bool:
    """Return whether q or k is rounded again, which moves the scores of a row together (B6)."""
    return bool(arithmetic.operand_error) or arithmetic.scaled_query is not None


def maximum_of_keys(conditions: Conditions | RowTotals) -> Tensor:
    """Return a row's largest score without its sink, ``(heads, rows)``; the sink if it sees no key.

    A kernel that adds the sink last subtracts this maximum.
    """
    if isinstance(conditions, RowTotals) or not conditions.has_sink:
        return conditions.maximum
    seen = conditions.seen[..., :-1]
    if seen.shape[-1] == 0:
        return conditions.maximum
    largest = torch.where(seen, conditions.scores[..., :-1], -math.inf).amax(-1)
    return torch.where(seen.any(-1), largest, conditions.maximum)


def _sink_error(conditions: Conditions, arithmetic: Arithmetic) -> tuple[Tensor, Tensor]:
    """Return B29: radius and variance of a sink's error, ``(heads, rows)``."""
    # A sink is no product: it is only converted to the units of q·k and back.
    sink = conditions.scores[..., -1].abs()
    count, fmt = 2 * factor_roundings(arithmetic) + _DIVIDED_SINK, arithmetic.computes
    smallest = 2.0**fmt.min_exponent
    radius = count * arithmetic.unit / (1 - count * arithmetic.unit) * sink
    radius = radius + smallest * 4 * max(1.0, abs(conditions.scale))
    # The exponent is the sink times log2 e, or the sink divided and multiplied by the scale.
    reach = max(1.0, 1.0 / abs(conditions.scale)) if conditions.scale else math.inf
    radius = torch.where(2 * sink * reach > fmt.max, torch.inf, radius)
    return radius, count * (arithmetic.unit * sink).square() / 3


def term_roundings(head_dim: int, arithmetic: Arithmetic) -> float:
    """Return how often one term of q·k is rounded at most (B5)."""
    terms = float(head_dim)
    if 2 * arithmetic.products.significand > arithmetic.computes.significand:
        return terms + 1 + _PRESCALED
    return terms + _PRESCALED if arithmetic.products.name == "tf32" else terms


def _scaled_error(
    conditions: Conditions, arithmetic: Arithmetic, contracted: Tensor, size: Tensor
) -> Tensor:
    """Return B5: the error after multiplying by the factor; infinite where fp32 may overflow."""
    exact, fmt = conditions.products.abs(), arithmetic.computes
    roundings = factor_roundings(arithmetic) * arithmetic.unit
    radius = contracted + roundings / (1 - roundings) * (exact + contracted)
    largest_product = arithmetic.products.max**2 if arithmetic.products.saturates else 0.0
    smallest = 2.0**fmt.min_exponent
    dim = conditions.q.shape[-1]
    radius = radius + smallest * (2 + size + dim * (abs(conditions.scale) + largest_product + 2))
    if not arithmetic.products.saturates:
        radius = torch.where(size > fmt.max / 2, torch.inf, radius)
    query_format = arithmetic.scaled_query
    if query_format is not None:
        # B6: the error of rounding a subnormal scale · q (· log2 e), or infinite where it may
        # overflow.
        below = query_format.subnormal_spacing / 2 * conditions.k.abs().sum(-1)[..., None, :]
        scaled = abs(conditions.scale) * math.log2(math.e) * conditions.q.abs()
        beyond = (scaled > query_format.max).any(-1, keepdim=True)
        radius = radius + torch.where(beyond, torch.inf, below)
    if arithmetic.operand_error:
        infinite = may_overflow(conditions.q, arithmetic).any(-1)[..., :, None]
        infinite = infinite | may_overflow(conditions.k, arithmetic).any(-1)[..., None, :]
        radius = torch.where(infinite, torch.inf, radius)
    return _or_infinite(conditions, arithmetic, radius)


def _or_infinite(conditions: Conditions, arithmetic: Arithmetic, radius: Tensor) -> Tensor:
    """Return ``radius``, infinite where the exponent, a score times log2 e, may overflow (B5)."""
    beyond = conditions.products.abs() + radius > arithmetic.computes.max / 2
    return torch.where(beyond, torch.inf, radius)


def may_overflow(operand: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Return which finite numbers may become infinite when rounded to tf32."""
    if not arithmetic.operand_error or arithmetic.truncates:
        return torch.zeros_like(operand, dtype=torch.bool)
    return operand.abs() > arithmetic.products.max


def _variance(
    conditions: Conditions, arithmetic: Arithmetic, terms: float, size: Tensor, cut: Tensor | None
) -> Tensor:
    """Return B8: the variance of the error, with roundings taken as independent."""
    scale = abs(conditions.scale)
    sd = arithmetic.scores.sd(terms)
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


def truncation_error(q: Tensor, k: Tensor, accumulator: Accumulator, significand: int) -> Tensor:
    """Return the largest error of each q·k by a truncating accumulator, ``(heads, rows, kv)``.

    Args:
        q: ``(heads, rows, head_dim)``, float64.
        k: ``(heads, kv, head_dim)``, float64.
        accumulator: An accumulator with a block.
        significand: Significant bits of the operands: a product has twice as many, and keeps all of
            them if it is close to the largest product of its step.

    The steps may be added up in either direction, and their sums moved to an fp32 accumulator
    after any number of steps.
    """
    assert accumulator.block is not None
    steps = [slice(i, i + accumulator.block) for i in range(0, q.shape[-1], accumulator.block)]
    size = q.abs() @ k.abs().mT
    # The largest |sum of consecutive steps| is the largest prefix sum less the smallest.
    total, low, high = (torch.zeros_like(size) for _ in range(3))
    largest = []
    for step in steps:
        total = total + q[..., step] @ k[..., step].mT
        low, high = torch.minimum(low, total), torch.maximum(high, total)
        largest_term = torch.zeros_like(size)
        for d in range(q.shape[-1])[step]:
            torch.maximum(largest_term, _products(q, k, d), out=largest_term)
        largest.append(largest_term)
    largest_sum = sum(largest, torch.zeros_like(size))
    count = torch.full_like(size[..., :1, :1], len(steps))
    # The running sum's own errors count too: they enlarge it, and with it the amount cut off.
    running = torch.minimum(running_size(high - low, largest_sum, accumulator, count), size)
    unit = 2.0**-accumulator.alignment
    error = len(steps) * 2.0 ** (1 - accumulator.result) * running
    for step, terms in zip(steps, largest, strict=True):
        above = unit * torch.maximum(terms, running)
        error += _cut_off(q[..., step], k[..., step], above, significand)
        # The running sum has been truncated to its own bits: only larger terms cut off more of it.
        error += unit * terms if len(steps) > 1 else 0.0
    # The error of adding up sums of steps in fp32.
    return error + len(steps) * accumulator.unit * size


def running_size(exact: Tensor, largest: Tensor, accumulator: Accumulator, steps: Tensor) -> Tensor:
    """Return the largest magnitude of a running sum, its own errors included.

    Args:
        exact: Largest magnitude of any exact sum of consecutive steps.
        largest: Σ over the steps of a step's largest |term|, same shape.
        accumulator: An accumulator with a block.
        steps: Number of steps, broadcastable to that shape.

    Infinite where errors of the sum could grow by their own errors without limit.
    """
    aligned, truncated = accumulator.step_loss()
    growth = steps * (aligned + truncated)
    return torch.where(growth < 1, (exact + aligned * largest) / (1 - growth), torch.inf)


def _products(q: Tensor, k: Tensor, d: int) -> Tensor:
    return q[..., d, None].abs() * k[..., None, :, d].abs()


def _cut_off(q: Tensor, k: Tensor, unit: Tensor, significand: int) -> Tensor:
    """Return the amount that alignment cuts off the products of one step, at most ``unit`` each."""
    # The last bit of a product with 2p significant bits lies 2p − 1 places below its first.
    exact_from = 2.0 ** (2 * significand - 1) * unit
    lost = torch.zeros_like(unit)
    for d in range(q.shape[-1]):
        term = _products(q, k, d)
        lost += torch.where(term < exact_from, torch.minimum(term, unit), 0.0)
    return lost


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExponentErrors:
    """Errors of the exponents and their parts, float64 ``(heads, rows, kv)``, 0 where not seen."""

    product: Tensor  # error of scale · q·k, propagated through the score mod
    own: Tensor  # error of the score mod itself
    exponent: Tensor  # error of all operations between a score and its weight
    arrival: Tensor  # ``exponent`` of the score that is the maximum, ``(heads, rows, 1)``
    highest: Tensor  # largest error of the computed maximum, ``(heads, rows, 1)``
    unbounded: Tensor  # bool ``(heads, rows)``: some score has no bound or may overflow

    @property
    def total(self) -> Tensor:
        """Largest |error| of a weight's logarithm (B9)."""
        # Without a score mod ``own`` is a single 0 that is expanded, with strides of 0.
        before = self.product + self.own if any(self.own.stride()) else self.product
        return before + self.exponent


@kept_step
def exponent_errors(
    conditions: Conditions, arithmetic: Arithmetic, scores: ScoreError, mod: ScoreModError | None
) -> ExponentErrors:
    """Return B9: the errors of all exponents of these rows."""
    seen = conditions.seen
    # With a score mod, the error is that of the mod's result.
    radius = scores.radius if mod is None else mod.radius
    # Where rounding may decide whether a score mod hides a key, its radius is infinite.
    unknown = ~torch.isfinite(radius) & (seen if mod is None else True)
    unbounded = unknown.any(-1)
    counted = seen & ~unbounded[..., None]
    product = radius = torch.where(counted, radius, 0.0)
    own = radius.new_zeros(()).expand_as(radius)  # takes no memory
    if mod is not None:
        own = torch.where(counted, mod.own.clamp_max(mod.radius), 0.0)
        product = radius - own
    maximum = conditions.maximum[..., None]
    below = (maximum - conditions.scores).abs()
    raised = torch.where(counted, radius - below, 0.0).amax(-1, keepdim=True)
    # Rounding raises the maximum by at most ``raised`` and lowers it by at most ``fallen``.
    fallen = torch.where(counted, radius + below, torch.inf).amin(-1, keepdim=True)
    highest = torch.maximum(raised, torch.where(torch.isfinite(fallen), fallen, 0.0))
    exponent = exponent_error(conditions, arithmetic, radius + highest, below)
    at_top = exponent_error(conditions, arithmetic, 2 * highest, torch.zeros_like(highest), maximum)
    return ExponentErrors(
        product=product,
        own=own,
        exponent=torch.where(counted, exponent, 0.0),
        arrival=at_top,
        highest=highest,
        unbounded=unbounded,
    )


def exponent_error(
    conditions: Conditions | RowTotals,
    arithmetic: Arithmetic,
    shift: Tensor,
    below: Tensor,
    score: Tensor | None = None,
) -> Tensor:
    """Return B9's last part for scores ``below`` under the maximum, off by ``shift`` together."""
    if score is None:
        assert not isinstance(conditions, RowTotals), "which have no scores"
        score = conditions.scores
    keys_maximum = maximum_of_keys(conditions)
    maximum = torch.maximum(conditions.maximum.abs(), keys_maximum.abs())[..., None]
    if conditions.has_sink:
        below = below + (conditions.maximum - keys_maximum)[..., None]
    tiles = tiles_passed(conditions, arithmetic)
    each = 2 * arithmetic.exp2_ulps + 1
    differences = factor_roundings(arithmetic) + 2
    lag = 2 * math.log(2) * arithmetic.lazy_rescale
    distance = below + shift + lag if lag else below + shift
    count = score.abs() + maximum + 2 * shift + differences * distance + each * tiles
    if arithmetic.splits > 1:
        logarithm = torch.log(conditions.count.clamp_min(1))
        count = count + 8 * (score.abs() + maximum + shift + logarithm) + 2 * each + 8
    unit = arithmetic.unit
    return count * (unit / (1 - each * unit))
