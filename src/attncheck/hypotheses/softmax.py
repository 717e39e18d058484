"""Faults of the softmax's end, of sentinels, of rows that see no key, and of LSE."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attncheck.hypotheses.model import Variant, masked, model
from attncheck.hypotheses.tiles import tile_sight
from attncheck.outputs import Outputs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attncheck.hypotheses.given import Given

_LOG2E = math.log2(math.e)
_SENTINELS = (-1e4, -1e5, -1e6, -1e9, -1e10, -1e30, -65504.0, -3.4028234663852886e38)


@model(
    "not-normalised",
    "the output is not divided by the row sum",
    group="softmax",
)
def _unnormalised(given: Given) -> Iterator[Variant]:
    parts = given.parts
    yield Variant(outputs=Outputs(parts.values, parts.lse))


@model(
    "sum-of-padding",
    "the row sum is too large by keys that have no value",
    group="softmax",
    order=2,
)
def _padding(given: Given) -> Iterator[Variant]:
    parts = given.parts
    base = torch.where(parts.maximum == -math.inf, 0.0, parts.maximum)

    def at(count: float) -> Outputs:
        total = parts.total + count * (-base).exp()
        return Outputs(parts.values / total.clamp(min=1e-300)[..., None], base + total.log())

    yield Variant(outputs=at(1.0), family=at, start=1.0, parameter="keys")


@model(
    "sentinel-finite",
    "hidden keys get a finite score: they have weight where all others score lower",
    group="softmax",
    applies=masked(),
)
def _sentinel(given: Given) -> Iterator[Variant]:
    units = dict.fromkeys((1.0, given.scale, 1.0 / _LOG2E))
    for sentinel in _SENTINELS:
        for unit in units:
            outputs = given.attend(hidden=sentinel * unit)
            yield Variant(outputs=outputs, parameters={"sentinel": sentinel})


def _dead(given: Given) -> Tensor:
    return given.parts.lse == -math.inf


@model(
    "empty-rows-mean",
    "rows that see no key get the mean of all values",
    group="softmax",
    applies=masked(),
)
def _mean(given: Given) -> Iterator[Variant]:
    dead, exact = _dead(given), given.parts.outputs
    if not bool(dead.any()):
        return
    assert exact.lse is not None, "of attention"
    scores = [unit * one for unit in (1.0, given.scale, 1 / _LOG2E) for one in _SENTINELS]
    for keys in _visited(given):
        there = keys.sum(-1, keepdim=True).clamp(min=1)
        sums = keys.double() @ given.v
        for size in (1, *given.key_tiles):
            count = -(-there // size) * size if size > 1 else there
            out = torch.where(dead[..., None], sums / count, exact.out)
            log = count[..., 0].double().log()
            for lse in (torch.full_like(log, -math.inf), *(one + log for one in scores)):
                yield Variant(outputs=Outputs(out, torch.where(dead, lse, exact.lse)))


def _visited(given: Given) -> Iterator[Tensor]:
    """Keys that a row has to do with: all, or those of tiles in which its block sees any."""
    yield torch.ones(given.shape, dtype=torch.bool)
    for rows, size in given.tilings:
        yield tile_sight(given, rows, size)[0]


@model(
    "empty-rows-nan",
    "rows that see no key are NaN",
    group="softmax",
    applies=masked(),
)
def _nan(given: Given) -> Iterator[Variant]:
    dead, exact = _dead(given), given.parts.outputs
    if not bool(dead.any()):
        return
    assert exact.lse is not None, "of attention"
    out = torch.where(dead[..., None], math.nan, exact.out)
    for lse in (math.nan, -math.inf):
        yield Variant(outputs=Outputs(out, torch.where(dead, lse, exact.lse)))
    yield Variant(outputs=Outputs(exact.out, torch.where(dead, math.nan, exact.lse)))


@model(
    "lse-plus-infinity-of-empty",
    "LSE of rows that see no key is +∞",
    group="lse",
    applies=masked(),
)
def _plus(given: Given) -> Iterator[Variant]:
    dead, exact = _dead(given), given.parts.outputs
    assert exact.lse is not None, "of attention"
    yield Variant(outputs=Outputs(exact.out, torch.where(dead, math.inf, exact.lse)))


@model(
    "lse-finite-of-empty",
    "LSE of rows that see no key is a finite number",
    group="lse",
    applies=masked(),
)
def _finite(given: Given) -> Iterator[Variant]:
    dead, exact = _dead(given), given.parts.outputs
    assert exact.lse is not None, "of attention"
    for number in (0.0, *_SENTINELS):
        lse = torch.where(dead, number, exact.lse)
        yield Variant(outputs=Outputs(exact.out, lse), parameters={"lse": number})


def _lse(given: Given, lse: Tensor) -> Variant:
    return Variant(outputs=Outputs(given.parts.out, lse))


@model("lse-base-2", "LSE is to base 2", group="lse")
def _base_2(given: Given) -> Iterator[Variant]:
    yield _lse(given, given.parts.lse * _LOG2E)


@model("lse-times-ln2", "LSE is multiplied by ln 2 once too often", group="lse")
def _ln_2(given: Given) -> Iterator[Variant]:
    yield _lse(given, given.parts.lse / _LOG2E)


@model("lse-without-maximum", "LSE lacks the row's maximum", group="lse")
def _no_maximum(given: Given) -> Iterator[Variant]:
    yield _lse(given, given.parts.total.log())


@model("lse-without-sum", "LSE is the row's maximum alone", group="lse")
def _no_sum(given: Given) -> Iterator[Variant]:
    yield _lse(given, given.parts.maximum)


@model(
    "lse-mixed-units",
    "the maximum and the logarithm in LSE are in different units",
    group="lse",
)
def _mixed(given: Given) -> Iterator[Variant]:
    parts = given.parts
    dead = parts.total == 0
    scale = given.scale
    for of_maximum, of_log in (
        (_LOG2E, 1.0),
        (1.0, _LOG2E),
        (1.0 / scale, 1.0),
        (1.0 / _LOG2E, 1.0),
        (1.0, 1.0 / _LOG2E),
        (scale, 1.0),
        (_LOG2E / scale, 1.0),
    ):
        lse = parts.maximum * of_maximum + parts.total.log() * of_log
        yield _lse(given, torch.where(dead, -math.inf, lse))
