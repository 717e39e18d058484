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

_DIVISION = 6  # Roundings of p ÷ l if P comes from the row sum and not from LSE, as in B14.
_PRODUCTS = 4  # Roundings of P · w · slope · scale; or of P · dLSE if it is added separately.
_LSE = 4  # Roundings of dLSE in w: the gradient of an LSE in log2 units, and its change of base.
_DIFFERENCES = 3  # Roundings of w = dP − δ + dLSE, in any order.


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SavedErrors:
    """Errors of a kernel's own out and LSE in some rows, float64."""

    # ``(heads, rows, value_dim)``: the signed error of the kernel's out if ``measured``, else a
    # bound of its magnitude.
    out_error: Tensor
    # ``(heads, rows)``: the error of LSE, whose sign is not used, or, if the kernel does not expose
    # LSE, the forward's bound of it.
    lse_error: Tensor
    measured: bool = True  # whether ``out_error`` is the error itself

    def delta_shift(self, conditions: GradientConditions) -> Tensor:
        """Return the change of delta by out's error, ``(heads, rows, 1)``; 0 if not measured."""
        if not self.measured:
            return torch.zeros_like(conditions.delta)[..., None]
        return (conditions.dout * self.out_error).sum(-1, keepdim=True)

    def delta_error(self, conditions: GradientConditions) -> Tensor:
        """Return a bound of that change, ``(heads, rows, 1)``; 0 if out's error is measured."""
        if self.measured:
            return torch.zeros_like(conditions.delta)[..., None]
        return (conditions.dout * self.out_error).abs().sum(-1, keepdim=True)


def zero_elsewhere(
    conditions: GradientConditions, saved: SavedErrors, rows: Tensor
) -> tuple[GradientConditions, SavedErrors]:
    """Return both with 0 in all rows but ``rows``, which removes NaN from rows without a bound."""

    def of(x: Tensor) -> Tensor:
        return torch.where(rows[..., None] if x.dim() > rows.dim() else rows, x, 0.0)

    names = ("dout", "dlse", "delta", "value_products", "slope", "dx")
    conditions = replace(
        conditions,
        known=replace(conditions.known, q=of(conditions.known.q), out=of(conditions.known.out)),
        **{name: of(getattr(conditions, name)) for name in names},
    )
    return conditions, replace(saved, out_error=of(saved.out_error), lse_error=of(saved.lse_error))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RecomputedWeights:
    """P of a backward, float64 ``(heads, rows, kv)``; 0 where not seen, and in unbounded rows."""

    exact: Tensor  # P
    moved: Tensor  # largest |computed P − P| before P is rounded
    rounded: Tensor  # largest error of rounding P to its format
    parts: dict[str, Tensor]  # parts of the error of log P, by name
    live: Tensor  # bool: seen keys of rows that are not unbounded
    unbounded: Tensor  # bool ``(heads, rows)``: rows without a bound
    # bool: keys that an unbounded row affects: seen, or perhaps seen after rounding.
    exposed: Tensor

    def without(self, keys: Tensor) -> RecomputedWeights:
        """Return these with rows that may see one of ``keys``, a bool like ``live``, unbounded."""
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


def _rounding(count: Count, arithmetic: Arithmetic) -> Count:
    """Return B1: the relative error of ``count`` roundings outside products of matrices."""
    error: Count = count * arithmetic.unit / (1 - count * arithmetic.unit)
    return error


def recompute_weights(
    conditions: GradientConditions,
    arithmetic: Arithmetic,
    scores: ScoreError,
    saved: SavedErrors,
    mod: ScoreModError | None,
) -> RecomputedWeights:
    """Return B31: the errors of P from the kernel's own LSE, or from its maximum and row sum."""
    forward = conditions.known
    errors = exponent_errors(forward, arithmetic, scores, mod)
    alive = forward.seen.any(-1)
    # Rows whose exact or saved results, loss and slopes are all finite.
    wide = (forward.out, conditions.dout, conditions.dx, saved.out_error)
    finite = torch.stack([torch.isfinite(x).all(-1) for x in wide]).all(0)
    narrow = (forward.lse, conditions.dlse, saved.lse_error)
    finite = finite & torch.stack([torch.isfinite(x) for x in narrow]).all(0)
    unbounded = errors.unbounded | (alive & ~finite)
    live = forward.seen & ~unbounded[..., None]
    lse_error = torch.where(alive, saved.lse_error.abs(), 0.0)
    lse_error = torch.where(unbounded, 0.0, lse_error)[..., None]

    # The exponent of exp2(z·c − LSE·c), or B9's of exp2(z·c − m·c) ÷ l with LSE's own rounding.
    lse = torch.where(alive[..., None], forward.lse[..., None], 0.0)
    each, differences = 2 * arithmetic.exp2_ulps + 1, factor_roundings(arithmetic) + 2
    size, distance = forward.scores.abs() + lse.abs(), (forward.scores - lse).abs()
    off = errors.product + errors.own + lse_error
    count = 2 * size + differences * (distance + off) + 4 * off + each
    from_lse = count * (arithmetic.unit / (1 - each * arithmetic.unit))
    stored = log_sum_base(forward, arithmetic, lse_error[..., 0])[..., None]
    from_sum = errors.exponent + stored + _rounding(_DIVISION, arithmetic)
    parts = {
        "scores": errors.product,
        "score mod": errors.own,
        "LSE": lse_error.expand_as(errors.product),
        "exponent": torch.maximum(from_lse, from_sum),
    }
    parts = {name: torch.where(live, part, 0.0) for name, part in parts.items()}

    # P, and P (e^ρ − 1) plus the numbers below the normal range that are flushed to 0.
    rho = sum(parts.values(), torch.zeros_like(conditions.dx))
    log = torch.where(live, forward.scores - forward.lse[..., None], -torch.inf)
    exact = torch.exp(log)
    growth = torch.where(exact > 0, exact * torch.expm1(rho), torch.exp(log + rho))
    moved = torch.where(live, growth + 2.0**arithmetic.computes.min_exponent, 0.0)
    radius = scores.radius if mod is None else mod.radius
    return RecomputedWeights(
        exact=exact,
        moved=moved,
        rounded=_weight_rounding(arithmetic, exact + moved),
        parts=parts,
        live=live,
        unbounded=unbounded,
        exposed=forward.seen | (~torch.isfinite(radius) if mod is not None else False),
    )


def _weight_rounding(arithmetic: Arithmetic, upper: Tensor) -> Tensor:
    """Return B13 for a normalised P."""
    if not arithmetic.weights_error:
        return torch.zeros_like(upper)
    fmt, scale = arithmetic.weights, arithmetic.weights_scale
    floor = fmt.subnormal_spacing / 2 / scale
    rounded = torch.maximum(arithmetic.weights_error * upper, upper.clamp_max(floor))
    return torch.where(scale * upper > fmt.max, torch.inf, rounded)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScoreGradients:
    """Errors of dX, the gradient of the scores, float64 ``(heads, rows, kv)``; 0 where P is 0."""

    shift: Tensor  # exact, signed change of dX by the error of the saved out (B33)
    size: Tensor  # the larger of |dX| and |dX + shift|
    # Largest |computed − dX| or |computed − (dX + shift)|, depending on how delta is computed,
    # before dX is rounded (B34).
    error: Tensor
    rounded: Tensor  # largest error of rounding dX to its format (B35)
    parts: dict[str, Tensor]  # parts of ``error`` + ``rounded`` by name; they sum to it


def score_gradients(
    conditions: GradientConditions,
    arithmetic: Arithmetic,
    weights: RecomputedWeights,
    saved: SavedErrors,
    slope: ScoreModError | None,
) -> ScoreGradients:
    """Return B33–B35: the errors of the score gradients of these rows."""
    live, exact = weights.live, weights.exact
    rounded = weights.moved + weights.rounded
    # Fused backwards multiply by the fp32 P, others by the rounded P that they stored.
    used = rounded if arithmetic.multiplies_rounded_weights else weights.moved
    summed = weights.moved if arithmetic.fused else rounded
    product = torch.where(live, _value_product_error(conditions, arithmetic), 0.0)
    delta = _delta_error(conditions, arithmetic, saved)
    delta = torch.maximum(
        delta, _weights_delta_error(conditions, arithmetic, exact, summed, product)
    )
    delta = delta + saved.delta_error(conditions)
    # The saved out's signed error is known: it shifts dX and is no error of the backward.
    shift = saved.delta_shift(conditions)
    inner = conditions.value_products - conditions.delta[..., None] + conditions.dlse[..., None]
    # Delta may be computed from the saved out, or from P.
    inner = torch.where(live, torch.maximum(inner.abs(), (inner - shift).abs()), 0.0)
    delta = delta + _difference_error(conditions, arithmetic, delta + shift.abs(), product)
    within = inner + product + delta
    # Without a score mod f′ is 1 and exact.
    off = torch.zeros_like(exact) if slope is None else torch.where(live, slope.radius, 0.0)
    steep = torch.where(live, conditions.slope.abs(), 0.0)
    apart = within + 2 * conditions.dlse.abs()[..., None]
    before = torch.where(live, (exact + used) * apart, 0.0)
    most = before * (steep + off)
    parts = _split_by_weights(
        arithmetic, weights, used, torch.where(live, within * (steep + off), 0.0)
    )
    parts |= {
        "dO·V": exact * product * (steep + off),
        "delta": exact * delta * (steep + off),
        "slope": exact * inner * off,
        "products": _rounding(_PRODUCTS, arithmetic) * most
        + torch.where(live, _underflow(arithmetic) * (2 + within + steep + off), 0.0),
    }
    error = sum(parts.values(), torch.zeros_like(exact))
    size = exact * inner * steep
    of_format = (
        _gradient_rounding(conditions, arithmetic, size + error)
        if arithmetic.fused
        else _gradient_rounding(conditions, arithmetic, most, before)
    )
    parts["rounding of dS"] = of_format
    return ScoreGradients(
        shift=-exact * conditions.slope * shift,
        size=size,
        error=error,
        rounded=of_format,
        parts={name: part for name, part in parts.items() if bool(part.any())},
    )


def _underflow(arithmetic: Arithmetic) -> float:
    return float(2.0**arithmetic.computes.min_exponent)


def _terms(conditions: GradientConditions, arithmetic: Arithmetic) -> int:
    """Return how often a term of dO·v is rounded: as in B5, without prescaled factors."""
    wide = 2 * arithmetic.products.significand > arithmetic.computes.significand
    return conditions.dout.shape[-1] + wide


def _value_product_error(conditions: GradientConditions, arithmetic: Arithmetic) -> Tensor:
    """Return B32: the largest error of dO·v; infinite where it may overflow."""
    dout, values = conditions.dout.abs(), conditions.known.v.abs()
    size = dout @ values.mT
    operands = 2 * arithmetic.operand_error + arithmetic.operand_error**2
    terms = _terms(conditions, arithmetic)
    error = arithmetic.scores.det(terms) * size * (1 + operands) + operands * size
    lost = terms + dout.sum(-1)[..., None] + values.sum(-1)[..., None, :]
    error = error + _underflow(arithmetic) * lost
    if arithmetic.rounds_value_products is not None:
        computed = conditions.value_products.abs() + error
        error = error + half_ulp(computed, arithmetic.rounds_value_products)
    beyond = 2 * size > arithmetic.computes.max
    beyond = beyond | may_overflow(dout, arithmetic).any(-1)[..., None]
    beyond = beyond | may_overflow(values, arithmetic).any(-1)[..., None, :]
    return torch.where(beyond, torch.inf, error)


def _delta_error(
    conditions: GradientConditions, arithmetic: Arithmetic, saved: SavedErrors
) -> Tensor:
    """Return B33: the largest error of computing Σ dO · Ô, ``(heads, rows, 1)``."""
    dout = conditions.dout.abs()
    size = (dout * (conditions.known.out.abs() + saved.out_error.abs())).sum(-1, keepdim=True)
    dims = conditions.dout.shape[-1]
    lost = _underflow(arithmetic) * (dims + dout.sum(-1, keepdim=True))
    return _rounding(dims + 1.0, arithmetic) * size + lost


def _weights_delta_error(
    conditions: GradientConditions,
    arithmetic: Arithmetic,
    exact: Tensor,
    used: Tensor,
    product: Tensor,
) -> Tensor:
    """Return B33: the largest error of δ computed as Σ P dP, ``(heads, rows, 1)``."""
    values = torch.where(exact > 0, conditions.value_products.abs(), 0.0)
    moved = (used * values + (exact + used) * product).sum(-1, keepdim=True)
    summed = ((exact + used) * (values + product)).sum(-1, keepdim=True)
    count = conditions.known.count + 2
    return moved + _rounding(count, arithmetic) * summed


def _difference_error(
    conditions: GradientConditions, arithmetic: Arithmetic, delta: Tensor, product: Tensor
) -> Tensor:
    """Return B34: the error of dP − δ + dLSE. The sum of dO·v may start with −δ."""
    of_row = (conditions.delta.abs() + conditions.dlse.abs())[..., None] + delta
    first = arithmetic.scores.det(_terms(conditions, arithmetic) + _DIFFERENCES + _LSE) * of_row
    each = _rounding(_DIFFERENCES, arithmetic) * (conditions.value_products.abs() + product)
    return first + each


def _split_by_weights(
    arithmetic: Arithmetic, weights: RecomputedWeights, used: Tensor, times: Tensor
) -> dict[str, Tensor]:
    """Return B34: errors of dX by those of P, one part for each part of P's error."""
    whole = sum(weights.parts.values(), torch.zeros_like(used))
    each = torch.where(whole > 0, weights.moved / whole, 0.0) * times
    parts = {name: part * each for name, part in weights.parts.items() if bool(part.any())}
    if arithmetic.multiplies_rounded_weights:
        parts["rounding of P"] = weights.rounded * times
    return parts


def _gradient_rounding(
    conditions: GradientConditions,
    arithmetic: Arithmetic,
    size: Tensor,
    before: Tensor | None = None,
) -> Tensor:
    """Return B35: the error of rounding dX; relative for normal numbers, constant below them.

    A backward that is not fused may round dX before and after multiplying it by the scale, and
    ``before`` multiplying it by a score mod's slope, which multiplies the constant too.
    """
    unit, fmt = arithmetic.score_gradients_error, arithmetic.score_gradients
    if not unit:
        return torch.zeros_like(size)
    scale = abs(conditions.known.scale)
    # A scale below 1 that is multiplied in first moves dX toward the subnormal numbers.
    floor = fmt.subnormal_spacing / 2 / (min(1.0, scale) or 1.0)
    if before is None:
        rounded, largest = torch.maximum(unit * size, size.clamp_max(floor)), size
    else:
        steep = torch.where(before > 0, size / before, 0.0).clamp_min(1.0)
        rounded = (2 + unit) * torch.maximum(unit * size, torch.minimum(size, floor * steep))
        largest = torch.maximum(size, before)
    return torch.where(largest * max(1.0, scale) > fmt.max, torch.inf, rounded)
