"""Faults of the online softmax: tile by tile, with something not rescaled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.hypotheses.given import product
from attncheck.hypotheses.model import Variant, model
from attncheck.outputs import Outputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from attncheck.hypotheses.given import Given

__all__ = ["Steps", "online"]

_FP32_LOWEST = -150 * math.log(2.0)  # exp below it is 0 in fp32
_FP32_LARGEST = 128 * math.log(2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What is done otherwise.

    Attributes:
        alpha_on_out, alpha_on_sum: Whether what was summed before is rescaled.
        exponent: What alpha's exponent is multiplied by.
        raw_last: Whether the last tile's weights are not relative to the maximum.
        first_maximum: Before the first tile.
        guarded: Whether a row that has seen nothing yet keeps a maximum of 0.
        weights: What becomes of a tile's weights before they are multiplied by V.
        sums: What becomes of them before they are summed.
        kept_out, kept_sum: What becomes of the running sums after each tile.
    """

    alpha_on_out: bool = True
    alpha_on_sum: bool = True
    exponent: float = 1.0
    raw_last: bool = False
    first_maximum: float = -math.inf
    guarded: bool = False
    weights: Callable[[Tensor], Tensor] | None = None
    sums: Callable[[Tensor], Tensor] | None = None
    kept_out: Callable[[Tensor], Tensor] | None = None
    kept_sum: Callable[[Tensor], Tensor] | None = None


def online(given: Given, size: int, steps: Steps, z: Tensor | None = None) -> Outputs:
    """FlashAttention-2's recurrence in float64 over tiles of ``size`` keys, with ``steps``."""
    z = given.z if z is None else z
    shape = z.shape[:3]
    m = z.new_full(shape, steps.first_maximum)
    total, out = z.new_zeros(shape), z.new_zeros((*shape, given.v.shape[-1]))
    if given.sink is not None:
        m, total = given.sink.expand(shape), torch.ones_like(total)
    tiles = list(range(0, z.shape[-1], size))
    for start in tiles:
        part = z[..., start : start + size]
        new = torch.maximum(m, part.amax(-1))
        if steps.guarded:
            new = torch.where(new == -math.inf, 0.0, new)
        shift = torch.where(new == -math.inf, 0.0, new)
        raw = steps.raw_last and start == tiles[-1]
        p = _exp(part if raw else part - shift[..., None])
        alpha = _exp((m - shift) * steps.exponent)
        total = total * (alpha if steps.alpha_on_sum else 1.0) + (
            p if steps.sums is None else steps.sums(p)
        ).sum(-1)
        p = p if steps.weights is None else steps.weights(p)
        weighted = product(p, given.v[:, :, start : start + size])
        out = out * (alpha if steps.alpha_on_out else 1.0 + 0 * alpha)[..., None] + weighted
        out = out if steps.kept_out is None else steps.kept_out(out)
        total = total if steps.kept_sum is None else steps.kept_sum(total)
        m = new
    dead = total == 0
    lse = torch.where(dead, -math.inf, m + total.log())
    return Outputs(
        torch.where(dead[..., None], 0.0, out / torch.where(dead, 1.0, total)[..., None]), lse
    )


def _exp(exponent: Tensor) -> Tensor:
    """With what is 0 or infinite in fp32 such."""
    found = exponent.exp()
    found = torch.where(exponent < _FP32_LOWEST, 0.0, found)
    return torch.where(exponent > _FP32_LARGEST, math.inf, found)


def _each(given: Given, steps: Steps) -> Iterator[Variant]:
    for size in given.key_tiles:
        yield Variant(outputs=online(given, size, steps), parameters={"tile": size})


@model(
    "alpha-not-on-out",
    "the output so far is not rescaled when the running maximum rises",
    group="softmax",
)
def _out(given: Given) -> Iterator[Variant]:
    yield from _each(given, Steps(alpha_on_out=False))


@model(
    "alpha-not-on-sum",
    "the row sum so far is not rescaled when the running maximum rises",
    group="softmax",
)
def _sum(given: Given) -> Iterator[Variant]:
    yield from _each(given, Steps(alpha_on_sum=False))


@model(
    "alpha-not-at-all",
    "neither the output nor the row sum so far is rescaled when the running maximum rises",
    group="softmax",
)
def _neither(given: Given) -> Iterator[Variant]:
    yield from _each(given, Steps(alpha_on_sum=False, alpha_on_out=False))


@model(
    "alpha-of-another-base",
    "what was summed so far is rescaled by a power of another base than the weights are of",
    group="softmax",
)
def _base(given: Given) -> Iterator[Variant]:
    for exponent in (math.log(2.0), 1 / math.log(2.0), given.scale, 1 / given.scale):
        yield from _each(given, Steps(exponent=exponent))


@model(
    "last-tile-without-maximum",
    "the weights of the last tile are not relative to the maximum",
    group="softmax",
)
def _raw(given: Given) -> Iterator[Variant]:
    yield from _each(given, Steps(raw_last=True))


@model(
    "maximum-from-zero",
    "the running maximum starts at 0: rows whose scores are all far below lose their weights",
    group="softmax",
)
def _from_zero(given: Given) -> Iterator[Variant]:
    for size in given.key_tiles:
        outputs = online(given, size, Steps(first_maximum=0.0))
        yield Variant(outputs=outputs, parameters={"tile": size})
        yield Variant(outputs=online(given, size, Steps(guarded=True)), parameters={"tile": size})
