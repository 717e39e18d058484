"""Every logit far below 0, or far above: what a maximum that starts at 0 and a sentinel spoil."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from attncheck.probes.codes import code, values
from attncheck.probes.logits import blank, product_of, too_far
from attncheck.probes.probe import Parameters, Probe
from attncheck.probes.storing import fill_apart, stored

if TYPE_CHECKING:
    from attncheck.inputs import Inputs
    from attncheck.problem import Problem

__all__ = ["NEGATIVE", "POSITIVE"]

_LOGIT = 128.0
"""exp(−128) is 0 in fp32 and exp(128) is infinite; the logits are from here to 160."""


def _unable(problem: Problem) -> str | None:
    return too_far(problem, _LOGIT)


def _fill(sign: int, problem: Problem, _: Parameters) -> Inputs:
    q, k = blank(problem)
    x, y = product_of(problem, _LOGIT)
    q[..., 0], k[..., 0] = x, sign * y
    fill_apart(q, k, 1)
    return stored(problem, q, k, values(problem, code(problem)))


NEGATIVE = Probe(
    name="negative",
    summary="every logit the same, −128 or less, and V a code: the maximum starts at −∞, not 0",
    fill=partial(_fill, -1),
    unable=_unable,
)
POSITIVE = Probe(
    name="positive",
    summary="every logit the same, 128 or more, and V a code: the maximum is subtracted",
    fill=partial(_fill, 1),
    unable=_unable,
)
