"""Errors of softmax weights, of their row sums and of LSE: equations B10–B14 and B18."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.core.conditions import Conditions, RowTotals, kept_step
from attncheck.core.declared_arithmetic import Arithmetic
from attncheck.judge.score_errors import ExponentErrors, factor_roundings, maximum_of_keys
from attncheck.judge.sum_roundings import division_error, nan_from_one, row_sum_rounding

# Errors of exponents up to which the plain forms are used alone: with larger ones the others may be
# the better ones, and take five exponentials more. All of them are bounds.
SMALL = 0.125


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WeightErrors:
    """Softmax weights and how far they move, float64 ``(heads, rows, kv)``, 0 where not seen."""

    exact: Tensor  # P
    upper: Tensor  # largest P that the errors of the exponents make (B11)
    # Numbers c_j ≥ 0 with |ΔO| ≤ Σ c_j |v_j − O| (B10); infinite or NaN where large.
    relative: Tensor
    changed: Tensor  # largest |ΔP|, which are such numbers too (B12)
    rounded: Tensor  # largest error of rounding P to its format (B13)
    floor: Tensor  # half the subnormal spacing of P's format, ``(heads, rows, 1)``
    total_error: Tensor  # largest |Δ log Σ exp|, ``(heads, rows, 1)``

    @property
    def lost(self) -> Tensor:
        """Weights that are rounded to 0, all of them (B25); ``(heads, rows, kv)``."""
        return torch.where(self.exact < self.floor, self.exact, 0.0)


@kept_step
def weight_errors(
    conditions: Conditions, arithmetic: Arithmetic, errors: ExponentErrors
) -> WeightErrors:
    """B10–B13: the weights of these rows and how far they move."""
    seen, rho = conditions.seen, errors.total
    log = torch.where(seen, conditions.scores - conditions.lse[..., None], -torch.inf)
    exact = torch.exp(log)
    # A weight that underflows in float64 may still grow to something.
    growth = torch.where(exact > 0, exact * torch.expm1(rho), torch.exp(log + rho))
    least = (exact * torch.exp(-rho)).sum(-1, keepdim=True)
    relative = growth / torch.where(least > 0, least, 1.0)
    changed, upper = _near(exact, growth, least)
    total_error = torch.log1p(growth.sum(-1, keepdim=True))
    # Large errors are rare; their five exponentials are computed for such rows alone.
    far = rho.amax(-1, keepdim=True) > SMALL
    if bool(far.any()):
        # B11: the largest and the least that every weight can become, whatever the errors.
        most = _share(log + rho, log - rho, shrink=True)
        least_share = _share(log - rho, log + rho, shrink=False)
        change = torch.maximum(most - exact, exact - least_share)
        relative = torch.where(far & ~(least > 0), torch.inf, relative)
        changed = torch.where(far, torch.fmin(changed, change), changed)
        upper = torch.where(far, most, upper)
        together = torch.logsumexp(log + rho, -1, keepdim=True)
        total_error = torch.where(torch.isfinite(total_error), total_error, together)
    floor = _floor(conditions, arithmetic, errors, least)
    return WeightErrors(
        exact=exact,
        upper=upper,
        relative=relative,
        changed=changed,
        rounded=_rounded(conditions, arithmetic, upper, floor),
        floor=floor,
        total_error=total_error,
    )


def _near(exact: Tensor, growth: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """B12's first form and B11's: largest |ΔP| and largest P; NaN where they overflow."""
    least = torch.where(least > 0, least, 1.0)
    # What float64 loses of the differences is added to them.
    slack = exact.shape[-1] * 2.0**-52
    others = (growth.sum(-1, keepdim=True) * (1 + slack) - growth).clamp_min(0)
    changed = (growth * (1 - exact + slack) + exact * others) / least
    return changed, (exact + growth) / least


def _share(own: Tensor, others: Tensor, *, shrink: bool) -> Tensor:
    """exp(own_j) ÷ (exp(own_j) + Σ_{k≠j} exp(others_k)), rounded up (``shrink``) or down."""
    # Relative to the largest of the others, so that no exponential overflows.
    top = others.amax(-1, keepdim=True)
    top = torch.where(torch.isneginf(top), 0.0, top)
    each = torch.exp(others - top)
    slack = each.shape[-1] * 2.0**-52
    total = each.sum(-1, keepdim=True) * (1 - slack if shrink else 1 + slack)
    rest = torch.log((total - each).clamp_min(0)) + top
    share = torch.sigmoid(own - rest)
    # No other key: all of it. Not seen: nothing.
    share = torch.where(torch.isneginf(rest), 1.0, share)
    return torch.where(torch.isneginf(own), 0.0, share)


def _rounded(
    conditions: Conditions, arithmetic: Arithmetic, upper: Tensor, floor: Tensor
) -> Tensor:
    """B13: relative above the subnormal range of P's format, a constant below; never beyond P."""
    if not arithmetic.weights_error:
        return torch.zeros_like(upper)
    if arithmetic.normalised_weights:
        upper = upper * (1 + division_error(conditions, arithmetic))
    return torch.maximum(arithmetic.weights_error * upper, torch.minimum(upper, floor))


def _floor(
    conditions: Conditions, arithmetic: Arithmetic, errors: ExponentErrors, least: Tensor
) -> Tensor:
    """B13: half the subnormal spacing of P's format ÷ the row sum; ``(heads, rows, 1)``."""
    half = arithmetic.weights.subnormal_spacing / 2 / arithmetic.weights_scale
    if arithmetic.normalised_weights:
        return torch.full_like(errors.arrival, half)
    arrival = torch.exp(errors.arrival)
    total = conditions.total[..., None] * least * torch.exp(-errors.highest)
    return half * arrival / torch.maximum(total, 1 / arrival)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SumError:
    """Relative errors of the row sum, ``(heads, rows, 1)``."""

    added: Tensor  # of adding it up (B14)
    rounded: Tensor | None  # of summing rounded weights; None where the unrounded ones are summed
    division: Tensor  # (1 + it) · O is what the last step makes of O at most (B14)


def row_sum_error(conditions: Conditions, arithmetic: Arithmetic, moved: WeightErrors) -> SumError:
    """B14: how far the row sum is off, and what dividing by it does."""
    rounded = None
    if arithmetic.sums_rounded_weights:
        rounded = nan_from_one(moved.rounded.sum(-1, keepdim=True))
    return SumError(
        added=row_sum_rounding(conditions, arithmetic),
        rounded=rounded,
        division=division_error(conditions, arithmetic),
    )


def log_sum_terms(
    conditions: Conditions,
    arithmetic: Arithmetic,
    errors: ExponentErrors,
    moved: WeightErrors,
    sums: SumError,
) -> dict[str, Tensor]:
    """B18: what LSE's bound is made of, each ``(heads, rows)``."""
    terms = {
        name: moved.total_error[..., 0] * share[..., 0]
        for name, share in part_shares(conditions, arithmetic, errors, moved.exact).items()
    }
    if sums.rounded is not None:
        terms["rounding of P"] = -torch.log1p(-sums.rounded[..., 0])
    terms["row sum"] = -torch.log1p(-sums.added[..., 0])
    before = sum(terms.values(), torch.zeros_like(conditions.total))
    terms["logarithm"] = log_sum_base(conditions, arithmetic, before)
    return terms


def log_sum_base(
    conditions: Conditions | RowTotals, arithmetic: Arithmetic, before: Tensor
) -> Tensor:
    """B18: of m · scale + log(sum), the product, the logarithm and the sum rounded."""
    alive = conditions.count[..., 0] > 0
    lse = torch.where(alive, conditions.lse.abs(), 0.0) + before
    before = before + math.log(2) * arithmetic.lazy_rescale  # so far below it may the maximum be
    own = maximum_of_keys(conditions)
    largest = torch.maximum(conditions.maximum.abs(), own.abs())
    log = torch.log(conditions.total.clamp_min(1)) + before + (conditions.maximum - own)
    of_maximum = factor_roundings(arithmetic) + 2
    count = 3 * lse + of_maximum * (largest + before) + 4 * log + 4
    return count * (2 if arithmetic.splits > 1 else 1) * arithmetic.unit


@kept_step
def part_shares(
    conditions: Conditions, arithmetic: Arithmetic, errors: ExponentErrors, by: Tensor
) -> dict[str, Tensor]:
    """Share that each part of the exponents' errors has of a row's, ``(heads, rows, 1)``.

    Args:
        conditions: The rows.
        arithmetic: Whatever it is.
        errors: Those of the exponents.
        by: ``(heads, rows, kv)``, what each key counts.
    """
    del conditions, arithmetic
    parts = {"scores": errors.product, "score mod": errors.own, "exponent": errors.exponent}
    weight = {n: (by * p).sum(-1, keepdim=True) for n, p in parts.items() if bool(p.any())}
    whole = sum(weight.values(), torch.zeros_like(errors.highest))
    return {n: torch.where(whole > 0, w / whole, 0.0) for n, w in weight.items()}
