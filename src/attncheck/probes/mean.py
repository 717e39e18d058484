"""The mean of a power of two of values with more bits than out has: it is rounded once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.draws import Draws
from attncheck.probes.kv_heads import amplitudes
from attncheck.probes.logits import blank, product_of, too_far
from attncheck.probes.probe import Parameters, Probe
from attncheck.probes.storing import fill_apart, stored

if TYPE_CHECKING:
    from attncheck.inputs import Inputs
    from attncheck.problem import Problem

__all__ = ["MEAN"]

_BELOW = 40.0
"""Nats that the other keys lie below: they weigh less than 2^-57."""

_BITS_FP8, _BITS = 13, 20
"""Of a sum of values at most: what the shortest accumulator holds, of fp8 products on Hopper and of
others; more than any output has but fp32."""


def _keys(problem: Problem) -> int:
    """The largest power of two of keys that there is."""
    return 1 << (problem.kv.bit_length() - 1)


def _unable(problem: Problem) -> str | None:
    return too_far(problem, _BELOW)


def _fill(problem: Problem, _: Parameters) -> Inputs:
    q, k = blank(problem)
    x, y = product_of(problem, _BELOW)
    q[..., 0] = x
    k[:, :, _keys(problem) :, 0] = -y
    fill_apart(q, k, 1)
    return stored(problem, q, k, _values(problem))


def _values(problem: Problem) -> torch.Tensor:
    """4 … 7 times 2^-s, of three bits each; s as large as the sum's bits allow."""
    draws = Draws(problem.seed)
    shape = (problem.batch, problem.kv_heads, problem.kv, problem.value_dim)
    held = _BITS_FP8 if problem.formats.scaled else _BITS
    most = max(0, held - 3 - (_keys(problem) - 1).bit_length())
    bits, exponent = (
        torch.from_numpy(draws.integers(f"mean {name}", shape, bound)).double()
        for name, bound in (("significand", 4), ("exponent", most + 1))
    )
    return (4.0 + bits) * torch.pow(2.0, -exponent) * amplitudes(problem)[..., None, None]


MEAN = Probe(
    name="mean",
    summary="equal weights and V of as many bits as accumulators hold: rows that see 2^n keys give "
    "their mean, rounded once",
    fill=_fill,
    unable=_unable,
)
