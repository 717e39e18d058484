"""Heads do not know their place: heads in another order, with their keys, give the same heads."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from attncheck.inputs import Descale
from attncheck.relations.fit import indices_read, of_attention
from attncheck.relations.order import compared, reflected, turns
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.question import Allowed
    from attncheck.relations.finding import Finding
    from attncheck.tensor_names import TensorName

__all__ = ["HEAD_PERMUTATION"]


def _key_heads(problem: Problem, turn: int) -> list[int]:
    return reflected(problem.kv_heads, turn % problem.kv_heads)


def _heads(problem: Problem, turn: int) -> list[int]:
    """Groups follow their key head, and within them heads move round, each group by one more.

    No kernel that takes another key head than h // group does so for all heads alike then.
    """
    group, further = problem.group, turn // problem.kv_heads
    return [
        key_head * group + (head + further + place) % group
        for place, key_head in enumerate(_key_heads(problem, turn))
        for head in range(group)
    ]


def _allowed(problem: Problem) -> Allowed:
    return {"turn": turns(problem.heads, partial(_heads, problem))}


def _unfit(problem: Problem) -> str | None:
    if problem.heads == 1:
        return "it has one head"
    for name, mod in (("mask", problem.mask), ("score mod", problem.score)):
        if "h" in indices_read(mod):
            return f"its {name} reads the head's index"
    return None


def _runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    turn = int(parameters["turn"])
    heads, key_heads = (of(inputs.problem, turn) for of in (_heads, _key_heads))
    scales = inputs.descale
    return inputs, inputs.replace(
        q=inputs.q[:, heads],
        k=inputs.k[:, key_heads],
        v=inputs.v[:, key_heads],
        sink=None if inputs.sink is None else inputs.sink[heads],
        dout=None if inputs.dout is None else inputs.dout[:, heads],
        dlse=None if inputs.dlse is None else inputs.dlse[:, heads],
        descale=scales
        and Descale(q=scales.q[:, key_heads], k=scales.k[:, key_heads], v=scales.v[:, key_heads]),
    )


def _holds(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], parameters: Parameters, errors: Errors
) -> Finding | None:
    turn, problem = int(parameters["turn"]), runs[0].problem
    heads, key_heads = _heads(problem, turn), _key_heads(problem, turn)

    def gradient(name: TensorName, tensor: torch.Tensor) -> torch.Tensor:
        if name == "dcaptured":
            return tensor
        if name == "dsink":
            return tensor[heads]
        return tensor[:, key_heads if name in ("dk", "dv") else heads]

    if problem.group > 1:  # the sums over a group's heads are in another order
        outputs = [replace(each, dk=None, dv=None) for each in outputs]
    return compared(outputs, lambda tensor: tensor[:, heads], errors, gradient)


HEAD_PERMUTATION = Relation(
    name="head_permutation",
    summary="key heads in another order, their groups of query heads with them, give the same "
    "heads in that order",
    runs=_runs,
    holds=_holds,
    promise="batch",
    unfit=of_attention(_unfit, gradients=True),
    allowed=_allowed,
)
"""Holds of the exact results where neither mask nor score mod reads h: head h is a function of its
own q and sink, and of the keys and values of head h // group. To the last bit in a kernel whose
rows know nothing of their place; else within the bounds of both runs, the first one's moved like
its out. Of the gradients of keys that several heads share nothing is said."""
