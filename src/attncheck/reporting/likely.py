"""What may be wrong with a kernel, by a Record's diagnosis, in a few lines of text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attncheck.record import Diagnosis, TileMap

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.record import Explanation, Record

__all__ = ["facts_of", "likely_facts", "picture", "tile_lines"]

_SHADES = ((0.01, "·"), (0.1, "░"), (0.3, "▒"), (0.7, "▓"), (math.inf, "█"))
_LEGEND = "of the largest: · ≤ 1 %, ░ ≤ 10 %, ▒ ≤ 30 %, ▓ ≤ 70 %, █ more"
_LEAST_CELLS = 8


def likely_facts(record: Record) -> Iterator[tuple[str, str]]:
    """Label and text of each line; nothing where nobody looked."""
    if isinstance(record.diagnosis, Diagnosis):
        yield from facts_of(record.diagnosis)


def facts_of(found: Diagnosis) -> Iterator[tuple[str, str]]:
    """Label and text of each line.

    A fault that explains all is told with those that explain it as well; else the best few are,
    and where none explains anything to speak of, that.
    """
    if not found.ranked:
        yield "likely", f"unknown: none of {found.tried} fault models fits"
        return
    if not found.tried:  # the failure says it by itself: there is no share of an error
        yield "likely", _named(found.ranked[0])
        yield from (("perhaps", _said(one)) for one in found.ranked[1:])
        return
    certain = found.ranked[0].explains_all
    told = found.ranked[: max(1, found.tied)] if certain else found.ranked
    label = "likely" if certain else "perhaps"
    for one in told:
        yield label, _said(one)
        label = "or"
    more = found.tied - len(found.ranked)
    if certain and more > 0:
        yield "or", f"{more} more fault models, which explain it equally well"
    if not certain:
        yield "", f"none of {found.tried} fault models explains all of the error"


def _named(one: Explanation) -> str:
    form = ", ".join(f"{name} {_value(value)}" for name, value in one.parameters.items())
    return f"{one.sentence}{f' [{form}]' if form else ''}"


def _said(one: Explanation) -> str:
    share = _percent(one.share)
    rest = ", and rounding the rest" if one.explains_all and one.share < 1 else ""
    return f"{_named(one)} (explains {share} % of the error{rest})"


def _value(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _percent(share: float) -> str:
    """Never rounded up to all of it."""
    whole = math.isfinite(share) and share >= 1
    return "100" if whole else f"{math.floor(1000 * share) / 10:.3g}" if share == share else "?"  # noqa: PLR0124


def tile_lines(record: Record) -> Iterator[str]:
    """The map of errors by tiles; nothing where nobody looked."""
    if isinstance(record.diagnosis, Diagnosis):
        yield from picture(record.diagnosis)


def picture(found: Diagnosis) -> Iterator[str]:
    """Groups of rows down, of keys to the right, then the legend; nothing where it is no picture.

    That is where there are few cells, or all are alike.
    """
    tiles = found.tiles
    if not isinstance(tiles, TileMap):
        return
    cells = [cell for line in tiles.values for cell in line]
    signs = {_shade(cell) for cell in cells}
    if len(cells) < _LEAST_CELLS or len(tiles.values) < 2 or len(signs) < 2:
        return
    yield (
        f"weights that are off; a line is {_many(tiles.rows, 'row')}, "
        f"a column {_many(tiles.keys, 'key')}"
    )
    yield from ("".join(map(_shade, line)) for line in tiles.values)
    yield _LEGEND


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def _shade(share: float) -> str:
    return next((sign for most, sign in _SHADES if share <= most), _SHADES[-1][1])
