"""A window that no distance reaches hides nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.relations.exchanged_masks import exchanged_masks

if TYPE_CHECKING:
    from attncheck.problem import Problem

__all__ = ["WINDOW_BEYOND"]

_INT32_LARGEST = 2**31 - 1


def _windows(problem: Problem) -> tuple[int, ...]:
    """The last row is query − 1 from the first key, which a window of query just reaches."""
    return (problem.query, problem.query + 1, _INT32_LARGEST)


WINDOW_BEYOND = exchanged_masks(
    name="window_beyond",
    summary="sliding_window with a `window` of the length or more is causal",
    plain="causal",
    argument=("sliding_window", "window"),
    numbers=_windows,
)
"""Finds windows off by one, and a largest window that overflows where an index is added."""
