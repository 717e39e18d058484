"""Grouped heads give what they give when each query head has a copy of its key head."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attncheck.inputs import Descale
from attncheck.relations.agreement import agree, mapped
from attncheck.relations.fit import of_attention
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.relations.finding import Finding
    from attncheck.tensor_names import TensorName

__all__ = ["GQA_REPEAT"]


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
    runs: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, errors: Errors
) -> Finding | None:
    copies, grouped = outputs
    problem = runs[1].problem
    if not problem.backward:
        return agree(grouped, copies, errors)

    def summed(name: TensorName, tensor: torch.Tensor) -> torch.Tensor:
        """The gradient of a shared key head is the sum over those of its copies."""
        if name not in ("dk", "dv"):
            return tensor
        batch, _heads, *rest = tensor.shape
        each = tensor.double().view(batch, problem.kv_heads, problem.group, *rest)
        return each.sum(2)

    def grouped_like(one: Outputs) -> Outputs:
        return mapped(one, lambda tensor: tensor, summed)

    if errors is None:  # a sum of rounded gradients is another sum
        copies, grouped = (replace(each, dk=None, dv=None) for each in outputs)
        return agree(grouped, copies, None)
    return agree(grouped, grouped_like(copies), [grouped_like(errors[0]), errors[1]])


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
