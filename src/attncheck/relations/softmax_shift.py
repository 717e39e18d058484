"""A number added to a row of scores leaves its softmax, and moves LSE by itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

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

__all__ = ["SOFTMAX_SHIFT"]

_NATS = (1, -1, 30, -30, 400, -400)


def _allowed(_: Problem) -> Allowed:
    return {"nats": _NATS}


def _runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    """Scores and shift are multiples of one unit, few enough for the largest sum to be a number."""
    nats, fmt = int(parameters["nats"]), inputs.problem.formats.storage
    x = inputs.scores().clamp(-fmt.max / 4, fmt.max / 4)
    _, exponent = torch.frexp(x.abs().amax() + abs(nats))
    # A sum is below 2^exponent, and rounding to units adds one of them at most.
    unit = 2.0 ** (int(exponent) + 1 - fmt.significand)
    shift = math.copysign(max(1, round(abs(nats) / unit)) * unit, nats)
    x = torch.round(x / unit) * unit
    before, after = (inputs.replace(x=each.to(fmt.torch_dtype)) for each in (x, x + shift))
    return before, after


def _holds(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], _: Parameters, errors: Errors
) -> Finding | None:
    before, after = outputs
    shift = (runs[1].scores() - runs[0].scores())[..., 0]
    lse = None if before.lse is None else before.lse.double() + shift
    return agree(after, Outputs(before.out, lse), errors)


SOFTMAX_SHIFT = Relation(
    name="softmax_shift",
    summary="about `nats` added to every score leaves out, and moves LSE by exactly as much",
    runs=_runs,
    holds=_holds,
    promise="bounds",
    unfit=of_softmax(),
    allowed=_allowed,
)
"""Holds of the exact results: softmax(x + c) = softmax(x), and log Σ exp(x + c) = c + log Σ exp(x).
The sums x + c are exact: x is rounded to a coarse grid first, and c is on it. Each run is within
its own bound: |second − first| ≤ the sum of both."""
