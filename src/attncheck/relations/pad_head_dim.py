"""Columns of zeros in q and k add nothing to a score."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.problem import LARGEST_HEAD_DIM
from attncheck.relations.agreement import agree
from attncheck.relations.fit import of_attention
from attncheck.relations.relation import Errors, Parameters, Relation
from attncheck.relations.zero_columns import COLUMNS, with_zero_columns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.relations.finding import Finding

__all__ = ["PAD_HEAD_DIM"]


def _allowed(problem: Problem) -> Mapping[str, Sequence[int]]:
    return {"columns": [n for n in COLUMNS if problem.head_dim + n <= LARGEST_HEAD_DIM]}


def _unfit(problem: Problem) -> str | None:
    return None if _allowed(problem)["columns"] else "its head_dim is the largest"


def _runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    columns = int(parameters["columns"])
    wider = inputs.problem.replace(head_dim=inputs.problem.head_dim + columns)
    q, k = (with_zero_columns(tensor, columns) for tensor in (inputs.q, inputs.k))
    return inputs, inputs.replace(problem=wider, q=q, k=k)


def _holds(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, errors: Errors
) -> Finding | None:
    before, wider = outputs
    return agree(wider, before, errors)


PAD_HEAD_DIM = Relation(
    name="pad_head_dim",
    summary="`columns` columns of zeros more in q and k, at the same scale, change nothing",
    runs=_runs,
    holds=_holds,
    promise="bounds",
    unfit=of_attention(_unfit),
    allowed=_allowed,
)
"""Holds for every right kernel: a product with 0 is 0. The scale stays as it was, and is not
1/√head_dim then. Within bounds: a wider tile adds in another order."""
