"""Sizes of a Problem, drawn where kernels break: at tile edges, unequal, with shared heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

from attncheck.core.errors import UsageError
from attncheck.inputs.distributions import Sizes
from attncheck.inputs.problem import LARGEST_HEAD_DIM
from attncheck.strategies.lengths import lengths

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hypothesis.strategies import SearchStrategy

__all__ = ["HEAD_DIMS", "shapes"]

HEAD_DIMS = (1, 3, 16, 17, 40, 64, 80, 96, 128)
"""Powers of two and what lies between them, where kernels pad or refuse."""

_LARGEST_BATCH, _MOST_QUERY_HEADS, _MOST_KV_HEADS, _LARGEST_GROUP = 2, 6, 4, 5


@st.composite
def _sizes(
    draw: st.DrawFn,
    most_heads: int,
    head_counts: tuple[tuple[int, int], ...],
    squares: tuple[int, int],
    query: SearchStrategy[int],
    kv: SearchStrategy[int],
    dims: SearchStrategy[int],
) -> Sizes:
    """Always the same choices in the same order, so that none is won by dropping another.

    Args:
        draw: Hypothesis's.
        most_heads: Largest batch · heads.
        head_counts: Heads and kv heads.
        squares: The shortest and the longest query, where it is to be kv.
        query: Query lengths.
        kv: Key lengths.
        dims: Head and value dims.
    """
    heads, kv_heads = draw(st.sampled_from(head_counts))
    batch = draw(st.integers(1, min(_LARGEST_BATCH, most_heads // heads)))
    rows, keys, head_dim, value_dim = draw(query), draw(kv), draw(dims), draw(dims)
    # Kernels take other paths where the two agree, and chance alone would seldom make them.
    square, same_dim = (draw(st.sampled_from((False, False, True))) for _ in range(2))
    if square and keys <= squares[1]:
        rows = keys = max(keys, squares[0])
    return Sizes(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        query=rows,
        kv=keys,
        head_dim=head_dim,
        value_dim=head_dim if same_dim else value_dim,
    )


def shapes(
    *,
    longest: int = 130,
    shortest_query: int = 1,
    longest_query: int | None = None,
    shortest_kv: int = 1,
    most_heads: int = 8,
    largest_group: int = _LARGEST_GROUP,
    head_dims: Iterable[int] = HEAD_DIMS,
) -> SearchStrategy[Sizes]:
    """Sizes with query and kv unequal both ways or equal, MHA, GQA and MQA, value_dim free.

    Args:
        longest: Largest query and kv length.
        shortest_query: Smallest query length.
        longest_query: Largest query length, where it is not ``longest``.
        shortest_kv: Smallest kv length.
        most_heads: Largest batch · heads: what an interpreted kernel's time is made of. From 8 on,
            a second sequence comes with several kv heads of several query heads each: a wrong
            stride of the batch shows beside a wrong head map.
        largest_group: Most query heads on a kv head.
        head_dims: What head_dim and value_dim are drawn from; they shrink to the first.

    Raises:
        UsageError: for numbers that leave nothing to draw.
    """
    if most_heads < 1:
        raise UsageError(f"most_heads={most_heads} must be at least 1.")
    dims = tuple(head_dims)
    if not dims or not all(1 <= dim <= LARGEST_HEAD_DIM for dim in dims):
        raise UsageError(f"head_dims={dims} must be one or more of 1–{LARGEST_HEAD_DIM}.")
    most_rows = longest if longest_query is None else longest_query
    return _sizes(
        most_heads,
        _head_counts(most_heads, largest_group),
        (shortest_query, most_rows),
        lengths(shortest=shortest_query, longest=most_rows),
        lengths(shortest=shortest_kv, longest=longest),
        st.sampled_from(dims),
    )


def _head_counts(most: int, largest_group: int) -> tuple[tuple[int, int], ...]:
    """(heads, kv_heads), few kv heads first; with 6/2 and 6/3, h // group and h % kv_heads differ.

    Each pair as likely as another: drawn one number after the other, those would be rare.
    """
    counts = (
        (kv_heads * group, kv_heads)
        for kv_heads in range(1, _MOST_KV_HEADS + 1)
        for group in range(1, largest_group + 1)
    )
    most = min(most, max(_MOST_QUERY_HEADS, largest_group))
    return tuple(pair for pair in counts if pair[0] <= most)
