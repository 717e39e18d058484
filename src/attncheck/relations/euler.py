"""Scores know q and k as a product: Σ q · dq over a head's rows is Σ k · dk over its keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.relations.finding import Finding, apart
from attncheck.relations.fit import of_gradients
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs

__all__ = ["EULER"]


def _runs(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    return (inputs,)


def _holds(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], _: Parameters, errors: Errors
) -> Finding | None:
    (inputs,), (given,) = runs, outputs
    assert errors is not None, "asked within bounds"
    (allowed,) = errors
    if given.dq is None or given.dk is None or allowed.dq is None or allowed.dk is None:
        return None
    q, k, _v = inputs.promoted()
    group = inputs.problem.group
    of_rows, of_keys = _sums(q * given.dq.double(), group), _sums(k * given.dk.double(), 1)
    may = _sums(q.abs() * allowed.dq, group) + _sums(k.abs() * allowed.dk, 1)
    # What adding up in float64 may lose of either sum.
    terms = max(q[0, 0].numel() * group, k[0, 0].numel())
    lost = _sums((q * given.dq.double()).abs(), group) + _sums((k * given.dk.double()).abs(), 1)
    # 0 · ∞: of what nothing is known, any sum may be right.
    may = (may + terms * 2.0**-52 * lost).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return apart("dk", of_keys, of_rows, may)


def _sums(products: torch.Tensor, group: int) -> torch.Tensor:
    """``(batch, kv_heads, 1, 1)``: over all that belongs to a key head."""
    batch, heads = products.shape[:2]
    return products.reshape(batch, heads // group, -1).sum(-1)[..., None, None]


EULER = Relation(
    name="euler",
    summary="the sum of q · dq over all rows that read a key head is that of k · dk over its keys",
    runs=_runs,
    holds=_holds,
    promise="bounds",
    unfit=of_gradients(),
)
"""Holds of the exact gradients: both are Σ_ij dX_ij · scale · q_i · k_j (Euler's theorem of
homogeneous functions, once in q and once in k). A factor that one of the two lacks, such as the
scale, shows without any oracle. Each product may be off by its own bound: the sums by the sum of
those, which in 16 bits is much: it tells most in fp32. The element that a finding names is the key
head's first; its value is the whole sum."""
