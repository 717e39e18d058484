"""Strategies for sizes at which kernels fail: lengths at tile edges, head counts, pages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from attncheck.core.errors import UsageError
from attncheck.core.paged_layout import LARGEST_PAGE, Paging
from attncheck.inputs.distributions import Sizes
from attncheck.inputs.problem import LARGEST_HEAD_DIM

TILES = (16, 32, 64, 128)
"""Tile sizes of kernels: edges are one to three tiles, and one less and one more than these."""

_EDGES = {0, 1, 2, 3} | {n * t + step for t in TILES for n in (1, 2, 3) for step in (-1, 0, 1)}


def lengths(*, shortest: int = 1, longest: int = 130) -> SearchStrategy[int]:
    """Lengths from ``shortest`` to ``longest``, half of them 1–3 or within one of a tile's edge.

    Draws from the sorted lengths with edges repeated, which shrinks to the shortest failing
    length, edge or not, if all longer lengths fail too. A fault at some lengths only, such as
    every 32nd, shrinks to one of the first of them.

    Raises:
        UsageError: unless 1 ≤ shortest ≤ longest.
    """
    if not 1 <= shortest <= longest:
        raise UsageError(
            f"shortest={shortest} and longest={longest} must be 1 ≤ shortest ≤ longest."
        )
    edges = sum(shortest <= n <= longest for n in _EDGES)
    rest = longest - shortest + 1 - edges
    return st.sampled_from(_sorted(shortest, longest, math.ceil(max(1, rest) / max(1, edges))))


@lru_cache(maxsize=4096)
def numbers(smallest: int, largest: int, *special: int) -> SearchStrategy[int]:
    """Integers from ``smallest`` to ``largest``, many of them edges, and ``special`` ones.

    For limits that depend on earlier draws: a choice stands for the same number when the limits
    shrink. Shrinks to the smallest failing number, and to a special one only if no other fails.
    """
    plain = st.sampled_from(_sorted(smallest, largest, _EDGE_REPEATS))
    which = st.sampled_from((None,) * (_EDGE_REPEATS + len(special)) + tuple(range(len(special))))
    return st.builds(lambda i, number: number if i is None else special[i], which, plain)


_EDGE_REPEATS = 4  # Edges are then half of all draws up to 130.


@lru_cache(maxsize=256)
def _sorted(smallest: int, largest: int, repeats: int) -> tuple[int, ...]:
    """Return the numbers in order, edges ``repeats`` times."""
    return tuple(
        n for n in range(smallest, largest + 1) for _ in range(repeats if n in _EDGES else 1)
    )


HEAD_DIMS = (1, 3, 16, 17, 40, 64, 80, 96, 128)
"""Powers of two, and dims between them, where kernels pad or refuse."""

# Strategies are created once and reused, because Hypothesis validates each new one first.
_SELDOM = st.sampled_from((False, False, True))
_LARGEST_BATCH, _MOST_QUERY_HEADS, _MOST_KV_HEADS, _LARGEST_GROUP = 2, 6, 4, 5


@st.composite
def _sizes(
    draw: st.DrawFn,
    most_heads: int,
    head_counts: SearchStrategy[tuple[int, int]],
    squares: tuple[int, int],
    query: SearchStrategy[int],
    kv: SearchStrategy[int],
    dims: SearchStrategy[int],
) -> Sizes:
    """Draw sizes; the same choices in the same order, so shrinking cannot gain by dropping one.

    Args:
        most_heads: Largest batch · heads.
        squares: The shortest and the longest query if query and kv are to be equal.
    """
    heads, kv_heads = draw(head_counts)
    batch = draw(st.integers(1, min(_LARGEST_BATCH, most_heads // heads)))
    rows, keys, head_dim, value_dim = draw(query), draw(kv), draw(dims), draw(dims)
    # Kernels take other paths for equal sizes, which chance alone would seldom draw.
    square, same_dim = (draw(_SELDOM) for _ in range(2))
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
        longest_query: Largest query length, if it is not ``longest``.
        shortest_kv: Smallest kv length.
        most_heads: Largest batch · heads, to which an interpreted kernel's time is proportional.
            From 8 on, a second sequence may have several kv heads with several query heads each,
            to find wrong batch strides together with wrong head maps.
        head_dims: Choices for head_dim and value_dim, which shrink to the first.

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
        st.sampled_from(_head_counts(most_heads, largest_group)),
        (shortest_query, most_rows),
        lengths(shortest=shortest_query, longest=most_rows),
        lengths(shortest=shortest_kv, longest=longest),
        st.sampled_from(dims),
    )


def _head_counts(most: int, largest_group: int) -> tuple[tuple[int, int], ...]:
    """Return pairs (heads, kv_heads), few kv heads first; drawn one by one, 6/2 would be rare.

    With 6/2 and 6/3, h // group and h % kv_heads differ.
    """
    counts = (
        (kv_heads * group, kv_heads)
        for kv_heads in range(1, _MOST_KV_HEADS + 1)
        for group in range(1, largest_group + 1)
    )
    most = min(most, max(_MOST_QUERY_HEADS, largest_group))
    return tuple(pair for pair in counts if pair[0] <= most)


PAGE_SIZES = (16, 32, 64, 128, 256)  # sizes that serving engines use

ODD_PAGE_SIZES = (3, 1, 17)
"""Sizes for kernels that look up the page of each key, since no tile is a multiple of them."""

_LARGEST_SEED = 99  # Enough different draws, and short to read in a failure.


def pagings(
    *, sizes: Iterable[int] = (*PAGE_SIZES, *ODD_PAGE_SIZES), shared: Iterable[int] = (0, 1, 2)
) -> SearchStrategy[Paging]:
    """Pages of several sizes in any order; shrinks to the first size, seed 0 and no shared page.

    Args:
        sizes: Keys in a page, plainest first.
        shared: Numbers of leading pages that all sequences share, plainest first: the first is
            drawn as often as all others together.

    Raises:
        UsageError: for no size or an impossible one; for no number of shared pages or a negative.
    """
    sizes, shared = tuple(sizes), tuple(shared)
    if not sizes or not all(1 <= size <= LARGEST_PAGE for size in sizes):
        raise UsageError(f"sizes={sizes} must be one or more of 1–{LARGEST_PAGE}.")
    if not shared or min(shared) < 0:
        raise UsageError(f"shared={shared} must be one or more numbers of at least 0.")
    repeated_first = shared[:1] * max(1, len(shared) - 1)
    return st.builds(
        Paging,
        size=st.sampled_from(sizes),
        seed=st.integers(0, _LARGEST_SEED),
        shared=st.sampled_from((*repeated_first, *shared[1:])),
    )


def parameters(*, allowed: Mapping[str, Sequence[int]]) -> SearchStrategy[dict[str, int]]:
    """One number for each name; shrinks to the first of each.

    Args:
        allowed: Values by name, smallest first; raises UsageError where a name has none.
    """
    for name, values in allowed.items():
        if not values:
            raise UsageError(f"parameter {name!r} has no value to draw from.")
    return _parameters(tuple((name, tuple(values)) for name, values in allowed.items()))


@lru_cache(maxsize=256)
def _parameters(
    allowed: tuple[tuple[str, tuple[int, ...]], ...],
) -> SearchStrategy[dict[str, int]]:
    return st.fixed_dictionaries({name: st.sampled_from(values) for name, values in allowed})
