"""Rows of a Problem, asked alone with all keys, are what they are in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.relations.agreement import agree, mapped
from attncheck.relations.excerpt import Excerpt, said
from attncheck.relations.fit import of_attention
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.relations.finding import Finding

__all__ = ["RECTANGULAR"]


def _taken(problem: Problem, parameters: Parameters) -> range:
    rows = int(parameters["rows"])
    return range(problem.query - rows, problem.query) if parameters["last"] else range(rows)


def _sayable(problem: Problem) -> list[int]:
    # The last row alone has the longest text, where a mask or score mod is written.
    ends = (range(1), range(problem.query - 1, problem.query))
    return [last for last, rows in enumerate(ends) if said(problem, Excerpt.of(problem, rows=rows))]


def _allowed(problem: Problem) -> Mapping[str, Sequence[int]]:
    return {"rows": range(1, problem.query), "last": _sayable(problem)}


def _unfit(problem: Problem) -> str | None:
    if problem.query == 1:
        return "one row has no part"
    return None if _sayable(problem) else "its mask or score mod cannot be said of some rows alone"


def _runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    rows = _taken(inputs.problem, parameters)
    return inputs, Excerpt.of(inputs.problem, rows=rows).inputs(inputs)


def _holds(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], parameters: Parameters, errors: Errors
) -> Finding | None:
    rows = _taken(runs[0].problem, parameters)

    def part(of: Outputs) -> Outputs:
        def taken(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[:, :, rows.start : rows.stop]

        return mapped(of, taken)

    expected = part(outputs[0])
    return agree(outputs[1], expected, errors and [part(errors[0]), errors[1]])


RECTANGULAR = Relation(
    name="rectangular",
    summary="the first `rows` rows, or with `last` the last, asked alone are those of the whole",
    runs=_runs,
    holds=_holds,
    promise="bounds",
    unfit=of_attention(_unfit),
    allowed=_allowed,
)
"""Holds for every right kernel: a row's result is of that row, and of the keys that it sees. The
last rows of a square causal Problem are those of a ``causal_bottom_right`` one with fewer rows than
keys, as in decoding with a cache; its first rows are those of ``causal``, aligned top-left. A
kernel may take another path for fewer rows (other tiles, split keys): within bounds."""
