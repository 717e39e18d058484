"""Documents as kernels of packed sequences take them: many, and causal in each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

from attncheck.mods.spec import Spec
from attncheck.strategies.lengths import numbers

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from attncheck.mods.spec import Dimensions

__all__ = ["packings"]

_DIAGONALS = ("", "top_left", "bottom_right")
_EMPTY = (None, None, 0, 1, -1)


def packings(*, dimensions: Dimensions) -> SearchStrategy[Spec]:
    """``documents`` of one length, down to 1, and one of another; alone or causal in each.

    Where query and kv differ, so do rows and keys of one document: of the last one where causal is
    aligned top-left, of the first where it is aligned bottom-right. Only then is a diagonal through
    the whole one through each document. Among them may be one without rows and keys. Shrinks to
    documents of length 1.

    Args:
        dimensions: What the masks must fit.
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
