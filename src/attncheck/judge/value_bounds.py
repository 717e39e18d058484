"""The deterministic bound of out = P·V: equations B15–B17 of the manual."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.judge.additions import additions
from attncheck.judge.aligned_values import accumulation, weighted_size
from attncheck.judge.row_sums import shares
from attncheck.judge.scores import overflows

if TYPE_CHECKING:
    from attncheck.conditions import Conditions
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.judge.exponents import Exponents
    from attncheck.judge.row_sums import SumError
    from attncheck.judge.weights import Weights

__all__ = ["ROUNDING", "about", "finite_values", "value_terms"]

ROUNDING = "rounding of P"


def value_terms(
    conditions: Conditions,
    arithmetic: Arithmetic,
    errors: Exponents,
    moved: Weights,
    sums: SumError,
) -> dict[str, torch.Tensor]:
    """What the bound is made of before out is rounded, each ``(heads, rows, value_dim)``."""
    values, touched = finite_values(conditions)
    size = values.abs()
    of_weights = _of_weights(conditions, moved, values)
    terms = {name: of_weights * share for name, share in shares(errors, moved.changed).items()}
    terms |= _operand_terms(conditions, arithmetic, moved, values, of_weights, sums)
    terms["accumulation"] = accumulation(conditions, arithmetic, moved, values)
    before = sum(terms.values(), torch.zeros_like(conditions.out))
    terms["division"] = sums.division * (conditions.out.abs() + before)
    terms["underflow"] = _underflow(conditions, arithmetic, size, sums)
    terms["division"] = torch.where(
        touched | _overflows(conditions, arithmetic, size), torch.inf, terms["division"]
    )
    return terms


def finite_values(conditions: Conditions) -> tuple[torch.Tensor, torch.Tensor]:
    """V with 0 for what is not finite, and which elements of out see such a value."""
    odd = ~torch.isfinite(conditions.v)
    touched = torch.zeros_like(conditions.out, dtype=torch.bool)
    if not bool(odd.any()):
        return conditions.v, touched
    touched = conditions.seen.to(torch.float64) @ odd.to(torch.float64) > 0
    return torch.where(odd, 0.0, conditions.v), touched


def _of_weights(conditions: Conditions, moved: Weights, values: torch.Tensor) -> torch.Tensor:
    """B10, B12 and B15: what the weights' errors make of out; never beyond the values."""
    out = conditions.out
    found = torch.fmin(*(about(weight, values, out) for weight in (moved.relative, moved.changed)))
    spread = torch.maximum(values.amax(-2)[..., None, :] - out, out - values.amin(-2)[..., None, :])
    return torch.fmin(found, spread.clamp_min(0))


def about(weight: torch.Tensor, values: torch.Tensor, center: torch.Tensor) -> torch.Tensor:
    """B15: Σ weight_j · |v_j − center| at most, ``(heads, rows, value_dim)``.

    The lesser of the triangle inequality and Cauchy–Schwarz's, which vanishes where V is constant;
    the difference that the latter takes is inflated by what float64 may lose of it.
    """
    total = weight.sum(-1, keepdim=True)
    plain = weight @ values.abs() + center.abs() * total
    squares = weight @ values.square()
    crossed = center * (weight @ values)
    whole = squares + 2 * crossed.abs() + center.square() * total
    spread = (squares - 2 * crossed + center.square() * total).clamp_min(0)
    spread = spread + (weight.shape[-1] + 8) * 2.0**-53 * whole
    return torch.minimum(plain, (total * spread).sqrt())


def _operand_terms(
    conditions: Conditions,
    arithmetic: Arithmetic,
    moved: Weights,
    values: torch.Tensor,
    of_weights: torch.Tensor,
    sums: SumError,
) -> dict[str, torch.Tensor]:
    """B16: P rounded to its format, and V where it is rounded to tf32."""
    terms = {}
    if arithmetic.weights_error:
        if sums.rounded is None:
            terms[ROUNDING] = moved.rounded @ values.abs()
        else:
            centered = about(moved.rounded, values, conditions.out) + sums.rounded * of_weights
            terms[ROUNDING] = centered / (1 - sums.rounded)
    if arithmetic.operand_error:
        terms["rounding of V"] = arithmetic.operand_error * weighted_size(moved, values)
    return terms


def _underflow(
    conditions: Conditions, arithmetic: Arithmetic, size: torch.Tensor, sums: SumError
) -> torch.Tensor:
    """B17: numbers below the normal range taken for 0, of every weight, rescaling and product."""
    smallest = 2.0**arithmetic.computes.min_exponent
    count = additions(conditions, arithmetic)
    lag = 2.0**arithmetic.lazy_rescale
    lost = count * lag * (conditions.seen.to(torch.float64) @ size) + 2 * count + 4
    underflow: torch.Tensor = smallest * lost * (1 + sums.division)
    return underflow


def _overflows(conditions: Conditions, arithmetic: Arithmetic, size: torch.Tensor) -> torch.Tensor:
    """Where the unnormalised sum may pass fp32's largest number, or V that of tf32.

    In any tile's frame: before the largest score has come, lesser ones have weights of 1.
    """
    largest = arithmetic.weights_scale * 2.0**arithmetic.lazy_rescale
    unnormalised = conditions.seen.to(torch.float64) @ size
    too_large: torch.Tensor = 2 * largest * unnormalised > arithmetic.computes.max
    return too_large | overflows(size, arithmetic).any(-2)[..., None, :]
