"""Relations between a Problem and its parts: keys split and merged, documents, rows, sequences."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, cast

import torch

from attncheck.core.outputs import Outputs
from attncheck.mods.library import FULL
from attncheck.mods.spec import Spec
from attncheck.relations.excerpt import Excerpt, can_excerpt
from attncheck.relations.relation import (
    Errors,
    Relation,
    compare_outputs,
    indices_read,
    map_outputs,
    of_attention,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Parameters, Problem
    from attncheck.relations.relation import Finding

__all__ = [
    "ALONE_IN_BATCH",
    "DOCUMENTS",
    "PREFILL_ROWS",
    "RECTANGULAR",
    "SPLIT_MERGE",
    "merge_error",
    "merge_parts",
]


# The merge itself, in float64: a difference, two sigmoids of a few ulps each, two products and a
# sum, and for LSE an exponential, a logarithm and a sum. 16 roundings are more than these.
_ROUNDINGS = 16 * 2.0**-53


def merge_parts(one: Outputs, other: Outputs) -> Outputs:
    """Out and LSE over the keys of both, in float64.

    A part of which a row sees nothing (LSE −∞) counts for nothing, whatever its out holds; where
    both are such, out is 0 and LSE −∞.
    """
    lse, other_lse = _lse(one), _lse(other)
    weights = _weights(lse, other_lse)
    outs = (one.out.double(), other.out.double())
    parts = (_times(w, out) for w, out in zip(weights, outs, strict=True))
    return Outputs(sum(parts, torch.zeros_like(outs[0])), torch.logaddexp(lse, other_lse))


def merge_error(parts: Sequence[Outputs], errors: Sequence[Outputs]) -> Outputs:
    """How far ``merged`` may be from exact attention over all keys.

    With exact parts O₁, l₁, O₂, l₂ and the first one's weight w = σ(l₁ − l₂), O = w·O₁ +
    (1 − w)·O₂. Computed parts o₁ … are off by at most E₁, D₁, E₂, D₂. With x = l̂₁ − l̂₂, ŵ = σ(x)
    and D = D₁ + D₂ the exact difference lies within x ± D, and as σ rises,

        |ŵ − w| ≤ max(σ(x + D) − ŵ, ŵ − σ(x − D)).

    Then

        |ŵ·o₁ + (1 − ŵ)·o₂ − O| ≤ ŵ·E₁ + (1 − ŵ)·E₂ + |ŵ − w|·|O₁ − O₂|

    with |O₁ − O₂| ≤ |o₁ − o₂| + E₁ + E₂. LSE is off by at most max(D₁, D₂), as each sum of
    exponentials is by a factor within e^±D. A part that a row does not see has no errors, and
    leaves the other's weight at 1.

    Args:
        parts: What the kernel gave of each.
        errors: How far each may be from the exact result.

    Returns:
        Of out ``(batch, heads, query, value_dim)`` and LSE ``(batch, heads, query)``.
    """
    (o1, o2), (l1, l2) = (part.out.double() for part in parts), (_lse(part) for part in parts)
    e1, e2 = (error.out.double() for error in errors)
    d1, d2 = (
        torch.where(torch.isneginf(lse), 0.0, _lse(error))
        for lse, error in zip((l1, l2), errors, strict=True)
    )
    w1, w2 = _weights(l1, l2)
    spread = (o1 - o2).abs() + e1 + e2
    moved = _times(_weight_error(l1, l2, d1 + d2), spread)
    # Of a part that is seen: what is not has weight 0 exactly.
    own = _times(_seen(l1), o1.abs() + e1) + _times(_seen(l2), o2.abs() + e2)
    of_lse = sum(torch.where(lse.isfinite(), lse.abs(), 0.0) for lse in (l1, l2))
    return Outputs(
        _times(w1, e1) + _times(w2, e2) + moved + own * _ROUNDINGS,
        torch.maximum(d1, d2) + (of_lse + 1.0) * _ROUNDINGS,
    )


def _seen(lse: torch.Tensor) -> torch.Tensor:
    return 1.0 - torch.isneginf(lse).double()


def _weight_error(one: torch.Tensor, other: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """How far a share may be off where ``one − other`` is by ``error``; 0 beside an unseen part."""
    x = one - other
    up, down = torch.sigmoid(x + error), torch.sigmoid(x - error)
    off = torch.maximum(up - torch.sigmoid(x), torch.sigmoid(x) - down)
    return torch.where(torch.isneginf(one) | torch.isneginf(other), 0.0, off)


def _lse(outputs: Outputs) -> torch.Tensor:
    assert outputs.lse is not None, "asked of kernels that give LSE"
    return outputs.lse.double()


def _weights(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The share of each part, ``(batch, heads, query)``; 0 of what a row does not see."""
    nothing = torch.isneginf(one) & torch.isneginf(other)
    first, second = torch.sigmoid(one - other), torch.sigmoid(other - one)
    return torch.where(nothing, 0.0, first), torch.where(nothing, 0.0, second)


def _times(weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Weighted ``values``; 0 where the weight is, though a value be infinite or NaN."""
    weight = weight[..., None]
    return torch.where(weight == 0, 0.0, weight * values)


def _parts(problem: Problem, cut: int) -> tuple[Excerpt, Excerpt]:
    return (
        Excerpt.of(problem, keys=range(cut)),
        Excerpt.of(problem, keys=range(cut, problem.kv)),
    )


def _cuts(problem: Problem) -> Mapping[str, Sequence[int]]:
    return {"cut": range(1, problem.kv)}


def _unfit(problem: Problem) -> str | None:
    if problem.kv == 1:
        return "one key cannot be cut"
    # The furthest cut has the longest text, where a mask or score mod is written.
    ends = (_parts(problem, 1)[0], _parts(problem, problem.kv - 1)[1])
    if not all(can_excerpt(problem, part) for part in ends):
        return "its mask or score mod cannot be said of the earlier or the later keys alone"
    return None


def _runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    one, other = _parts(inputs.problem, int(parameters["cut"]))
    return one.inputs(inputs), _without_sink(other.inputs(inputs)), inputs


def _without_sink(inputs: Inputs) -> Inputs:
    return replace(inputs, problem=inputs.problem.replace(sink=False), sink=None)


def _holds(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, errors: Errors
) -> Finding | None:
    assert errors is not None, "a merge has rounding errors"
    *parts, whole = outputs
    return compare_outputs(whole, merge_parts(*parts), [merge_error(parts, errors[:2]), errors[2]])


SPLIT_MERGE = Relation(
    name="split_merge",
    summary="keys before and from `cut` on, each alone and merged through LSE, give the whole",
    runs=_runs,
    holds=_holds,
    promise="bounds",
    needs_lse=True,
    unfit=of_attention(_unfit),
    allowed=_cuts,
)
"""Holds for every right kernel that gives LSE, in natural units: it is what split-KV decoding and
ring attention do. Rows may see nothing of a part. A sink is one key, of the first part alone. For
the allowance see ``merge_error``."""


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


def _unfit_of_documents(problem: Problem) -> str | None:
    if _document(problem.mask) is None:
        return "its mask is neither document nor documents, nor an and with such a part"
    inside = problem.replace(mask=_rest(problem.mask))
    if not all(can_excerpt(inside, each) for each in _excerpts(problem)):
        return "the rest of its mask, or its score mod, cannot be said of one document alone"
    return None


def _runs_of_documents(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    problem = inputs.problem
    inside = inputs.replace(problem=problem.replace(mask=_rest(problem.mask)))
    return (*(each.inputs(inside) for each in _excerpts(problem)), inputs)


def _holds_of_documents(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], _: Parameters, errors: Errors
) -> Finding | None:
    *alone, whole = outputs
    rows = [each.rows for each in _excerpts(runs[-1].problem)]
    expected = _joined(whole, alone, rows, _of_nothing(runs[-1]))
    if errors is None:
        return compare_outputs(whole, expected, None)
    *theirs, own = errors
    return compare_outputs(whole, expected, [_joined(own, theirs, rows, torch.zeros(1)), own])


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
    runs=_runs_of_documents,
    holds=_holds_of_documents,
    promise="bounds",
    unfit=of_attention(_unfit_of_documents),
)
"""Holds for every right kernel: a row sees keys of its own document alone. Rows of a document that
has no keys give 0 and −∞, and a sink its logit. Where the mask is also causal (``and``), each
document is. Within bounds: tiles begin elsewhere."""


def _taken(problem: Problem, parameters: Parameters) -> range:
    rows = int(parameters["rows"])
    return range(problem.query - rows, problem.query) if parameters["last"] else range(rows)


def _sayable(problem: Problem) -> list[int]:
    # The last row alone has the longest text, where a mask or score mod is written.
    ends = (range(1), range(problem.query - 1, problem.query))
    return [
        last
        for last, rows in enumerate(ends)
        if can_excerpt(problem, Excerpt.of(problem, rows=rows))
    ]


def _allowed(problem: Problem) -> Mapping[str, Sequence[int]]:
    return {"rows": range(1, problem.query), "last": _sayable(problem)}


def _unfit_of_rectangular(problem: Problem) -> str | None:
    if problem.query == 1:
        return "one row has no part"
    return None if _sayable(problem) else "its mask or score mod cannot be said of some rows alone"


def _runs_of_rectangular(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    rows = _taken(inputs.problem, parameters)
    return inputs, Excerpt.of(inputs.problem, rows=rows).inputs(inputs)


def _holds_of_rectangular(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], parameters: Parameters, errors: Errors
) -> Finding | None:
    rows = _taken(runs[0].problem, parameters)

    def part(of: Outputs) -> Outputs:
        def taken(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[:, :, rows.start : rows.stop]

        return map_outputs(of, taken)

    expected = part(outputs[0])
    return compare_outputs(outputs[1], expected, errors and [part(errors[0]), errors[1]])


RECTANGULAR = Relation(
    name="rectangular",
    summary="the first `rows` rows, or with `last` the last, asked alone are those of the whole",
    runs=_runs_of_rectangular,
    holds=_holds_of_rectangular,
    promise="bounds",
    unfit=of_attention(_unfit_of_rectangular),
    allowed=_allowed,
)
"""Holds for every right kernel: a row's result is of that row, and of the keys that it sees. The
last rows of a square causal Problem are those of a ``causal_bottom_right`` one with fewer rows than
keys, as in decoding with a cache; its first rows are those of ``causal``, aligned top-left. A
kernel may take another path for fewer rows (other tiles, split keys): within bounds."""


def _allowed_of_prefill_rows(problem: Problem) -> Mapping[str, Sequence[int]]:
    return {"rows": range(1, problem.query)}


def _unfit_of_prefill_rows(problem: Problem) -> str | None:
    return "one row has no rows before it" if problem.query == 1 else None


def _later(mod: Spec, rows: int) -> Spec:
    """``mod`` of rows that are ``rows`` later; itself where it is the same for every row."""
    return Spec.of("offset", mod, rows=rows) if "q_idx" in indices_read(mod) else mod


def _runs_of_prefill_rows(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    problem, rows = inputs.problem, int(parameters["rows"])
    before = problem.query - rows
    last = inputs.replace(
        problem=problem.replace(
            query=rows,
            mask=_later(problem.mask, before),
            score=_later(problem.score, before),
        ),
        q=inputs.q[:, :, before:].clone(memory_format=torch.contiguous_format),
    )
    return inputs, last


def _holds_of_prefill_rows(
    _: Sequence[Inputs], outputs: Sequence[Outputs], parameters: Parameters, errors: Errors
) -> Finding | None:
    rows = int(parameters["rows"])

    def last(of: Outputs) -> Outputs:
        return map_outputs(of, lambda tensor: tensor[:, :, -rows:])

    prefill, decoded = outputs
    return compare_outputs(decoded, last(prefill), errors and [last(errors[0]), errors[1]])


PREFILL_ROWS = Relation(
    name="prefill_rows",
    summary="the last `rows` rows, decoded behind the others, are those of prefill",
    runs=_runs_of_prefill_rows,
    holds=_holds_of_prefill_rows,
    promise="bounds",
    unfit=of_attention(_unfit_of_prefill_rows),
    allowed=_allowed_of_prefill_rows,
)
"""Holds for every right kernel, under any mask and score mod: they are asked of row i what they
were asked of row i + query − `rows` (the composition ``offset``), and a row's result is of that row
and of the keys that it sees. What decoding with a cache relies on. Within bounds: fewer rows may be
computed by other tiles, and with their keys in splits."""


def _excerpt(problem: Problem, sequence: int) -> Excerpt:
    return Excerpt.of(problem, sequences=range(sequence, sequence + 1))


def _allowed_of_alone_in_batch(problem: Problem) -> Mapping[str, Sequence[int]]:
    return {"sequence": range(problem.batch)}


def _unfit_of_alone_in_batch(problem: Problem) -> str | None:
    if problem.batch == 1:
        return "its only sequence is alone"
    # The last sequence has the longest text, where a mask or score mod is written.
    if not all(can_excerpt(problem, _excerpt(problem, b)) for b in (0, problem.batch - 1)):
        return "its mask or score mod cannot be said of one sequence alone"
    return None


def _runs_of_alone_in_batch(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    return _excerpt(inputs.problem, int(parameters["sequence"])).inputs(inputs), inputs


def _holds_of_alone_in_batch(
    _: Sequence[Inputs], outputs: Sequence[Outputs], parameters: Parameters, errors: Errors
) -> Finding | None:
    b = int(parameters["sequence"])

    def sequence(of: Outputs) -> Outputs:
        return map_outputs(of, lambda tensor: tensor[b : b + 1])

    alone, batch = outputs
    found = compare_outputs(sequence(batch), alone, errors and [errors[0], sequence(errors[1])])
    return found and dataclasses.replace(found, place=(b, *found.place[1:]))


ALONE_IN_BATCH = Relation(
    name="alone_in_batch",
    summary="sequence `sequence` gives in its batch what it gives alone",
    runs=_runs_of_alone_in_batch,
    holds=_holds_of_alone_in_batch,
    promise="batch",
    unfit=of_attention(_unfit_of_alone_in_batch),
    allowed=_allowed_of_alone_in_batch,
)
"""Holds for every right kernel within bounds: no sequence reads another. To the last bit where a
row's tiles and order do not depend on how many sequences there are; a kernel that fills a GPU by
splitting the keys of a small batch does not promise it."""
