"""Errors of the scores' gradients dX = P (dO·v − δ + dLSE) f′: equations B32–B35 of the manual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.judge.gradients.recomputed import roundings
from attncheck.judge.scores import overflows
from attncheck.judge.spacing import half_ulp

if TYPE_CHECKING:
    from attncheck.conditions import GradientConditions, ScoreModError
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.judge.gradients.recomputed import Recomputed
    from attncheck.judge.gradients.saved import Saved

__all__ = ["ScoreGradients", "score_gradients"]

_PRODUCTS = 4  # P times w, its slope and the scale; or P · dLSE added apart
# The gradient of an LSE in log2 units, and the change of its base: on the way into w.
_OF_LSE = 4
_DIFFERENCES = 3  # dP − δ + dLSE, in any order


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScoreGradients:
    """dX and how far it may be off, float64 ``(heads, rows, kv)``; 0 where P is.

    Attributes:
        shift: What the saved out makes of it, exactly, with its sign (B33).
        size: |dX| or |dX + shift|, the larger.
        error: Largest |computed − dX| or |computed − (dX + shift)|, as delta is computed, before it
            is rounded (B34).
        rounded: Largest error of rounding it to its format (B35).
        parts: What ``error`` and ``rounded`` are made of, by name; they sum to them.
    """

    shift: torch.Tensor
    size: torch.Tensor
    error: torch.Tensor
    rounded: torch.Tensor
    parts: dict[str, torch.Tensor]


def score_gradients(
    known: GradientConditions,
    arithmetic: Arithmetic,
    weights: Recomputed,
    saved: Saved,
    slope: ScoreModError | None,
) -> ScoreGradients:
    """B33–B35 of these rows."""
    live, exact = weights.live, weights.exact
    rounded = weights.moved + weights.rounded
    used = rounded if arithmetic.multiplies_rounded_weights else weights.moved
    summed = weights.moved if arithmetic.fused else rounded
    product = torch.where(live, _value_product_error(known, arithmetic), 0.0)
    delta = _delta_error(known, arithmetic, saved)
    delta = torch.maximum(delta, _from_weights(known, arithmetic, exact, summed, product))
    delta = delta + saved.delta_error(known)
    shift = saved.delta_shift(known)
    inner = known.value_products - known.delta[..., None] + known.dlse[..., None]
    # Of a delta from the saved out, or from P.
    inner = torch.where(live, torch.maximum(inner.abs(), (inner - shift).abs()), 0.0)
    delta = delta + _difference_error(known, arithmetic, delta + shift.abs(), product)
    within = inner + product + delta
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
        "products": roundings(_PRODUCTS, arithmetic) * most
        + torch.where(live, _underflow(arithmetic) * (2 + within + steep + off), 0.0),
    }
    error = sum(parts.values(), torch.zeros_like(exact))
    size = exact * inner * steep
    of_format = (
        _rounded(known, arithmetic, size + error)
        if arithmetic.fused
        else _rounded(known, arithmetic, most, before)
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


def _value_product_error(known: GradientConditions, arithmetic: Arithmetic) -> torch.Tensor:
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
    beyond = beyond | overflows(dout, arithmetic).any(-1)[..., None]
    beyond = beyond | overflows(values, arithmetic).any(-1)[..., None, :]
    return torch.where(beyond, torch.inf, error)


def _delta_error(known: GradientConditions, arithmetic: Arithmetic, saved: Saved) -> torch.Tensor:
    """B33: largest error of Σ dO · Ô beside its exact value, ``(heads, rows, 1)``."""
    dout = known.dout.abs()
    size = (dout * (known.known.out.abs() + saved.out_error.abs())).sum(-1, keepdim=True)
    dims = known.dout.shape[-1]
    lost = _underflow(arithmetic) * (dims + dout.sum(-1, keepdim=True))
    return roundings(dims + 1.0, arithmetic) * size + lost


def _from_weights(
    known: GradientConditions,
    arithmetic: Arithmetic,
    exact: torch.Tensor,
    used: torch.Tensor,
    product: torch.Tensor,
) -> torch.Tensor:
    """B33: largest error of Σ P dP beside δ, ``(heads, rows, 1)``."""
    values = torch.where(exact > 0, known.value_products.abs(), 0.0)
    moved = (used * values + (exact + used) * product).sum(-1, keepdim=True)
    summed = ((exact + used) * (values + product)).sum(-1, keepdim=True)
    count = known.known.seen.sum(-1, keepdim=True).to(torch.float64) + 2
    return moved + roundings(count, arithmetic) * summed


def _difference_error(
    known: GradientConditions, arithmetic: Arithmetic, delta: torch.Tensor, product: torch.Tensor
) -> torch.Tensor:
    """B34: of dP − δ + dLSE. δ may be what the sum of dO·v starts with."""
    of_row = (known.delta.abs() + known.dlse.abs())[..., None] + delta
    first = arithmetic.scores.det(_terms(known, arithmetic) + _DIFFERENCES + _OF_LSE) * of_row
    each = roundings(_DIFFERENCES, arithmetic) * (known.value_products.abs() + product)
    return first + each


def _of_weights(
    arithmetic: Arithmetic, weights: Recomputed, used: torch.Tensor, times: torch.Tensor
) -> dict[str, torch.Tensor]:
    """B34: what the errors of P make of dX, by what they are made of."""
    whole = sum(weights.parts.values(), torch.zeros_like(used))
    each = torch.where(whole > 0, weights.moved / whole, 0.0) * times
    parts = {name: part * each for name, part in weights.parts.items() if bool(part.any())}
    if arithmetic.multiplies_rounded_weights:
        parts["rounding of P"] = weights.rounded * times
    return parts


def _rounded(
    known: GradientConditions,
    arithmetic: Arithmetic,
    size: torch.Tensor,
    before: torch.Tensor | None = None,
) -> torch.Tensor:
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
