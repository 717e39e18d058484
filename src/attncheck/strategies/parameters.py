"""A relation's numbers, among those that it allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

from attncheck.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hypothesis.strategies import SearchStrategy

__all__ = ["parameters"]


def parameters(*, allowed: Mapping[str, Sequence[int]]) -> SearchStrategy[dict[str, int]]:
    """One number for each name; shrinks to the first of each.

    Args:
        allowed: Values by name, smallest first; raises UsageError where a name has none.
    """
    for name, values in allowed.items():
        if not values:
            raise UsageError(f"parameter {name!r} has no value to draw from.")
    return st.fixed_dictionaries(
        {name: st.sampled_from(values) for name, values in allowed.items()}
    )
