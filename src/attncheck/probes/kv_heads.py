"""What tells one batch and key head from another in a probe: a factor of V, a shift of its code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from attncheck.problem import Problem

__all__ = ["amplitudes", "shifts"]

_FACTOR = 4
"""Between the values of two key heads: a row that reads the other one's is off by 3/4 or more."""

_KINDS = 5
"""Different factors: 1 to 4**4 = 256, which every format can store."""


def _pairs(problem: Problem, per_batch: int) -> torch.Tensor:
    batch = torch.arange(problem.batch)[:, None]
    return batch * per_batch + torch.arange(problem.kv_heads)


def amplitudes(problem: Problem) -> torch.Tensor:
    """Powers of four, float64 ``(batch, kv_heads)``: what V is multiplied by.

    A neighbour in heads, in batch or in both has another one.
    """
    kinds = _pairs(problem, 2) % _KINDS
    return torch.pow(torch.tensor(float(_FACTOR), dtype=torch.float64), kinds)


def shifts(problem: Problem) -> torch.Tensor:
    """By how many columns the code of V is turned, int64 ``(batch, kv_heads)``."""
    return _pairs(problem, problem.kv_heads)
