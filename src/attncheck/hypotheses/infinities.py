"""Faults of 0 · ∞: what multiplies to NaN where nothing should be multiplied at all."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attncheck.hypotheses.model import Variant, attention, model
from attncheck.hypotheses.tiles import tile_sight
from attncheck.outputs import Outputs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attncheck.hypotheses.given import Given
    from attncheck.problem import Problem

_LOG2E = math.log2(math.e)


def _visits(given: Given, size: int) -> Iterator[Tensor]:
    """Places (batch, heads, rows, kv) whose tile of ``size`` keys is looked at for their row.

    Every tile; or those in which the row sees a key, or its block of rows does.
    """
    yield torch.ones(given.shape, dtype=torch.bool)
    for rows in dict.fromkeys((1, *(rows for rows, keys in given.tiles if keys == size))):
        yield tile_sight(given, rows, size)[0]


def _ragged(given: Given, size: int) -> Tensor:
    """Keys (1, 1, 1, kv) of a last tile that is not full; none of them where it is."""
    kv = given.problem.kv
    return (given.j // size == kv // size) if kv % size else torch.zeros_like(given.j).bool()


def _without(given: Given, rows: Tensor, /, *, lse: bool = True, **parameters: int) -> Variant:
    """NaN in these rows: in out, and in LSE too."""
    exact = given.parts
    out = torch.where(rows[..., None], math.nan, exact.out)
    of_rows = torch.where(rows, math.nan, exact.lse) if lse else exact.lse
    return Variant(outputs=Outputs(out, of_rows), parameters=parameters)


@model(
    "scale-of-zero-after-mask",
    "a scale that is 0 in fp32 multiplies what is −∞, hidden scores or the maximum before the "
    "first tile: 0 · ∞ is NaN",
    group="scale",
    applies=attention,
)
def _scaled(given: Given) -> Iterator[Variant]:
    for gone in _gone(given):
        if not bool(gone.any()):
            continue
        # The maximum is −∞ before the first tile, whatever is seen.
        yield _without(given, gone.expand(given.shape[:3]))
        for size in given.key_tiles:
            ragged = _ragged(given, size)
            for visited in _visits(given, size):
                hidden = (visited & (~given.seen | ragged)).any(-1)
                yield _without(given, hidden & gone, tile=size)


def _gone(given: Given) -> Iterator[Tensor]:
    """Sequences and query heads ``(batch, heads, 1)`` whose factor of q·k is 0 in fp32.

    That of exp, or of exp2; also where what is smaller than a normal number is 0.
    """
    problem, descale = given.problem, given.inputs.descale
    products = torch.ones((problem.batch, problem.heads, 1))
    if descale is not None:
        products = products * given.by_query_head(descale.q.float() * descale.k.float())[..., None]
    for unit in (1.0, _LOG2E):
        factor = torch.tensor(given.scale * unit, dtype=torch.float32) * products
        yield factor == 0
        yield factor.abs() < torch.finfo(torch.float32).tiny


@model(
    "mask-times-infinity",
    "the mask is multiplied by −∞ and added to the scores: what is seen gets 0 · ∞, which is NaN",
    group="softmax",
)
def _added(given: Given) -> Iterator[Variant]:
    yield _without(given, given.seen.any(-1))
    # Or only in tiles that need a mask.
    for rows, size in given.tiles:
        some, every = tile_sight(given, rows, size)
        masked = some & (~every | _ragged(given, size))
        yield _without(given, (given.seen & masked).any(-1), tile=size, rows=rows)


def _scaled_format(problem: Problem) -> bool:
    return problem.formats.scaled


@model(
    "column-scale-of-zero",
    "a column of V that is 0 throughout has no scale: 0 · ∞ or 0 / 0 is NaN in that column",
    group="fp8",
    applies=_scaled_format,
)
def _columns(given: Given) -> Iterator[Variant]:
    exact, v = given.parts.outputs, given.v
    for size in (*given.key_tiles, given.problem.kv):
        whose = torch.arange(given.problem.kv) // size
        # (batch, heads, value_dim, tiles)
        empty = torch.stack(
            [(v[:, :, whose == n] == 0).all(-2) for n in range(int(whose[-1]) + 1)], -1
        )
        if not bool(empty.any()):
            continue
        of_keys = empty[..., whose].double()
        for visited in _visits(given, size):
            touched = visited.double() @ of_keys.mT > 0
            out = torch.where(touched, math.nan, exact.out)
            yield Variant(outputs=Outputs(out, exact.lse), parameters={"tile": size})


@model(
    "tail-in-block-scale",
    "what lies behind the last key has a part in the scale of its block: NaN, if there is one",
    group="fp8",
    applies=_scaled_format,
)
def _tail(given: Given) -> Iterator[Variant]:
    for size in given.key_tiles:
        ragged = _ragged(given, size)
        if bool(ragged.any()):
            for visited in _visits(given, size):
                rows = (visited & ragged).any(-1)
                for of_keys in (False, True):  # whose scores LSE is of
                    yield _without(given, rows, lse=of_keys, tile=size)
