"""One key takes a row's whole weight, exactly: out is its value, bit for bit, and LSE is 0."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attncheck import inputs as inputs_room
from attncheck.draws import Draws
from attncheck.inputs import Inputs
from attncheck.mods import library
from attncheck.relations import sight
from attncheck.relations.finding import Finding, wrong
from attncheck.relations.fit import of_attention, without_sink
from attncheck.relations.relation import Errors, Parameters, Relation
from attncheck.relations.single_weights import as_read

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.question import Allowed

__all__ = ["ONE_HOT"]

_APART = 128.0
"""Nats or more: exp(−128) is below 2^-184, and half of fp32's smallest number is 2^-150."""

_LARGEST_EXPONENT = 60


def _bits(problem: Problem) -> int:
    """What it takes to tell every key."""
    return (problem.kv - 1).bit_length()


def _factor(problem: Problem) -> float:
    """The power of two that a differing bit costs in q · k."""
    return 2.0 ** math.ceil(math.log2(_APART / problem.scale))


def _unfit(problem: Problem) -> str | None:
    if problem.score != library.NONE:
        return "its score mod may make something else of a score"
    if problem.head_dim < 2 * _bits(problem):
        return f"head_dim={problem.head_dim} has no room for {_bits(problem)} bits of a key, twice"
    fmt, factor = problem.formats.storage, _factor(problem)
    most = 2.0**_LARGEST_EXPONENT if fmt.saturates else min(fmt.max, 2.0**_LARGEST_EXPONENT)
    if not 1 / most <= factor <= most:
        return f"scale={problem.scale:g} asks for q beyond {fmt.name}"
    return None


def _allowed(problem: Problem) -> Allowed:
    return {"turn": range(problem.kv)}


def _chosen(problem: Problem, turn: int, device: torch.device) -> torch.Tensor:
    """int64 ``(batch, heads, query)``: of the n keys that row i sees number (i + turn) mod n.

    −1 where it sees none.
    """
    keys = []
    for rows, visible in sight.blocks(problem, device):
        count = visible.sum(-1, keepdim=True)
        number = torch.arange(rows.start, rows.stop, device=device)[:, None] + turn
        nth = visible & (visible.cumsum(-1) == number % count.clamp(min=1) + 1)
        key = torch.where(count[..., 0] > 0, nth.byte().argmax(-1), -1)
        keys.append(key.expand(problem.batch, problem.heads, -1))
    return torch.cat(keys, dim=2)


def _runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    problem, device, bits = inputs.problem, inputs.device, _bits(inputs.problem)
    chosen = _chosen(problem, int(parameters["turn"]), device)
    row, key = (_digits(x, bits) for x in (chosen, torch.arange(problem.kv, device=device)))
    spare = _spare(problem).to(device)
    k = torch.cat([torch.cat([key, 1 - key], -1).expand(*spare.shape[:3], -1), spare], -1)
    q = torch.cat([1 - row, row], -1) * -_factor(problem)
    q = torch.nn.functional.pad(q, (0, spare.shape[-1]))
    exact = Inputs(
        problem=problem.replace(dtype="fp64"),
        q=_turned(q, problem.group),
        k=_turned(k, 1),
        v=inputs.v.double(),
    )
    return (_with_own_values(inputs_room.rounded(exact, problem), inputs),)


def _digits(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """The low ``bits`` of whole numbers along a last axis, float64."""
    return (numbers[..., None] >> torch.arange(bits, device=numbers.device) & 1).double()


def _spare(problem: Problem) -> torch.Tensor:
    """±1 for the columns of K that no bit needs, where q is 0."""
    shape = (problem.batch, problem.kv_heads, problem.kv, problem.head_dim - 2 * _bits(problem))
    return torch.from_numpy(Draws(problem.seed).integers("one_hot spare", shape, 2)) * 2.0 - 1.0


def _turned(x: torch.Tensor, group: int) -> torch.Tensor:
    """Columns moved round by sequence and key head: no other head's q has its 0 in the place."""
    batch, heads, _, dim = x.shape
    by = torch.arange(batch)[:, None] + torch.arange(heads) // group
    column = (torch.arange(dim) - by[..., None]) % dim
    return x.gather(-1, column[:, :, None].to(x.device).expand(x.shape))


def _with_own_values(made: Inputs, drawn: Inputs) -> Inputs:
    """V as the product reads it; in fp8 with the descale 1, for out is rounded once then."""
    problem, descale = made.problem, made.descale
    if descale is not None:
        descale = replace(descale, v=torch.ones_like(descale.v))
    return made.replace(v=as_read(drawn.v, problem), descale=descale)


def _holds(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], parameters: Parameters, _: Errors
) -> Finding | None:
    (inputs,), (given,) = runs, outputs
    chosen = _chosen(inputs.problem, int(parameters["turn"]), inputs.device)
    v = inputs.v.to(given.out.dtype).repeat_interleave(inputs.problem.group, dim=1)
    value = v.gather(2, chosen.clamp(min=0)[..., None].expand(given.out.shape))
    found = wrong("out", given.out, value.masked_fill(chosen[..., None] < 0, 0.0))
    if found or given.lse is None:
        return found
    zeros = torch.zeros_like(given.lse)
    return wrong("lse", given.lse, zeros.masked_fill(chosen < 0, -torch.inf))


ONE_HOT = Relation(
    name="one_hot",
    summary="a row whose other keys weigh nothing returns the value of the one key left, bit for "
    "bit, and LSE is 0",
    runs=_runs,
    holds=_holds,
    unfit=of_attention(without_sink, _unfit),
    allowed=_allowed,
)
"""Holds of every right kernel. A key's columns are the bits of its number and their complements; a
row's are −c where the key that it singles out has a 0. So q · k = −c · (bits that differ): the
score is exactly 0 for that key and at most −128 for every other one. In whatever order, scale and
base, its weight is exp(0) = 1 and theirs are below half of fp32's smallest number: 0 when the two
meet, however far the maximum lags before. Out = 1 · v / 1 and LSE = 0 + log 1, without rounding.
V is first rounded to what P · V reads of it (``single_weights``).

Unlike the probe ``isolated``, whose best score is large and whose values are counted within an
error, it compares every bit, in fp32 too, and singles out every visible key in its turn. The sign
of a zero is left open.
"""
