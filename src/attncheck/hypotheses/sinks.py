"""Faults of sinks: what has a part in the softmax and no value."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attncheck.hypotheses.model import Variant, model
from attncheck.outputs import Outputs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attncheck.hypotheses.given import Given
    from attncheck.problem import Problem

_LOG2E = math.log2(math.e)


def _sunk(problem: Problem) -> bool:
    return problem.sink


def _with_sink(given: Given, sink: Tensor | None) -> Outputs:
    return given.softmax(given.z, sink=sink).outputs


@model("sink-ignored", "the sink is ignored", group="sinks", applies=_sunk)
def _no_sink(given: Given) -> Iterator[Variant]:
    plain = _with_sink(given, None)
    exact = given.parts
    yield Variant(outputs=plain)
    yield Variant(outputs=Outputs(plain.out, exact.lse))
    yield Variant(outputs=Outputs(exact.out, plain.lse))


@model("sink-twice", "the sink counts more than once", group="sinks", applies=_sunk)
def _sink_twice(given: Given) -> Iterator[Variant]:
    assert given.sink is not None, "asked of what has one"
    blocks = {-(-given.problem.kv // size) for size in given.key_tiles}
    for count in sorted({2, 3, 4, 5, *(n for n in blocks if 1 < n < 64)}):
        outputs = _with_sink(given, given.sink + math.log(count))
        yield Variant(outputs=outputs, parameters={"times": count})


@model(
    "sink-in-other-units",
    "the sink is in other units than the scores: log2 e or the scale is missing, or there too "
    "often",
    group="sinks",
    applies=_sunk,
)
def _units(given: Given) -> Iterator[Variant]:
    assert given.sink is not None, "asked of what has one"
    for factor in (_LOG2E, 1.0 / _LOG2E, given.scale, 1.0 / given.scale):
        yield Variant(outputs=_with_sink(given, given.sink * factor))


@model("sink-of-head-0", "every head has another head's sink", group="sinks", applies=_sunk)
def _sink_head(given: Given) -> Iterator[Variant]:
    assert given.sink is not None, "asked of what has one"
    h, problem = torch.arange(given.problem.heads), given.problem
    for of in (0 * h, h // problem.group, h % problem.kv_heads, problem.heads - 1 - h):
        yield Variant(outputs=_with_sink(given, given.sink[:, of]))


@model("sink-as-key", "the sink is a key with a value", group="sinks", applies=_sunk)
def _sink_key(given: Given) -> Iterator[Variant]:
    plain, exact = _with_sink(given, None), given.parts
    # Whose share is that of a gate: out · sigmoid(LSE − sink), with LSE of the keys alone.
    assert plain.lse is not None, "as it was made"
    assert given.sink is not None, "asked of what has one"
    gate = torch.sigmoid(plain.lse - given.sink)
    yield Variant(outputs=Outputs(plain.out * gate[..., None], plain.lse))
    yield Variant(outputs=Outputs(exact.out * gate[..., None], exact.lse))
