"""Relations between a Problem and parts of it: some keys, documents, rows or sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
    compare_ends,
    compare_outputs,
    each_tensor,
    indices_read,
    of_attention,
)

# ------------------------------------------------------------------ keys in two parts

# Bound on the relative rounding error of the merge itself in float64: a difference, two sigmoids of
# a few ulps each, two products and a sum, and for LSE an exponential, a logarithm and a sum.
_ROUNDINGS = 16 * 2.0**-53


def merge_parts(one: Outputs, other: Outputs) -> Outputs:
    """Return out and LSE over the keys of both parts, in float64.

    A part in which a row sees no key (LSE −∞) has weight 0, whatever its out holds; if a row sees
    no key in either part, its out is 0 and its LSE −∞.
    """
    lse, other_lse = _lse(one), _lse(other)
    weight, other_weight = _weights(lse, other_lse)
    out = _weigh(weight, one.out.double()) + _weigh(other_weight, other.out.double())
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
    exponentials is off by a factor within e^±D. A part in which a row sees no key has no errors,
    and leaves the other's weight at 1.

    Args:
        errors: How far each part may be from its exact result.

    Returns:
        Bounds for out ``(batch, heads, query, value_dim)`` and LSE ``(batch, heads, query)``.
    """
    (o1, o2), (l1, l2) = (part.out.double() for part in parts), (_lse(part) for part in parts)
    e1, e2 = (error.out.double() for error in errors)
    unseen = torch.isneginf(l1), torch.isneginf(l2)
    d1, d2 = (
        torch.where(none, 0.0, _lse(error)) for none, error in zip(unseen, errors, strict=True)
    )
    w1, w2 = _weights(l1, l2)
    x, d = l1 - l2, d1 + d2
    w_error = torch.maximum(
        torch.sigmoid(x + d) - torch.sigmoid(x), torch.sigmoid(x) - torch.sigmoid(x - d)
    )
    shifted = _weigh(torch.where(unseen[0] | unseen[1], 0.0, w_error), (o1 - o2).abs() + e1 + e2)
    # A part in which a row sees no key has a weight of exactly 0, without rounding error.
    seen = [1.0 - none.double() for none in unseen]
    magnitudes = _weigh(seen[0], o1.abs() + e1) + _weigh(seen[1], o2.abs() + e2)
    lse_magnitudes = sum(torch.where(lse.isfinite(), lse.abs(), 0.0) for lse in (l1, l2))
    return Outputs(
        _weigh(w1, e1) + _weigh(w2, e2) + shifted + magnitudes * _ROUNDINGS,
        torch.maximum(d1, d2) + (lse_magnitudes + 1.0) * _ROUNDINGS,
    )


def _lse(outputs: Outputs) -> torch.Tensor:
    assert outputs.lse is not None, "only kernels that give LSE are compared"
    return outputs.lse.double()


def _weights(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight of each part, ``(batch, heads, query)``; 0 if a row sees none of it."""
    nothing = torch.isneginf(one) & torch.isneginf(other)
    first, second = torch.sigmoid(one - other), torch.sigmoid(other - one)
    return torch.where(nothing, 0.0, first), torch.where(nothing, 0.0, second)


def _weigh(weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return weight · values, but 0 where the weight is 0 even if a value is infinite or NaN."""
    weight = weight[..., None]
    return torch.where(weight == 0, 0.0, weight * values)


def _excerpts_around(problem: Problem, cut: int) -> tuple[Excerpt, Excerpt]:
    return (
        Excerpt.of(problem, keys=range(cut)),
        Excerpt.of(problem, keys=range(cut, problem.kv)),
    )


def _unless_cut(problem: Problem) -> str | None:
    if problem.kv == 1:
        return "one key cannot be cut"
    # The furthest cut has the longest text if a mask or score mod becomes an expression.
    ends = (_excerpts_around(problem, 1)[0], _excerpts_around(problem, problem.kv - 1)[1])
    if not all(can_excerpt(problem, part) for part in ends):
        return "its mask or score mod cannot be said of the earlier or the later keys alone"
    return None


def _split_keys(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    one, other = _excerpts_around(inputs.problem, int(parameters["cut"]))
    later = other.inputs(inputs)
    # The sink belongs to the first part only; Inputs.replace would keep it in the second.
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
"""Holds for every right kernel that gives LSE, in natural units: split-KV decoding and ring
attention merge parts so. Rows may see no key of a part. ``merge_error`` has the tolerance."""

# ------------------------------------------------------------------ documents

# Masks that define documents → their arguments with the number of rows and keys of each document.
_SIDES = {
    "document": ("lengths", "lengths"),
    **dict.fromkeys(("documents", "documents_bottom_right"), ("query_lengths", "kv_lengths")),
}


def _document_mask(mask: Spec) -> Spec | None:
    """Return the part that defines documents: the mask itself, a part of an ``and``, or None."""
    parts = mask.parts if mask.name == "and" else (mask,)
    return next((part for part in parts if part.name in _SIDES), None)


def _within_documents(problem: Problem) -> Problem:
    """Return the Problem with the rest of its mask, which hides keys within a document."""
    rest = list(problem.mask.parts) if problem.mask.name == "and" else []
    if rest:
        rest.remove(cast("Spec", _document_mask(problem.mask)))
    mask = Spec.of("and", *rest) if len(rest) > 1 else rest[0] if rest else FULL
    return problem.replace(mask=mask)


def _documents(problem: Problem) -> list[Excerpt]:
    """Return the documents that have rows and keys; rows of other documents see no key."""
    document = cast("Spec", _document_mask(problem.mask))
    rows, keys = (
        _ranges(document.values[name], length)
        for name, length in zip(_SIDES[document.name], (problem.query, problem.kv), strict=True)
    )
    return [Excerpt.of(problem, rows=r, keys=k) for r, k in zip(rows, keys, strict=True) if r and k]


def _ranges(lengths: Sequence[int], end: int) -> list[range]:
    """Return consecutive ranges of these lengths, cut off at ``end``."""
    ends = list(accumulate(lengths))
    return [range(min(at - n, end), min(at, end)) for n, at in zip(lengths, ends, strict=True)]


def _alone(inputs: Inputs, document: Spec) -> Inputs:
    """Return a document's inputs with the mask that an aligned ``document`` has within it."""
    problem = inputs.problem
    if document.name != "documents_bottom_right":
        return inputs
    own = Spec.of("bottom_right", *document.parts, lengths=[problem.kv] * problem.batch)
    mask = own if problem.mask == FULL else Spec.of("and", own, problem.mask)
    return inputs.replace(problem=problem.replace(mask=mask))


def _unless_documents(problem: Problem) -> str | None:
    if _document_mask(problem.mask) is None:
        return "its mask is neither document nor documents, nor an and with either, aligned or not"
    inside = _within_documents(problem)
    if not all(can_excerpt(inside, each) for each in _documents(problem)):
        return "the rest of its mask, or its score mod, cannot be said of one document alone"
    return None


def _unpack(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    inside = inputs.replace(problem=_within_documents(inputs.problem))
    document = cast("Spec", _document_mask(inputs.problem.mask))
    alone = (_alone(each.inputs(inside), document) for each in _documents(inputs.problem))
    return (*alone, inputs)


def _compare_packed(results: Results) -> Finding | None:
    *alone, whole = results.outputs
    last = results.inputs[-1]
    rows = [each.rows for each in _documents(last.problem)]
    # LSE of rows that see no key; it broadcasts to (batch, heads, query).
    empty_lse = torch.tensor([-torch.inf]) if last.sink is None else last.sink[:, None]
    errors = results.errors
    if errors is not None:
        *document_errors, whole_errors = errors
        errors = [_join(whole_errors, document_errors, rows, torch.zeros(1)), whole_errors]
    return compare_outputs(whole, _join(whole, alone, rows, empty_lse), errors)


def _join(
    like: Outputs, parts: Sequence[Outputs], rows: Sequence[range], empty_lse: torch.Tensor
) -> Outputs:
    """Return the documents' rows at their positions; elsewhere out is 0 and LSE ``empty_lse``."""
    out = torch.zeros_like(like.out)
    lse = None if like.lse is None else empty_lse.to(like.lse).expand_as(like.lse).clone()
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
has no keys give out 0 and LSE −∞, or the sink's logit. If the mask is also causal (``and``), each
document alone is causal too. Compared within bounds, because tiles begin at other rows and keys."""

# ------------------------------------------------------------------ rows


def _compare_rows(results: Results, rows: slice) -> Finding | None:
    """Compare the second run with ``rows`` of the first run, which has all rows."""
    return compare_ends(results, first=each_tensor(lambda x: x[:, :, rows]))


def _excerpted_rows(problem: Problem, parameters: Parameters) -> range:
    rows = int(parameters["rows"])
    return range(problem.query - rows, problem.query) if parameters["last"] else range(rows)


def _first_and_last(problem: Problem) -> list[int]:
    """Return a list with 0 if the first rows alone can be a Problem, and 1 if the last can."""
    # The last row alone has the longest text if a mask or score mod becomes an expression.
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
"""Holds for every right kernel: a row's result depends on that row and the keys that it sees. The
last rows of a square causal Problem are those of a ``causal_bottom_right`` one with fewer rows than
keys, as in decoding with a cache; its first rows are those of ``causal``, aligned top-left. A
kernel may take another path for fewer rows (other tiles, split keys): compared within bounds."""


def _decode_last_rows(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    problem, rows = inputs.problem, int(parameters["rows"])
    before = problem.query - rows

    def later(mod: Spec) -> Spec:
        """Return ``mod`` with ``before`` added to the row index, if it reads the row index."""
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
"""Holds for every right kernel, under any mask and score mod: row i is evaluated with the index
i + query − `rows` (the composition ``offset``), and a row's result depends on that row and the keys
that it sees. Decoding with a cache relies on it. Compared within bounds: fewer rows may be computed
in other tiles, and with split keys."""

# ------------------------------------------------------------------ sequences


def _one_sequence(problem: Problem, sequence: int) -> Excerpt:
    return Excerpt.of(problem, sequences=range(sequence, sequence + 1))


def _unless_sequence_alone(problem: Problem) -> str | None:
    if problem.batch == 1:
        return "its only sequence is alone"
    # The last sequence has the longest text if a mask or score mod becomes an expression.
    if not all(can_excerpt(problem, _one_sequence(problem, b)) for b in (0, problem.batch - 1)):
        return "its mask or score mod cannot be said of one sequence alone"
    return None


def _excerpt_sequence(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    return _one_sequence(inputs.problem, int(parameters["sequence"])).inputs(inputs), inputs


def _compare_sequence(results: Results) -> Finding | None:
    b = results.number("sequence")
    finding = compare_ends(results, last=each_tensor(lambda tensor: tensor[b : b + 1]))
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
"""Holds for every right kernel within bounds: no sequence reads another. Holds bitwise if a row's
tiles and order do not depend on the number of sequences; a kernel that splits the keys of a small
batch to fill the GPU does not promise it."""
