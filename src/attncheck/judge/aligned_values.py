"""Errors of adding up P·V: equation B17 of the manual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.judge.additions import additions, taken
from attncheck.judge.aligned_products import running_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.conditions import Conditions
    from attncheck.judge.accumulators import Accumulator
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.judge.weights import Weights

__all__ = ["accumulation", "weighted_size"]


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
