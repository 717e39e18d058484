"""Out is linear in V: what some keys' values give and what the others' give adds up to out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.outputs import Outputs
from attncheck.relations.agreement import agree
from attncheck.relations.fills import replaced
from attncheck.relations.finding import same
from attncheck.relations.fit import of_attention
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.inputs import Inputs
    from attncheck.problem import Problem
    from attncheck.question import Allowed
    from attncheck.relations.finding import Finding

__all__ = ["VALUES_ADDED"]

_LONGEST = 10  # 2^10 keys in a row


def _allowed(problem: Problem) -> Allowed:
    powers = (2**n for n in range(_LONGEST + 1))
    return {"run": [run for run in powers if run == 1 or run < problem.kv]}


def _runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    run = int(parameters["run"])
    odd = torch.arange(inputs.problem.kv, device=inputs.device) // run % 2 == 1

    def without(keys: torch.Tensor) -> Inputs:
        zero = torch.zeros_like(inputs.v)
        return inputs.replace(v=replaced(inputs.v, zero, keys[:, None]))

    return without(odd), without(~odd), inputs


def _holds(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, errors: Errors
) -> Finding | None:
    one, other, both = outputs
    assert errors is not None, "asked within bounds"
    out = one.out.double() + other.out.double()
    found = same("out", both.out, out, torch.stack([each.out for each in errors]).sum(0))
    if found:
        return found
    # V is no part of LSE: the first run's is the last one's.
    return agree(Outputs(both.out, both.lse), Outputs(both.out, one.lse), [errors[0], errors[2]])


VALUES_ADDED = Relation(
    name="values_added",
    summary="V = 0 in every second `run` of keys, and V = 0 in the others: the two outs add up to "
    "that of V",
    runs=_runs,
    holds=_holds,
    promise="bounds",
    unfit=of_attention(),
    allowed=_allowed,
)
"""Holds of the exact results, as V splits into two summands and the weights do not know it. Each
kernel's out is within its own bound e of them: |both − (one + other)| ≤ e₁ + e₂ + e₃, by the
triangle inequality; |LSE₃ − LSE₁| ≤ e₁ + e₃."""
