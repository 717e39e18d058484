"""Proven deterministic bound of out and LSE: equations B15–B17, B19 and B20."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.core.conditions import Conditions, ScoreModError, kept_step
from attncheck.core.declared_arithmetic import Accumulator, Arithmetic
from attncheck.judge.score_errors import (
    ExponentErrors,
    ScoreError,
    exponent_errors,
    may_overflow,
    running_size,
)
from attncheck.judge.sum_roundings import half_ulp, steps_with_keys, sum_roundings
from attncheck.judge.weight_errors import (
    SumError,
    WeightErrors,
    log_sum_terms,
    part_shares,
    row_sum_error,
    weight_errors,
)

OUTPUT = "output rounding"
_ROUNDING = "rounding of P"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeterministicBound:
    """Bounds of |error|, float64; infinite where there is none, 0 in rows that see no key."""

    out: Tensor  # ``(heads, rows, value_dim)``
    lse: Tensor  # ``(heads, rows)``
    out_terms: dict[str, Tensor]  # terms by name, each of the shape of ``out``; they sum to it
    lse_terms: dict[str, Tensor]  # terms by name, each of the shape of ``lse``; they sum to it


def deterministic_bound(
    conditions: Conditions,
    arithmetic: Arithmetic,
    scores: ScoreError,
    mod: ScoreModError | None = None,
) -> DeterministicBound:
    """Bound the errors of every kernel of this arithmetic, whatever its tiles and order.

    Source: B9–B19 in ``docs/explanation/bounds.md``.
    """
    errors = exponent_errors(conditions, arithmetic, scores, mod)
    moved = weight_errors(conditions, arithmetic, errors)
    return bound_of_weights(conditions, arithmetic, errors, moved)


def bound_of_weights(
    conditions: Conditions, arithmetic: Arithmetic, errors: ExponentErrors, moved: WeightErrors
) -> DeterministicBound:
    """Return the deterministic bound, from the errors of the exponents and of the weights.

    It includes output rounding (B19); it is 0 in rows that see no key and infinite where unknown.
    """
    sums = row_sum_error(conditions, arithmetic, moved)
    if conditions.given_scores:
        out = _softmax_terms(conditions, arithmetic, moved, sums)
    else:
        out = _value_terms(conditions, arithmetic, errors, moved, sums)
    lse = log_sum_terms(conditions, arithmetic, errors, moved, sums)
    # The bound itself is summed in float64.
    inflation = 1 + 8 * conditions.keys * 2.0**-53
    out = {name: term * inflation for name, term in out.items()}
    lse = {name: term * inflation for name, term in lse.items()}
    # The output is rounded last: the computed number, which may be larger than the exact one.
    exact = conditions.out.abs()
    out[OUTPUT] = half_ulp(exact + sum(out.values()), arithmetic.output)
    dead = conditions.count[..., 0] == 0
    unknown_out = errors.unbounded[..., None] | ~torch.isfinite(conditions.out)
    unknown_lse = errors.unbounded | ~torch.isfinite(conditions.lse)
    out = {n: _settle_rows(t, dead[..., None], unknown_out) for n, t in out.items()}
    lse = {n: _settle_rows(t, dead, unknown_lse) for n, t in lse.items()}
    return DeterministicBound(
        out=torch.stack(list(out.values())).sum(0),
        lse=torch.stack(list(lse.values())).sum(0),
        out_terms=out,
        lse_terms=lse,
    )


def _settle_rows(term: Tensor, dead: Tensor, unknown: Tensor) -> Tensor:
    settled = torch.where(unknown | torch.isnan(term), torch.inf, term)
    return torch.where(dead, 0.0, settled)


def _softmax_terms(
    conditions: Conditions, arithmetic: Arithmetic, moved: WeightErrors, sums: SumError
) -> dict[str, Tensor]:
    """Return the terms of a softmax's bound before out is rounded, each ``(heads, rows, kv)``."""
    # P is the output itself: there is no product whose errors could cancel.
    change = moved.changed
    smallest = 2.0**arithmetic.computes.min_exponent
    count = sum_roundings(conditions, arithmetic)
    seen = conditions.seen
    return {
        "exponent": torch.where(seen, change, 0.0),
        "division": torch.where(seen, sums.division * (moved.exact + change), 0.0),
        "underflow": torch.where(seen, smallest * (count + 4), 0.0).to(torch.float64),
    }


def _value_terms(
    conditions: Conditions,
    arithmetic: Arithmetic,
    errors: ExponentErrors,
    moved: WeightErrors,
    sums: SumError,
) -> dict[str, Tensor]:
    """Return the terms of the bound before out is rounded, each ``(heads, rows, value_dim)``."""
    values, touched = finite_values(conditions, arithmetic)
    size, exact = values.abs(), conditions.out
    of_weights = _spread_of_weights(conditions, arithmetic, moved, values)
    shares = part_shares(conditions, arithmetic, errors, moved.changed)
    terms = {name: of_weights * share for name, share in shares.items()}
    # B16: P is rounded to its format, and V to tf32 in some arithmetics.
    if arithmetic.weights_error:
        if sums.rounded is None:
            terms[_ROUNDING] = moved.rounded @ size
        else:
            centered = weighted_spread(moved.rounded, values, exact) + sums.rounded * of_weights
            terms[_ROUNDING] = centered / (1 - sums.rounded)
    if arithmetic.operand_error:
        size_of_all = _weighted_size(conditions, arithmetic, moved, values)
        terms["rounding of V"] = arithmetic.operand_error * size_of_all
    terms["accumulation"] = accumulation_error(conditions, arithmetic, moved, values)
    before = sum(terms.values(), torch.zeros_like(exact))
    division = sums.division * (exact.abs() + before)
    unknown = touched | _overflows(conditions, arithmetic, size)
    terms["division"] = torch.where(unknown, torch.inf, division)
    terms["underflow"] = _underflow(conditions, arithmetic, sums)
    return terms


@kept_step
def _spread_of_weights(
    conditions: Conditions, arithmetic: Arithmetic, moved: WeightErrors, values: Tensor
) -> Tensor:
    """Return the error of out by those of the weights (B10, B12, B15); at most the range of V."""
    del arithmetic
    exact = conditions.out
    spread = torch.maximum(
        values.amax(-2)[..., None, :] - exact, exact - values.amin(-2)[..., None, :]
    )
    by_weights = [
        weighted_spread(weight, values, exact) for weight in (moved.relative, moved.changed)
    ]
    return torch.fmin(torch.fmin(*by_weights), spread.clamp_min(0))


@kept_step
def finite_values(conditions: Conditions, arithmetic: Arithmetic) -> tuple[Tensor, Tensor]:
    """Return V with 0 for non-finite values, and which elements of out see such a value."""
    del arithmetic
    odd = ~torch.isfinite(conditions.v)
    touched = torch.zeros_like(conditions.out, dtype=torch.bool)
    if not bool(odd.any()):
        return conditions.v, touched
    touched = conditions.seen.to(torch.float64) @ odd.to(torch.float64) > 0
    return torch.where(odd, 0.0, conditions.v), touched


def weighted_spread(weight: Tensor, values: Tensor, center: Tensor) -> Tensor:
    """Return B15: an upper bound of Σ weight_j · |v_j − center|, ``(heads, rows, value_dim)``.

    The lesser of the bounds by the triangle inequality and by Cauchy–Schwarz, which is 0 where V is
    constant. The latter takes a difference, to which float64's rounding errors are added.
    """
    # The triangle inequality is better where V varies, Cauchy–Schwarz where it hardly does.
    total = weight.sum(-1, keepdim=True)
    plain = weight @ values.abs() + center.abs() * total
    squares = weight @ values.square()
    crossed = center * (weight @ values)
    magnitude = squares + 2 * crossed.abs() + center.square() * total
    spread = (squares - 2 * crossed + center.square() * total).clamp_min(0)
    spread = spread + (weight.shape[-1] + 8) * 2.0**-53 * magnitude
    return torch.minimum(plain, (total * spread).sqrt())


@kept_step
def _size_of_seen(conditions: Conditions, arithmetic: Arithmetic) -> Tensor:
    """Return Σ |v| over the seen keys, ``(heads, rows, value_dim)``."""
    values, _ = finite_values(conditions, arithmetic)
    total: Tensor = conditions.seen.to(torch.float64) @ values.abs()
    return total


def _underflow(conditions: Conditions, arithmetic: Arithmetic, sums: SumError) -> Tensor:
    """Return B17's underflow: every weight, rescaling and product may be flushed to 0."""
    smallest = 2.0**arithmetic.computes.min_exponent
    # A flushed weight loses itself times its value; a flushed product loses itself.
    count = sum_roundings(conditions, arithmetic)
    lag = 2.0**arithmetic.lazy_rescale
    lost = count * lag * _size_of_seen(conditions, arithmetic) + 2 * count + 4
    underflow: Tensor = smallest * lost * (1 + sums.division)
    return underflow


def _overflows(conditions: Conditions, arithmetic: Arithmetic, size: Tensor) -> Tensor:
    """Return which elements' unnormalised sums may overflow fp32, or whose V may overflow tf32.

    In any order of tiles: until the largest score is reached, smaller scores have weights up to 1.
    """
    largest = arithmetic.weights_scale * 2.0**arithmetic.lazy_rescale
    unnormalised = _size_of_seen(conditions, arithmetic)
    too_large: Tensor = 2 * largest * unnormalised > arithmetic.computes.max
    return too_large | may_overflow(size, arithmetic).any(-2)[..., None, :]


def accumulation_error(
    conditions: Conditions, arithmetic: Arithmetic, moved: WeightErrors, values: Tensor
) -> Tensor:
    """Return the largest error of adding up the products, ``(heads, rows, value_dim)``."""
    size = _weighted_size(conditions, arithmetic, moved, values)
    accumulator, count = arithmetic.values, sum_roundings(conditions, arithmetic)
    if not accumulator.coarse:
        return accumulator.det(count, steps_with_keys(conditions, accumulator)) * size
    # The part cut off cannot exceed the sum of the terms.
    rounded = accumulator.rounded(count) * size
    return rounded + torch.minimum(_cut_off(conditions, accumulator, moved, values), size)


@kept_step
def _weighted_size(
    conditions: Conditions, arithmetic: Arithmetic, moved: WeightErrors, values: Tensor
) -> Tensor:
    """Return Σ |terms| that a kernel adds up: of weights that sum to 1, plus P's rounding."""
    del conditions, arithmetic
    size = values.abs()
    exact = torch.fmin(moved.upper @ size, size.amax(-2)[..., None, :])
    total: Tensor = exact + moved.rounded @ size
    return total


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One step of a coarse accumulator."""

    sum: Tensor  # its exact part of out, ``(heads, rows, value_dim)``
    size: Tensor  # Σ |terms| that a kernel adds, ``(heads, rows, value_dim)``
    largest: Tensor  # bound of |term| in the step, ``(heads, rows, value_dim)``
    sees_key: Tensor  # 1 if the row sees a key of the step, else 0; float64 ``(heads, rows, 1)``


def _steps(
    conditions: Conditions, block: int, moved: WeightErrors, values: Tensor
) -> Iterator[_Step]:
    computed = moved.upper + moved.rounded
    for start in range(0, values.shape[-2], block):
        keys = slice(start, start + block)
        size = values[..., keys, :].abs()
        yield _Step(
            moved.exact[..., keys] @ values[..., keys, :],
            computed[..., keys] @ size,
            computed[..., keys].amax(-1)[..., None] * size.amax(-2)[..., None, :],
            conditions.seen[..., keys].any(-1, keepdim=True).to(torch.float64),
        )


def _cut_off(
    conditions: Conditions, accumulator: Accumulator, moved: WeightErrors, values: Tensor
) -> Tensor:
    """Return B17's second part: what alignment and truncation cut off, summed over the steps."""
    assert accumulator.block is not None
    running, steps = _running_sums(conditions, accumulator, moved, values)
    unit = 2.0**-accumulator.alignment
    # In each step the running sum itself is truncated to its own bits.
    error = steps * 2.0 ** (1 - accumulator.result) * running
    for step in _steps(conditions, accumulator.block, moved, values):
        above = unit * torch.maximum(step.largest, running)
        error += step.sees_key * (torch.minimum(accumulator.block * above, step.size) + above)
    return error


def _running_sums(
    conditions: Conditions, accumulator: Accumulator, moved: WeightErrors, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the largest |running sum| of any tile, over the final row sum, and a row's steps."""
    assert accumulator.block is not None
    total = torch.zeros_like(conditions.out)
    low, high, size, largest = (total.clone() for _ in range(4))
    steps = torch.zeros_like(conditions.total)[..., None]
    for step in _steps(conditions, accumulator.block, moved, values):
        total = total + step.sum
        low, high = torch.minimum(low, total), torch.maximum(high, total)
        size, largest = size + step.size, largest + step.largest
        steps = steps + step.sees_key
    spread = values.abs()
    exact = high - low + (moved.changed + moved.rounded) @ spread
    return torch.minimum(running_size(exact, largest, accumulator, steps), size), steps
