"""Score mods of the library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

from attncheck.core.errors import UnknownName
from attncheck.mods.library import NONE
from attncheck.mods.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hypothesis.strategies import SearchStrategy

__all__ = ["captured_scores", "scores"]


def scores(*, names: Iterable[str] = ()) -> SearchStrategy[Spec]:
    """Score mods of the library, not composed, each at a few strengths.

    Args:
        names: Which, simplest first (default: all, from none on).

    Raises:
        UnknownName: for a name that is none of the library's plain score mods.
    """
    chosen = tuple(names) or tuple(_SCORES)
    for name in chosen:
        if name not in _SCORES:
            raise UnknownName("score mod", name, _SCORES)
    return st.one_of([_SCORES[name] for name in chosen])


def captured_scores() -> SearchStrategy[Spec]:
    """Score mods that read numbers from tensors, alone and before or behind one that bends scores.

    Shrinks to ``alibi``.
    """
    bent = scores(names=("temperature", "softcap"))
    added = st.one_of([_SCORES[name] for name in ("alibi", "relative_bias", "bias")])
    chained = st.tuples(added, bent) | st.tuples(bent, added) | st.tuples(added, added)
    return added | _SCORES["offset"] | chained.map(lambda parts: Spec.of("chain", *parts))


_SCORES: dict[str, SearchStrategy[Spec]] = {
    NONE.name: st.just(NONE),
    "alibi": st.just(Spec.of("alibi")),
    "softcap": st.sampled_from((20.0, 1.5, 50.0)).map(lambda cap: Spec.of("softcap", cap=cap)),
    "temperature": st.sampled_from((2.0, 0.25)).map(
        lambda temperature: Spec.of("temperature", temperature=temperature)
    ),
    "relative_bias": st.integers(0, 8).map(
        lambda distance: Spec.of("relative_bias", distance=distance, seed=0)
    ),
    "bias": st.tuples(st.integers(0, 1), st.integers(0, 1)).map(
        lambda each: Spec.of("bias", seed=0, per_batch=each[0], per_head=each[1])
    ),
}
_SCORES["offset"] = st.tuples(
    st.one_of([_SCORES[name] for name in ("alibi", "relative_bias", "bias")]),
    st.sampled_from((1, 0, 33)),
).map(lambda drawn: Spec.of("offset", drawn[0], rows=drawn[1]))
