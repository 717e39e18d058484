"""Lengths where kernels break: 1–3 and at the edges of one to three tiles."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from attncheck.core.errors import UsageError

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["TILES", "lengths", "numbers"]

TILES = (16, 32, 64, 128)
"""Tile sizes of kernels: a length is interesting at one to three of them, one below, one above."""

_EDGES = {0, 1, 2, 3} | {n * t + step for t in TILES for n in (1, 2, 3) for step in (-1, 0, 1)}


def lengths(*, shortest: int = 1, longest: int = 130) -> SearchStrategy[int]:
    """Lengths from ``shortest`` to ``longest``, half of them 1–3 or within one of a tile's edge.

    One choice among the lengths in order, edges repeated: that shrinks to the shortest length
    that fails, whether it is an edge or not, where all longer ones fail too. A fault at some
    lengths alone (every 32nd, say) shrinks to one of the first of them.

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


@lru_cache(maxsize=256)
def numbers(smallest: int, largest: int, *special: int) -> SearchStrategy[int]:
    """Whole numbers from ``smallest`` to ``largest``, many of them edges, and ``special`` ones.

    For limits that depend on what was drawn before: choices mean the same numbers when the limits
    shrink. Shrinks to the smallest that fails, and to a special one only where no other does.
    """
    plain = st.sampled_from(_sorted(smallest, largest, _REPEATS))
    which = st.sampled_from((None,) * (_REPEATS + len(special)) + tuple(range(len(special))))
    return st.builds(lambda i, number: number if i is None else special[i], which, plain)


_REPEATS = 4  # up to 130 half of all


@lru_cache(maxsize=256)
def _sorted(smallest: int, largest: int, repeats: int) -> tuple[int, ...]:
    """The numbers in order, edges ``repeats`` times."""
    return tuple(
        n for n in range(smallest, largest + 1) for _ in range(repeats if n in _EDGES else 1)
    )
