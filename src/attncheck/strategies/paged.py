"""How keys and values lie in pages: sizes, orders, and pages that sequences share."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from attncheck.core.errors import UsageError
from attncheck.core.paged_layout import LARGEST_PAGE, Paging

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hypothesis.strategies import SearchStrategy

__all__ = ["ODD_PAGE_SIZES", "PAGE_SIZES", "pagings"]

PAGE_SIZES = (16, 32, 64, 128, 256)
"""Sizes that serving engines use."""

ODD_PAGE_SIZES = (3, 1, 17)
"""Sizes that only a kernel takes which looks up each key by itself: no tile is made of them."""

_LARGEST_SEED = 99  # a draw among many; a short number to read in a failure


def pagings(
    *, sizes: Iterable[int] = (*PAGE_SIZES, *ODD_PAGE_SIZES), shared: Iterable[int] = (0, 1, 2)
) -> SearchStrategy[Paging]:
    """Pages of several sizes, in any order; shrinks to the first size, order 0 and nothing shared.

    Args:
        sizes: Keys in a page, plainest first.
        shared: How many leading pages all sequences share, plainest first: the first is drawn as
            often as all others together.

    Raises:
        UsageError: for no size, or one that no page has; for no number of shared pages, or a
            negative one.
    """
    sizes, shared = tuple(sizes), tuple(shared)
    if not sizes or not all(1 <= size <= LARGEST_PAGE for size in sizes):
        raise UsageError(f"sizes={sizes} must be one or more of 1–{LARGEST_PAGE}.")
    if not shared or min(shared) < 0:
        raise UsageError(f"shared={shared} must be one or more numbers of at least 0.")
    return _pagings(sizes, shared)


@lru_cache(maxsize=64)
def _pagings(sizes: tuple[int, ...], shared: tuple[int, ...]) -> SearchStrategy[Paging]:
    """The same object for each draw: Hypothesis looks a new strategy through first."""
    usual = shared[:1] * max(1, len(shared) - 1)
    return st.builds(
        Paging,
        size=st.sampled_from(sizes),
        seed=st.integers(0, _LARGEST_SEED),
        shared=st.sampled_from((*usual, *shared[1:])),
    )
