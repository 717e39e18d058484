"""Equal values and random logits: the weights of a row add up to 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.draws import Draws
from attncheck.probes.kv_heads import amplitudes
from attncheck.probes.logits import blank
from attncheck.probes.probe import Parameters, Probe
from attncheck.probes.storing import stored

if TYPE_CHECKING:
    from attncheck.inputs import Inputs
    from attncheck.problem import Problem

__all__ = ["ONES"]


def _fill(problem: Problem, _: Parameters) -> Inputs:
    draws = Draws(problem.seed)
    q, k = (
        torch.from_numpy(draws.normal(f"ones {name}", tuple(zeros.shape)))
        for name, zeros in zip("qk", blank(problem), strict=True)
    )
    v = torch.ones((*k.shape[:3], problem.value_dim), dtype=torch.float64)
    return stored(problem, q, k, v * amplitudes(problem)[..., None, None], exact=False)


ONES = Probe(
    name="ones",
    summary="random logits and V the same in every key: out is V, since weights add up to 1",
    fill=_fill,
)
