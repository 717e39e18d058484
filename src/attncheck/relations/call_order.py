"""What a call gives does not depend on the call before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck import inputs as inputs_room
from attncheck.relations.agreement import agree
from attncheck.relations.excerpt import Excerpt, said
from attncheck.relations.fit import of_attention
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.relations.finding import Finding

__all__ = ["CALL_ORDER"]

_LONGER = 2


def _allowed(problem: Problem) -> Mapping[str, Sequence[int]]:
    shorter = max(problem.query, problem.kv) > 1 and said(problem, _half(problem))
    return {"between": (0, 1, 2) if shorter else (0,)}


def _half(problem: Problem) -> Excerpt:
    rows, keys = (range((length + 1) // 2) for length in (problem.query, problem.kv))
    return Excerpt.of(problem, rows=rows, keys=keys)


def _runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    problem = inputs.problem
    # Normal whatever the first: another draw of constant values is the same.
    other = problem.replace(distribution="normal", seed=(problem.seed + 1) % 2**63)
    if parameters["between"]:
        other = _half(other).problem(other)
    drawn = inputs_room.draw(other, inputs.device)
    return (drawn, inputs, drawn) if parameters["between"] == _LONGER else (inputs, drawn, inputs)


def _holds(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, errors: Errors
) -> Finding | None:
    before, _between, after = outputs
    return agree(after, before, errors and [errors[0], errors[2]])


CALL_ORDER = Relation(
    name="call_order",
    summary="a call after one on other inputs, with `between` 1 shorter ones and with 2 longer "
    "ones, gives what it gave before",
    runs=_runs,
    holds=_holds,
    promise="repeat",
    unfit=of_attention(gradients=True),
    allowed=_allowed,
)
"""Holds to the last bit for every kernel that gives the same bits twice: nothing is left of the
call between, whose inputs are as long, half as long, or twice. Finds workspaces that are not
cleared, padding that holds what a longer call left there, and what is kept of the last call by
pointer or shape: the runs' tensors may lie in the same memory. What is kept for good gives the
first call's again; then the call between is wrong, which comparing with exact attention shows."""
