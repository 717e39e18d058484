"""Masks of masks, later rows, and score mods one after another."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from attncheck.mods.spec import Dimensions, Spec
from attncheck.strategies.expressions import score_expressions
from attncheck.strategies.lengths import numbers
from attncheck.strategies.masks import masks
from attncheck.strategies.scores import scores

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["compositions", "offsets", "score_chains"]

_DEEPEST = 3
_MOST_PARTS = 3
_BEYOND = 7  # rows behind the last key


def compositions(*, dimensions: Dimensions) -> SearchStrategy[Spec]:
    """``and``, ``or`` and ``not`` of the library's masks, up to three one inside the other.

    Among the masks are such of later rows (``offsets``).

    Shrinks to ``and(full, full)``, which is no mask at all: what fails with it has nothing to do
    with masks.

    Args:
        dimensions: What the masks must fit.
    """
    return _nested(dimensions, _DEEPEST)


@lru_cache(maxsize=256)
def _nested(dimensions: Dimensions, deepest: int) -> SearchStrategy[Spec]:
    part = masks(dimensions=dimensions) | offsets(dimensions=dimensions)
    if deepest > 1:
        part |= _nested(dimensions, deepest - 1)
    # ``not`` leaves out what was drawn for others: with fewer choices it would be the simplest.
    parts = st.lists(part, min_size=2, max_size=_MOST_PARTS)
    return st.tuples(_KINDS, parts).map(
        lambda drawn: Spec.of(drawn[0], *drawn[1][: 1 if drawn[0] == "not" else _MOST_PARTS])
    )


def offsets(*, dimensions: Dimensions) -> SearchStrategy[Spec]:
    """``offset`` of a mask of the library: rows 0 to beyond all keys later.

    Shrinks to ``offset(full, rows=0)``.

    Args:
        dimensions: Of the rows that are asked; the part fits the longer problem.
    """
    return _offsets(dimensions)


@st.composite
def _offsets(draw: st.DrawFn, dimensions: Dimensions) -> Spec:
    kv = dimensions.kv
    rows = draw(numbers(0, max(dimensions.query, kv), kv, kv + _BEYOND))
    later = replace(dimensions, query=dimensions.query + rows)
    return Spec.of("offset", draw(masks(dimensions=later)), rows=rows)


_KINDS = st.sampled_from(("and", "or", "not", "and", "or"))


def score_chains() -> SearchStrategy[Spec]:
    """Two or three score mods one after another; shrinks to ``chain(none, none)``."""
    parts = st.lists(scores() | score_expressions(), min_size=2, max_size=_MOST_PARTS)
    return parts.map(lambda drawn: Spec.of("chain", *drawn))
