"""Two levels of logits: how much less the lower one weighs is the temperature."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.probes.codes import by_parity, values
from attncheck.probes.logits import blank, product_of, too_far
from attncheck.probes.probe import Parameters, Probe
from attncheck.probes.storing import fill_apart, stored

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attncheck.inputs import Inputs
    from attncheck.problem import Problem

__all__ = ["TWO_LEVEL"]

_APART = (8, 14)
"""Nats, or up to a quarter more. At 8 the lower level weighs 2^-11.5 to 2^-14.4: a normal number of
every format of P that is scaled as it must be, and below e4m3's smallest where it is not. At 14 the
same holds of e5m2."""


def _unable(problem: Problem) -> str | None:
    return too_far(problem, _APART[0] / 2) or too_far(problem, _APART[1] / 2)


def _allowed(_: Problem) -> Mapping[str, Sequence[int]]:
    return {"apart": _APART}


def _fill(problem: Problem, parameters: Parameters) -> Inputs:
    q, k = blank(problem)
    x, y = product_of(problem, parameters["apart"] / 2)
    low = torch.arange(problem.kv) % 2 == 1
    q[..., 0], k[..., 0] = x, torch.where(low, -y, y).double()
    fill_apart(q, k, 1)
    return stored(problem, q, k, values(problem, by_parity(problem)))


TWO_LEVEL = Probe(
    name="two_level",
    summary="odd keys lie `apart` nats or more below even ones, in columns of their own: how much "
    "less they weigh is the temperature",
    fill=_fill,
    unable=_unable,
    allowed=_allowed,
)
