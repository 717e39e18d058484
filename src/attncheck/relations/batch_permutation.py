"""Sequences do not know each other: in another order they give the same in that order."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from attncheck.inputs import Descale
from attncheck.mods.spec import Spec
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

__all__ = ["BATCH_PERMUTATION"]


def _sequences(problem: Problem, turn: int) -> list[int]:
    return reflected(problem.batch, turn)


def _allowed(problem: Problem) -> Allowed:
    return {"turn": turns(problem.batch, partial(_sequences, problem))}


def _unfit(problem: Problem) -> str | None:
    if problem.batch == 1:
        return "it has one sequence"
    parts = [part for part in problem.mask.walk() if part.name != "padding" and not part.parts]
    for name, mods in (("mask", parts), ("score mod", [problem.score])):
        if any("b" in indices_read(mod) for mod in mods):
            return f"its {name} reads the sequence's index"
    return None


def _mask(mask: Spec, order: list[int]) -> Spec:
    """The mask with each padded length where its sequence is."""
    if mask.name == "padding":
        lengths = cast("tuple[int, ...]", mask.values["lengths"])
        return Spec.of("padding", lengths=[lengths[b] for b in order])
    return Spec(mask.name, mask.arguments, tuple(_mask(part, order) for part in mask.parts))


def _runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    problem, scales = inputs.problem, inputs.descale
    order = _sequences(problem, int(parameters["turn"]))
    return inputs, inputs.replace(
        problem=problem.replace(mask=_mask(problem.mask, order)),
        q=inputs.q[order],
        k=inputs.k[order],
        v=inputs.v[order],
        dout=None if inputs.dout is None else inputs.dout[order],
        dlse=None if inputs.dlse is None else inputs.dlse[order],
        descale=scales and Descale(q=scales.q[order], k=scales.k[order], v=scales.v[order]),
    )


def _holds(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], parameters: Parameters, errors: Errors
) -> Finding | None:
    order = _sequences(runs[0].problem, int(parameters["turn"]))
    problem = runs[0].problem

    def gradient(name: TensorName, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if name in ("dsink", "dcaptured") else tensor[order]

    # A sink's is a sum over all sequences, in another order now.
    outputs = [_without_sink(each) for each in outputs] if problem.sink else outputs
    return compared(outputs, lambda tensor: tensor[order], errors, gradient)


def _without_sink(outputs: Outputs) -> Outputs:
    return replace(outputs, dsink=None)


BATCH_PERMUTATION = Relation(
    name="batch_permutation",
    summary="sequences in another order, padded lengths with them, give the same in that order",
    runs=_runs,
    holds=_holds,
    promise="batch",
    unfit=of_attention(_unfit, gradients=True),
    allowed=_allowed,
)
"""Holds of the exact results: a sequence is a function of its own q, k, v and padded length. To the
last bit in a kernel whose rows know nothing of their place; else within the bounds of both runs,
the first one's moved like its out. Of a sink's gradient nothing is said."""
