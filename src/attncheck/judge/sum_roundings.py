"""Rounding errors of a format and of the sums of a row: equations B4 and B14."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attncheck.core.conditions import Conditions, RowTotals
from attncheck.core.declared_arithmetic import FP32, FP64, Accumulator, Arithmetic
from attncheck.core.formats import Format, spacing


def half_ulp(size: Tensor, fmt: Format) -> Tensor:
    """Return the largest error of rounding numbers up to ``size`` to nearest in ``fmt`` (B4).

    Args:
        size: float64, not negative, any shape.
        fmt: The format; below its normal range the spacing is that of its subnormal numbers.

    At a power of two the spacing is the larger one, above it. The error is infinite where ``size``
    exceeds the format's largest number, so that rounding overflows, or is infinite or NaN.
    """
    # The exponent that frexp returns for 0 would be too large.
    in_range = torch.where(size <= fmt.max, size, 1.0).clamp_min(2.0**fmt.min_exponent)
    return torch.where(size <= fmt.max, spacing(in_range, fmt) / 2, math.inf)


# Roundings per tile if O is divided after each: l · α, O · l, β times the product, their sum, and a
# division within 2 ulps, which are 4 u.
_TILE_ROUNDINGS = 8


def tiles_passed(conditions: Conditions | RowTotals, arithmetic: Arithmetic) -> Tensor:
    """Return the most tiles with a seen key, and splits, of a row, ``(heads, rows, 1)``."""
    tiles = _tiles(conditions, arithmetic)
    return conditions.count.clamp(min=1, max=tiles)


def _tiles(conditions: Conditions | RowTotals, arithmetic: Arithmetic) -> int:
    """Return the number of tiles, splits and sinks; a sink is a step of its own (B29)."""
    keys = conditions.keys - conditions.has_sink
    return -(-keys // arithmetic.block_kv) + arithmetic.splits + conditions.has_sink


def sum_roundings(conditions: Conditions | RowTotals, arithmetic: Arithmetic) -> Tensor:
    """Return how often a weight or its product is rounded in a row sum, ``(heads, rows, 1)``.

    Once for the product, for each seen key and for each split, and twice for each tile (B14); if O
    is divided after each tile, ``_TILE_ROUNDINGS`` times per tile, with or without seen keys.
    """
    if arithmetic.divides_each_step:
        of_tiles = tiles_passed(conditions, arithmetic) * 0 + _TILE_ROUNDINGS * _tiles(
            conditions, arithmetic
        )
    else:
        of_tiles = 2 * tiles_passed(conditions, arithmetic)
    return conditions.count + of_tiles + arithmetic.splits + 1


def steps_with_keys(conditions: Conditions | RowTotals, accumulator: Accumulator) -> Tensor | None:
    """Return the steps of P·V in which a row sees a key, ``(heads, rows, 1)``.

    Other steps add zeros to an already truncated sum, which loses nothing (B2). None if the
    accumulator adds single products.
    """
    if accumulator.block is None:
        return None
    if isinstance(conditions, RowTotals):  # the fewest steps that can hold its keys
        return (conditions.count / accumulator.block).ceil()
    # Steps start at multiples of the block from key 0, whatever the row sees.
    seen = conditions.seen
    padded = torch.nn.functional.pad(seen, (0, -seen.shape[-1] % accumulator.block))
    sees_key = padded.reshape(*seen.shape[:-1], -1, accumulator.block).any(-1)
    return sees_key.sum(-1, keepdim=True).to(torch.float64)


def sum_accumulator(arithmetic: Arithmetic) -> Accumulator:
    """Return the row sum's accumulator: additions, unless a product sums the rounded weights."""
    if arithmetic.sums_rounded_weights and arithmetic.values.block is not None:
        return arithmetic.values
    return FP64 if arithmetic.computes.name == "fp64" else FP32


def row_sum_rounding(conditions: Conditions | RowTotals, arithmetic: Arithmetic) -> Tensor:
    """Return the relative error of a row's sum of weights, ``(heads, rows, 1)``; NaN from 1 on."""
    accumulator = sum_accumulator(arithmetic)
    count = sum_roundings(conditions, arithmetic)
    return nan_from_one(accumulator.det(count, steps_with_keys(conditions, accumulator)))


def sum_bias(conditions: Conditions | RowTotals, arithmetic: Arithmetic) -> Tensor:
    """Return the systematic part of that error; 0 without truncation (B26, B27)."""
    accumulator = sum_accumulator(arithmetic)
    steps = steps_with_keys(conditions, accumulator)
    return accumulator.bias(conditions.count, steps).clamp(max=1)


def division_error(conditions: Conditions | RowTotals, arithmetic: Arithmetic) -> Tensor:
    """Return the error of dividing by the row sum: at most, |O| is multiplied by 1 + this (B14)."""
    # A GPU's approximate division is within 2 ulps, and the factor is rounded as well.
    # O may be divided once more when splits are merged.
    division = (6 + (4 if arithmetic.splits > 1 else 0)) * arithmetic.unit
    return (1 + division / (1 - division)) / (1 - row_sum_rounding(conditions, arithmetic)) - 1


def nan_from_one(error: Tensor) -> Tensor:
    """Return ``error``, NaN from 1 on: a sum that may be off by its own size bounds nothing."""
    return torch.where(error < 1, error, torch.nan)
