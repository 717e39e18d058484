"""Faults of tiles: which keys a loop over them visits, and what pads the last one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attncheck.hypotheses.model import Variant, attention, masked, model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from attncheck.hypotheses.given import Given
    from attncheck.outputs import Outputs

__all__ = ["padded_keys", "tile_sight", "with_padding"]

_MOST_TILES = 12


def padded_keys(given: Given, size: int) -> int:
    """How many keys the last tile of ``size`` lacks."""
    return -given.problem.kv % size


def with_padding(given: Given, count: int) -> Iterator[Outputs]:
    """With ``count`` keys more of score 0 and value 0.

    Seen by every row, or by those that see the last key, or any; their scores modified as the last
    key's, or not.
    """
    zero = given.x.new_zeros((*given.shape[:3], 1))
    last = given.seen[..., -1:]
    as_last = given.modified(torch.zeros_like(given.x))[..., -1:]
    v = torch.nn.functional.pad(given.v, (0, 0, 0, count))
    some = given.seen.any(-1, keepdim=True)
    plain = given.problem.score.name == "none"
    for seen in (torch.ones_like(last), last, some):
        for score in (zero,) if plain else (zero, as_last):
            pad = torch.where(seen, score, -math.inf).expand(*given.shape[:3], count)
            yield given.softmax(torch.cat([given.z, pad], -1), v, sink=given.sink).outputs


@model(
    "tail-unmasked",
    "the padding of the last tile of keys is not masked: it counts as keys of score 0 and value 0",
    group="tiles",
)
def _tail(given: Given) -> Iterator[Variant]:
    for size in given.key_tiles:
        count = padded_keys(given, size)
        if count:
            for outputs in with_padding(given, count):
                yield Variant(outputs=outputs, parameters={"tile": size})


def _dropped(given: Given, keys: Tensor, **parameters: int) -> Variant:
    return Variant(outputs=given.attend(seen=given.seen & ~keys), parameters=parameters)


@model(
    "last-tile-dropped",
    "the last tile of keys is never visited",
    group="tiles",
)
def _last(given: Given) -> Iterator[Variant]:
    kv = given.problem.kv
    for size in given.key_tiles:
        tile = given.j // size
        yield _dropped(given, tile == (kv - 1) // size, tile=size)
    # Of each block of rows the last tile that they see something in.
    for rows, size in given.tilings:
        edge = _edge_tiles(given, rows, size, last=True)
        yield _dropped(given, edge, tile=size, rows=rows)


@model(
    "first-tile-dropped",
    "the first tile of keys is never visited",
    group="tiles",
)
def _first(given: Given) -> Iterator[Variant]:
    for size in given.key_tiles:
        yield _dropped(given, given.j < size, tile=size)
    for rows, size in given.tilings:
        edge = _edge_tiles(given, rows, size, last=False)
        yield _dropped(given, edge, tile=size, rows=rows)
        # Rounded up to a whole tile: where the block's first key is that of a tile none is lost.
        begins = edge & _of_block(given, rows, given.seen) & (given.j % size == 0)
        yield _dropped(given, edge & ~begins.any(-1, keepdim=True), tile=size, rows=rows)


def _of_block(given: Given, rows: int, seen: Tensor) -> Tensor:
    """What any row of a block of rows sees."""
    found, number = torch.zeros_like(seen), given.i.flatten() // rows
    for block in sorted(set(number.tolist())):
        mine = number == block
        found[:, :, mine] = seen[:, :, mine].any(2, keepdim=True)
    return found


@model(
    "partial-tile-dropped",
    "tiles that the mask hides a part of are not visited",
    group="tiles",
    applies=masked(),
)
def _partial(given: Given) -> Iterator[Variant]:
    for rows, size in given.tiles:
        some, every = tile_sight(given, rows, size)
        yield _dropped(given, some & ~every, tile=size, rows=rows)


@model(
    "partial-tile-as-full",
    "tiles that the mask hides a part of count as seen throughout",
    group="tiles",
    applies=masked(),
)
def _as_full(given: Given) -> Iterator[Variant]:
    for rows, size in given.tiles:
        some, _ = tile_sight(given, rows, size)
        yield Variant(outputs=given.attend(seen=some), parameters={"tile": size, "rows": rows})


@model(
    "tiles-above-diagonal-skipped",
    "tiles behind the diagonal are skipped, although rows see keys there",
    group="tiles",
    applies=masked("prefix_lm", "not", "or", "expression"),
)
def _above(given: Given) -> Iterator[Variant]:
    for rows, size in given.tiles:
        last_row = (given.i // rows + 1) * rows - 1
        above = (given.j // size) * size > last_row
        yield _dropped(given, above.expand(given.shape), tile=size, rows=rows)


@model(
    "tile-skipped",
    "one tile of keys is skipped",
    group="tiles",
    order=1,
)
def _skipped(given: Given) -> Iterator[Variant]:
    yield from _one_tile(given, lambda tile: given.attend(seen=given.seen & ~tile))


@model(
    "tile-twice",
    "one tile of keys counts twice",
    group="tiles",
    order=1,
)
def _twice(given: Given) -> Iterator[Variant]:
    yield from _one_tile(given, lambda tile: given.attend(s=given.s + math.log(2.0) * tile))


def _one_tile(given: Given, outputs: Callable[[Tensor], Outputs]) -> Iterator[Variant]:
    for size in given.key_tiles:
        count = -(-given.problem.kv // size)
        if 1 < count <= _MOST_TILES:
            for number in range(count):
                tile = (given.j // size == number).expand(given.shape)
                yield Variant(outputs=outputs(tile), parameters={"tile": size, "number": number})


def tile_sight(given: Given, rows: int, size: int) -> tuple[Tensor, Tensor]:
    """Of each place whether its tile is seen in part, and in full."""
    seen = given.visible(given.mask)
    tiles = (given.i // rows) * (1 << 20) + given.j // size
    flat, which = tiles[0, 0].reshape(-1), seen.reshape(*seen.shape[:2], -1)
    place = _numbered(flat)
    count = int(place.max()) + 1
    sums = which.new_zeros((*seen.shape[:2], count), dtype=torch.float64)
    sums.index_add_(2, place, which.double())
    sizes = torch.zeros(count, dtype=torch.float64).index_add_(
        0, place, torch.ones(len(place), dtype=torch.float64)
    )
    some, every = sums > 0, sums == sizes
    return some[..., place].view(seen.shape), every[..., place].view(seen.shape)


def _numbered(names: Tensor) -> Tensor:
    """From 0 on, in order."""
    place: Tensor = torch.unique(names, return_inverse=True)[1]
    return place


def _edge_tiles(given: Given, rows: int, size: int, *, last: bool) -> Tensor:
    """The last, or first, tile in which a block of rows sees anything."""
    some, _ = tile_sight(given, rows, size)
    tile = (given.j // size).expand(given.shape)
    if last:
        edge = torch.where(some, tile, -1).amax(-1, keepdim=True)
    else:
        edge = torch.where(some, tile, 1 << 20).amin(-1, keepdim=True)
    return some & (tile == edge)


@model(
    "values-stale",
    "the values of the tile before are used again",
    group="tiles",
    applies=attention,
)
def _stale_values(given: Given) -> Iterator[Variant]:
    for size, place in _before(given):
        yield Variant(outputs=given.attend(v=given.v[:, :, place]), parameters={"tile": size})


@model(
    "keys-stale",
    "the keys of the tile before are used again",
    group="tiles",
    applies=attention,
)
def _stale_keys(given: Given) -> Iterator[Variant]:
    for size, place in _before(given):
        outputs = given.attend(x=given.x[..., place])
        yield Variant(outputs=outputs, parameters={"tile": size})


def _before(given: Given) -> Iterator[tuple[int, Tensor]]:
    """Where each key of a tile but the first finds the one of the tile before."""
    kv = given.problem.kv
    for size in given.key_tiles:
        if size < kv:
            keys = torch.arange(kv)
            yield size, torch.where(keys >= size, keys - size, keys)
