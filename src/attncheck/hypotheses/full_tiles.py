"""Faults of tiles that count as full: a list says of them that nothing in them has to be hidden."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from attncheck.hypotheses.model import Variant, masked, model
from attncheck.hypotheses.tiles import padded_keys

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attncheck.hypotheses.given import Given
    from attncheck.outputs import Outputs

# What a mask or a score mod that reads a table raises behind the end of it.
_BEHIND_ITS_END = (RuntimeError, IndexError, TypeError, ValueError)


@model(
    "mask-dropped-in-whole-tiles",
    "where rows and keys are whole tiles the mask is not applied in what is visited: the path "
    "without bounds has none",
    group="tiles",
    applies=masked(),
    order=1,
)
def _whole(given: Given) -> Iterator[Variant]:
    # Defined before what it is the same as where tiles are whole: that fails on ragged ones too.
    problem = given.problem
    for rows, size in given.tiles:
        parameters = {"tile": size, "rows": rows}
        if problem.query % rows or problem.kv % size:
            yield Variant(outputs=given.parts.outputs, parameters=parameters)
            continue
        # A kernel visits what its list has, or every tile.
        some = _cut(_asked(given, rows, size), rows, size).any(5).any(3)
        for visited in (some, torch.ones_like(some)):
            yield Variant(outputs=_as_full(given, visited, rows, size), parameters=parameters)


@model(
    "tile-mostly-seen-as-full",
    "a tile of which more than half is seen counts as seen throughout",
    group="tiles",
    order=1,
)
def _mostly(given: Given) -> Iterator[Variant]:
    for rows, size in given.tiles:
        asked = _asked(given, rows, size)
        there = _there(given, rows, size)
        parameters = {"tile": size, "rows": rows}
        tried: list[Tensor] = []
        # Rows behind the last one are asked about like any, or hidden.
        for seen in (asked & there.any(2, keepdim=True), asked & there):
            tiles = _cut(seen, rows, size)
            # Of all places more than half, or of the columns that all rows see.
            for share in (tiles.double().mean((3, 5)), tiles.all(3).double().mean(4)):
                full = share > 0.5
                if any(torch.equal(full, other) for other in tried):
                    continue
                tried.append(full)
                outputs = _as_full(given, full, rows, size)
                yield Variant(outputs=outputs, parameters=parameters)
                inside = _as_full(given, full, rows, size, behind=False)
                yield Variant(outputs=inside, parameters=parameters)


@model(
    "full-tile-beyond-the-end",
    "a tile that is seen as far as the keys go counts as full: what lies behind the last key "
    "counts there, as by a list of tiles that was made for a longer sequence",
    group="tiles",
    applies=masked(),
    order=1,
)
def _longer(given: Given) -> Iterator[Variant]:
    for rows, size in given.tiles:
        if padded_keys(given, size):
            asked = _asked(given, rows, size)
            # Rows behind the last one are asked about like any, or not at all.
            for seen in (asked, asked | ~_there(given, rows, size).any(-1, keepdim=True)):
                full = _cut(seen, rows, size).all(5).all(3)
                outputs = _as_full(given, full, rows, size)
                yield Variant(outputs=outputs, parameters={"tile": size, "rows": rows})


def _asked(given: Given, rows: int, size: int) -> Tensor:
    """What the mask says in whole tiles, ``(batch', heads', rows, keys)``: behind the ends, too.

    Of a mask that has no more than the call's rows and keys, what it says of the last of them.
    """
    problem = given.problem
    i = torch.arange(problem.query + -problem.query % rows).view(1, 1, -1, 1)
    j = torch.arange(problem.kv + padded_keys(given, size)).view(1, 1, 1, -1)
    try:
        seen = torch.as_tensor(given.mask(given.b, given.h, i, j)).bool()
    except _BEHIND_ITS_END:
        i, j = i.clamp(max=problem.query - 1), j.clamp(max=problem.kv - 1)
        seen = torch.as_tensor(given.mask(given.b, given.h, i, j)).bool()
    seen = seen[(None,) * (4 - seen.dim())]
    return seen.expand(*seen.shape[:2], i.shape[2], j.shape[3])


def _there(given: Given, rows: int, size: int) -> Tensor:
    """Which places of whole tiles are rows and keys of the call, ``(1, 1, rows, keys)``."""
    problem = given.problem
    whole = torch.ones(1, 1, problem.query, problem.kv, dtype=torch.bool)
    return pad(whole, (0, padded_keys(given, size), 0, -problem.query % rows))


def _cut(seen: Tensor, rows: int, size: int) -> Tensor:
    """``(batch, heads, blocks, rows, blocks, keys)``."""
    return seen.reshape(*seen.shape[:2], seen.shape[2] // rows, rows, seen.shape[3] // size, size)


def _as_full(given: Given, full: Tensor, rows: int, size: int, *, behind: bool = True) -> Outputs:
    """With tiles ``(batch', heads', blocks, blocks)`` in which nothing is hidden.

    Keys ``behind`` the last one, of score 0 before the score mod and value 0, are not either.
    """
    full = full[:, :, given.rows // rows].repeat_interleave(size, -1)
    kv, shape = given.problem.kv, given.shape
    z = torch.where(given.seen | full[..., :kv], given.s, -math.inf)
    count = padded_keys(given, size)
    if not count or not behind:
        return given.softmax(z, sink=given.sink).outputs
    score = _score_behind(given, count)
    more = torch.where(full[..., kv:], score, -math.inf).expand(*shape[:3], count)
    v = pad(given.v, (0, 0, 0, count))
    return given.softmax(torch.cat([z, more], -1), v, sink=given.sink).outputs


def _score_behind(given: Given, count: int) -> Tensor:
    """Of keys that are zeros: by where they would be, or as the last key."""
    zeros = given.x.new_zeros((*given.shape[:3], count))
    if given.problem.score.name == "none":
        return zeros
    j = torch.arange(given.problem.kv, given.problem.kv + count).view(1, 1, 1, -1)
    try:
        return given.score(zeros, given.b, given.h, given.i, j).to(torch.float64)
    except _BEHIND_ITS_END:
        return given.modified(torch.zeros_like(given.x))[..., -1:]
