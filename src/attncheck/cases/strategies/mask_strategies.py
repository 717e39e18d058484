"""Strategies for the library's masks, with numbers that fit a Problem."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from itertools import pairwise

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from attncheck.cases.strategies.sizes import numbers
from attncheck.core.errors import require_known
from attncheck.core.mod_spec import FULL, Dimensions, Spec

Pair = tuple[int, int]

_EXTRA_LINES = (0, 0, 0, 1)  # Most canvases end at or before the last row or key, some beyond.


@st.composite
def _neighborhood_masks(draw: st.DrawFn, dimensions: Dimensions, name: str) -> Spec:
    """Windows from one cell to the whole canvas; shrinks to one column and a window of one cell.

    The canvas has about as many cells as there are rows, or keys. Tiles need not divide it.
    """
    lengths = sorted((dimensions.query, dimensions.kv))
    canvas = _draw_canvas(draw, draw(st.sampled_from(lengths)))
    sides = [("canvas", canvas), ("kernel", _draw_pair_within(draw, canvas))]
    if name == "neighborhood_tiled":
        sides.append(("tile", _draw_pair_within(draw, canvas)))
    return Spec.of(name, **{which: list(pair) for which, pair in sides})


def _draw_canvas(draw: st.DrawFn, length: int) -> Pair:
    """Draw the sides of a canvas with ``length`` cells or a few fewer, sometimes a line more."""
    short = draw(numbers(1, math.isqrt(length)))
    long = length // short + draw(st.sampled_from(_EXTRA_LINES))
    return (short, long) if draw(st.booleans()) else (long, short)


def _draw_pair_within(draw: st.DrawFn, canvas: Pair) -> Pair:
    rows, columns = (draw(numbers(1, side, side)) for side in canvas)
    return rows, columns


_BEYOND = 7  # Keys by which a window or prefix exceeds the lengths; odd, to be no multiple.
_MOST_CUTS = 3


def masks(*, dimensions: Dimensions, names: Iterable[str] = ()) -> SearchStrategy[Spec]:
    """Masks of the library, not composed.

    Among them are windows of 0 and beyond all keys, prefixes of 0, of all keys and beyond, empty
    documents, and sequences that consist of padding.

    Args:
        names: Names of masks, simplest first (default: PLAIN_MASKS).

    Raises:
        UnknownName: for a name that is none of the library's plain masks.
    """
    chosen = tuple(names) or PLAIN_MASKS
    require_known("mask", chosen, _MASKS)
    return _any_of(chosen, dimensions)


@lru_cache(maxsize=1024)
def _any_of(names: tuple[str, ...], dimensions: Dimensions) -> SearchStrategy[Spec]:
    """Return a cached strategy, because Hypothesis validates each new strategy first."""
    return st.one_of([_MASKS[name](dimensions) for name in names])


def causal_masks(*, dimensions: Dimensions) -> SearchStrategy[Spec]:
    """Masks that hide from some row all the keys after some key; needs kv ≥ 2.

    Causal from either corner, windows, and causal together with documents or padding.
    """
    names = ["causal", "sliding_window"]
    if dimensions.query > 1:  # a single row, aligned bottom-right, sees every key
        names.append("causal_bottom_right")
    both = masks(dimensions=dimensions, names=("padding", "document"))
    return masks(dimensions=dimensions, names=names) | both.map(
        partial(Spec.of, "and", Spec.of("causal"))
    )


def _plain(name: str) -> Callable[[Dimensions], SearchStrategy[Spec]]:
    return lambda _: st.just(Spec.of(name))


def _sliding_windows(dimensions: Dimensions) -> SearchStrategy[Spec]:
    """Sliding windows; shrinks to a window of 1. A window of 0 hides every key."""
    widest = max(dimensions.query, dimensions.kv)
    windows = numbers(1, widest, 0, widest + 1, widest + _BEYOND)
    return windows.map(lambda window: Spec.of("sliding_window", window=window))


def _prefixes(dimensions: Dimensions) -> SearchStrategy[Spec]:
    """Prefixes; shrinks to a prefix of 0, which is causal."""
    kv = dimensions.kv
    prefixes = numbers(0, kv - 1, 0, kv, kv + 1, kv + _BEYOND)
    return prefixes.map(lambda prefix: Spec.of("prefix_lm", prefix=prefix))


def _documents(dimensions: Dimensions) -> SearchStrategy[Spec]:
    """Up to four documents, cut anywhere, and perhaps an empty one; shrinks to one."""
    total = max(dimensions.query, dimensions.kv)
    cut = numbers(1, total - 1) if total > 1 else st.nothing()
    cuts = st.lists(cut, max_size=_MOST_CUTS, unique=True) if total > 1 else st.just([])
    empty = st.sampled_from((None, None, 0, 1, _MOST_CUTS + 1))
    return st.tuples(cuts, empty).map(lambda drawn: _cut_documents(*drawn, total))


def _pairs_of_documents(dimensions: Dimensions) -> SearchStrategy[Spec]:
    """Up to four documents of rows and keys each, cut anywhere; shrinks to one.

    A cut at 0, at the end or at another one leaves a document without rows, without keys or
    without both.
    """

    def cuts(total: int) -> SearchStrategy[list[int]]:
        return st.lists(numbers(0, total, total), min_size=_MOST_CUTS, max_size=_MOST_CUTS)

    drawn = st.tuples(st.integers(0, _MOST_CUTS), cuts(dimensions.query), cuts(dimensions.kv))
    return drawn.map(
        lambda cut: Spec.of(
            "documents",
            query_lengths=_lengths(cut[1][: cut[0]], dimensions.query),
            kv_lengths=_lengths(cut[2][: cut[0]], dimensions.kv),
        )
    )


def _cut_documents(cuts: list[int], empty: int | None, total: int) -> Spec:
    """Return documents that end at ``cuts`` and ``total``, with an empty one at index ``empty``."""
    lengths = _lengths(cuts, total)
    if empty is not None:
        lengths.insert(empty, 0)
    return Spec.of("document", lengths=lengths)


def _lengths(cuts: list[int], total: int) -> list[int]:
    """Return the lengths of consecutive ranges that end at ``cuts`` and ``total``."""
    ends = [*sorted(cuts), total]
    return [end - start for start, end in pairwise([0, *ends])]


def _paddings(dimensions: Dimensions) -> SearchStrategy[Spec]:
    """Any number of padding keys in each sequence, up to all; shrinks to none."""
    kv = dimensions.kv
    # "All keys" is a special choice, so that it remains all keys while kv shrinks.
    padding = st.tuples(*[numbers(0, kv - 1, kv)] * dimensions.batch)
    return padding.map(lambda hidden: Spec.of("padding", lengths=[kv - n for n in hidden]))


def _row_masks(dimensions: Dimensions) -> SearchStrategy[Spec]:
    """Causal masks and windows, of which each sequence or document may have its own."""
    return st.just(Spec.of("causal")) | _sliding_windows(dimensions)


def _bottom_right(dimensions: Dimensions) -> SearchStrategy[Spec]:
    """Causal masks and windows of sequences that end anywhere; shrinks to causal of all keys."""
    return st.builds(
        lambda part, padding: Spec.of("bottom_right", part, lengths=padding.values["lengths"]),
        _row_masks(dimensions),
        _paddings(dimensions),
    )


def _documents_bottom_right(dimensions: Dimensions) -> SearchStrategy[Spec]:
    """Causal masks and windows of each of several documents; shrinks to causal of one."""
    return st.builds(
        lambda part, documents: Spec.of("documents_bottom_right", part, **documents.values),
        _row_masks(dimensions),
        _pairs_of_documents(dimensions),
    )


NEIGHBORHOODS = ("neighborhood", "neighborhood_tiled", "neighborhood_morton")
"""The orders of a canvas's cells, simplest first."""

_MASKS: dict[str, Callable[[Dimensions], SearchStrategy[Spec]]] = {
    FULL.name: _plain(FULL.name),
    "causal": _plain("causal"),
    "causal_bottom_right": _plain("causal_bottom_right"),
    "sliding_window": _sliding_windows,
    "prefix_lm": _prefixes,
    "padding": _paddings,
    "document": _documents,
    "documents": _pairs_of_documents,
    "bottom_right": _bottom_right,
    "documents_bottom_right": _documents_bottom_right,
    **{name: partial(_neighborhood_masks, name=name) for name in NEIGHBORHOODS},
}

_OF_THEIR_OWN = {"documents", "bottom_right", "documents_bottom_right", *NEIGHBORHOODS}
PLAIN_MASKS = tuple(name for name in _MASKS if name not in _OF_THEIR_OWN)
"""Simplest first, because failures shrink to the first."""


_DIAGONALS = ("", "top_left", "bottom_right")
_EMPTY = (None, None, 0, 1, -1)  # Index of an empty document; None for none.


def packings(*, dimensions: Dimensions) -> SearchStrategy[Spec]:
    """``documents`` of equal lengths and one of another length; alone or causal in each document.

    If query and kv differ, so do rows and keys of one document: the last one if causal is aligned
    top-left, the first one if it is aligned bottom-right. Only so does the diagonal of the whole
    mask run along the diagonal of each document. One document may have no rows and keys. Shrinks to
    documents of length 1.
    """
    shorter = min(dimensions.query, dimensions.kv)
    return st.builds(
        lambda length, diagonal, empty: _packing(dimensions, length, diagonal, empty),
        numbers(1, shorter),
        st.sampled_from(_DIAGONALS),
        st.sampled_from(_EMPTY),
    )


def _packing(dimensions: Dimensions, length: int, diagonal: str, empty: int | None) -> Spec:
    shorter = min(dimensions.query, dimensions.kv)
    alike = [length] * ((shorter - 1) // length)
    other = [[total - sum(alike)] for total in (dimensions.query, dimensions.kv)]
    sides = [one + alike if diagonal == "bottom_right" else alike + one for one in other]
    if empty is not None:
        for side in sides:
            side.insert(len(side) if empty < 0 else empty, 0)
    documents = Spec.of("documents", query_lengths=sides[0], kv_lengths=sides[1])
    if not diagonal:
        return documents
    causal = "causal" if diagonal == "top_left" else "causal_bottom_right"
    return Spec.of("and", Spec.of(causal), documents)
