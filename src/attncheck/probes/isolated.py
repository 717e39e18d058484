"""One key at a boundary takes a row's whole weight: out is its value, a row of whole numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch

from attncheck.draws import Draws
from attncheck.probes.boundaries import boundaries
from attncheck.probes.kv_heads import amplitudes
from attncheck.probes.probe import Parameters, Probe
from attncheck.probes.storing import stored

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attncheck.inputs import Inputs
    from attncheck.problem import Problem

__all__ = ["ISOLATED"]

_APART = 32.0
"""Nats that the chosen key is above all others, at least."""

_LARGEST = 8  # whole numbers up to it have three bits, as e5m2 has
_KEYS = 6
"""Boundary keys that all rows share out among them, beside those at their own edges."""


def _edges(problem: Problem) -> list[int]:
    """Keys at the edges of a row's own view, relative to its index: the last seen, the next one."""
    offsets: list[int] = []
    for part in problem.mask.walk():
        if part.name in {"causal", "sliding_window", "prefix_lm"}:
            offsets += [1, 0]
        if part.name == "sliding_window":
            window = cast("int", part.values["window"])
            offsets += [-window, 1 - window]
        if part.name == "causal_bottom_right":
            offsets += [problem.kv - problem.query + 1, problem.kv - problem.query]
    return list(dict.fromkeys(offsets))


def _allowed(problem: Problem) -> Mapping[str, Sequence[int]]:
    return {"turn": range(len(_edges(problem)) + min(_KEYS, problem.kv))}


def _chosen(problem: Problem, turn: int) -> torch.Tensor:
    """int64 ``(batch, heads, query)``: the key that a row singles out on this turn."""
    edges, shared = _edges(problem), boundaries(problem)[:_KEYS]
    row = torch.arange(problem.query)
    lanes = [row + offset for offset in edges] + [torch.full_like(row, key) for key in shared]
    lane = torch.stack(lanes)
    spare = torch.tensor(shared)[row % len(shared)]
    lane = torch.where((lane >= 0) & (lane < problem.kv), lane, spare)
    pair = torch.arange(problem.batch)[:, None] + torch.arange(problem.heads)
    which = (pair[..., None] + row + turn) % len(lanes)
    return lane[which, row.expand_as(which)]


def _used_bits(problem: Problem) -> int:
    return min(max(1, (problem.kv - 1).bit_length()), problem.head_dim)


def _factor(problem: Problem) -> float:
    """The power of two that makes two keys, of which one is singled out, lie ``_APART``."""
    differ = problem.head_dim // _used_bits(problem)
    return 2.0 ** math.ceil(math.log2(_APART / (2 * differ * problem.scale)))


def _unable(problem: Problem) -> str | None:
    fmt, factor = problem.formats.storage, 3 * _factor(problem)
    if fmt.saturates or 2.0**fmt.min_exponent < factor <= fmt.max:
        return None
    return f"scale={problem.scale:g} asks for q beyond {fmt.name}"


def _fill(problem: Problem, parameters: Parameters) -> Inputs:
    draws, turn = Draws(problem.seed), int(parameters["turn"])
    bits = _used_bits(problem)
    shape = (problem.batch, problem.kv_heads, 1, problem.head_dim)
    flips = torch.from_numpy(draws.integers("isolated signs", shape, 2))
    k = _signs(torch.arange(problem.kv), bits, flips)
    of_head = flips.repeat_interleave(problem.group, dim=1)
    first, second = (_signs(_chosen(problem, turn + n), bits, of_head) for n in (0, 1))
    q = _factor(problem) * (2 * first + second)
    return stored(problem, q, k, _values(problem, draws, bits))


def _signs(numbers: torch.Tensor, bits: int, flips: torch.Tensor) -> torch.Tensor:
    """±1 by the low ``bits`` of each number, over and over along a last axis like ``flips``'s."""
    column = torch.arange(flips.shape[-1]) % bits
    return 1.0 - 2.0 * ((numbers[..., None] >> column) & 1 ^ flips).double()


def _values(problem: Problem, draws: Draws, bits: int) -> torch.Tensor:
    """−8 … 8 times the amplitude; keys that have the same signs have the same values."""
    shape = (problem.batch, problem.kv_heads, problem.kv, problem.value_dim)
    v = torch.from_numpy(draws.integers("isolated v", shape, 2 * _LARGEST + 1)).double() - _LARGEST
    v = v[:, :, torch.arange(problem.kv) % 2**bits]
    return v * amplitudes(problem)[..., None, None]


ISOLATED = Probe(
    name="isolated",
    summary="each row singles out a key at a boundary, and a second one should that be hidden: "
    "out is that key's value",
    fill=_fill,
    unable=_unable,
    allowed=_allowed,
)
"""q = c(2·k₁ + k₂) with k distinct rows of signs. With d(x, y) = D − x·y, twice the signs that
differ, k₁ is above any other key x by c(2d(k₁, x) + d(k₂, x) − d(k₁, k₂)) ≥ c·d(k₁, x): the
triangle inequality. Where head_dim is too short for that many keys, keys share signs and values."""
