"""Errors of scores and of the exponents of softmax weights: equations B5–B9 and B29."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.core.conditions import Conditions, RowTotals, ScoreModError, kept_step
from attncheck.core.declared_arithmetic import Accumulator, Arithmetic
from attncheck.judge.sum_roundings import tiles_passed

# q·√scale and k·√scale, where a kernel of wide products scales them first: two factors, each
# rounded itself and multiplied with one rounding.
_PRESCALED = 4

# A sink in the units of q·k: divided by the scale, or multiplied by what 1 is when divided by it.
_DIVIDED_SINK = 4


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScoreError:
    """Errors of scale · q·k, float64 ``(heads, rows, kv)``; infinite where it may overflow.

    Of a sink, the last key: those of bringing it into the units of the scores.
    """

    radius: Tensor  # largest |computed − exact|
    variance: Tensor  # of what is random of it
    # Signed: a systematic error is −β · bias with one β in [0, 1] for a whole row (truncation);
    # None where nothing truncates.
    bias: Tensor | None = None


@kept_step
def score_error(conditions: Conditions, arithmetic: Arithmetic) -> ScoreError:
    """The error of ``conditions.products`` as a kernel of this arithmetic computes them.

    A softmax is given its scores: their error is 0, but for what may overflow. Source: B5–B8, and
    B29 of a sink, in ``docs/explanation/bounds.md``.
    """
    if conditions.given_scores:
        nothing = torch.zeros_like(conditions.products)
        return ScoreError(radius=_or_infinite(conditions, arithmetic, nothing), variance=nothing)
    # Every bound of a sum is relative to the sum of magnitudes, which cancellation leaves.
    size = conditions.q.abs() @ conditions.k.abs().mT
    scale, terms = abs(conditions.scale), term_roundings(conditions.q.shape[-1], arithmetic)
    added = arithmetic.scores.det(terms) * size
    contracted, cut = scale * added, None
    if arithmetic.scores.coarse:  # B7
        bits = arithmetic.products.significand
        lost = truncation_error(conditions.q, conditions.k, arithmetic.scores, bits)
        cut = torch.minimum(lost, added)
        contracted = torch.minimum(contracted, scale * cut)
    contracted = of_operands(arithmetic, contracted, scale * size)
    radius = _scaled(conditions, arithmetic, contracted, size)
    variance = _variance(conditions, arithmetic, terms, size, cut)
    if conditions.has_sink:
        radius[..., -1], variance[..., -1] = _of_sink(conditions, arithmetic)
    # B8: what truncation of operands or sums takes from every score, by its own sign.
    bias = None
    if arithmetic.truncates and arithmetic.operand_error:
        bias = 2 * arithmetic.operand_error * conditions.products
    if arithmetic.scores.block is not None:
        share = torch.full_like(size, arithmetic.scores.bias(terms))
        if cut is not None:
            share = torch.where(size > 0, cut / size, 0.0)
        bias = share * conditions.products + (0.0 if bias is None else bias)
    return ScoreError(radius=radius, variance=variance, bias=bias)


def of_operands(arithmetic: Arithmetic, contracted: Tensor, size: Tensor) -> Tensor:
    """B6: ``contracted``, an error of scale · q·k, with operands that are rounded once more.

    To tf32, or as scaled q; ``size`` is scale · Σ_d |q_d k_d|.
    """
    u, scaled = arithmetic.operand_error, arithmetic.scaled_query
    operands = 2 * u + u * u
    if scaled is not None:
        operands = (1 + operands) * (1 + scaled.unit_roundoff) - 1
    return contracted * (1 + operands) + operands * size if operands else contracted


def likely_radius(scores: ScoreError, sigmas: float) -> Tensor:
    """Radius that the random part of the error keeps to, of ``sigmas`` deviations (B22)."""
    return torch.minimum(scores.radius, sigmas * scores.variance.sqrt())


def factor_roundings(arithmetic: Arithmetic) -> int:
    """Roundings in the one factor that scores are multiplied by: scale · log2 e, and descales."""
    return 4 if arithmetic.products.saturates else 2


def rounds_operands(arithmetic: Arithmetic) -> bool:
    """Return whether q or k is rounded once more, which moves scores of a row together (B6)."""
    return bool(arithmetic.operand_error) or arithmetic.scaled_query is not None


def maximum_of_keys(conditions: Conditions | RowTotals) -> Tensor:
    """Largest score of a row but for its sink, ``(heads, rows)``; the sink's where it sees no key.

    A kernel that adds the sink last subtracts it.
    """
    if isinstance(conditions, RowTotals) or not conditions.has_sink:
        return conditions.maximum
    seen = conditions.seen[..., :-1]
    if seen.shape[-1] == 0:
        return conditions.maximum
    largest = torch.where(seen, conditions.scores[..., :-1], -math.inf).amax(-1)
    return torch.where(seen.any(-1), largest, conditions.maximum)


def _of_sink(conditions: Conditions, arithmetic: Arithmetic) -> tuple[Tensor, Tensor]:
    """B29: radius and variance of a sink's error, ``(heads, rows)``."""
    # No product: a sink is only brought into the units of the scores, and back.
    sink = conditions.scores[..., -1].abs()
    count, fmt = 2 * factor_roundings(arithmetic) + _DIVIDED_SINK, arithmetic.computes
    smallest = 2.0**fmt.min_exponent
    radius = count * arithmetic.unit / (1 - count * arithmetic.unit) * sink
    radius = radius + smallest * 4 * max(1.0, abs(conditions.scale))
    # An exponent is the sink times log2 e, or divided by the scale and multiplied by it again.
    reach = max(1.0, 1.0 / abs(conditions.scale)) if conditions.scale else math.inf
    radius = torch.where(2 * sink * reach > fmt.max, torch.inf, radius)
    return radius, count * (arithmetic.unit * sink).square() / 3


def term_roundings(head_dim: int, arithmetic: Arithmetic) -> float:
    """Roundings that one term of q·k passes through at most (B5)."""
    terms = float(head_dim)
    if 2 * arithmetic.products.significand > arithmetic.computes.significand:
        return terms + 1 + _PRESCALED
    return terms + _PRESCALED if arithmetic.products.name == "tf32" else terms


def _scaled(
    conditions: Conditions, arithmetic: Arithmetic, contracted: Tensor, size: Tensor
) -> Tensor:
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
    narrow = arithmetic.scaled_query
    if narrow is not None:
        # B6: what rounding scale · q (· log2 e) takes below the normal range; infinite where it may
        # be beyond the largest number.
        below = narrow.subnormal_spacing / 2 * conditions.k.abs().sum(-1)[..., None, :]
        scaled = abs(conditions.scale) * math.log2(math.e) * conditions.q.abs()
        beyond = (scaled > narrow.max).any(-1, keepdim=True)
        radius = radius + torch.where(beyond, torch.inf, below)
    if arithmetic.operand_error:
        lost = may_overflow(conditions.q, arithmetic).any(-1)[..., :, None]
        lost = lost | may_overflow(conditions.k, arithmetic).any(-1)[..., None, :]
        radius = torch.where(lost, torch.inf, radius)
    return _or_infinite(conditions, arithmetic, radius)


def _or_infinite(conditions: Conditions, arithmetic: Arithmetic, radius: Tensor) -> Tensor:
    """B5: an exponent is a score times log2 e, which may be beyond the largest number."""
    beyond = conditions.products.abs() + radius > arithmetic.computes.max / 2
    return torch.where(beyond, torch.inf, radius)


def may_overflow(operand: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Mark the finite numbers that a product may read as infinite: near the end of tf32."""
    if not arithmetic.operand_error or arithmetic.truncates:
        return torch.zeros_like(operand, dtype=torch.bool)
    return operand.abs() > arithmetic.products.max


def _variance(
    conditions: Conditions, arithmetic: Arithmetic, terms: float, size: Tensor, cut: Tensor | None
) -> Tensor:
    """B8: variance of the error, roundings taken as independent."""
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
    """Largest error of every q·k that a truncating accumulator makes, ``(heads, rows, kv)``.

    Args:
        q: ``(heads, rows, head_dim)``, float64.
        k: ``(heads, kv, head_dim)``, float64.
        accumulator: One with a block.
        significand: Significant bits of the operands: a product has twice as many, and what is
            near the largest of its step keeps them all.

    The steps may be added up in either direction, and their sums be handed to an accumulator of
    fp32 after any number of them.
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
        most = torch.zeros_like(size)
        for d in range(q.shape[-1])[step]:
            torch.maximum(most, _products(q, k, d), out=most)
        largest.append(most)
    together = sum(largest, torch.zeros_like(size))
    count = torch.full_like(size[..., :1, :1], len(steps))
    # Its own errors count too: they make the running sum larger, and what is cut off with it.
    running = torch.minimum(running_size(high - low, together, accumulator, count), size)
    unit = 2.0**-accumulator.alignment
    error = len(steps) * 2.0 ** (1 - accumulator.result) * running
    for step, terms in zip(steps, largest, strict=True):
        above = unit * torch.maximum(terms, running)
        error += _lost(q[..., step], k[..., step], above, significand)
        # The running sum is cut to its own bits already: only larger terms take more of it.
        error += unit * terms if len(steps) > 1 else 0.0
    # Sums of steps added up in fp32.
    return error + len(steps) * accumulator.unit * size


def running_size(exact: Tensor, largest: Tensor, accumulator: Accumulator, steps: Tensor) -> Tensor:
    """Largest magnitude that a running sum reaches when its own errors are counted.

    Args:
        exact: Largest magnitude of any sum of consecutive steps, exactly.
        largest: Σ over the steps of a step's largest |term|, same shape.
        accumulator: One with a block.
        steps: How many, broadcastable to that shape.

    Infinite where the errors could feed on themselves.
    """
    aligned, truncated = accumulator.step_loss()
    growth = steps * (aligned + truncated)
    return torch.where(growth < 1, (exact + aligned * largest) / (1 - growth), torch.inf)


def _products(q: Tensor, k: Tensor, d: int) -> Tensor:
    return q[..., d, None].abs() * k[..., None, :, d].abs()


def _lost(q: Tensor, k: Tensor, unit: Tensor, significand: int) -> Tensor:
    """Amount that alignment cuts off the products of one step: a last bit of each at most."""
    # The last bit of a product of 2p significant bits lies 2p − 1 below its first.
    whole = 2.0 ** (2 * significand - 1) * unit
    lost = torch.zeros_like(unit)
    for d in range(q.shape[-1]):
        term = _products(q, k, d)
        lost += torch.where(term < whole, torch.minimum(term, unit), 0.0)
    return lost


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExponentErrors:
    """Errors of the exponents and their parts, float64 ``(heads, rows, kv)``, 0 where not seen."""

    product: Tensor  # of scale · q·k, after the score mod
    own: Tensor  # the score mod's own
    exponent: Tensor  # of everything between a score and its weight
    arrival: Tensor  # ``exponent`` of the score that is the maximum, ``(heads, rows, 1)``
    highest: Tensor  # how far the computed maximum is from the exact one at most, likewise
    unbounded: Tensor  # bool ``(heads, rows)``: nothing is known of a score, or it may overflow

    @property
    def total(self) -> Tensor:
        """Largest |error| of a weight's logarithm (B9)."""
        # Without a score mod ``own`` is a single 0, whatever its shape.
        before = self.product + self.own if any(self.own.stride()) else self.product
        return before + self.exponent


@kept_step
def exponent_errors(
    conditions: Conditions, arithmetic: Arithmetic, scores: ScoreError, mod: ScoreModError | None
) -> ExponentErrors:
    """B9: errors of every exponent of these rows."""
    seen = conditions.seen
    # A score mod replaces the score's error by its own bound of the mod's result.
    radius = scores.radius if mod is None else mod.radius
    # A score mod may hide a key, or show it, after rounding: its radius is infinite there.
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
    moved = torch.where(counted, radius - below, 0.0).amax(-1, keepdim=True)
    # The computed maximum is at most the highest score, and at least the one that fell least.
    fallen = torch.where(counted, radius + below, torch.inf).amin(-1, keepdim=True)
    highest = torch.maximum(moved, torch.where(torch.isfinite(fallen), fallen, 0.0))
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
    """B9's last part: of scores ``below`` the maximum, both known within ``shift``."""
    if score is None:
        assert not isinstance(conditions, RowTotals), "which have no scores"
        score = conditions.scores
    own = maximum_of_keys(conditions)
    maximum = torch.maximum(conditions.maximum.abs(), own.abs())[..., None]
    if conditions.has_sink:
        below = below + (conditions.maximum - own)[..., None]
    tiles = tiles_passed(conditions, arithmetic)
    each = 2 * arithmetic.exp2_ulps + 1
    differences = factor_roundings(arithmetic) + 2
    lag = 2 * math.log(2) * arithmetic.lazy_rescale
    apart = below + shift + lag if lag else below + shift
    count = score.abs() + maximum + 2 * shift + differences * apart + each * tiles
    if arithmetic.splits > 1:
        logarithm = torch.log(conditions.count.clamp_min(1))
        count = count + 8 * (score.abs() + maximum + shift + logarithm) + 2 * each + 8
    unit = arithmetic.unit
    return count * (unit / (1 - each * unit))
