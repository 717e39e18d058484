"""How many roundings a row passes through, and the error of its sum: equation B14 of the manual."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.judge.accumulators import FP32, FP64

if TYPE_CHECKING:
    from attncheck.conditions import Conditions
    from attncheck.judge.accumulators import Accumulator
    from attncheck.judge.arithmetic import Arithmetic

__all__ = [
    "additions",
    "below_one",
    "division",
    "steps",
    "sum_accumulator",
    "sum_bias",
    "sum_of_weights",
    "taken",
]

# l · α, O · l, β times the product, their sum, and a division within 2 ulps, which are 4 u.
_DIVIDED = 8


def steps(conditions: Conditions, arithmetic: Arithmetic) -> torch.Tensor:
    """Most tiles with a seen key, and parts, that a row passes through, ``(heads, rows, 1)``."""
    tiles = _tiles(conditions, arithmetic)
    return conditions.seen.sum(-1, keepdim=True).clamp(min=1, max=tiles).to(torch.float64)


def _tiles(conditions: Conditions, arithmetic: Arithmetic) -> int:
    """A sink is a step of its own, where it comes first or last (B29)."""
    keys = conditions.seen.shape[-1] - conditions.has_sink
    return -(-keys // arithmetic.block_kv) + arithmetic.splits + conditions.has_sink


def additions(conditions: Conditions, arithmetic: Arithmetic) -> torch.Tensor:
    """Roundings that a weight or its product passes through in a row sum, ``(heads, rows, 1)``.

    A product, an addition for every seen key, two a tile, and the merging of parts (B14); more, and
    in every tile, where O is divided after each.
    """
    seen = conditions.seen.sum(-1, keepdim=True).to(torch.float64)
    if arithmetic.divides_each_step:
        of_tiles = steps(conditions, arithmetic) * 0 + _DIVIDED * _tiles(conditions, arithmetic)
    else:
        of_tiles = 2 * steps(conditions, arithmetic)
    return seen + of_tiles + arithmetic.splits + 1


def taken(conditions: Conditions, accumulator: Accumulator) -> torch.Tensor | None:
    """Steps of P·V in which a row sees a key, ``(heads, rows, 1)``; None of single additions.

    Any other step adds zeros to a sum that has its bits already, and loses nothing (B2).
    """
    if accumulator.block is None:
        return None
    seen = conditions.seen
    padded = torch.nn.functional.pad(seen, (0, -seen.shape[-1] % accumulator.block))
    held = padded.reshape(*seen.shape[:-1], -1, accumulator.block).any(-1)
    return held.sum(-1, keepdim=True).to(torch.float64)


def sum_accumulator(arithmetic: Arithmetic) -> Accumulator:
    """What rows are summed in: plain additions, unless a product sums the rounded weights."""
    if arithmetic.sums_rounded_weights and arithmetic.values.block is not None:
        return arithmetic.values
    return FP64 if arithmetic.computes.name == "fp64" else FP32


def sum_of_weights(conditions: Conditions, arithmetic: Arithmetic) -> torch.Tensor:
    """Relative error of adding up a row's weights, ``(heads, rows, 1)``; NaN from 1 on."""
    accumulator = sum_accumulator(arithmetic)
    count = additions(conditions, arithmetic)
    return below_one(accumulator.det(count, taken(conditions, accumulator)))


def sum_bias(conditions: Conditions, arithmetic: Arithmetic) -> torch.Tensor:
    """The systematic part of that, ``(heads, rows, 1)``: 0 where nothing truncates (B26, B27)."""
    accumulator = sum_accumulator(arithmetic)
    seen = conditions.seen.sum(-1, keepdim=True).to(torch.float64)
    return accumulator.bias(seen, taken(conditions, accumulator)).clamp(max=1)


def division(conditions: Conditions, arithmetic: Arithmetic) -> torch.Tensor:
    """What is left of any O after it is divided by the row sum is (1 + this) · O at most (B14)."""
    # A division by a GPU's approximation is within 2 ulps; then the factor, itself rounded.
    last = (6 + (4 if arithmetic.splits > 1 else 0)) * arithmetic.unit
    return (1 + last / (1 - last)) / (1 - sum_of_weights(conditions, arithmetic)) - 1


def below_one(error: torch.Tensor) -> torch.Tensor:
    """A sum that may be off by all of itself bounds nothing: NaN."""
    return torch.where(error < 1, error, torch.nan)
