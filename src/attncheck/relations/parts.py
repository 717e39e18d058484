"""Relations between a Problem and its parts: keys split and merged, documents, rows, sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import cast

import torch

from attncheck.core.mod_spec import FULL, Spec
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Allowed, Parameters, Problem
from attncheck.relations.excerpt import Excerpt, can_excerpt
from attncheck.relations.relation import (
    Finding,
    Relation,
    Results,
    compare_outputs,
    indices_read,
    map_outputs,
    of_attention,
)

# ------------------------------------------------------------------ keys in two parts

# The merge itself, in float64: a difference, two sigmoids of a few ulps each, two products and a
# sum, and for LSE an exponential, a logarithm and a sum. 16 roundings are more than these.
_ROUNDINGS = 16 * 2.0**-53


def merge_parts(one: Outputs, other: Outputs) -> Outputs:
    """Return out and LSE over the keys of both, in float64.

    A part of which a row sees nothing (LSE −∞) counts for nothing, whatever its out holds; where
    both are such, out is 0 and LSE −∞.
    """
    lse, other_lse = _lse(one), _lse(other)
    weight, other_weight = _weights(lse, other_lse)
    out = _times(weight, one.out.double()) + _times(other_weight, other.out.double())
    return Outputs(out, torch.logaddexp(lse, other_lse))


def merge_error(parts: Sequence[Outputs], errors: Sequence[Outputs]) -> Outputs:
    """Return how far ``merge_parts`` may be from exact attention over all keys.

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
        errors: How far each may be from the exact result.

    Returns:
        Of out ``(batch, heads, query, value_dim)`` and LSE ``(batch, heads, query)``.
    """
    (o1, o2), (l1, l2) = (part.out.double() for part in parts), (_lse(part) for part in parts)
    e1, e2 = (error.out.double() for error in errors)
    unseen = torch.isneginf(l1), torch.isneginf(l2)
    d1, d2 = (
        torch.where(none, 0.0, _lse(error)) for none, error in zip(unseen, errors, strict=True)
    )
    w1, w2 = _weights(l1, l2)
    x, d = l1 - l2, d1 + d2
    off = torch.maximum(
        torch.sigmoid(x + d) - torch.sigmoid(x), torch.sigmoid(x) - torch.sigmoid(x - d)
    )
    moved = _times(torch.where(unseen[0] | unseen[1], 0.0, off), (o1 - o2).abs() + e1 + e2)
    # Of a part that is seen: what is not has weight 0 exactly.
    seen = [1.0 - none.double() for none in unseen]
    own = _times(seen[0], o1.abs() + e1) + _times(seen[1], o2.abs() + e2)
    of_lse = sum(torch.where(lse.isfinite(), lse.abs(), 0.0) for lse in (l1, l2))
    return Outputs(
        _times(w1, e1) + _times(w2, e2) + moved + own * _ROUNDINGS,
        torch.maximum(d1, d2) + (of_lse + 1.0) * _ROUNDINGS,
    )


def _lse(outputs: Outputs) -> torch.Tensor:
    assert outputs.lse is not None, "only kernels that give LSE are compared"
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


def _halves(problem: Problem, cut: int) -> tuple[Excerpt, Excerpt]:
    return (
        Excerpt.of(problem, keys=range(cut)),
        Excerpt.of(problem, keys=range(cut, problem.kv)),
    )


def _unless_cut(problem: Problem) -> str | None:
    if problem.kv == 1:
        return "one key cannot be cut"
    # The furthest cut has the longest text, where a mask or score mod is written.
    ends = (_halves(problem, 1)[0], _halves(problem, problem.kv - 1)[1])
    if not all(can_excerpt(problem, part) for part in ends):
        return "its mask or score mod cannot be said of the earlier or the later keys alone"
    return None


def _split_keys(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    one, other = _halves(inputs.problem, int(parameters["cut"]))
    later = other.inputs(inputs)
    # A sink is one key, of the first part alone; Inputs.replace would keep it.
    later = replace(later, problem=later.problem.replace(sink=False), sink=None)
    return one.inputs(inputs), later, inputs


def _compare_merged(results: Results) -> Finding | None:
    *parts, whole = results.outputs
    errors = results.bounds()
    return compare_outputs(whole, merge_parts(*parts), [merge_error(parts, errors[:2]), errors[2]])


SPLIT_MERGE = Relation(
    name="split_merge",
    summary="keys before and from `cut` on, each alone and merged through LSE, give the whole",
    runs=_split_keys,
    rule=_compare_merged,
    promise="bounds",
    needs_lse=True,
    unfit=of_attention(_unless_cut),
    allowed=lambda problem: {"cut": range(1, problem.kv)},
)
"""Holds for every right kernel that gives LSE, in natural units: it is what split-KV decoding and
ring attention do. Rows may see nothing of a part. For the allowance see ``merge_error``."""

# ------------------------------------------------------------------ documents

# Masks that name documents, and where they say the rows and the keys of each.
_SIDES = {"document": ("lengths", "lengths"), "documents": ("query_lengths", "kv_lengths")}


def _document(mask: Spec) -> Spec | None:
    """The mask's part that names documents: the mask itself, or a part of an ``and``."""
    parts = mask.parts if mask.name == "and" else (mask,)
    return next((part for part in parts if part.name in _SIDES), None)


def _within_documents(problem: Problem) -> Problem:
    """The Problem under what hides keys within a document."""
    left = list(problem.mask.parts)
    if left:
        left.remove(cast("Spec", _document(problem.mask)))
    mask = Spec.of("and", *left) if len(left) > 1 else left[0] if left else FULL
    return problem.replace(mask=mask)


def _documents(problem: Problem) -> list[Excerpt]:
    """Each document that has rows and keys; rows of the others see nothing."""
    document = cast("Spec", _document(problem.mask))
    rows, keys = (
        _ranges(cast("tuple[int, ...]", document.values[name]), length)
        for name, length in zip(_SIDES[document.name], (problem.query, problem.kv), strict=True)
    )
    return [Excerpt.of(problem, rows=r, keys=k) for r, k in zip(rows, keys, strict=True) if r and k]


def _ranges(lengths: Sequence[int], end: int) -> list[range]:
    """One after another, cut where the Problem ends; the lengths may go beyond."""
    ends = list(accumulate(lengths))
    return [range(min(at - n, end), min(at, end)) for n, at in zip(lengths, ends, strict=True)]


def _unless_documents(problem: Problem) -> str | None:
    if _document(problem.mask) is None:
        return "its mask is neither document nor documents, nor an and with such a part"
    inside = _within_documents(problem)
    if not all(can_excerpt(inside, each) for each in _documents(problem)):
        return "the rest of its mask, or its score mod, cannot be said of one document alone"
    return None


def _unpack(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    inside = inputs.replace(problem=_within_documents(inputs.problem))
    return (*(each.inputs(inside) for each in _documents(inputs.problem)), inputs)


def _compare_packed(results: Results) -> Finding | None:
    *alone, whole = results.outputs
    last = results.inputs[-1]
    rows = [each.rows for each in _documents(last.problem)]
    # LSE of rows that see no key; it broadcasts to (batch, heads, query).
    nothing = torch.tensor([-torch.inf]) if last.sink is None else last.sink[:, None]
    errors = results.errors
    if errors is not None:
        *theirs, own = errors
        errors = [_join(own, theirs, rows, torch.zeros(1)), own]
    return compare_outputs(whole, _join(whole, alone, rows, nothing), errors)


def _join(
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
    runs=_unpack,
    rule=_compare_packed,
    promise="bounds",
    unfit=of_attention(_unless_documents),
)
"""Holds for every right kernel: a row sees keys of its own document alone. Rows of a document that
has no keys give 0 and −∞, and a sink its logit. Where the mask is also causal (``and``), each
document is. Within bounds: tiles begin elsewhere."""

# ------------------------------------------------------------------ rows


def _rows(outputs: Outputs, rows: slice) -> Outputs:
    return map_outputs(outputs, lambda tensor: tensor[:, :, rows])


def _compare_rows(results: Results, rows: slice) -> Finding | None:
    """The second run's rows with those of the first, the whole."""
    whole, part = results.outputs
    errors = results.errors
    return compare_outputs(part, _rows(whole, rows), errors and [_rows(errors[0], rows), errors[1]])


def _excerpted_rows(problem: Problem, parameters: Parameters) -> range:
    rows = int(parameters["rows"])
    return range(problem.query - rows, problem.query) if parameters["last"] else range(rows)


def _first_and_last(problem: Problem) -> list[int]:
    """0 where the first rows alone can be a Problem, 1 where the last can."""
    # The last row alone has the longest text, where a mask or score mod is written.
    ends = (range(1), range(problem.query - 1, problem.query))
    return [
        last
        for last, rows in enumerate(ends)
        if can_excerpt(problem, Excerpt.of(problem, rows=rows))
    ]


def _unless_rows_alone(problem: Problem) -> str | None:
    if problem.query == 1:
        return "one row has no part"
    if not _first_and_last(problem):
        return "its mask or score mod cannot be said of some rows alone"
    return None


def _excerpt_rows(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    rows = _excerpted_rows(inputs.problem, parameters)
    return inputs, Excerpt.of(inputs.problem, rows=rows).inputs(inputs)


def _compare_excerpt(results: Results) -> Finding | None:
    rows = _excerpted_rows(results.inputs[0].problem, results.parameters)
    return _compare_rows(results, slice(rows.start, rows.stop))


def _rows_and_ends(problem: Problem) -> Allowed:
    return {"rows": range(1, problem.query), "last": _first_and_last(problem)}


RECTANGULAR = Relation(
    name="rectangular",
    summary="the first `rows` rows, or with `last` the last, asked alone are those of the whole",
    runs=_excerpt_rows,
    rule=_compare_excerpt,
    promise="bounds",
    unfit=of_attention(_unless_rows_alone),
    allowed=_rows_and_ends,
)
"""Holds for every right kernel: a row's result is of that row, and of the keys that it sees. The
last rows of a square causal Problem are those of a ``causal_bottom_right`` one with fewer rows than
keys, as in decoding with a cache; its first rows are those of ``causal``, aligned top-left. A
kernel may take another path for fewer rows (other tiles, split keys): within bounds."""


def _decode_last_rows(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    problem, rows = inputs.problem, int(parameters["rows"])
    before = problem.query - rows

    def later(mod: Spec) -> Spec:
        """``mod`` of rows that are ``before`` later; itself where it reads no row."""
        return Spec.of("offset", mod, rows=before) if "q_idx" in indices_read(mod) else mod

    last = inputs.replace(
        problem=problem.replace(query=rows, mask=later(problem.mask), score=later(problem.score)),
        q=inputs.q[:, :, before:].clone(memory_format=torch.contiguous_format),
    )
    return inputs, last


PREFILL_ROWS = Relation(
    name="prefill_rows",
    summary="the last `rows` rows, decoded behind the others, are those of prefill",
    runs=_decode_last_rows,
    rule=lambda results: _compare_rows(results, slice(-results.number("rows"), None)),
    promise="bounds",
    unfit=of_attention(lambda p: "one row has no rows before it" if p.query == 1 else None),
    allowed=lambda problem: {"rows": range(1, problem.query)},
)
"""Holds for every right kernel, under any mask and score mod: they are asked of row i what they
were asked of row i + query − `rows` (the composition ``offset``), and a row's result is of that row
and of the keys that it sees. What decoding with a cache relies on. Within bounds: fewer rows may be
computed by other tiles, and with their keys in splits."""

# ------------------------------------------------------------------ sequences


def _one_sequence(problem: Problem, sequence: int) -> Excerpt:
    return Excerpt.of(problem, sequences=range(sequence, sequence + 1))


def _unless_sequence_alone(problem: Problem) -> str | None:
    if problem.batch == 1:
        return "its only sequence is alone"
    # The last sequence has the longest text, where a mask or score mod is written.
    if not all(can_excerpt(problem, _one_sequence(problem, b)) for b in (0, problem.batch - 1)):
        return "its mask or score mod cannot be said of one sequence alone"
    return None


def _excerpt_sequence(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    return _one_sequence(inputs.problem, int(parameters["sequence"])).inputs(inputs), inputs


def _compare_sequence(results: Results) -> Finding | None:
    b = results.number("sequence")
    sequence = partial(map_outputs, change=lambda tensor: tensor[b : b + 1])
    alone, batch = results.outputs
    errors = results.errors
    finding = compare_outputs(sequence(batch), alone, errors and [errors[0], sequence(errors[1])])
    return finding and replace(finding, place=(b, *finding.place[1:]))


ALONE_IN_BATCH = Relation(
    name="alone_in_batch",
    summary="sequence `sequence` gives in its batch what it gives alone",
    runs=_excerpt_sequence,
    rule=_compare_sequence,
    promise="batch",
    unfit=of_attention(_unless_sequence_alone),
    allowed=lambda problem: {"sequence": range(problem.batch)},
)
"""Holds for every right kernel within bounds: no sequence reads another. To the last bit where a
row's tiles and order do not depend on how many sequences there are; a kernel that fills a GPU by
splitting the keys of a small batch does not promise it."""
