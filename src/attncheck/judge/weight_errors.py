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

# Errors of exponents up to which only the simple forms of the bounds are computed. For larger ones
# the other forms may be better, but take five more exponentials. All forms are valid bounds.
SMALL = 0.125


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WeightErrors:
    """Softmax weights and their errors, float64 ``(heads, rows, kv)``, 0 where not seen."""

    exact: Tensor  # P
    upper: Tensor  # largest P that errors of the exponents can cause (B11)
    # Numbers c_j ≥ 0 with |ΔO| ≤ Σ c_j |v_j − O| (B10); infinite or NaN where large.
    relative: Tensor
    changed: Tensor  # largest |ΔP|, which also satisfies that inequality (B12)
    rounded: Tensor  # largest error of rounding P to its format (B13)
    floor: Tensor  # half the subnormal spacing of P's format, ``(heads, rows, 1)``
    total_error: Tensor  # largest |Δ log Σ exp|, ``(heads, rows, 1)``

    @property
    def lost(self) -> Tensor:
        """Weights that may be rounded to 0 (B25), others 0; ``(heads, rows, kv)``."""
        return torch.where(self.exact < self.floor, self.exact, 0.0)


@kept_step
def weight_errors(
    conditions: Conditions, arithmetic: Arithmetic, errors: ExponentErrors
) -> WeightErrors:
    """Return B10–B13: the weights of these rows and their errors."""
    seen, rho = conditions.seen, errors.total
    log = torch.where(seen, conditions.scores - conditions.lse[..., None], -torch.inf)
    exact = torch.exp(log)
    # A weight that underflows in float64 may still grow to a float64 number.
    growth = torch.where(exact > 0, exact * torch.expm1(rho), torch.exp(log + rho))
    least = (exact * torch.exp(-rho)).sum(-1, keepdim=True)
    relative = growth / torch.where(least > 0, least, 1.0)
    changed, upper = _simple_bounds(exact, growth, least)
    total_error = torch.log1p(growth.sum(-1, keepdim=True))
    # Large errors are rare: their five exponentials are computed only if a row has some.
    far = rho.amax(-1, keepdim=True) > SMALL
    if bool(far.any()):
        # B11: the largest and the least value that each weight can take.
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
        rounded=_rounding_error(conditions, arithmetic, upper, floor),
        floor=floor,
        total_error=total_error,
    )


def _simple_bounds(exact: Tensor, growth: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Return the simple forms of B12 and B11: largest |ΔP| and P; NaN where they overflow."""
    least = torch.where(least > 0, least, 1.0)
    # Float64's rounding errors are added to the differences.
    slack = exact.shape[-1] * 2.0**-52
    others = (growth.sum(-1, keepdim=True) * (1 + slack) - growth).clamp_min(0)
    changed = (growth * (1 - exact + slack) + exact * others) / least
    return changed, (exact + growth) / least


def _share(own: Tensor, others: Tensor, *, shrink: bool) -> Tensor:
    """Return exp(own_j) ÷ (exp(own_j) + Σ_{k≠j} exp(others_k)), rounded up (``shrink``) or down."""
    # Exponents are relative to the largest of the others, so that no exponential overflows.
    top = others.amax(-1, keepdim=True)
    top = torch.where(torch.isneginf(top), 0.0, top)
    each = torch.exp(others - top)
    slack = each.shape[-1] * 2.0**-52
    total = each.sum(-1, keepdim=True) * (1 - slack if shrink else 1 + slack)
    rest = torch.log((total - each).clamp_min(0)) + top
    share = torch.sigmoid(own - rest)
    # The only key of a row has all the weight; a key that is not seen has none.
    share = torch.where(torch.isneginf(rest), 1.0, share)
    return torch.where(torch.isneginf(own), 0.0, share)


def _rounding_error(
    conditions: Conditions, arithmetic: Arithmetic, upper: Tensor, floor: Tensor
) -> Tensor:
    """Return B13: P's rounding error, relative for normal numbers, constant below; at most P."""
    if not arithmetic.weights_error:
        return torch.zeros_like(upper)
    if arithmetic.normalised_weights:
        upper = upper * (1 + division_error(conditions, arithmetic))
    return torch.maximum(arithmetic.weights_error * upper, torch.minimum(upper, floor))


def _floor(
    conditions: Conditions, arithmetic: Arithmetic, errors: ExponentErrors, least: Tensor
) -> Tensor:
    """Return B13: half the subnormal spacing of P's format ÷ the row sum; ``(heads, rows, 1)``."""
    half = arithmetic.weights.subnormal_spacing / 2 / arithmetic.weights_scale
    if arithmetic.normalised_weights:
        return torch.full_like(errors.arrival, half)
    arrival = torch.exp(errors.arrival)
    total = conditions.total[..., None] * least * torch.exp(-errors.highest)
    return half * arrival / torch.maximum(total, 1 / arrival)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SumError:
    """Relative errors of the row sum, ``(heads, rows, 1)``."""

    added: Tensor  # error of adding it up (B14)
    rounded: Tensor | None  # error of summing rounded weights; None if unrounded ones are summed
    division: Tensor  # the last step multiplies |O| by 1 + this at most (B14)


def row_sum_error(conditions: Conditions, arithmetic: Arithmetic, moved: WeightErrors) -> SumError:
    """Return B14: the errors of the row sum and of dividing by it."""
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
    """Return B18: the terms of LSE's bound, each ``(heads, rows)``."""
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
    """Return B18: the rounding errors of m · scale + log(sum), each operation rounded."""
    alive = conditions.count[..., 0] > 0
    lse = torch.where(alive, conditions.lse.abs(), 0.0) + before
    before = before + math.log(2) * arithmetic.lazy_rescale  # a lazy maximum lags by up to this
    keys_maximum = maximum_of_keys(conditions)
    largest = torch.maximum(conditions.maximum.abs(), keys_maximum.abs())
    log = torch.log(conditions.total.clamp_min(1)) + before + (conditions.maximum - keys_maximum)
    of_maximum = factor_roundings(arithmetic) + 2
    count = 3 * lse + of_maximum * (largest + before) + 4 * log + 4
    return count * (2 if arithmetic.splits > 1 else 1) * arithmetic.unit


@kept_step
def part_shares(
    conditions: Conditions, arithmetic: Arithmetic, errors: ExponentErrors, by: Tensor
) -> dict[str, Tensor]:
    """Return the share of each part in a row's errors of exponents, ``(heads, rows, 1)``.

    Args:
        conditions: The rows, with which ``kept_step`` caches the result.
        arithmetic: Not read, only part of the cache's key.
        errors: Errors of the exponents.
        by: ``(heads, rows, kv)``, the weight of each key in the sums over a row.
    """
    del conditions, arithmetic
    parts = {"scores": errors.product, "score mod": errors.own, "exponent": errors.exponent}
    weight = {n: (by * p).sum(-1, keepdim=True) for n, p in parts.items() if bool(p.any())}
    whole = sum(weight.values(), torch.zeros_like(errors.highest))
    return {n: torch.where(whole > 0, w / whole, 0.0) for n, w in weight.items()}
