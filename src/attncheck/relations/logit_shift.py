"""A constant that a score mod adds to every logit: out stays, LSE moves by the constant."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.mods import library
from attncheck.mods.spec import Spec
from attncheck.outputs import Outputs
from attncheck.relations.agreement import agree
from attncheck.relations.fit import of_attention, without_sink
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.inputs import Inputs
    from attncheck.problem import Problem
    from attncheck.question import Allowed
    from attncheck.relations.finding import Finding

__all__ = ["LOGIT_SHIFT"]

_NATS = (0, 1, -1, 40, -40, 400, -400)


def _allowed(_: Problem) -> Allowed:
    """Whole numbers; 0 stands for the library's bias, which kernels take that know no text."""
    return {"nats": _NATS}


def _added(problem: Problem, nats: int) -> Spec:
    """What adds a number of the head's own."""
    if nats == 0:
        return Spec.of("relative_bias", distance=0, seed=problem.seed)
    return Spec.of("expression", text=f"score + (h {'-' if nats < 0 else '+'} {abs(nats)})")


def _runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    problem = inputs.problem
    added = _added(problem, int(parameters["nats"]))
    score = added if problem.score == library.NONE else Spec.of("chain", problem.score, added)
    return inputs, inputs.replace(problem=problem.replace(score=score))


def _holds(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], parameters: Parameters, errors: Errors
) -> Finding | None:
    before, after = outputs
    lse = before.lse
    if lse is not None:
        lse = lse.double() + _shift(runs[0].problem, int(parameters["nats"])).to(lse.device)
    return agree(after, Outputs(before.out, lse), errors)


def _shift(problem: Problem, nats: int) -> torch.Tensor:
    """What is added to 0, float64 ``(heads, 1)``."""
    added = library.build_score(_added(problem, nats), problem.dimensions)
    head = torch.arange(problem.heads)[:, None]
    zero = torch.zeros_like(head)
    return added(zero.double(), zero, head, zero, zero)


LOGIT_SHIFT = Relation(
    name="logit_shift",
    summary="a score mod that adds one number to every logit of a head, `nats` + h, leaves out and "
    "moves LSE by it",
    runs=_runs,
    holds=_holds,
    promise="bounds",
    unfit=of_attention(without_sink),
    allowed=_allowed,
)
"""Holds of the exact results after any score mod of the Problem's: softmax(s + t) = softmax(s), and
log Σ exp(s + t) = t + log Σ exp(s). The number t is an fp32 number: whole, or of the bias's table.
Each run is within its own bound, the second one's with the score mod's roundings in it:
|second − first| ≤ the sum."""
