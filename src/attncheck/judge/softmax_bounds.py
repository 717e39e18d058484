"""The deterministic bound of the operation softmax, whose out is P: equation B20 of the manual."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.judge.additions import additions

if TYPE_CHECKING:
    from attncheck.conditions import Conditions
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.judge.row_sums import SumError
    from attncheck.judge.weights import Weights

__all__ = ["softmax_terms"]


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
