"""Fault models of precision: what is rounded that must not be, and descales of fp8."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attncheck.core.formats import FORMATS
from attncheck.core.outputs import Outputs
from attncheck.fault_models.fault_model import Prediction, attention, model
from attncheck.fault_models.softmax_models import OnlineSteps, online_attention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from attncheck.fault_models.exact_attention import ExactAttention
    from attncheck.inputs.problem import Problem


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
def _weights(given: ExactAttention) -> Iterator[Prediction]:
    for name in _FORMATS:
        for size in given.key_tiles:
            outputs = online_attention(given, size, OnlineSteps(weights=_to(name)))
            yield Prediction(outputs=outputs, parameters={"format": name, "tile": size})


@model(
    "sum-rounded",
    "the row sum is kept in too few bits",
    group="precision",
    order=1,
)
def _sum(given: ExactAttention) -> Iterator[Prediction]:
    for name in ("bf16", "fp16"):
        for size in given.key_tiles:
            both = OnlineSteps(kept_sum=_to(name)), OnlineSteps(sums=_to(name), kept_sum=_to(name))
            for steps in both:
                outputs = online_attention(given, size, steps)
                yield Prediction(outputs=outputs, parameters={"format": name, "tile": size})


@model(
    "out-rounded",
    "the output is accumulated in too few bits",
    group="precision",
    order=1,
)
def _out(given: ExactAttention) -> Iterator[Prediction]:
    for name in ("bf16", "fp16"):
        for size in given.key_tiles:
            outputs = online_attention(given, size, OnlineSteps(kept_out=_to(name)))
            yield Prediction(outputs=outputs, parameters={"format": name, "tile": size})


@model(
    "scores-rounded",
    "scores are rounded to too few bits before the softmax",
    group="precision",
    order=1,
)
def _scores(given: ExactAttention) -> Iterator[Prediction]:
    for name in ("bf16", "fp16"):
        rounded = _to(name)
        yield Prediction(
            outputs=given.attend(x=rounded(given.qk) * given.scale), parameters={"format": name}
        )
        yield Prediction(outputs=given.attend(x=rounded(given.x)), parameters={"format": name})
        yield Prediction(outputs=given.attend(s=rounded(given.s)), parameters={"format": name})


@model(
    "products-tf32",
    "q, k and v are rounded before they are multiplied: tf32, or fewer bits",
    group="precision",
    applies=attention,
    order=1,
)
def _products(given: ExactAttention) -> Iterator[Prediction]:
    for name in ("tf32", "bf16", "fp16", "e4m3"):
        rounded = _to(name)
        q, k, v = (rounded(x) for x in (given.q, given.k, given.v))
        x = q @ k.mT * given.scale
        yield Prediction(outputs=given.attend(x=x, v=v), parameters={"format": name})
        yield Prediction(outputs=given.attend(x=x), parameters={"format": name})
        scaled = rounded(given.q * given.scale) @ given.k.mT
        yield Prediction(outputs=given.attend(x=scaled), parameters={"format": name})


@model(
    "normaliser-biased",
    "the output is off by a factor: the reciprocal of the row sum is biased",
    group="precision",
    order=2,
)
def _biased(given: ExactAttention) -> Iterator[Prediction]:
    exact = given.parts.outputs

    def at(share: float) -> Outputs:
        return Outputs(exact.out * (1.0 + share), exact.lse)

    yield Prediction(outputs=at(-0.01), family=at, start=-0.01, parameter="share")


@model(
    "out-overflows",
    "the output before it is normalised overflows fp16",
    group="precision",
)
def _overflow(given: ExactAttention) -> Iterator[Prediction]:
    for size in given.key_tiles:
        for steps in (
            OnlineSteps(kept_out=_to("fp16")),
            OnlineSteps(kept_out=lambda x: torch.where(x.abs() > FORMATS["fp16"].max, math.nan, x)),
        ):
            outputs = online_attention(given, size, steps)
            if not bool(outputs.out.isfinite().all()):
                yield Prediction(outputs=outputs, parameters={"tile": size})


def _fp8(problem: Problem) -> bool:
    return problem.formats.scaled


def _scales(given: ExactAttention, name: str) -> Tensor:
    """A descale of each query head, ``(batch, heads, 1, 1)``."""
    return given.by_query_head(getattr(given.inputs.descale, name).double())[..., None, None]


def _without(given: ExactAttention, *names: str) -> Prediction:
    x, v = given.x, None
    for name in names:
        if name == "v":
            v = given.v / _scales(given, "v")
        else:
            x = x / _scales(given, name)
    return Prediction(outputs=given.attend(x=x, v=v), parameters={"of": ", ".join(names)})


@model("descale-q-missing", "the descale of q is ignored", group="fp8", applies=_fp8)
def _q(given: ExactAttention) -> Iterator[Prediction]:
    yield _without(given, "q")


@model("descale-k-missing", "the descale of k is ignored", group="fp8", applies=_fp8)
def _k(given: ExactAttention) -> Iterator[Prediction]:
    yield _without(given, "k")


@model("descale-v-missing", "the descale of v is ignored", group="fp8", applies=_fp8)
def _v(given: ExactAttention) -> Iterator[Prediction]:
    yield _without(given, "v")


@model("descales-missing", "several descales are ignored", group="fp8", applies=_fp8, order=1)
def _several(given: ExactAttention) -> Iterator[Prediction]:
    for names in (("q", "k"), ("q", "k", "v"), ("k", "v"), ("q", "v")):
        yield _without(given, *names)


@model(
    "descale-first-head",
    "one head's descale is used for all: its index is missing",
    group="fp8",
    applies=lambda problem: _fp8(problem) and problem.batch * problem.kv_heads > 1,
)
def _first(given: ExactAttention) -> Iterator[Prediction]:
    for names in (("q", "k", "v"), ("q", "k"), ("q",), ("k",), ("v",)):
        for where in ("all", "batch", "head"):
            x, v = given.x, None
            for name in names:
                own = _scales(given, name)
                first = {"all": own[:1, :1], "batch": own[:1], "head": own[:, :1]}[where]
                if name == "v":
                    v = given.v * first / own
                else:
                    x = x * first / own
            yield Prediction(
                outputs=given.attend(x=x, v=v),
                parameters={"of": ", ".join(names), "first": where},
            )


def _formatted(given: ExactAttention, lift: float) -> OnlineSteps:
    name = given.problem.formats.weights.name
    fmt = FORMATS[name]

    def rounded(p: Tensor) -> Tensor:
        kept = (p * lift).clamp(max=fmt.max).float().to(fmt.torch_dtype).double()
        return kept / lift

    return OnlineSteps(weights=rounded)


@model(
    "weights-underflow",
    "small weights are lost in fp8: they are not multiplied by anything before they are rounded",
    group="fp8",
    applies=_fp8,
)
def _underflow(given: ExactAttention) -> Iterator[Prediction]:
    for size in given.key_tiles:
        outputs = online_attention(given, size, _formatted(given, 1.0))
        yield Prediction(outputs=outputs, parameters={"tile": size})


@model(
    "weights-saturated",
    "large weights are cut off in fp8: they are multiplied by too much before they are rounded",
    group="fp8",
    applies=_fp8,
)
def _saturated(given: ExactAttention) -> Iterator[Prediction]:
    for size in given.key_tiles:
        for bits in (9, 10, 11, 12):
            outputs = online_attention(given, size, _formatted(given, 2.0**bits))
            yield Prediction(outputs=outputs, parameters={"tile": size, "bits": bits})


@model(
    "weights-scale-left",
    "the factor of P is not taken off the output",
    group="fp8",
    applies=_fp8,
)
def _left(given: ExactAttention) -> Iterator[Prediction]:
    exact, lift = given.parts.outputs, given.problem.formats.weights_scale
    for factor in (lift, 1.0 / lift):
        out = (exact.out * factor).clamp(torch.finfo(torch.float32).min)
        yield Prediction(outputs=Outputs(out, exact.lse))
