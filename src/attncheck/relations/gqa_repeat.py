"""Grouped heads give what they give when each query head has a copy of its key head."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attncheck.inputs import Descale
from attncheck.relations.agreement import agree, mapped
from attncheck.relations.fit import of_attention, of_gradients
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.relations.finding import Finding
    from attncheck.tensor_names import TensorName

__all__ = ["GQA_REPEAT", "GROUP_SUMS"]


def _unfit(problem: Problem) -> str | None:
    return None if problem.group > 1 else "each of its query heads has a key head of its own"


def _runs(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    problem, scales = inputs.problem, inputs.descale

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        """Head h // group for each h; by a view, since fp8 tensors know few operations."""
        batch, kv_heads, *rest = tensor.shape
        shape = (batch, kv_heads, problem.group, *rest)
        return tensor.unsqueeze(2).expand(shape).reshape(batch, problem.heads, *rest)

    each = scales and Descale(q=repeated(scales.q), k=repeated(scales.k), v=repeated(scales.v))
    copies = inputs.replace(
        problem=problem.replace(kv_heads=problem.heads),
        k=repeated(inputs.k),
        v=repeated(inputs.v),
        descale=each,
    )
    return copies, inputs


def _holds(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, errors: Errors
) -> Finding | None:
    # What copies of a key head have for gradients is for ``GROUP_SUMS`` to add up.
    copies, grouped = (replace(each, dk=None, dv=None) for each in outputs)
    return agree(grouped, copies, errors)


def _sums_hold(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], _: Parameters, errors: Errors
) -> Finding | None:
    problem = runs[1].problem
    assert errors is not None, "asked within bounds"

    def summed(name: TensorName, tensor: torch.Tensor) -> torch.Tensor:
        if name not in ("dk", "dv"):
            return tensor
        batch, _heads, *rest = tensor.shape
        each = tensor.double().view(batch, problem.kv_heads, problem.group, *rest)
        return each.sum(2)

    def like_groups(one: Outputs) -> Outputs:
        return mapped(one, lambda tensor: tensor, summed)

    copies, grouped = outputs
    return agree(grouped, like_groups(copies), [like_groups(errors[0]), errors[1]])


GQA_REPEAT = Relation(
    name="gqa_repeat",
    summary="grouped query heads give what they give with their key head repeated for each",
    runs=_runs,
    holds=_holds,
    promise="batch",
    unfit=of_attention(_unfit, gradients=True),
)
"""Holds for every right kernel within bounds: head h reads key head h // group. To the last bit
where a head's bits depend on its own q, k and v alone; a kernel that packs a group's heads into the
rows of one tile, or splits keys by the number of key heads, does not promise it."""


GROUP_SUMS = Relation(
    name="group_sums",
    summary="the gradients of a shared key head are the sums of those of its copies",
    runs=_runs,
    holds=_sums_hold,
    promise="bounds",
    unfit=of_gradients(_unfit),
)
"""Holds of the exact gradients: a loss that reads one key through several copies changes with it by
the sum of what it changes by with each. Each run is within its own bound, and a sum of gradients
within the sum of theirs."""
