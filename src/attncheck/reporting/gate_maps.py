"""A record's map of errors, as a drawing and as text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from attncheck.records.record import ErrorMap
from attncheck.reporting import figures

if TYPE_CHECKING:
    from attncheck.records.record import Record

__all__ = ["LEVELS", "Drawing", "Tile", "drawing", "level", "says_more"]

LEVELS: tuple[tuple[float, str], ...] = (
    (0.1, "≤ 0.1"),
    (0.5, "≤ 0.5"),
    (1.0, "≤ 1"),
    (3.0, "≤ 3"),
    (10.0, "≤ 10"),
    (100.0, "≤ 100"),
    (float("inf"), "> 100"),
)
"""Largest share of each level, and how a legend calls it; above 1 is wrong."""

_WIDTH, _HEIGHT = 320.0, 220.0
_LEAST, _LARGEST = 6.0, 26.0


@dataclass(frozen=True, slots=True)
class Tile:
    """Neighbours of one level, drawn as one."""

    x: float
    y: float
    width: float
    height: float
    level: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A heat map: heads down, rows to the right.

    Attributes:
        width, height: Of all tiles.
        tiles: In reading order.
        description: For those who do not see it.
        rows, heads: What one cell stands for.
    """

    width: float
    height: float
    tiles: tuple[Tile, ...]
    description: str
    rows: str
    heads: str


def level(share: float) -> int:
    """Place in ``LEVELS``; NaN is the last."""
    return next((i for i, (most, _) in enumerate(LEVELS) if share <= most), len(LEVELS) - 1)


def says_more(record: Record) -> bool:
    """Whether the map has more to say than the worst element: several cells, and not all alike."""
    found = record.error_map
    return isinstance(found, ErrorMap) and sum(map(len, found.values)) > 1


def drawing(record: Record) -> Drawing | None:
    """The map of ``record``; None where it has none, or it says nothing."""
    found = record.error_map
    if not isinstance(found, ErrorMap) or not says_more(record):
        return None
    wrong = sum(not share <= 1 for line in found.values for share in line)  # NaN too
    if not wrong and _elsewhere(record):
        return None
    columns, lines = max(map(len, found.values)), len(found.values)
    wide = max(_LEAST, min(_LARGEST, _WIDTH / columns))
    high = max(_LEAST, min(_LARGEST, _HEIGHT / lines))
    tiles = tuple(
        tile for i, line in enumerate(found.values) for tile in _line(found, i, line, wide, high)
    )
    return Drawing(
        width=columns * wide,
        height=lines * high,
        tiles=tiles,
        description=f"largest error ÷ allowance of out over {_heads(found)} down and "
        f"{_rows(found)} to the right: beyond it in {wrong} of {columns * lines} cells",
        rows=f"{found.rows} rows" if found.rows != 1 else "1 row",
        heads=f"{found.heads} heads" if found.heads != 1 else "1 head",
    )


def _elsewhere(record: Record) -> bool:
    """Whether what is wrong is LSE or a gradient: the map is of out."""
    worst = None if record.judgement is None else record.judgement.worst
    return worst is not None and worst.tensor != "out"


def _line(found: ErrorMap, i: int, line: tuple[float, ...], wide: float, high: float) -> list[Tile]:
    tiles, start = [], 0
    for place, cells in groupby(line, key=level):
        shares = list(cells)
        worst = max(shares, key=lambda share: (math.isnan(share), share))
        first, last = start * found.rows, (start + len(shares)) * found.rows - 1
        head = i * found.heads
        heads = f"head {head}" if found.heads == 1 else f"heads {head}–{head + found.heads - 1}"
        text = f"{heads}, rows {first}–{last}: {figures.share(worst)} × what is allowed"
        tiles.append(Tile(start * wide, i * high, len(shares) * wide, high, place, text))
        start += len(shares)
    return tiles


def _heads(found: ErrorMap) -> str:
    return f"{len(found.values)} groups of {found.heads} heads" if found.heads > 1 else "heads"


def _rows(found: ErrorMap) -> str:
    return f"tiles of {found.rows} rows"
