"""What a relation is about, and why it says nothing of a Problem."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attncheck.mods.spec import Spec
    from attncheck.problem import Problem

__all__ = [
    "INDICES",
    "Unfit",
    "indices_read",
    "of_attention",
    "of_gradients",
    "of_softmax",
    "without_sink",
]

Unfit = Callable[["Problem"], "str | None"]

INDICES = frozenset({"b", "h", "q_idx", "kv_idx"})

_PLACES = frozenset({"q_idx", "kv_idx"})
_READ = {
    "full": frozenset[str](),
    "causal": _PLACES,
    "causal_bottom_right": _PLACES,
    "sliding_window": _PLACES,
    "prefix_lm": _PLACES,
    "document": _PLACES,
    "documents": _PLACES,
    "neighborhood": _PLACES,
    "neighborhood_tiled": _PLACES,
    "neighborhood_morton": _PLACES,
    "padding": frozenset({"b", "kv_idx"}),
    **dict.fromkeys(("and", "or", "not", "offset", "chain"), frozenset[str]()),  # their parts do
    **dict.fromkeys(("none", "softcap", "temperature"), frozenset[str]()),
    "alibi": _PLACES | {"h"},
}


def of_attention(*reasons: Unfit, gradients: bool = False) -> Unfit:
    """``unfit`` of a relation about attention: the first of ``reasons`` that there is.

    Of a Problem with a backward it says nothing unless it speaks of ``gradients`` too.
    """
    return _of("attention", reasons if gradients else (_without_gradients, *reasons))


def of_gradients(*reasons: Unfit) -> Unfit:
    """``unfit`` of a relation about gradients alone."""
    return of_attention(_with_gradients, *reasons, gradients=True)


def of_softmax(*reasons: Unfit) -> Unfit:
    """``unfit`` of a relation about a softmax of scores."""
    return _of("softmax", reasons)


def without_sink(problem: Problem) -> str | None:
    """Why a relation that counts a row's keys, or moves their scores alone, says nothing."""
    return "it has a sink" if problem.sink else None


def _without_gradients(problem: Problem) -> str | None:
    return "it says nothing of gradients" if problem.backward else None


def _with_gradients(problem: Problem) -> str | None:
    return None if problem.backward else "it is about gradients"


def indices_read(mod: Spec) -> frozenset[str]:
    """Which of b, h, q_idx and kv_idx a mask or score mod reads, as far as its names tell.

    All of them where they do not.
    """
    return frozenset[str]().union(*map(_read_by, mod.walk()))


def _read_by(part: Spec) -> frozenset[str]:
    if part.name == "expression":
        return INDICES.intersection(re.findall(r"\w+", str(part.values["text"])))
    if part.name == "relative_bias":  # clamped to 0, a distance is no distance
        return frozenset({"h"}) | (_PLACES if part.values["distance"] else frozenset())
    if part.name == "bias":
        each = (("b", "per_batch"), ("h", "per_head"))
        return _PLACES.union(index for index, per in each if part.values[per])
    return _READ.get(part.name, INDICES)


def _of(operation: str, reasons: tuple[Unfit, ...]) -> Unfit:
    def unfit(problem: Problem) -> str | None:
        if problem.operation != operation:
            return f"it is about {operation}"
        return next(filter(None, (reason(problem) for reason in reasons)), None)

    return unfit
