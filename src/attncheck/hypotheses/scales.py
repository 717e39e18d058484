"""Faults of the softmax scale and of units."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attncheck.hypotheses.model import Variant, attention, model, scored
from attncheck.outputs import Outputs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.hypotheses.given import Given

_LOG2E = math.log2(math.e)


def _factor(given: Given, factor: float, **parameters: float) -> Iterator[Variant]:
    """Scores times ``factor``: all the same, or all but the maximum that LSE adds."""
    for outputs in _of(given, factor):
        yield Variant(outputs=outputs, parameters=parameters)


def _of(given: Given, factor: float) -> Iterator[Outputs]:
    plain = given.problem.score.name == "none" and given.sink is None
    yield given.attend(x=given.x * factor)
    if not plain:
        yield given.attend(s=given.s * factor)
    parts = given.softmax(given.z * factor, sink=_sink(given, factor))
    outputs = parts.outputs
    yield Outputs(outputs.out, _other_maximum(given, parts.maximum, parts.lse))


def _sink(given: Given, factor: float) -> torch.Tensor | None:
    return None if given.sink is None else given.sink * factor


def _other_maximum(given: Given, maximum: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    dead = maximum == -math.inf
    return torch.where(dead, -math.inf, lse - maximum + given.parts.maximum)


@model("scale-missing", "q·k is not multiplied by the scale", group="scale", applies=attention)
def _missing(given: Given) -> Iterator[Variant]:
    yield from _factor(given, 1.0 / given.scale)


@model("scale-twice", "q·k is multiplied by the scale twice", group="scale", applies=attention)
def _twice(given: Given) -> Iterator[Variant]:
    yield from _factor(given, given.scale)


@model(
    "scale-of-dim",
    "the scale is 1 / head_dim, without the square root",
    group="scale",
    applies=attention,
)
def _dim(given: Given) -> Iterator[Variant]:
    yield from _factor(given, 1.0 / given.problem.head_dim / given.scale)


@model(
    "scale-log2e",
    "log2 e is missing or there twice: weights are powers of another base than e",
    group="scale",
)
def _log2e(given: Given) -> Iterator[Variant]:
    yield from _factor(given, 1.0 / _LOG2E)
    yield from _factor(given, _LOG2E)


@model(
    "scale-inverted",
    "q·k is multiplied by √head_dim, not divided by it",
    group="scale",
    applies=attention,
)
def _inverted(given: Given) -> Iterator[Variant]:
    yield from _factor(given, 1.0 / given.scale**2)
    yield from _factor(given, math.sqrt(given.problem.head_dim) / given.scale)


@model(
    "scale-fixed",
    "the scale is a constant, whatever the call says",
    group="scale",
    applies=attention,
)
def _fixed(given: Given) -> Iterator[Variant]:
    dims = dict.fromkeys((given.problem.head_dim, 32, 64, 128, given.problem.value_dim))
    padded = 1 << (given.problem.head_dim - 1).bit_length()
    for dim in dict.fromkeys([*dims, padded]):
        constant = 1.0 / math.sqrt(dim)
        if abs(constant / given.scale - 1.0) > 1e-6:  # another scale at all
            yield from _factor(given, constant / given.scale, scale=constant)


@model(
    "scale-off",
    "the scale is off by a factor",
    group="scale",
    order=2,
)
def _off(given: Given) -> Iterator[Variant]:
    def at(log: float) -> Outputs:
        return given.attend(x=given.x * math.exp(min(max(log, -20.0), 20.0)))

    yield Variant(outputs=at(0.1), family=at, start=0.1, parameter="log of the factor")


@model(
    "score-mod-before-scale",
    "the score mod is applied before the scale",
    group="mods",
    applies=scored(),
)
def _before(given: Given) -> Iterator[Variant]:
    yield Variant(outputs=given.attend(s=given.modified(given.qk) * given.scale))


@model(
    "bias-not-scaled",
    "what the score mod adds is in other units than the scores: log2 e is missing there",
    group="mods",
    applies=scored("alibi", "relative_bias", "bias", "expression"),
)
def _bias(given: Given) -> Iterator[Variant]:
    added = given.s - given.x
    for factor in (1.0 / _LOG2E, _LOG2E):
        yield Variant(outputs=given.attend(s=given.x + added * factor))
    # Scores in base 2 go into the mod, and what comes out is taken for base 2.
    yield Variant(outputs=given.attend(s=given.modified(given.x * _LOG2E) / _LOG2E))
