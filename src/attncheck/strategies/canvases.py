"""Canvases whose cells are about as many as rows or keys, and windows on them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from hypothesis import strategies as st

from attncheck.mods.spec import Dimensions, Spec
from attncheck.strategies.lengths import numbers

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["neighborhoods"]

Pair = tuple[int, int]

_WHOLE = (0, 0, 0, 1)  # most canvases end at the last row or key or before it, some beyond


def neighborhoods(
    dimensions: Dimensions, order: Literal["", "tiled", "morton"] = ""
) -> SearchStrategy[Spec]:
    """Windows from one cell to the whole canvas; shrinks to one column and a window of one cell.

    Args:
        dimensions: The canvas has about as many cells as there are rows, or keys.
        order: Of the cells: row by row, in tiles (any, also such as do not divide the canvas), or
            along a Z curve.
    """
    name = f"neighborhood_{order}" if order else "neighborhood"
    return _drawn(dimensions, name, tiled=order == "tiled")


@st.composite
def _drawn(draw: st.DrawFn, dimensions: Dimensions, name: str, *, tiled: bool) -> Spec:
    lengths = sorted((dimensions.query, dimensions.kv))
    canvas = _canvas(draw, draw(st.sampled_from(lengths)))
    sides = [("canvas", canvas), ("kernel", _within(draw, canvas))]
    if tiled:
        sides.append(("tile", _within(draw, canvas)))
    return Spec.of(name, **{which: list(pair) for which, pair in sides})


def _canvas(draw: st.DrawFn, length: int) -> Pair:
    """As many cells as ``length`` or a few fewer, sometimes a line of them more."""
    short = draw(numbers(1, math.isqrt(length)))
    long = length // short + draw(st.sampled_from(_WHOLE))
    return (short, long) if draw(st.booleans()) else (long, short)


def _within(draw: st.DrawFn, canvas: Pair) -> Pair:
    rows, columns = (draw(numbers(1, side, side)) for side in canvas)
    return rows, columns
