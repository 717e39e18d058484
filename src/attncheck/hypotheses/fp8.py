"""Faults of fp8: descales, and what of P is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.formats import FORMATS
from attncheck.hypotheses.model import Variant, model
from attncheck.hypotheses.recurrence import Steps, online
from attncheck.outputs import Outputs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attncheck.hypotheses.given import Given
    from attncheck.problem import Problem


def _fp8(problem: Problem) -> bool:
    return problem.formats.scaled


def _scales(given: Given, name: str) -> Tensor:
    """A descale of each query head, ``(batch, heads, 1, 1)``."""
    return given.by_query_head(getattr(given.inputs.descale, name).double())[..., None, None]


def _without(given: Given, *names: str) -> Variant:
    x, v = given.x, None
    for name in names:
        if name == "v":
            v = given.v / _scales(given, "v")
        else:
            x = x / _scales(given, name)
    return Variant(outputs=given.attend(x=x, v=v), parameters={"of": ", ".join(names)})


@model("descale-q-missing", "the descale of q is ignored", group="fp8", applies=_fp8)
def _q(given: Given) -> Iterator[Variant]:
    yield _without(given, "q")


@model("descale-k-missing", "the descale of k is ignored", group="fp8", applies=_fp8)
def _k(given: Given) -> Iterator[Variant]:
    yield _without(given, "k")


@model("descale-v-missing", "the descale of v is ignored", group="fp8", applies=_fp8)
def _v(given: Given) -> Iterator[Variant]:
    yield _without(given, "v")


@model("descales-missing", "several descales are ignored", group="fp8", applies=_fp8, order=1)
def _several(given: Given) -> Iterator[Variant]:
    for names in (("q", "k"), ("q", "k", "v"), ("k", "v"), ("q", "v")):
        yield _without(given, *names)


@model(
    "descale-first-head",
    "one head's descale is used for all: its index is missing",
    group="fp8",
    applies=lambda problem: _fp8(problem) and problem.batch * problem.kv_heads > 1,
)
def _first(given: Given) -> Iterator[Variant]:
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
            yield Variant(
                outputs=given.attend(x=x, v=v),
                parameters={"of": ", ".join(names), "first": where},
            )


def _formatted(given: Given, lift: float) -> Steps:
    name = given.problem.formats.weights.name
    fmt = FORMATS[name]

    def rounded(p: Tensor) -> Tensor:
        kept = (p * lift).clamp(max=fmt.max).float().to(fmt.torch_dtype).double()
        return kept / lift

    return Steps(weights=rounded)


@model(
    "weights-underflow",
    "small weights are lost in fp8: they are not multiplied by anything before they are rounded",
    group="fp8",
    applies=_fp8,
)
def _underflow(given: Given) -> Iterator[Variant]:
    for size in given.key_tiles:
        outputs = online(given, size, _formatted(given, 1.0))
        yield Variant(outputs=outputs, parameters={"tile": size})


@model(
    "weights-saturated",
    "large weights are cut off in fp8: they are multiplied by too much before they are rounded",
    group="fp8",
    applies=_fp8,
)
def _saturated(given: Given) -> Iterator[Variant]:
    for size in given.key_tiles:
        for bits in (9, 10, 11, 12):
            outputs = online(given, size, _formatted(given, 2.0**bits))
            yield Variant(outputs=outputs, parameters={"tile": size, "bits": bits})


@model(
    "weights-scale-left",
    "the factor of P is not taken off the output",
    group="fp8",
    applies=_fp8,
)
def _left(given: Given) -> Iterator[Variant]:
    exact, lift = given.parts.outputs, given.problem.formats.weights_scale
    for factor in (lift, 1.0 / lift):
        out = (exact.out * factor).clamp(torch.finfo(torch.float32).min)
        yield Variant(outputs=Outputs(out, exact.lse))
