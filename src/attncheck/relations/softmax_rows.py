"""Rows of a softmax do not know each other: in another order they give the same in that order."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from attncheck.relations.fit import of_softmax
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

__all__ = ["SOFTMAX_ROWS"]


def _rows(problem: Problem) -> int:
    return problem.batch * problem.heads * problem.query


def _allowed(problem: Problem) -> Allowed:
    rows = _rows(problem)
    return {"turn": turns(rows, partial(reflected, rows))}


def _unfit(problem: Problem) -> str | None:
    return "it has one row" if _rows(problem) == 1 else None


def _moved(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """Rows ``(batch, heads, query)`` in the order of ``turn``; a last axis goes with them."""
    rows = tensor.flatten(0, 2)
    return rows[reflected(len(rows), turn)].view(tensor.shape)


def _runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    assert inputs.x is not None, "a softmax has scores"
    return inputs, inputs.replace(x=_moved(inputs.x, int(parameters["turn"])))


def _holds(
    _: Sequence[Inputs], outputs: Sequence[Outputs], parameters: Parameters, errors: Errors
) -> Finding | None:
    return compared(outputs, lambda tensor: _moved(tensor, int(parameters["turn"])), errors)


SOFTMAX_ROWS = Relation(
    name="softmax_rows",
    summary="rows of scores in another order, of all heads and sequences, give the same rows in "
    "that order",
    runs=_runs,
    holds=_holds,
    promise="batch",
    unfit=of_softmax(_unfit),
    allowed=_allowed,
)
"""Holds of the exact results: a row is a function of its own scores. To the last bit in a kernel
whose rows know nothing of their place; else within the bounds of both runs, the first one's moved
like its out."""
