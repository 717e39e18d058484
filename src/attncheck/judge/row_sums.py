"""Errors of the row sum and of LSE: equations B14 and B18 of the manual."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.judge.additions import below_one, division, sum_of_weights
from attncheck.judge.scores import factor_roundings, maximum_of_keys

if TYPE_CHECKING:
    from attncheck.conditions import Conditions
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.judge.exponents import Exponents
    from attncheck.judge.weights import Weights

__all__ = ["SumError", "log_sum_base", "log_sum_terms", "shares", "sum_error"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SumError:
    """Relative errors of the row sum, ``(heads, rows, 1)``.

    Attributes:
        added: Of adding it up (B14).
        rounded: Of summing rounded weights; None where the unrounded ones are summed.
        division: (1 + it) · O is what the last step makes of O at most (B14).
    """

    added: torch.Tensor
    rounded: torch.Tensor | None
    division: torch.Tensor


def sum_error(conditions: Conditions, arithmetic: Arithmetic, moved: Weights) -> SumError:
    """B14: how far the row sum is off, and what dividing by it does."""
    rounded = None
    if arithmetic.sums_rounded_weights:
        rounded = below_one(moved.rounded.sum(-1, keepdim=True))
    return SumError(
        added=sum_of_weights(conditions, arithmetic),
        rounded=rounded,
        division=division(conditions, arithmetic),
    )


def log_sum_terms(
    conditions: Conditions,
    arithmetic: Arithmetic,
    errors: Exponents,
    moved: Weights,
    sums: SumError,
) -> dict[str, torch.Tensor]:
    """B18: what LSE's bound is made of, each ``(heads, rows)``."""
    terms = {
        name: moved.total_error[..., 0] * share[..., 0]
        for name, share in shares(errors, moved.exact).items()
    }
    if sums.rounded is not None:
        terms["rounding of P"] = -torch.log1p(-sums.rounded[..., 0])
    terms["row sum"] = -torch.log1p(-sums.added[..., 0])
    before = sum(terms.values(), torch.zeros_like(conditions.total))
    terms["logarithm"] = log_sum_base(conditions, arithmetic, before)
    return terms


def log_sum_base(
    conditions: Conditions, arithmetic: Arithmetic, before: torch.Tensor
) -> torch.Tensor:
    """B18: of m · scale + log(sum), the product, the logarithm and the sum rounded."""
    alive = conditions.seen.any(-1)
    lse = torch.where(alive, conditions.lse.abs(), 0.0) + before
    before = before + math.log(2) * arithmetic.lazy_rescale  # so far below it may the maximum be
    own = maximum_of_keys(conditions)
    largest = torch.maximum(conditions.maximum.abs(), own.abs())
    log = torch.log(conditions.total.clamp_min(1)) + before + (conditions.maximum - own)
    of_maximum = factor_roundings(arithmetic) + 2
    count = 3 * lse + of_maximum * (largest + before) + 4 * log + 4
    return count * (2 if arithmetic.splits > 1 else 1) * arithmetic.unit


def shares(errors: Exponents, by: torch.Tensor) -> dict[str, torch.Tensor]:
    """What share each part of the exponents' errors has of a row's, ``(heads, rows, 1)``.

    Args:
        errors: Of the exponents.
        by: ``(heads, rows, kv)``, what each key counts.
    """
    parts = {"scores": errors.product, "score mod": errors.own, "exponent": errors.exponent}
    weight = {n: (by * p).sum(-1, keepdim=True) for n, p in parts.items() if bool((p != 0).any())}
    whole = sum(weight.values(), torch.zeros_like(errors.highest))
    return {n: torch.where(whole > 0, w / whole, 0.0) for n, w in weight.items()}
