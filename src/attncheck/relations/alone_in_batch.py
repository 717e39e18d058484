"""A sequence asked alone gives what it gives in its batch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from attncheck.relations.agreement import agree, mapped
from attncheck.relations.excerpt import Excerpt, said
from attncheck.relations.fit import of_attention
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.relations.finding import Finding

__all__ = ["ALONE_IN_BATCH"]


def _excerpt(problem: Problem, sequence: int) -> Excerpt:
    return Excerpt.of(problem, sequences=range(sequence, sequence + 1))


def _allowed(problem: Problem) -> Mapping[str, Sequence[int]]:
    return {"sequence": range(problem.batch)}


def _unfit(problem: Problem) -> str | None:
    if problem.batch == 1:
        return "its only sequence is alone"
    # The last sequence has the longest text, where a mask or score mod is written.
    if not all(said(problem, _excerpt(problem, b)) for b in (0, problem.batch - 1)):
        return "its mask or score mod cannot be said of one sequence alone"
    return None


def _runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    return _excerpt(inputs.problem, int(parameters["sequence"])).inputs(inputs), inputs


def _holds(
    _: Sequence[Inputs], outputs: Sequence[Outputs], parameters: Parameters, errors: Errors
) -> Finding | None:
    b = int(parameters["sequence"])

    def sequence(of: Outputs) -> Outputs:
        return mapped(of, lambda tensor: tensor[b : b + 1])

    alone, batch = outputs
    found = agree(sequence(batch), alone, errors and [errors[0], sequence(errors[1])])
    return found and dataclasses.replace(found, place=(b, *found.place[1:]))


ALONE_IN_BATCH = Relation(
    name="alone_in_batch",
    summary="sequence `sequence` gives in its batch what it gives alone",
    runs=_runs,
    holds=_holds,
    promise="batch",
    unfit=of_attention(_unfit),
    allowed=_allowed,
)
"""Holds for every right kernel within bounds: no sequence reads another. To the last bit where a
row's tiles and order do not depend on how many sequences there are; a kernel that fills a GPU by
splitting the keys of a small batch does not promise it."""
