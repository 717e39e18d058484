"""Masks with numbers that fit the dimensions of a Problem."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

from attncheck.errors import UnknownName
from attncheck.mods.library import FULL
from attncheck.mods.spec import Dimensions, Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hypothesis.strategies import SearchStrategy

__all__ = ["causal_masks", "masks"]


def masks(*, dimensions: Dimensions, names: Iterable[str] = ()) -> SearchStrategy[Spec]:
    """Masks of the library, not composed.

    Args:
        dimensions: What the masks must fit.
        names: Which, simplest first (default: all).

    Raises:
        UnknownName: for a name that is none of the library's plain masks.
    """
    chosen = tuple(names) or tuple(_MASKS)
    for name in chosen:
        if name not in _MASKS:
            raise UnknownName("mask", name, _MASKS)
    return st.one_of([_MASKS[name](dimensions) for name in chosen])


def causal_masks(*, dimensions: Dimensions) -> SearchStrategy[Spec]:
    """Masks that hide from some row all the keys after some key; needs kv ≥ 2.

    Causal from either corner, windows, and causal together with documents or padding.
    """
    names = ["causal", "sliding_window"]
    if dimensions.query > 1:  # a single row, aligned bottom-right, sees every key
        names.append("causal_bottom_right")
    both = masks(dimensions=dimensions, names=("padding", "document"))
    return masks(dimensions=dimensions, names=names) | both.map(_and_causal)


def _and_causal(mask: Spec) -> Spec:
    return Spec.of("and", Spec.of("causal"), mask)


def _plain(name: str) -> Callable[[Dimensions], SearchStrategy[Spec]]:
    return lambda _: st.just(Spec.of(name))


def _sliding_windows(dimensions: Dimensions) -> SearchStrategy[Spec]:
    widest = max(dimensions.query, dimensions.kv)
    return st.integers(1, widest).map(lambda window: Spec.of("sliding_window", window=window))


def _prefixes(dimensions: Dimensions) -> SearchStrategy[Spec]:
    return st.integers(0, dimensions.kv).map(lambda prefix: Spec.of("prefix_lm", prefix=prefix))


def _documents(dimensions: Dimensions) -> SearchStrategy[Spec]:
    """Up to four documents, cut anywhere; shrinks to one."""
    total = max(dimensions.query, dimensions.kv)
    if total == 1:
        return st.just(Spec.of("document", lengths=[1]))
    return st.sets(st.integers(1, total - 1), max_size=3).map(lambda cuts: _cut(cuts, total))


def _cut(cuts: set[int], total: int) -> Spec:
    ends = [*sorted(cuts), total]
    starts = [0, *ends[:-1]]
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    return Spec.of("document", lengths=lengths)


def _paddings(dimensions: Dimensions) -> SearchStrategy[Spec]:
    """Any number of padding keys in each sequence; shrinks to none."""
    padding = st.tuples(*[st.integers(0, dimensions.kv)] * dimensions.batch)
    return padding.map(
        lambda hidden: Spec.of("padding", lengths=[dimensions.kv - n for n in hidden])
    )


_MASKS: dict[str, Callable[[Dimensions], SearchStrategy[Spec]]] = {
    FULL.name: _plain(FULL.name),
    "causal": _plain("causal"),
    "causal_bottom_right": _plain("causal_bottom_right"),
    "sliding_window": _sliding_windows,
    "prefix_lm": _prefixes,
    "padding": _paddings,
    "document": _documents,
}
"""Simplest first: what a failure shrinks to."""
