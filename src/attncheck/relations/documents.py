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


# Masks that name documents, and where they say the rows and the keys of each.
_SIDES = {"document": ("lengths", "lengths"), "documents": ("query_lengths", "kv_lengths")}


def _document(mask: Spec) -> Spec | None:
    """The mask's part that names documents: the mask itself, or a part of an ``and``."""
    parts = mask.parts if mask.name == "and" else (mask,)
    return next((part for part in parts if part.name in _SIDES), None)


def _rest(mask: Spec) -> Spec:
    """What hides keys within a document."""
    left = list(mask.parts)
    if left:
        left.remove(cast("Spec", _document(mask)))
    return Spec.of("and", *left) if len(left) > 1 else left[0] if left else FULL


def _excerpts(problem: Problem) -> list[Excerpt]:
    """Each document that has rows and keys; rows of the others see nothing."""
    document = cast("Spec", _document(problem.mask))
    rows, keys = (
        _places(cast("tuple[int, ...]", document.values[name]), length)
        for name, length in zip(_SIDES[document.name], (problem.query, problem.kv), strict=True)
    )
    return [
        Excerpt.of(problem, rows=of_rows, keys=of_keys)
        for of_rows, of_keys in zip(rows, keys, strict=True)
        if of_rows and of_keys
    ]


def _places(lengths: Sequence[int], end: int) -> list[range]:
    """One after another, cut where the Problem ends; the lengths may go beyond."""
    ends = list(accumulate(lengths))
    return [range(min(at - n, end), min(at, end)) for n, at in zip(lengths, ends, strict=True)]


def _unfit(problem: Problem) -> str | None:
    if _document(problem.mask) is None:
        return "its mask is neither document nor documents, nor an and with such a part"
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
    expected = _joined(whole, alone, rows, _of_nothing(runs[-1]))
    if errors is None:
        return agree(whole, expected, None)
    *theirs, own = errors
    return agree(whole, expected, [_joined(own, theirs, rows, torch.zeros(1)), own])


def _of_nothing(inputs: Inputs) -> torch.Tensor:
    """LSE of rows that see no key; it broadcasts to ``(batch, heads, query)``."""
    return torch.tensor([-torch.inf]) if inputs.sink is None else inputs.sink[:, None]


def _joined(
    like: Outputs, parts: Sequence[Outputs], rows: Sequence[range], nothing: torch.Tensor
) -> Outputs:
    """The documents' rows in their places; elsewhere out is 0 and LSE ``nothing``."""
    out = torch.zeros_like(like.out)
    lse = None if like.lse is None else nothing.to(like.lse).expand_as(like.lse).clone()
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
has no keys give 0 and −∞, and a sink its logit. Where the mask is also causal (``and``), each
document is. Within bounds: tiles begin elsewhere."""
