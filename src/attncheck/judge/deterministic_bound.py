"""Deterministic bound of out and LSE: B15–B20."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.judge.declared_arithmetic import additions, half_ulp, taken
from attncheck.judge.score_errors import exponents, overflows, running_size
from attncheck.judge.weight_errors import log_sum_terms, shares, sum_error, weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.core.conditions import Conditions, ScoreModError
    from attncheck.judge.declared_arithmetic import Accumulator, Arithmetic
    from attncheck.judge.score_errors import Exponents, ScoreError
    from attncheck.judge.weight_errors import SumError, Weights

__all__ = [
    "OUTPUT",
    "ROUNDING",
    "DeterministicBound",
    "about",
    "accumulation",
    "deterministic_bound",
    "finished",
    "finite_values",
    "softmax_terms",
    "value_terms",
    "weighted_size",
]


def accumulation(
    conditions: Conditions, arithmetic: Arithmetic, moved: Weights, values: torch.Tensor
) -> torch.Tensor:
    """Largest error of adding up the products, ``(heads, rows, value_dim)``."""
    size = weighted_size(moved, values)
    accumulator, count = arithmetic.values, additions(conditions, arithmetic)
    if not accumulator.coarse:
        return accumulator.det(count, taken(conditions, accumulator)) * size
    rounded = accumulator.rounded(count) * size
    return rounded + torch.minimum(_cut_off(conditions, accumulator, moved, values), size)


def weighted_size(moved: Weights, values: torch.Tensor) -> torch.Tensor:
    """Σ of what a kernel adds up, in magnitude: the weights sum to 1, and what rounding adds."""
    size = values.abs()
    exact = torch.fmin(moved.upper @ size, size.amax(-2)[..., None, :])
    return exact + moved.rounded @ size


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One step of a coarse accumulator.

    Attributes:
        sum: Its exact part of out, ``(heads, rows, value_dim)``.
        size: Σ |terms| of what a kernel adds, likewise.
        largest: No term of the step is larger.
        taken: Whether a row sees a key of it, float64 ``(heads, rows, 1)``.
    """

    sum: torch.Tensor
    size: torch.Tensor
    largest: torch.Tensor
    taken: torch.Tensor


def _steps(
    conditions: Conditions, block: int, moved: Weights, values: torch.Tensor
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
    conditions: Conditions, accumulator: Accumulator, moved: Weights, values: torch.Tensor
) -> torch.Tensor:
    """B17's second part: what alignment and truncation take, step by step."""
    assert accumulator.block is not None
    running, taken = _running(conditions, accumulator, moved, values)
    unit = 2.0**-accumulator.alignment
    error = taken * 2.0 ** (1 - accumulator.result) * running
    for step in _steps(conditions, accumulator.block, moved, values):
        above = unit * torch.maximum(step.largest, running)
        error += step.taken * (torch.minimum(accumulator.block * above, step.size) + above)
    return error


def _running(
    conditions: Conditions, accumulator: Accumulator, moved: Weights, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest magnitude of a running sum, in any tile's frame; how many steps a row takes."""
    assert accumulator.block is not None
    total = torch.zeros_like(conditions.out)
    low, high, size, largest = (total.clone() for _ in range(4))
    taken = torch.zeros_like(conditions.total)[..., None]
    for step in _steps(conditions, accumulator.block, moved, values):
        total = total + step.sum
        low, high = torch.minimum(low, total), torch.maximum(high, total)
        size, largest = size + step.size, largest + step.largest
        taken = taken + step.taken
    spread = values.abs()
    exact = high - low + (moved.changed + moved.rounded) @ spread
    return torch.minimum(running_size(exact, largest, accumulator, taken), size), taken


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


def softmax_terms(
    conditions: Conditions,
    arithmetic: Arithmetic,
    moved: Weights,
    sums: SumError,
) -> dict[str, torch.Tensor]:
    """What the bound is made of before out is rounded, each ``(heads, rows, kv)``."""
    change = moved.changed
    smallest = 2.0**arithmetic.computes.min_exponent
    count = additions(conditions, arithmetic)
    seen = conditions.seen
    return {
        "exponent": torch.where(seen, change, 0.0),
        "division": torch.where(seen, sums.division * (moved.exact + change), 0.0),
        "underflow": torch.where(seen, smallest * (count + 4), 0.0).to(torch.float64),
    }


OUTPUT = "output rounding"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeterministicBound:
    """Bounds of |error|, float64; infinite where there is none, 0 in rows that see no key.

    Attributes:
        out: ``(heads, rows, value_dim)``.
        lse: ``(heads, rows)``.
        out_terms: What ``out`` is made of, by name, each of its shape; they sum to it.
        lse_terms: What ``lse`` is made of.
    """

    out: torch.Tensor
    lse: torch.Tensor
    out_terms: dict[str, torch.Tensor]
    lse_terms: dict[str, torch.Tensor]


def deterministic_bound(
    conditions: Conditions,
    arithmetic: Arithmetic,
    scores: ScoreError,
    mod: ScoreModError | None = None,
) -> DeterministicBound:
    """What no kernel of this arithmetic passes on these inputs, whatever its tiles and order.

    Args:
        conditions: Of the rows.
        arithmetic: What the kernel declares.
        scores: ``score_error`` of both.
        mod: Where the Problem has a score mod.

    Source: B9–B19 in ``docs/explanation/bounds.md``.
    """
    errors = exponents(conditions, arithmetic, scores, mod)
    moved = weights(conditions, arithmetic, errors)
    sums = sum_error(conditions, arithmetic, moved)
    if conditions.given_scores:
        out = softmax_terms(conditions, arithmetic, moved, sums)
    else:
        out = value_terms(conditions, arithmetic, errors, moved, sums)
    lse = log_sum_terms(conditions, arithmetic, errors, moved, sums)
    return finished(conditions, arithmetic, errors.unbounded, out, lse)


def finished(
    conditions: Conditions,
    arithmetic: Arithmetic,
    unbounded: torch.Tensor,
    out: dict[str, torch.Tensor],
    lse: dict[str, torch.Tensor],
) -> DeterministicBound:
    """B19: output rounding added; 0 where no key is seen, infinite where nothing is known."""
    # The sums of this bound are float64 themselves.
    inflation = 1 + 8 * conditions.seen.shape[-1] * 2.0**-53
    out = {name: term * inflation for name, term in out.items()}
    lse = {name: term * inflation for name, term in lse.items()}
    exact = conditions.out.abs()
    out[OUTPUT] = half_ulp(exact + sum(out.values()), arithmetic.output)
    dead = ~conditions.seen.any(-1)
    unknown_out = unbounded[..., None] | ~torch.isfinite(conditions.out)
    unknown_lse = unbounded | ~torch.isfinite(conditions.lse)
    out = {n: _settled(t, dead[..., None], unknown_out) for n, t in out.items()}
    lse = {n: _settled(t, dead, unknown_lse) for n, t in lse.items()}
    return DeterministicBound(
        out=torch.stack(list(out.values())).sum(0),
        lse=torch.stack(list(lse.values())).sum(0),
        out_terms=out,
        lse_terms=lse,
    )


def _settled(term: torch.Tensor, dead: torch.Tensor, unknown: torch.Tensor) -> torch.Tensor:
    known = torch.where(unknown | torch.isnan(term), torch.inf, term)
    return torch.where(dead, 0.0, known)
