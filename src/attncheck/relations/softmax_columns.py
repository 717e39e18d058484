"""Columns of scores have no order: in another one they give the same in that order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.draws import Draws
from attncheck.outputs import Outputs
from attncheck.relations.agreement import agree
from attncheck.relations.fit import of_softmax
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.inputs import Inputs
    from attncheck.problem import Problem
    from attncheck.question import Allowed
    from attncheck.relations.finding import Finding

__all__ = ["SOFTMAX_COLUMNS"]

_SHUFFLES = 4


def _unfit(problem: Problem) -> str | None:
    return "it has one column" if problem.kv == 1 else None


def _allowed(_: Problem) -> Allowed:
    return {"shuffle": range(_SHUFFLES)}


def _order(problem: Problem, shuffle: int) -> torch.Tensor:
    """int64 ``(kv,)``: which column comes in each place; shuffle 0 turns them round."""
    if shuffle == 0:
        return torch.arange(problem.kv).flip(0)
    drawn = Draws(problem.seed).uniform(f"softmax columns {shuffle}", (problem.kv,))
    return torch.from_numpy(drawn).argsort()


def _runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    assert inputs.x is not None, "a softmax has scores"
    order = _order(inputs.problem, int(parameters["shuffle"])).to(inputs.device)
    return inputs, inputs.replace(x=inputs.x[..., order])


def _holds(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], parameters: Parameters, errors: Errors
) -> Finding | None:
    before, after = outputs
    order = _order(runs[0].problem, int(parameters["shuffle"])).to(before.out.device)

    def moved(given: Outputs) -> Outputs:
        return Outputs(given.out[..., order], given.lse)

    return agree(after, moved(before), errors and [moved(errors[0]), errors[1]])


SOFTMAX_COLUMNS = Relation(
    name="softmax_columns",
    summary="scores in another order within their rows give the same weights in that order, and "
    "the same LSE",
    runs=_runs,
    holds=_holds,
    promise="bounds",
    unfit=of_softmax(_unfit),
    allowed=_allowed,
)
"""Holds of the exact results, whose sums have no order. A kernel's round otherwise in another one:
|second − first| ≤ the sum of both bounds, the first one's moved like its out."""
