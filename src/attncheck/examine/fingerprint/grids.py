"""Which numbers are told apart: the bits of a sum or an operand, by equality alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["STEPS", "Grid", "coarsest", "grid"]

STEPS = 8
"""Numbers 0 … 7 that are added to 2^b or 1.5 · 2^b."""

_SPACINGS = (1, 2, 4, 8)
_ROUNDINGS = ("nearest", "down", "up")


@dataclass(frozen=True, slots=True, order=True)
class Grid:
    """How a number is held.

    Attributes:
        bits: Significant ones.
        rounding: ``nearest`` (ties to even), ``truncated``; empty where nothing was rounded.
    """

    bits: int
    rounding: str = ""

    def __str__(self) -> str:
        return f"{self.bits} bits" + (f", {self.rounding}" if self.rounding else "")


def grid(seen: Sequence[float], b: int) -> Grid | None:
    """The grid of numbers that hold 2^b + x, for x = 0, 1, … in turn, as what came of each tells.

    Args:
        seen: What came of each x: equal exactly where x was held as the same number.
        b: Binary exponent of what x was added to.

    Returns:
        None where all are held, where all are the same, or where no grid tells them apart so.
    """
    told = _classes(seen)
    for spacing in _SPACINGS[1:]:
        for rounding in _ROUNDINGS:
            held = [_held(x, spacing, rounding) for x in range(len(seen))]
            if _classes(held) == told and len(set(held)) > 1:
                bits = b + 1 - int(math.log2(spacing))
                return Grid(bits, "nearest" if rounding == "nearest" else "truncated")
    return None


def all_held(seen: Sequence[float]) -> bool:
    """Whether every x is told from the others."""
    return len(set(seen)) == len(seen) and all(map(math.isfinite, seen))


def coarsest(ladder: Iterable[tuple[int, Sequence[float]]]) -> Grid | None:
    """The coarsest grid on a ladder of exponents b; at least the bits that all were held in.

    Args:
        ladder: (b, what came of each x).

    Returns:
        Without a rounding where all were held throughout; None where nothing can be said.
    """
    grids: list[Grid] = []
    most = 0
    for b, seen in ladder:
        if not all(map(math.isfinite, seen)):
            continue
        if all_held(seen):
            most = max(most, b + 1)
        found = grid(seen, b)
        if found is not None:
            grids.append(found)
    if grids:
        return min(grids)
    return Grid(most) if most else None


def _classes(values: Sequence[float]) -> tuple[int, ...]:
    """For each value the place of the first that equals it."""
    return tuple(list(values).index(value) for value in values)


def _held(x: int, spacing: int, rounding: str) -> int:
    if rounding == "down":
        return x // spacing * spacing
    if rounding == "up":
        return -(-x // spacing) * spacing
    return round(x / spacing) * spacing  # Python's ties go to even
