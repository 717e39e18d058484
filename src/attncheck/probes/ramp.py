"""Maxima that rise along the keys, slowly or fast, and begin anew."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attncheck.probes.codes import by_column, values
from attncheck.probes.logits import blank, product_of, too_far
from attncheck.probes.probe import Parameters, Probe
from attncheck.probes.storing import fill_apart, stored

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attncheck.inputs import Inputs
    from attncheck.problem import Problem

__all__ = ["RAMP"]

_STEP = 16
"""Keys of a level: a tile has one level or more, and a step of the recurrence one rise or more."""

_DIGIT = 8  # whole numbers below it have three bits, as e5m2 has
_FAST, _SLOW = 32, 1
"""Rises in log2 units. The levels below the highest vanish; or the maximum rises by so little at a
time that a lazy one lags behind for several tiles."""


def _levels(problem: Problem, rise: int) -> torch.Tensor:
    """Of each key. There is an odd number of levels: the next ramp has them on odd places."""
    most = _DIGIT * _DIGIT - 1 if rise == _SLOW and problem.head_dim > 1 else _DIGIT - 1
    return torch.arange(problem.kv) // _STEP % most


def _unable(problem: Problem) -> str | None:
    return too_far(problem, _FAST * math.log(2.0), _DIGIT) or too_far(problem, math.log(2.0), 1.0)


def _allowed(_: Problem) -> Mapping[str, Sequence[int]]:
    return {"rise": (_FAST, _SLOW)}


def _fill(problem: Problem, parameters: Parameters) -> Inputs:
    rise = int(parameters["rise"])
    level = _levels(problem, rise).double()
    q, k = blank(problem)
    x, y = product_of(problem, rise * math.log(2.0))
    q[..., 0], k[..., 0] = y, level % _DIGIT * x
    if problem.head_dim > 1:
        q[..., 1], k[..., 1] = _DIGIT * y, level // _DIGIT * x
    fill_apart(q, k, 2)
    odd = torch.arange(problem.kv) // _STEP % 2 == 1
    v = values(problem, by_column(problem)) * torch.where(odd, 3.0, 1.0)[:, None]
    return stored(problem, q, k, v)


RAMP = Probe(
    name="ramp",
    summary="the logit rises by `rise` log2 units every 16 keys: earlier keys are scaled down",
    fill=_fill,
    unable=_unable,
    allowed=_allowed,
)
