"""A prefix of no keys, and one of all keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.relations.exchanged_masks import exchanged_masks

if TYPE_CHECKING:
    from attncheck.problem import Problem

__all__ = ["PREFIX_FULL", "PREFIX_ZERO"]

_INT32_LARGEST = 2**31 - 1


def _nothing(problem: Problem) -> tuple[int, ...]:
    """Key 0 is seen by every row anyway: a prefix of 1 hides and shows what 0 does."""
    del problem
    return (0, 1)


def _everything(problem: Problem) -> tuple[int, ...]:
    return (problem.kv, problem.kv + 1, _INT32_LARGEST)


PREFIX_ZERO = exchanged_masks(
    name="prefix_zero",
    summary="prefix_lm with a `prefix` of 0 or 1 is causal",
    plain="causal",
    argument=("prefix_lm", "prefix"),
    numbers=_nothing,
)
"""The plain causal mask may take a path of its own, which knows where its tiles end."""

PREFIX_FULL = exchanged_masks(
    name="prefix_full",
    summary="prefix_lm with a `prefix` of all keys or more is full",
    plain="full",
    argument=("prefix_lm", "prefix"),
    numbers=_everything,
)
"""No key after the last is a key, however long the prefix."""
