"""Decoding is the last rows of prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.mods.spec import Spec
from attncheck.relations.agreement import agree, mapped
from attncheck.relations.fit import indices_read, of_attention
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.relations.finding import Finding

__all__ = ["PREFILL_ROWS"]


def _allowed(problem: Problem) -> Mapping[str, Sequence[int]]:
    return {"rows": range(1, problem.query)}


def _unfit(problem: Problem) -> str | None:
    return "one row has no rows before it" if problem.query == 1 else None


def _later(mod: Spec, rows: int) -> Spec:
    """``mod`` of rows that are ``rows`` later; itself where it is the same for every row."""
    return Spec.of("offset", mod, rows=rows) if "q_idx" in indices_read(mod) else mod


def _runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    problem, rows = inputs.problem, int(parameters["rows"])
    before = problem.query - rows
    last = inputs.replace(
        problem=problem.replace(
            query=rows,
            mask=_later(problem.mask, before),
            score=_later(problem.score, before),
        ),
        q=inputs.q[:, :, before:].clone(memory_format=torch.contiguous_format),
    )
    return inputs, last


def _holds(
    _: Sequence[Inputs], outputs: Sequence[Outputs], parameters: Parameters, errors: Errors
) -> Finding | None:
    rows = int(parameters["rows"])

    def last(of: Outputs) -> Outputs:
        return mapped(of, lambda tensor: tensor[:, :, -rows:])

    prefill, decoded = outputs
    return agree(decoded, last(prefill), errors and [last(errors[0]), errors[1]])


PREFILL_ROWS = Relation(
    name="prefill_rows",
    summary="the last `rows` rows, decoded behind the others, are those of prefill",
    runs=_runs,
    holds=_holds,
    promise="bounds",
    unfit=of_attention(_unfit),
    allowed=_allowed,
)
"""Holds for every right kernel, under any mask and score mod: they are asked of row i what they
were asked of row i + query − `rows` (the composition ``offset``), and a row's result is of that row
and of the keys that it sees. What decoding with a cache relies on. Within bounds: fewer rows may be
computed by other tiles, and with their keys in splits."""
