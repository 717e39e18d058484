"""What a call gives does not depend on the mask of the call before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.mods.library import FULL
from attncheck.mods.spec import Spec
from attncheck.relations.agreement import agree, mapped
from attncheck.relations.excerpt import Excerpt, said
from attncheck.relations.fit import of_attention
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.relations.finding import Finding

__all__ = ["MASK_ORDER"]


def _rows(problem: Problem) -> range:
    """Half of them: another shape than the whole."""
    return range((problem.query + 1) // 2)


def _unfit(problem: Problem) -> str | None:
    if problem.query == 1 or problem.kv == 1:
        return "it needs two rows, of which one is left out, and two keys, of which one is hidden"
    if not said(problem, Excerpt.of(problem, rows=_rows(problem))):
        return "its mask or score mod cannot be said of some rows alone"
    return None


def _runs(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    problem = inputs.problem
    other = Spec.of("causal") if problem.mask == FULL else FULL
    alone = Excerpt.of(problem, rows=_rows(problem)).inputs(inputs)
    return alone, inputs.replace(problem=problem.replace(mask=other)), inputs


def _holds(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], _: Parameters, errors: Errors
) -> Finding | None:
    rows = len(_rows(runs[-1].problem))

    def first(of: Outputs) -> Outputs:
        return mapped(of, lambda tensor: tensor[:, :, :rows])

    alone, _other, whole = outputs
    return agree(first(whole), alone, errors and [errors[0], first(errors[2])])


MASK_ORDER = Relation(
    name="mask_order",
    summary="after a call of the same shape under another mask, the first rows are what they are "
    "alone",
    runs=_runs,
    holds=_holds,
    promise="bounds",
    unfit=of_attention(_unfit),
)
"""Holds for every right kernel: nothing is left of the call between. Finds what is kept by shape,
be it a mask, a block mask or a plan, where the shape was first met under another mask: the rows
alone are of another shape, and not mistaken. See ``rectangular`` for why they are the whole's.
"""
