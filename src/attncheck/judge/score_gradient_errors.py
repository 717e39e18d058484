"""Errors of a backward's softmax weights and score gradients: equations B30–B35."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch

from attncheck.judge.score_errors import exponent_errors, factor_roundings, may_overflow
from attncheck.judge.sum_roundings import half_ulp
from attncheck.judge.weight_errors import log_sum_base

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.core.conditions import GradientConditions, ScoreModError
    from attncheck.core.declared_arithmetic import Arithmetic
    from attncheck.judge.score_errors import ScoreError

    Count = TypeVar("Count", float, Tensor)

# p ÷ l where P is had from a row sum and not from LSE: as in B14.
_DIVISION = 6

_PRODUCTS = 4  # P times w, its slope and the scale; or P · dLSE added apart
# The gradient of an LSE in log2 units, and the change of its base: on the way into w.
_OF_LSE = 4
_DIFFERENCES = 3  # dP − δ + dLSE, in any order


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SavedErrors:
    """Errors of a kernel's own out and LSE in some rows, float64."""

    # ``(heads, rows, value_dim)``. ``measured``: what the kernel gave less what is exact, with
    # its sign. Otherwise a bound of its magnitude.
    out_error: Tensor
    # ``(heads, rows)``, likewise, its sign not used; of a kernel that does not expose LSE the
    # forward's bound.
    lse_error: Tensor
    measured: bool = True  # whether ``out_error`` is the error itself

    def delta_shift(self, known: GradientConditions) -> Tensor:
        """Change of delta by the error of out, ``(heads, rows, 1)``; 0 where not measured."""
        if not self.measured:
            return torch.zeros_like(known.delta)[..., None]
        return (known.dout * self.out_error).sum(-1, keepdim=True)

    def delta_error(self, known: GradientConditions) -> Tensor:
        """Largest change of delta by it where it is not measured, ``(heads, rows, 1)``; else 0."""
        if self.measured:
            return torch.zeros_like(known.delta)[..., None]
        return (known.dout * self.out_error).abs().sum(-1, keepdim=True)


def zero_elsewhere(
    known: GradientConditions, saved: SavedErrors, rows: Tensor
) -> tuple[GradientConditions, SavedErrors]:
    """Return both with 0 in all but ``rows``: no NaN where no key is seen or nothing is known."""

    def of(x: Tensor) -> Tensor:
        return torch.where(rows[..., None] if x.dim() > rows.dim() else rows, x, 0.0)

    names = ("dout", "dlse", "delta", "value_products", "slope", "dx")
    known = replace(
        known,
        known=replace(known.known, q=of(known.known.q), out=of(known.known.out)),
        **{name: of(getattr(known, name)) for name in names},
    )
    return known, replace(saved, out_error=of(saved.out_error), lse_error=of(saved.lse_error))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RecomputedWeights:
    """P of a backward, float64 ``(heads, rows, kv)``; 0 where not seen, and in unbounded rows."""

    exact: Tensor  # P
    moved: Tensor  # largest |computed P − P| before it is rounded
    rounded: Tensor  # largest error of rounding it to its format
    parts: dict[str, Tensor]  # what the error of its logarithm is made of, by name
    live: Tensor  # bool: seen, of a row that something is known of
    unbounded: Tensor  # bool ``(heads, rows)``: nothing is known of the row
    exposed: Tensor  # bool: the keys that are then not known: seen, or perhaps seen after rounding

    def without(self, keys: Tensor) -> RecomputedWeights:
        """Return these, rows with one of ``keys`` unbounded; bool ``(heads, rows, kv)``."""
        unbounded = self.unbounded | (keys & self.exposed).any(-1)
        live = self.live & ~unbounded[..., None]
        exact, moved, rounded = (
            torch.where(live, x, 0.0) for x in (self.exact, self.moved, self.rounded)
        )
        return replace(
            self,
            exact=exact,
            moved=moved,
            rounded=rounded,
            parts={name: torch.where(live, part, 0.0) for name, part in self.parts.items()},
            live=live,
            unbounded=unbounded,
        )


def _roundings(count: Count, arithmetic: Arithmetic) -> Count:
    """B1 in the arithmetic of everything that is no product of matrices."""
    error: Count = count * arithmetic.unit / (1 - count * arithmetic.unit)
    return error


def recompute_weights(
    known: GradientConditions,
    arithmetic: Arithmetic,
    scores: ScoreError,
    saved: SavedErrors,
    mod: ScoreModError | None,
) -> RecomputedWeights:
    """B31: P from the kernel's own LSE, or from its own maximum and row sum."""
    forward = known.known
    errors = exponent_errors(forward, arithmetic, scores, mod)
    alive = forward.seen.any(-1)
    # Rows whose exact or saved results, or whose loss or slopes, are not finite.
    wide = (forward.out, known.dout, known.dx, saved.out_error)
    finite = torch.stack([torch.isfinite(x).all(-1) for x in wide]).all(0)
    narrow = (forward.lse, known.dlse, saved.lse_error)
    finite = finite & torch.stack([torch.isfinite(x) for x in narrow]).all(0)
    unbounded = errors.unbounded | (alive & ~finite)
    live = forward.seen & ~unbounded[..., None]
    lse_error = torch.where(alive, saved.lse_error.abs(), 0.0)
    lse_error = torch.where(unbounded, 0.0, lse_error)[..., None]

    # The exponent of exp2(z·c − LSE·c), or B9's of exp2(z·c − m·c) ÷ l and what LSE was rounded to.
    lse = torch.where(alive[..., None], forward.lse[..., None], 0.0)
    each, differences = 2 * arithmetic.exp2_ulps + 1, factor_roundings(arithmetic) + 2
    size, distance = forward.scores.abs() + lse.abs(), (forward.scores - lse).abs()
    off = errors.product + errors.own + lse_error
    count = 2 * size + differences * (distance + off) + 4 * off + each
    from_lse = count * (arithmetic.unit / (1 - each * arithmetic.unit))
    stored = log_sum_base(forward, arithmetic, lse_error[..., 0])[..., None]
    from_sum = errors.exponent + stored + _roundings(_DIVISION, arithmetic)
    parts = {
        "scores": errors.product,
        "score mod": errors.own,
        "LSE": lse_error.expand_as(errors.product),
        "exponent": torch.maximum(from_lse, from_sum),
    }
    parts = {name: torch.where(live, part, 0.0) for name, part in parts.items()}

    # P, and P (e^ρ − 1) with what is taken for 0 below the normal range.
    rho = sum(parts.values(), torch.zeros_like(known.dx))
    log = torch.where(live, forward.scores - forward.lse[..., None], -torch.inf)
    exact = torch.exp(log)
    growth = torch.where(exact > 0, exact * torch.expm1(rho), torch.exp(log + rho))
    moved = torch.where(live, growth + 2.0**arithmetic.computes.min_exponent, 0.0)
    radius = scores.radius if mod is None else mod.radius
    return RecomputedWeights(
        exact=exact,
        moved=moved,
        rounded=_rounded_weights(arithmetic, exact + moved),
        parts=parts,
        live=live,
        unbounded=unbounded,
        exposed=forward.seen | (~torch.isfinite(radius) if mod is not None else False),
    )


def _rounded_weights(arithmetic: Arithmetic, upper: Tensor) -> Tensor:
    """B13 of a P that is divided already."""
    if not arithmetic.weights_error:
        return torch.zeros_like(upper)
    fmt, scale = arithmetic.weights, arithmetic.weights_scale
    floor = fmt.subnormal_spacing / 2 / scale
    rounded = torch.maximum(arithmetic.weights_error * upper, upper.clamp_max(floor))
    return torch.where(scale * upper > fmt.max, torch.inf, rounded)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScoreGradients:
    """dX and how far it may be off, float64 ``(heads, rows, kv)``; 0 where P is."""

    shift: Tensor  # what the saved out makes of it, exactly, with its sign (B33)
    size: Tensor  # |dX| or |dX + shift|, the larger
    # Largest |computed − dX| or |computed − (dX + shift)|, as delta is computed, before it is
    # rounded (B34).
    error: Tensor
    rounded: Tensor  # largest error of rounding it to its format (B35)
    # What ``error`` and ``rounded`` are made of, by name; they sum to them.
    parts: dict[str, Tensor]


def score_gradients(
    known: GradientConditions,
    arithmetic: Arithmetic,
    weights: RecomputedWeights,
    saved: SavedErrors,
    slope: ScoreModError | None,
) -> ScoreGradients:
    """B33–B35 of these rows."""
    live, exact = weights.live, weights.exact
    rounded = weights.moved + weights.rounded
    # Fused backwards multiply by the fp32 P, others by the one that they stored.
    used = rounded if arithmetic.multiplies_rounded_weights else weights.moved
    summed = weights.moved if arithmetic.fused else rounded
    product = torch.where(live, _value_product_error(known, arithmetic), 0.0)
    delta = _delta_error(known, arithmetic, saved)
    delta = torch.maximum(delta, _from_weights(known, arithmetic, exact, summed, product))
    delta = delta + saved.delta_error(known)
    # The saved out's error is known, sign and all: it shifts dX and is no error of the backward.
    shift = saved.delta_shift(known)
    inner = known.value_products - known.delta[..., None] + known.dlse[..., None]
    # Of a delta from the saved out, or from P.
    inner = torch.where(live, torch.maximum(inner.abs(), (inner - shift).abs()), 0.0)
    delta = delta + _difference_error(known, arithmetic, delta + shift.abs(), product)
    within = inner + product + delta
    # Without a score mod f′ is 1 and exact.
    off = torch.zeros_like(exact) if slope is None else torch.where(live, slope.radius, 0.0)
    steep = torch.where(live, known.slope.abs(), 0.0)
    apart = within + 2 * known.dlse.abs()[..., None]
    before = torch.where(live, (exact + used) * apart, 0.0)
    most = before * (steep + off)
    parts = _of_weights(arithmetic, weights, used, torch.where(live, within * (steep + off), 0.0))
    parts |= {
        "dO·V": exact * product * (steep + off),
        "delta": exact * delta * (steep + off),
        "slope": exact * inner * off,
        "products": _roundings(_PRODUCTS, arithmetic) * most
        + torch.where(live, _underflow(arithmetic) * (2 + within + steep + off), 0.0),
    }
    error = sum(parts.values(), torch.zeros_like(exact))
    size = exact * inner * steep
    of_format = (
        _rounded_gradients(known, arithmetic, size + error)
        if arithmetic.fused
        else _rounded_gradients(known, arithmetic, most, before)
    )
    parts["rounding of dS"] = of_format
    return ScoreGradients(
        shift=-exact * known.slope * shift,
        size=size,
        error=error,
        rounded=of_format,
        parts={name: part for name, part in parts.items() if bool(part.any())},
    )


def _underflow(arithmetic: Arithmetic) -> float:
    return float(2.0**arithmetic.computes.min_exponent)


def _terms(known: GradientConditions, arithmetic: Arithmetic) -> int:
    """Roundings that a term of dO·v passes through: as B5's, without its factors."""
    wide = 2 * arithmetic.products.significand > arithmetic.computes.significand
    return known.dout.shape[-1] + wide


def _value_product_error(known: GradientConditions, arithmetic: Arithmetic) -> Tensor:
    """B32: largest error of dO·v; infinite where it may overflow."""
    dout, values = known.dout.abs(), known.known.v.abs()
    size = dout @ values.mT
    operands = 2 * arithmetic.operand_error + arithmetic.operand_error**2
    terms = _terms(known, arithmetic)
    error = arithmetic.scores.det(terms) * size * (1 + operands) + operands * size
    lost = terms + dout.sum(-1)[..., None] + values.sum(-1)[..., None, :]
    error = error + _underflow(arithmetic) * lost
    if arithmetic.rounds_value_products is not None:
        computed = known.value_products.abs() + error
        error = error + half_ulp(computed, arithmetic.rounds_value_products)
    beyond = 2 * size > arithmetic.computes.max
    beyond = beyond | may_overflow(dout, arithmetic).any(-1)[..., None]
    beyond = beyond | may_overflow(values, arithmetic).any(-1)[..., None, :]
    return torch.where(beyond, torch.inf, error)


def _delta_error(known: GradientConditions, arithmetic: Arithmetic, saved: SavedErrors) -> Tensor:
    """B33: largest error of Σ dO · Ô beside its exact value, ``(heads, rows, 1)``."""
    dout = known.dout.abs()
    size = (dout * (known.known.out.abs() + saved.out_error.abs())).sum(-1, keepdim=True)
    dims = known.dout.shape[-1]
    lost = _underflow(arithmetic) * (dims + dout.sum(-1, keepdim=True))
    return _roundings(dims + 1.0, arithmetic) * size + lost


def _from_weights(
    known: GradientConditions, arithmetic: Arithmetic, exact: Tensor, used: Tensor, product: Tensor
) -> Tensor:
    """B33: largest error of Σ P dP beside δ, ``(heads, rows, 1)``."""
    values = torch.where(exact > 0, known.value_products.abs(), 0.0)
    moved = (used * values + (exact + used) * product).sum(-1, keepdim=True)
    summed = ((exact + used) * (values + product)).sum(-1, keepdim=True)
    count = known.known.count + 2
    return moved + _roundings(count, arithmetic) * summed


def _difference_error(
    known: GradientConditions, arithmetic: Arithmetic, delta: Tensor, product: Tensor
) -> Tensor:
    """B34: of dP − δ + dLSE. δ may be what the sum of dO·v starts with."""
    of_row = (known.delta.abs() + known.dlse.abs())[..., None] + delta
    first = arithmetic.scores.det(_terms(known, arithmetic) + _DIFFERENCES + _OF_LSE) * of_row
    each = _roundings(_DIFFERENCES, arithmetic) * (known.value_products.abs() + product)
    return first + each


def _of_weights(
    arithmetic: Arithmetic, weights: RecomputedWeights, used: Tensor, times: Tensor
) -> dict[str, Tensor]:
    """B34: what the errors of P make of dX, by what they are made of."""
    whole = sum(weights.parts.values(), torch.zeros_like(used))
    each = torch.where(whole > 0, weights.moved / whole, 0.0) * times
    parts = {name: part * each for name, part in weights.parts.items() if bool(part.any())}
    if arithmetic.multiplies_rounded_weights:
        parts["rounding of P"] = weights.rounded * times
    return parts


def _rounded_gradients(
    known: GradientConditions, arithmetic: Arithmetic, size: Tensor, before: Tensor | None = None
) -> Tensor:
    """B35: relative above the subnormal range of the format, a constant below; infinite beyond it.

    What is not fused may round it before and after it is multiplied by the scale, and ``before`` it
    is multiplied by a score mod's slope, which multiplies the constant too.
    """
    unit, fmt = arithmetic.score_gradients_error, arithmetic.score_gradients
    if not unit:
        return torch.zeros_like(size)
    scale = abs(known.known.scale)
    # Multiplied by a scale below 1 first, it is nearer to the subnormal numbers.
    floor = fmt.subnormal_spacing / 2 / (min(1.0, scale) or 1.0)
    if before is None:
        rounded, largest = torch.maximum(unit * size, size.clamp_max(floor)), size
    else:
        steep = torch.where(before > 0, size / before, 0.0).clamp_min(1.0)
        rounded = (2 + unit) * torch.maximum(unit * size, torch.minimum(size, floor * steep))
        largest = torch.maximum(size, before)
    return torch.where(largest * max(1.0, scale) > fmt.max, torch.inf, rounded)
