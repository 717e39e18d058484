"""Equal weights and V a code of the key index: out counts the keys that a row saw."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.probes.codes import code, rounds, values
from attncheck.probes.logits import blank
from attncheck.probes.probe import Parameters, Probe
from attncheck.probes.storing import fill_apart, stored

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attncheck.inputs import Inputs
    from attncheck.problem import Problem

__all__ = ["DECODE"]


def _allowed(problem: Problem) -> Mapping[str, Sequence[int]]:
    return {"round": range(rounds(problem))}


def _fill(problem: Problem, parameters: Parameters) -> Inputs:
    q, k = blank(problem)
    fill_apart(q, k, 0)
    return stored(problem, q, k, values(problem, code(problem, int(parameters["round"]))))


DECODE = Probe(
    name="decode",
    summary="q·k = 0 and V a code of the key index: out · n and exp(LSE) count the keys seen",
    fill=_fill,
    allowed=_allowed,
)
"""Holds for every right kernel: with all scores 0 every weight is the same power of two, exact in
every format of P, so that sums of 0s and 1s are counts; only the division and out are rounded."""
