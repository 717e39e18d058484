"""Masks that are bands along the diagonal, as the windows that kernels take."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

from attncheck.mods.compose import later

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from attncheck.mods.spec import Dimensions, Spec

__all__ = ["Band", "Lengths", "band", "offset", "window"]

Lengths = tuple[int, int]
"""Query rows and keys of one sequence."""


@dataclass(frozen=True, slots=True)
class Band:
    """Row i sees the keys j with ``low <= j - i <= high``; None is no limit."""

    low: int | None = None
    high: int | None = None

    def __and__(self, other: Band) -> Band:
        """What both show."""
        lows = [b.low for b in (self, other) if b.low is not None]
        highs = [b.high for b in (self, other) if b.high is not None]
        return Band(max(lows, default=None), min(highs, default=None))


def _window(spec: Spec, dimensions: Dimensions) -> Band:
    del dimensions
    size = spec.values["window"]
    assert isinstance(size, int)
    return Band(1 - size, 0)


_BANDS: dict[str, Callable[[Spec, Dimensions], Band]] = {
    "full": lambda _spec, _dimensions: Band(),
    "causal": lambda _spec, _dimensions: Band(high=0),
    "causal_bottom_right": lambda _spec, dims: Band(high=dims.kv - dims.query),
    "sliding_window": _window,
}


def band(mask: Spec, dimensions: Dimensions) -> Band | None:
    """The mask as a band; None where it is none, or nobody says so."""
    if mask.name == "offset":
        return _later(mask, dimensions)
    if mask.name != "and":
        known = _BANDS.get(mask.name)
        return known(mask, dimensions) if known else None
    whole = Band()
    for part in mask.parts:
        one = band(part, dimensions)
        if one is None:
            return None
        whole &= one
    return whole


def _later(mask: Spec, dimensions: Dimensions) -> Band | None:
    """Of rows that are further than their index says: the part's band, moved."""
    rows = mask.values["rows"]
    assert isinstance(rows, int)
    found = band(mask.parts[0], later(mask.values, dimensions))
    if found is None:
        return None
    low, high = (None if limit is None else limit + rows for limit in (found.low, found.high))
    return Band(low, high)


def offset(lengths: Lengths, *, bottom_right: bool) -> int:
    """``j - i`` on the diagonal: 0 where it is aligned top-left, else what ends in the corner."""
    query, kv = lengths
    return kv - query if bottom_right else 0


def window(
    seen: Band,
    sequences: Iterable[Lengths],
    *,
    bottom_right: bool,
    leads: Iterable[int] | None = None,
) -> tuple[int, int] | None:
    """``(left, right)`` with which a kernel's window is ``seen`` in every sequence.

    Row i of such a window sees the keys ``i + offset - left`` to ``i + offset + right``; -1 is no
    limit. None where no window is it: the diagonal lies elsewhere, or differs between sequences.

    Args:
        seen: The band, in indices that may count on through several sequences.
        sequences: Their lengths.
        bottom_right: How the window is aligned.
        leads: By how much the index of a sequence's first key is above that of its first row, for
            each; None: by nothing.
    """
    alive = [
        (query - lead, kv + lead, offset((query, kv), bottom_right=bottom_right) + lead)
        for (query, kv), lead in zip(sequences, repeat(0) if leads is None else leads, strict=False)
        if min(query, kv) > 0  # others see nothing
    ]
    low, high = seen.low, seen.high
    # Of a window's left edge everything is mirrored: rows for keys, and signs.
    left = _edge(None if low is None else -low, [(query, -at) for query, _, at in alive])
    right = _edge(high, [(kv, at) for _, kv, at in alive])
    return None if left is None or right is None else (left, right)


def _edge(limit: int | None, sequences: list[tuple[int, int]]) -> int | None:
    """The number for ``limit`` that holds in all sequences of (first index beyond, offset)."""
    if limit is None:
        return -1
    exact = [limit - at for _, at in sequences if limit >= at]
    for edge in [*exact, -1]:
        if all(_holds(edge, limit, end, at) for end, at in sequences):
            return edge
    return None


def _holds(edge: int, limit: int, end: int, at: int) -> bool:
    """Whether a window's ``edge`` shows what ``limit`` does: both may be beyond the last key."""
    beyond = limit >= end - 1
    if edge < 0:
        return beyond
    return edge + at == limit or (beyond and edge + at >= end - 1)
