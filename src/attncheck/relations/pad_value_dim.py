"""Columns of zeros in V give columns of zeros in out, and leave the others as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.outputs import Outputs
from attncheck.problem import LARGEST_HEAD_DIM
from attncheck.relations.agreement import agree
from attncheck.relations.fit import of_attention
from attncheck.relations.relation import Errors, Parameters, Relation
from attncheck.relations.zero_columns import COLUMNS, with_zero_columns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attncheck.inputs import Inputs
    from attncheck.problem import Problem
    from attncheck.relations.finding import Finding

__all__ = ["PAD_VALUE_DIM"]


def _allowed(problem: Problem) -> Mapping[str, Sequence[int]]:
    return {"columns": [n for n in COLUMNS if problem.value_dim + n <= LARGEST_HEAD_DIM]}


def _unfit(problem: Problem) -> str | None:
    return None if _allowed(problem)["columns"] else "its value_dim is the largest"


def _runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    columns = int(parameters["columns"])
    wider = inputs.problem.replace(value_dim=inputs.problem.value_dim + columns)
    return inputs, inputs.replace(problem=wider, v=with_zero_columns(inputs.v, columns))


def _holds(
    _: Sequence[Inputs], outputs: Sequence[Outputs], parameters: Parameters, errors: Errors
) -> Finding | None:
    assert errors is not None, "asked within bounds"
    columns = int(parameters["columns"])

    def with_exact_zeros(of: Outputs) -> Outputs:
        own = of.out if of is not errors[1] else of.out[..., :-columns]
        return Outputs(with_zero_columns(own, columns), of.lse)

    before, wider = outputs
    return agree(wider, with_exact_zeros(before), [with_exact_zeros(error) for error in errors])


PAD_VALUE_DIM = Relation(
    name="pad_value_dim",
    summary="`columns` columns of zeros more in V give exactly 0, and leave the others as they are",
    runs=_runs,
    holds=_holds,
    promise="bounds",
    unfit=of_attention(_unfit),
    allowed=_allowed,
)
"""Holds for every right kernel: each column of out is of the same column of V alone, and weights
are finite, so that Σ of weights times 0 is 0, of either sign. Within bounds in the other columns: a
wider tile may come with another order of the keys."""
