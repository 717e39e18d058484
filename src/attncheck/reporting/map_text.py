"""A record's map of errors as a few lines of text, where it says more than its worst element."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.records.record import ErrorMap

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.records.record import Record

__all__ = ["PLAIN", "map_lines"]

_SHADES = ((0.1, "·"), (1.0, "░"), (10.0, "▒"), (100.0, "▓"), (float("inf"), "█"))
_LEGEND = "· ≤ 0.1, ░ ≤ 1, ▒ ≤ 10, ▓ ≤ 100, █ more"
_LEAST_CELLS = 8
_MOST_LINES, _MOST_COLUMNS = 8, 48

PLAIN = str.maketrans({"·": ".", "░": "-", "▒": "+", "▓": "#", "█": "@"})
"""The shades where a stream has no others."""


def map_lines(record: Record) -> Iterator[str]:
    """Heads down, rows to the right, then the legend; nothing where one element says it all.

    That is where a single cell is beyond what is allowed, or every cell, or none, and where there
    are only a handful: a problem that was shrunk is small enough.
    """
    found = record.error_map
    if not isinstance(found, ErrorMap):
        return
    cells = [not share <= 1 for line in found.values for share in line]  # NaN is beyond
    if len(cells) < _LEAST_CELLS or not 1 < sum(cells) < len(cells):
        return
    heads = -(-len(found.values) // _MOST_LINES)
    rows = -(-max(map(len, found.values)) // _MOST_COLUMNS)
    what = f"{found.heads * heads} head{'s' * (found.heads * heads > 1)}"
    yield (
        f"error ÷ allowed; a line is {what}, a column {found.rows * rows} "
        f"row{'s' * (found.rows * rows > 1)}"
    )
    for first in range(0, len(found.values), heads):
        group = found.values[first : first + heads]
        yield "".join(
            _shade([share for line in group for share in line[i : i + rows]])
            for i in range(0, len(group[0]), rows)
        )
    yield _LEGEND


def _shade(shares: list[float]) -> str:
    return max((_place(share) for share in shares), default=(0, " "))[1]


def _place(share: float) -> tuple[int, str]:
    for i, (most, sign) in enumerate(_SHADES):
        if share <= most:
            return i, sign
    return len(_SHADES), _SHADES[-1][1]
