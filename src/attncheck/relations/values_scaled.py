"""Out is linear in V: V times a power of two gives out times it, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attncheck.formats import round_to
from attncheck.outputs import Outputs
from attncheck.relations.agreement import agree
from attncheck.relations.fit import of_attention
from attncheck.relations.relation import Errors, Parameters, Relation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.formats import Format
    from attncheck.inputs import Inputs
    from attncheck.problem import Problem
    from attncheck.question import Allowed
    from attncheck.relations.finding import Finding

__all__ = ["VALUES_SCALED"]

_POWERS_FP8 = (-1, -4)
_POWERS_FP16 = (-1, 1, -8, 8)
_POWERS = (-1, 1, -24, 24)
_LARGEST_EXPONENT = 4  # of |V|, and of 1/|V|
_DESCALE_EXPONENT = 20  # of V's descale, either way
_LARGEST_SCORE = 24.0

# Score mods that make no score larger.
_NO_LARGER = {"none", "softcap", "chain"}


def _unfit(problem: Problem) -> str | None:
    if all(part.name in _NO_LARGER for part in problem.score.walk()):
        return None
    return "its score mod may make scores so far apart that weights are subnormal"


def _allowed(problem: Problem) -> Allowed:
    """Exponents."""
    storage = problem.formats.storage
    if storage.saturates:
        return {"power": _POWERS_FP8}
    return {"power": _POWERS_FP16 if storage.name == "fp16" else _POWERS}


def _runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    fmt = inputs.problem.formats.storage
    v = _of_one_sign(inputs.v.double(), fmt)
    scaled = v * 2.0 ** int(parameters["power"])
    sink = _smaller_sink(inputs)
    first = inputs.replace(q=_smaller_q(inputs), v=v.to(fmt.torch_dtype), sink=sink)
    if first.descale is not None:
        ends = (2.0**-_DESCALE_EXPONENT, 2.0**_DESCALE_EXPONENT)
        first = first.replace(descale=replace(first.descale, v=first.descale.v.clamp(*ends)))
    return first, first.replace(v=scaled.to(fmt.torch_dtype))


def _of_one_sign(v: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Each column of ``v`` with its first key's sign, and no value too small or too large."""
    if fmt.saturates:
        low, high = 2.0 ** (fmt.min_exponent - min(_POWERS_FP8)), fmt.max
    else:
        low, high = 2.0**-_LARGEST_EXPONENT, 2.0**_LARGEST_EXPONENT
    return torch.where(v[:, :, :1] < 0, -1.0, 1.0) * v.abs().clamp(low, high)


def _smaller_q(inputs: Inputs) -> torch.Tensor:
    """q, divided in each head by a power of two that keeps its scores within ``_LARGEST_SCORE``."""
    q, k, _ = inputs.promoted()
    q_norm, k_norm = (x.square().sum(-1).amax(-1).sqrt() for x in (q, k))
    norms = q_norm * k_norm.repeat_interleave(inputs.problem.group, dim=1)
    _, exponent = torch.frexp(inputs.problem.scale * norms / _LARGEST_SCORE)
    factor = torch.pow(2.0, -exponent.clamp(min=0).double())[..., None, None]
    fmt = inputs.problem.formats.storage
    return round_to(inputs.q.double() * factor, fmt).to(fmt.torch_dtype)


def _smaller_sink(inputs: Inputs) -> torch.Tensor | None:
    """No larger than a score, and in fp16 no larger than any: keys keep half of the weight."""
    if inputs.sink is None:
        return None
    fp16 = inputs.problem.formats.storage.name == "fp16"
    return inputs.sink.clamp(-_LARGEST_SCORE, -_LARGEST_SCORE if fp16 else _LARGEST_SCORE)


def _holds(
    _: Sequence[Inputs], outputs: Sequence[Outputs], parameters: Parameters, errors: Errors
) -> Finding | None:
    factor = 2.0 ** int(parameters["power"])
    before, after = outputs
    expected = Outputs((before.out.double() * factor).to(before.out.dtype), before.lse)
    if errors is None:
        return agree(after, expected, None)
    return agree(after, expected, [Outputs(errors[0].out * factor, errors[0].lse), errors[1]])


VALUES_SCALED = Relation(
    name="values_scaled",
    summary="V times 2^`power` gives out times 2^`power` and the same LSE",
    runs=_runs,
    holds=_holds,
    unfit=of_attention(_unfit),
    allowed=_allowed,
)
"""Bit for bit in every kernel that gives the same bits twice, whatever its order and accumulator.

What V enters are products, sums and roundings, and a power of two passes through all of them where
no number that V is part of is subnormal or overflows; P, row sums and LSE do not know V. So the
runs are chosen:

* A column of V has one sign and 2^-4 ≤ |V| ≤ 2^4 (in fp8: no less than is normal still when divided
  by 2^4), so that nothing cancels: what is not 0 is no smaller than one key's part of it.
* q is so small that |score| ≤ 24 (Cauchy–Schwarz on the longest rows of q and k): a weight,
  relative to any maximum before or after it, is at least e^-48 > 2^-70. A key's part of O, divided
  by the row sum or not, is thus at least 2^(-70 − 4 − 24) / kv, normal in fp32 for kv < 2^28.
* Out is a mean of V: at least 2^(-4 − 8) in fp16, where 2^-14 is normal, and below 2^13. A sink is
  24 at most, like any score, and in fp16 −24, so that out is half of the mean at least.
* In fp8 V's descale lies within 2^±20; out is bf16.

A P that rounds to 0 does so in both runs.
"""
