"""Documents packed one after another give what each gives in a call of its own."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, cast

import torch

from attncheck.mods.library import FULL
from attncheck.mods.spec import Spec
from attncheck.outputs import Outputs
from attncheck.relations.agreement import agree
from attncheck.relations.excerpt import Excerpt, said
from attncheck.relations.fit import of_attention
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.inputs import Inputs
    from attncheck.problem import Problem
    from attncheck.relations.finding import Finding

__all__ = ["DOCUMENTS"]


def _document(mask: Spec) -> Spec | None:
    """The mask's document part, which is the mask itself or a part of an ``and``."""
    parts = mask.parts if mask.name == "and" else (mask,)
    return next((part for part in parts if part.name == "document"), None)


def _rest(mask: Spec) -> Spec:
    """What hides keys within a document."""
    left = list(mask.parts)
    if left:
        left.remove(cast("Spec", _document(mask)))
    return Spec.of("and", *left) if len(left) > 1 else left[0] if left else FULL


def _excerpts(problem: Problem) -> list[Excerpt]:
    """Each document that has rows and keys; rows of the others see nothing."""
    lengths = cast("tuple[int, ...]", cast("Spec", _document(problem.mask)).values["lengths"])
    places = [range(end - n, end) for n, end in zip(lengths, accumulate(lengths), strict=True)]
    cut = [(_within(place, problem.query), _within(place, problem.kv)) for place in places]
    return [Excerpt.of(problem, rows=rows, keys=keys) for rows, keys in cut if rows and keys]


def _within(place: range, length: int) -> range:
    return range(min(place.start, length), min(place.stop, length))


def _unfit(problem: Problem) -> str | None:
    if _document(problem.mask) is None:
        return "its mask is neither document nor an and with a document part"
    inside = problem.replace(mask=_rest(problem.mask))
    if not all(said(inside, each) for each in _excerpts(problem)):
        return "the rest of its mask, or its score mod, cannot be said of one document alone"
    return None


def _runs(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    problem = inputs.problem
    inside = inputs.replace(problem=problem.replace(mask=_rest(problem.mask)))
    return (*(each.inputs(inside) for each in _excerpts(problem)), inputs)


def _holds(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], _: Parameters, errors: Errors
) -> Finding | None:
    *alone, whole = outputs
    rows = [each.rows for each in _excerpts(runs[-1].problem)]
    expected = _joined(whole, alone, rows, hidden=-torch.inf)
    if errors is None:
        return agree(whole, expected, None)
    *theirs, own = errors
    return agree(whole, expected, [_joined(own, theirs, rows, hidden=0.0), own])


def _joined(
    like: Outputs, parts: Sequence[Outputs], rows: Sequence[range], *, hidden: float
) -> Outputs:
    """The documents' rows in their places; elsewhere out is 0 and LSE ``hidden``."""
    out = torch.zeros_like(like.out)
    lse = None if like.lse is None else torch.full_like(like.lse, hidden)
    for part, place in zip(parts, rows, strict=True):
        out[:, :, place.start : place.stop] = part.out
        if lse is not None and part.lse is not None:
            lse[:, :, place.start : place.stop] = part.lse
    return Outputs(out, lse)


DOCUMENTS = Relation(
    name="documents",
    summary="packed documents give what each gives in a call of its own, and 0 where one is empty",
    runs=_runs,
    holds=_holds,
    promise="bounds",
    unfit=of_attention(_unfit),
)
"""Holds for every right kernel: a row sees keys of its own document alone. Rows of a document that
has no keys give 0 and −∞. Where the mask is also causal (``and``), each document is. Within bounds:
tiles begin elsewhere."""
