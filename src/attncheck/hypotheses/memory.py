"""Faults of memory: pages, what lies behind the last key, and what is never written."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attncheck.hypotheses.heads import with_keys
from attncheck.hypotheses.model import Variant, attention, model
from attncheck.hypotheses.reading import wider
from attncheck.hypotheses.tiles import padded_keys, tile_sight, with_padding
from attncheck.outputs import Outputs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attncheck.hypotheses.given import Given


@model(
    "page-table-ignored",
    "pages are read as if they were in order: the table is not looked at",
    group="memory",
    applies=lambda problem: problem.paging is not None,
)
def _table(given: Given) -> Iterator[Variant]:
    from attncheck.mods.paging import packed, page_table

    problem = given.problem
    assert problem.paging is not None, "asked of what has pages"
    size = problem.paging.size
    table = page_table(problem.paging, problem.batch, problem.kv, (problem.kv,) * problem.batch)
    count = -(-problem.kv // size)
    place = torch.arange(count)
    # The first pages, or those of the sequence's number.
    own = place + count * torch.arange(problem.batch)[:, None]
    for order in (place.expand(problem.batch, -1), own):
        read = []
        for tensor in (given.inputs.k, given.inputs.v):
            pool = packed(tensor, table)  # (pages, size, kv_heads, dim)
            pages = pool[order.clamp(max=len(pool) - 1)].double()
            keys = pages.flatten(1, 2)[:, : problem.kv].transpose(1, 2)
            read.append(given.by_query_head(keys.contiguous()))
        if given.inputs.descale is None:
            yield from with_keys(given, *read)


@model(
    "page-boundary-leak",
    "the rest of the last page counts: keys behind the last one are seen",
    group="tiles",
    applies=lambda problem: problem.paging is not None,
)
def _page(given: Given) -> Iterator[Variant]:
    assert given.problem.paging is not None, "asked of what has pages"
    size = given.problem.paging.size
    count = padded_keys(given, size)
    if count:
        for outputs in with_padding(given, count):
            yield Variant(outputs=outputs, parameters={"page": size})
        yield from _unwritten_slots(given, size)


def _unwritten_slots(given: Given, size: int) -> Iterator[Variant]:
    """What lies behind the last key is NaN: it reaches out alone, or LSE too."""
    lse = given.parts.lse
    nan = torch.full_like(given.parts.out, math.nan)
    for each in (torch.full_like(lse, math.nan), lse):
        yield Variant(outputs=Outputs(nan, each), parameters={"page": size})


@model(
    "hidden-values-leak",
    "the value of a key that the mask hides reaches a row: 0 times NaN is NaN",
    group="memory",
    applies=attention,
)
def _leak(given: Given) -> Iterator[Variant]:
    exact = given.parts.outputs
    wild = ~given.v.isfinite().all(-1)[:, :, None, :]  # (batch, heads, 1, kv)
    if not bool(wild.any()):
        return
    touched = (~given.v.isfinite())[:, :, None]  # (batch, heads, 1, kv, dim)
    some = given.seen.any(-1, keepdim=True)
    for reach in (torch.ones_like(given.seen), some.expand(given.seen.shape)):
        hit = (reach[..., None] & touched).any(-2)
        yield Variant(outputs=Outputs(torch.where(hit, math.nan, exact.out), exact.lse))


@model(
    "values-behind-keys",
    "the last tile loads what lies in memory behind the last value: a weight of 0 times NaN is NaN",
    group="memory",
    applies=lambda problem: attention(problem) and problem.paging is None,
)
def _behind(given: Given) -> Iterator[Variant]:
    exact, kv = given.parts.outputs, given.problem.kv
    for size in given.key_tiles:
        if kv % size == 0:
            continue
        for read in wider(given.inputs.v, 2, -(-kv // size) * size):
            wild = ~read[:, :, kv:].double().isfinite().all(2, keepdim=True)
            if not bool(wild.any()):
                continue
            last = torch.ones(given.shape[:3], dtype=torch.bool)
            for rows in [last, *_visiting(given, size)]:
                out = torch.where(rows[..., None] & given.by_query_head(wild), math.nan, exact.out)
                yield Variant(outputs=Outputs(out, exact.lse), parameters={"tile": size})


def _visiting(given: Given, size: int) -> Iterator[Tensor]:
    """Rows ``(batch, heads, rows)`` of blocks that visit the last tile of keys."""
    for rows, keys in given.tiles:
        if keys == size:
            yield tile_sight(given, rows, size)[0][..., -1]


@model(
    "rows-unwritten",
    "some rows are never written",
    group="tiles",
    order=1,
)
def _unwritten(given: Given) -> Iterator[Variant]:
    exact = given.parts.outputs
    assert exact.lse is not None, "of attention"
    query = given.problem.query
    for rows in dict.fromkeys(rows for rows, _ in given.tiles):
        number = given.i[..., 0] // rows
        ragged = number == (query - 1) // rows
        dead = (~given.seen.any(-1)) & (exact.lse == -math.inf)
        for gone in (ragged.expand(dead.shape), dead, _dead_blocks(dead, number)):
            if bool(gone.any()) and bool(gone.all()):  # of what sees keys it would explain anything
                if bool(dead.all()):
                    yield Variant(outputs=exact, free=gone)
            elif bool(gone.any()):
                yield Variant(outputs=exact, parameters={"rows": rows}, free=gone)
                for lse in (exact.lse, torch.where(gone, 0.0, exact.lse)):
                    out = torch.where(gone[..., None], 0.0, exact.out)
                    yield Variant(outputs=Outputs(out, lse), parameters={"rows": rows})


def _dead_blocks(dead: Tensor, number: Tensor) -> Tensor:
    """Rows of blocks in which no row is alive."""
    found = torch.zeros_like(dead)
    for block in sorted(set(number.flatten().tolist())):
        mine = (number == block).expand(dead.shape)
        all_dead = (dead | ~mine).all(-1, keepdim=True)
        found |= mine & all_dead
    return found
