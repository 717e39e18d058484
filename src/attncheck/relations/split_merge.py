"""Attention over two parts of the keys, merged through their LSE, is that over all keys."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attncheck.outputs import Outputs
from attncheck.relations.agreement import agree
from attncheck.relations.excerpt import Excerpt, said
from attncheck.relations.fit import of_attention
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attncheck.inputs import Inputs
    from attncheck.problem import Problem
    from attncheck.relations.finding import Finding

__all__ = ["SPLIT_MERGE", "merge_error", "merged"]

# The merge itself, in float64: a difference, two sigmoids of a few ulps each, two products and a
# sum, and for LSE an exponential, a logarithm and a sum. 16 roundings are more than these.
_ROUNDINGS = 16 * 2.0**-53


def merged(one: Outputs, other: Outputs) -> Outputs:
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
    if not all(said(problem, part) for part in ends):
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
    return agree(whole, merged(*parts), [merge_error(parts, errors[:2]), errors[2]])


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
