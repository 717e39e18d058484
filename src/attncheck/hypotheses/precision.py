"""Faults of precision: what is rounded that must not be, or rounded too far."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attncheck.formats import FORMATS
from attncheck.hypotheses.model import Variant, attention, model
from attncheck.hypotheses.recurrence import Steps, online
from attncheck.outputs import Outputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from attncheck.hypotheses.given import Given

_FORMATS = ("fp16", "bf16", "e4m3", "e5m2")


def _to(name: str) -> Callable[[Tensor], Tensor]:
    """Rounds to a format, as a conversion does: what is too large becomes its infinity."""
    fmt = FORMATS[name]
    if name == "tf32":
        return lambda x: _cut(x, 2.0**-10)

    def rounded(x: Tensor) -> Tensor:
        if fmt.saturates:
            x = torch.where(x.isfinite(), x.clamp(-fmt.max, fmt.max), x)
        return x.float().to(fmt.torch_dtype).double()

    return rounded


def _cut(x: Tensor, unit: float) -> Tensor:
    """Truncated to a relative spacing of ``unit``."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * (2 / unit)).trunc() * (unit / 2), exponent)


@model(
    "weights-rounded",
    "the weights are rounded to too few bits before they multiply the values",
    group="precision",
    order=1,
)
def _weights(given: Given) -> Iterator[Variant]:
    for name in _FORMATS:
        for size in given.key_tiles:
            outputs = online(given, size, Steps(weights=_to(name)))
            yield Variant(outputs=outputs, parameters={"format": name, "tile": size})


@model(
    "sum-rounded",
    "the row sum is kept in too few bits",
    group="precision",
    order=1,
)
def _sum(given: Given) -> Iterator[Variant]:
    for name in ("bf16", "fp16"):
        for size in given.key_tiles:
            both = Steps(kept_sum=_to(name)), Steps(sums=_to(name), kept_sum=_to(name))
            for steps in both:
                outputs = online(given, size, steps)
                yield Variant(outputs=outputs, parameters={"format": name, "tile": size})


@model(
    "out-rounded",
    "the output is accumulated in too few bits",
    group="precision",
    order=1,
)
def _out(given: Given) -> Iterator[Variant]:
    for name in ("bf16", "fp16"):
        for size in given.key_tiles:
            outputs = online(given, size, Steps(kept_out=_to(name)))
            yield Variant(outputs=outputs, parameters={"format": name, "tile": size})


@model(
    "scores-rounded",
    "scores are rounded to too few bits before the softmax",
    group="precision",
    order=1,
)
def _scores(given: Given) -> Iterator[Variant]:
    for name in ("bf16", "fp16"):
        rounded = _to(name)
        yield Variant(
            outputs=given.attend(x=rounded(given.qk) * given.scale), parameters={"format": name}
        )
        yield Variant(outputs=given.attend(x=rounded(given.x)), parameters={"format": name})
        yield Variant(outputs=given.attend(s=rounded(given.s)), parameters={"format": name})


@model(
    "products-tf32",
    "q, k and v are rounded before they are multiplied: tf32, or fewer bits",
    group="precision",
    applies=attention,
    order=1,
)
def _products(given: Given) -> Iterator[Variant]:
    for name in ("tf32", "bf16", "fp16", "e4m3"):
        rounded = _to(name)
        q, k, v = (rounded(x) for x in (given.q, given.k, given.v))
        x = q @ k.mT * given.scale
        yield Variant(outputs=given.attend(x=x, v=v), parameters={"format": name})
        yield Variant(outputs=given.attend(x=x), parameters={"format": name})
        scaled = rounded(given.q * given.scale) @ given.k.mT
        yield Variant(outputs=given.attend(x=scaled), parameters={"format": name})


@model(
    "normaliser-biased",
    "the output is off by a factor: the reciprocal of the row sum is biased",
    group="precision",
    order=2,
)
def _biased(given: Given) -> Iterator[Variant]:
    exact = given.parts.outputs

    def at(share: float) -> Outputs:
        return Outputs(exact.out * (1.0 + share), exact.lse)

    yield Variant(outputs=at(-0.01), family=at, start=-0.01, parameter="share")


@model(
    "out-overflows",
    "the output before it is normalised overflows fp16",
    group="precision",
)
def _overflow(given: Given) -> Iterator[Variant]:
    for size in given.key_tiles:
        for steps in (
            Steps(kept_out=_to("fp16")),
            Steps(kept_out=lambda x: torch.where(x.abs() > FORMATS["fp16"].max, math.nan, x)),
        ):
            outputs = online(given, size, steps)
            if not bool(outputs.out.isfinite().all()):
                yield Variant(outputs=outputs, parameters={"tile": size})
