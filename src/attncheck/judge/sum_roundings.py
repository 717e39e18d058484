"""Roundings to a format, and those that the sums of a row pass through: equations B4 and B14."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attncheck.core.conditions import Conditions, RowTotals
from attncheck.core.declared_arithmetic import FP32, FP64, Accumulator, Arithmetic
from attncheck.core.formats import Format, spacing


def half_ulp(size: Tensor, fmt: Format) -> Tensor:
    """Largest error of rounding anything of at most ``size`` to nearest in ``fmt`` (B4).

    Args:
        size: float64, not negative, any shape.
        fmt: The format; below its normal range the spacing of subnormals counts.

    At a power of two the spacing above counts, that of the number itself. Infinite beyond the
    format's largest number, where rounding overflows, and where ``size`` is infinite or NaN.
    """
    # frexp calls the exponent of 0 zero.
    known = torch.where(size <= fmt.max, size, 1.0).clamp_min(2.0**fmt.min_exponent)
    # The smallest subnormal is a number too, half of it is not one of fp64.
    return torch.where(size <= fmt.max, spacing(known, fmt) / 2, math.inf)


# l · α, O · l, β times the product, their sum, and a division within 2 ulps, which are 4 u.
_DIVIDED = 8


def tiles_passed(conditions: Conditions | RowTotals, arithmetic: Arithmetic) -> Tensor:
    """Most tiles with a seen key, and parts, that a row passes through, ``(heads, rows, 1)``."""
    tiles = _tiles(conditions, arithmetic)
    return conditions.count.clamp(min=1, max=tiles)


def _tiles(conditions: Conditions | RowTotals, arithmetic: Arithmetic) -> int:
    """A sink is a step of its own, where it comes first or last (B29)."""
    keys = conditions.keys - conditions.has_sink
    return -(-keys // arithmetic.block_kv) + arithmetic.splits + conditions.has_sink


def sum_roundings(conditions: Conditions | RowTotals, arithmetic: Arithmetic) -> Tensor:
    """Roundings that a weight or its product passes through in a row sum, ``(heads, rows, 1)``.

    A product, an addition for every seen key, two a tile, and the merging of parts (B14); more, and
    in every tile, where O is divided after each.
    """
    if arithmetic.divides_each_step:
        of_tiles = tiles_passed(conditions, arithmetic) * 0 + _DIVIDED * _tiles(
            conditions, arithmetic
        )
    else:
        of_tiles = 2 * tiles_passed(conditions, arithmetic)
    return conditions.count + of_tiles + arithmetic.splits + 1


def steps_with_keys(conditions: Conditions | RowTotals, accumulator: Accumulator) -> Tensor | None:
    """Steps of P·V in which a row sees a key, ``(heads, rows, 1)``; None of single additions.

    Any other step adds zeros to a sum that has its bits already, and loses nothing (B2).
    """
    if accumulator.block is None:
        return None
    if isinstance(conditions, RowTotals):  # the fewest that its keys take
        return (conditions.count / accumulator.block).ceil()
    # Steps are cut at multiples of the block from key 0, whatever the row sees.
    seen = conditions.seen
    padded = torch.nn.functional.pad(seen, (0, -seen.shape[-1] % accumulator.block))
    held = padded.reshape(*seen.shape[:-1], -1, accumulator.block).any(-1)
    return held.sum(-1, keepdim=True).to(torch.float64)


def sum_accumulator(arithmetic: Arithmetic) -> Accumulator:
    """Accumulator of the row sum: plain additions, unless a product sums the rounded weights."""
    if arithmetic.sums_rounded_weights and arithmetic.values.block is not None:
        return arithmetic.values
    return FP64 if arithmetic.computes.name == "fp64" else FP32


def row_sum_rounding(conditions: Conditions | RowTotals, arithmetic: Arithmetic) -> Tensor:
    """Relative error of adding up a row's weights, ``(heads, rows, 1)``; NaN from 1 on."""
    accumulator = sum_accumulator(arithmetic)
    count = sum_roundings(conditions, arithmetic)
    return nan_from_one(accumulator.det(count, steps_with_keys(conditions, accumulator)))


def sum_bias(conditions: Conditions | RowTotals, arithmetic: Arithmetic) -> Tensor:
    """The systematic part of that, ``(heads, rows, 1)``: 0 where nothing truncates (B26, B27)."""
    accumulator = sum_accumulator(arithmetic)
    steps = steps_with_keys(conditions, accumulator)
    return accumulator.bias(conditions.count, steps).clamp(max=1)


def division_error(conditions: Conditions | RowTotals, arithmetic: Arithmetic) -> Tensor:
    """Relative error of dividing by the row sum: O becomes (1 + this) · O at most (B14)."""
    # A division by a GPU's approximation is within 2 ulps; then the factor, itself rounded.
    # O may be divided once more where parts are merged.
    last = (6 + (4 if arithmetic.splits > 1 else 0)) * arithmetic.unit
    return (1 + last / (1 - last)) / (1 - row_sum_rounding(conditions, arithmetic)) - 1


def nan_from_one(error: Tensor) -> Tensor:
    """A sum that may be off by all of itself bounds nothing: NaN."""
    return torch.where(error < 1, error, torch.nan)
