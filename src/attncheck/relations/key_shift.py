"""The same vector added to every key moves a row's logits alike: out stays, LSE moves by q · c."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attncheck import inputs as inputs_room
from attncheck.formats import round_to
from attncheck.inputs import Descale, Inputs
from attncheck.mods import library
from attncheck.relations import sight
from attncheck.relations.agreement import agree
from attncheck.relations.fills import replaced
from attncheck.relations.fit import of_attention, without_sink
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.formats import Format
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.question import Allowed
    from attncheck.relations.finding import Finding

__all__ = ["KEY_SHIFT"]

_NATS = (1, -1, 30, -30, 100, -100, 400, -400)
_LARGEST_EXPONENT = 60  # of a number of q or k: no product overflows fp32


def _factors(problem: Problem, nats: int) -> tuple[float, float]:
    """(x, y) with scale · x · y near ``nats``: x is a power of two, y has three bits."""
    significand, exponent = math.frexp(abs(nats) / problem.scale)
    half = exponent // 2
    # By eighths, down: one of 0.5, 0.625, 0.75 and 0.875.
    y = math.ldexp(math.floor(8 * significand) / 8, exponent - half)
    return math.ldexp(1.0, half), math.copysign(y, nats)


def _held(fmt: Format, number: float) -> bool:
    """Whether the format has ``number``, with room to spare; fp8 has it by its descale."""
    least, most = -_LARGEST_EXPONENT, _LARGEST_EXPONENT
    if not fmt.saturates:
        least = max(least, fmt.min_exponent + fmt.significand)
        most = min(most, math.floor(math.log2(fmt.max)))
    return 2.0**least <= abs(number) <= 2.0**most


def _allowed(problem: Problem) -> Allowed:
    fmt = problem.formats.storage
    return {
        "nats": [n for n in _NATS if all(_held(fmt, number) for number in _factors(problem, n))]
    }


def _unfit(problem: Problem) -> str | None:
    if problem.score != library.NONE:
        return "its score mod may make something else of a shifted score"
    if not _allowed(problem)["nats"]:
        return f"scale={problem.scale:g} asks for q and k beyond {problem.formats.storage.name}"
    return None


def _runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    """The column of its own that each key head has for the shift: x in q, 0 and then y in K."""
    problem = inputs.problem
    x, y = _factors(problem, int(parameters["nats"]))
    own = _own_column(problem).to(inputs.device)
    q, k, v = inputs.promoted()
    q = torch.where(own.repeat_interleave(problem.group, dim=1), x, q)
    forward = problem.replace(backward=False, dlse=False, dcaptured=False)
    exact = Inputs(problem=forward.replace(dtype="fp64"), q=q, k=torch.where(own, y, k), v=v)
    shifted = _rounded(exact, forward)
    after = inputs.replace(q=shifted.q, k=shifted.k, v=shifted.v, descale=shifted.descale)
    k = replaced(after.k, torch.zeros_like(after.k), own)
    return after.replace(k=k), after


def _own_column(problem: Problem) -> torch.Tensor:
    """Bool ``(batch, kv_heads, 1, head_dim)``: a column that a neighbour has not."""
    pair = torch.arange(problem.batch)[:, None] + torch.arange(problem.kv_heads)
    own = pair[..., None] % problem.head_dim == torch.arange(problem.head_dim)
    return own[:, :, None]


def _rounded(exact: Inputs, problem: Problem) -> Inputs:
    """Rounded once; in fp8 with powers of two as descales: the shift is a float64 number."""
    rounded = inputs_room.rounded(exact, problem)
    if rounded.descale is None:
        return rounded
    fmt, stored, scales = problem.formats.storage, {}, {}
    for name, values in exact.tensors().items():
        _, exponent = torch.frexp(getattr(rounded.descale, name))
        scales[name] = torch.pow(2.0, exponent.float())
        each = scales[name].repeat_interleave(values.shape[1] // problem.kv_heads, dim=1)
        stored[name] = round_to(values / each.double()[..., None, None], fmt).to(fmt.torch_dtype)
    return Inputs(problem=problem, **stored, descale=Descale(**scales))


def _added(runs: Sequence[Inputs]) -> torch.Tensor:
    """Scale · c of each head's keys, float64 ``(batch, heads, 1, head_dim)``."""
    before, after = (each.promoted()[1] for each in runs)
    c = (after - before)[:, :, :1].repeat_interleave(runs[0].problem.group, dim=1)
    return c * runs[0].problem.scale


def _shift(runs: Sequence[Inputs]) -> torch.Tensor:
    """The shift, float64 ``(batch, heads, query)``: q and c meet in one column, exactly."""
    return (runs[1].promoted()[0] * _added(runs)).sum(-1)


def _gradient_shift(runs: Sequence[Inputs]) -> torch.Tensor:
    """What is added to dq, as q in shape: a row's gradients of scores sum to that of its LSE."""
    _, dlse = runs[0].loss()
    alive = ~sight.empty(runs[0].problem).to(dlse.device)
    return (dlse * alive)[..., None] * _added(runs)


def _holds(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], _: Parameters, errors: Errors
) -> Finding | None:
    before, after = outputs
    lse = None if before.lse is None else before.lse.double() + _shift(runs)
    dq = None if before.dq is None else before.dq.double() + _gradient_shift(runs)
    return agree(after, replace(before, lse=lse, dq=dq), errors)


KEY_SHIFT = Relation(
    name="key_shift",
    summary="a vector c added to every key of a key head, which moves all logits by about `nats`: "
    "out stays, LSE moves by scale · q · c, and gradients stay but for the loss's part of LSE",
    runs=_runs,
    holds=_holds,
    promise="bounds",
    unfit=of_attention(without_sink, _unfit, gradients=True),
    allowed=_allowed,
)
"""Holds of the exact results: softmax(s + t) = softmax(s) for a number t of the row's own, and
log Σ exp(s + t) = t + log Σ exp(s). Gradients stay too: those of a row's scores sum to 0; or, where
the loss has a part of LSE, to that, which moves q's by scale · c times it. K + c is a number of
every format, since a column of K that is 0 holds c alone: a number of three bits. q has a power of
two there and scale 24 bits, so t is a float64 number. Each run is within its own bound:
|second − first| ≤ the sum of both."""
