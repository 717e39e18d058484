"""Where in out the errors of a failure are: tile by tile, head by head."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace

from attncheck.judge.shares import shares
from attncheck.record import ErrorMap

if TYPE_CHECKING:
    from attncheck.examine.evidence import Evidence
    from attncheck.examine.executor import Execution
    from attncheck.record import Record

__all__ = ["MOST_HEADS", "MOST_ROWS", "mapped"]

MOST_HEADS, MOST_ROWS = 32, 64
"""Cells of a map, down and to the right."""


def mapped(record: Record, result: Execution, evidence: Evidence) -> Record:
    """``record`` with the map of its errors where it fails.

    Args:
        record: As judged.
        result: What the kernel gave, and the tiling that it declares: cells are whole tiles of it
            where there are several, and else as few rows as fit.
        evidence: The Case, its exact result and what is allowed.
    """
    if record.status != "fail":
        return record
    allowed = evidence.allowance(result.arithmetic).out
    error = result.outputs.out.to(torch.float64) - evidence.truth.out
    # Nothing is asked where nothing finite is allowed.
    ratio = torch.where(allowed.isfinite(), shares(error, allowed), 0.0)
    largest = ratio.amax(dim=(0, 3))  # (heads, query)
    tile = result.tiling.block_query if result.tiling else 1
    heads = _step(largest.shape[0], 1, MOST_HEADS)
    rows = _step(largest.shape[1], tile, MOST_ROWS)
    return replace(
        record, error_map=ErrorMap(rows=rows, heads=heads, values=_cells(largest, heads, rows))
    )


def _step(size: int, tile: int, most: int) -> int:
    """The fewest whole tiles, at most ``most`` of which make up ``size``; a single row of one."""
    tile = tile if tile < size else 1
    return tile * math.ceil(math.ceil(size / tile) / most)


def _cells(largest: torch.Tensor, heads: int, rows: int) -> tuple[tuple[float, ...], ...]:
    """The largest of each cell, in three digits: a map is to be looked at."""
    lines = []
    for head in range(0, largest.shape[0], heads):
        line = largest[head : head + heads].amax(dim=0)
        parts = [line[row : row + rows].amax() for row in range(0, len(line), rows)]
        lines.append(tuple(float(f"{float(part):.3g}") for part in parts))
    return tuple(lines)
