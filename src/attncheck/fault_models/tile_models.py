"""Fault models of tiles and splits of the keys: which are visited, how they are merged."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from attncheck.core.outputs import Outputs
from attncheck.fault_models.fault_model import Prediction, attention, masked, model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from attncheck.fault_models.exact_attention import ExactAttention
    from attncheck.inputs.problem import Problem

__all__ = ["padded_keys", "tile_visibility", "with_padding"]


_MOST_TILES = 12


def padded_keys(given: ExactAttention, size: int) -> int:
    """How many keys the last tile of ``size`` lacks."""
    return -given.problem.kv % size


def with_padding(given: ExactAttention, count: int) -> Iterator[Outputs]:
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
def _tail(given: ExactAttention) -> Iterator[Prediction]:
    for size in given.key_tiles:
        count = padded_keys(given, size)
        if count:
            for outputs in with_padding(given, count):
                yield Prediction(outputs=outputs, parameters={"tile": size})


def _dropped(given: ExactAttention, keys: Tensor, **parameters: int) -> Prediction:
    return Prediction(outputs=given.attend(seen=given.seen & ~keys), parameters=parameters)


@model(
    "last-tile-dropped",
    "the last tile of keys is never visited",
    group="tiles",
)
def _last(given: ExactAttention) -> Iterator[Prediction]:
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
def _first(given: ExactAttention) -> Iterator[Prediction]:
    for size in given.key_tiles:
        yield _dropped(given, given.j < size, tile=size)
    for rows, size in given.tilings:
        edge = _edge_tiles(given, rows, size, last=False)
        yield _dropped(given, edge, tile=size, rows=rows)
        # Rounded up to a whole tile: where the block's first key is that of a tile none is lost.
        begins = edge & _of_block(given, rows, given.seen) & (given.j % size == 0)
        yield _dropped(given, edge & ~begins.any(-1, keepdim=True), tile=size, rows=rows)


def _of_block(given: ExactAttention, rows: int, seen: Tensor) -> Tensor:
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
def _partial(given: ExactAttention) -> Iterator[Prediction]:
    for rows, size in given.tiles:
        some, every = tile_visibility(given, rows, size)
        yield _dropped(given, some & ~every, tile=size, rows=rows)


@model(
    "partial-tile-as-full",
    "tiles that the mask hides a part of count as seen throughout",
    group="tiles",
    applies=masked(),
)
def _as_full(given: ExactAttention) -> Iterator[Prediction]:
    for rows, size in given.tiles:
        some, _ = tile_visibility(given, rows, size)
        yield Prediction(outputs=given.attend(seen=some), parameters={"tile": size, "rows": rows})


@model(
    "tiles-above-diagonal-skipped",
    "tiles behind the diagonal are skipped, although rows see keys there",
    group="tiles",
    applies=masked("prefix_lm", "not", "or", "expression"),
)
def _above(given: ExactAttention) -> Iterator[Prediction]:
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
def _skipped(given: ExactAttention) -> Iterator[Prediction]:
    yield from _one_tile(given, lambda tile: given.attend(seen=given.seen & ~tile))


@model(
    "tile-twice",
    "one tile of keys counts twice",
    group="tiles",
    order=1,
)
def _twice(given: ExactAttention) -> Iterator[Prediction]:
    yield from _one_tile(given, lambda tile: given.attend(s=given.s + math.log(2.0) * tile))


def _one_tile(given: ExactAttention, outputs: Callable[[Tensor], Outputs]) -> Iterator[Prediction]:
    for size in given.key_tiles:
        count = -(-given.problem.kv // size)
        if 1 < count <= _MOST_TILES:
            for number in range(count):
                tile = (given.j // size == number).expand(given.shape)
                yield Prediction(outputs=outputs(tile), parameters={"tile": size, "number": number})


def tile_visibility(given: ExactAttention, rows: int, size: int) -> tuple[Tensor, Tensor]:
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


def _edge_tiles(given: ExactAttention, rows: int, size: int, *, last: bool) -> Tensor:
    """The last, or first, tile in which a block of rows sees anything."""
    some, _ = tile_visibility(given, rows, size)
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
def _stale_values(given: ExactAttention) -> Iterator[Prediction]:
    for size, place in _before(given):
        yield Prediction(outputs=given.attend(v=given.v[:, :, place]), parameters={"tile": size})


@model(
    "keys-stale",
    "the keys of the tile before are used again",
    group="tiles",
    applies=attention,
)
def _stale_keys(given: ExactAttention) -> Iterator[Prediction]:
    for size, place in _before(given):
        outputs = given.attend(x=given.x[..., place])
        yield Prediction(outputs=outputs, parameters={"tile": size})


def _before(given: ExactAttention) -> Iterator[tuple[int, Tensor]]:
    """Where each key of a tile but the first finds the one of the tile before."""
    kv = given.problem.kv
    for size in given.key_tiles:
        if size < kv:
            keys = torch.arange(kv)
            yield size, torch.where(keys >= size, keys - size, keys)


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
def _whole(given: ExactAttention) -> Iterator[Prediction]:
    # Defined before what it is the same as where tiles are whole: that fails on ragged ones too.
    problem = given.problem
    for rows, size in given.tiles:
        parameters = {"tile": size, "rows": rows}
        if problem.query % rows or problem.kv % size:
            yield Prediction(outputs=given.parts.outputs, parameters=parameters)
            continue
        # A kernel visits what its list has, or every tile.
        some = _cut(_asked(given, rows, size), rows, size).any(5).any(3)
        for visited in (some, torch.ones_like(some)):
            yield Prediction(
                outputs=_as_full_of_full_tiles(given, visited, rows, size), parameters=parameters
            )


@model(
    "tile-mostly-seen-as-full",
    "a tile of which more than half is seen counts as seen throughout",
    group="tiles",
    order=1,
)
def _mostly(given: ExactAttention) -> Iterator[Prediction]:
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
                outputs = _as_full_of_full_tiles(given, full, rows, size)
                yield Prediction(outputs=outputs, parameters=parameters)
                inside = _as_full_of_full_tiles(given, full, rows, size, behind=False)
                yield Prediction(outputs=inside, parameters=parameters)


@model(
    "full-tile-beyond-the-end",
    "a tile that is seen as far as the keys go counts as full: what lies behind the last key "
    "counts there, as by a list of tiles that was made for a longer sequence",
    group="tiles",
    applies=masked(),
    order=1,
)
def _longer(given: ExactAttention) -> Iterator[Prediction]:
    for rows, size in given.tiles:
        if padded_keys(given, size):
            asked = _asked(given, rows, size)
            # Rows behind the last one are asked about like any, or not at all.
            for seen in (asked, asked | ~_there(given, rows, size).any(-1, keepdim=True)):
                full = _cut(seen, rows, size).all(5).all(3)
                outputs = _as_full_of_full_tiles(given, full, rows, size)
                yield Prediction(outputs=outputs, parameters={"tile": size, "rows": rows})


def _asked(given: ExactAttention, rows: int, size: int) -> Tensor:
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


def _there(given: ExactAttention, rows: int, size: int) -> Tensor:
    """Which places of whole tiles are rows and keys of the call, ``(1, 1, rows, keys)``."""
    problem = given.problem
    whole = torch.ones(1, 1, problem.query, problem.kv, dtype=torch.bool)
    return pad(whole, (0, padded_keys(given, size), 0, -problem.query % rows))


def _cut(seen: Tensor, rows: int, size: int) -> Tensor:
    """``(batch, heads, blocks, rows, blocks, keys)``."""
    return seen.reshape(*seen.shape[:2], seen.shape[2] // rows, rows, seen.shape[3] // size, size)


def _as_full_of_full_tiles(
    given: ExactAttention, full: Tensor, rows: int, size: int, *, behind: bool = True
) -> Outputs:
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


def _score_behind(given: ExactAttention, count: int) -> Tensor:
    """Of keys that are zeros: by where they would be, or as the last key."""
    zeros = given.x.new_zeros((*given.shape[:3], count))
    if given.problem.score.name == "none":
        return zeros
    j = torch.arange(given.problem.kv, given.problem.kv + count).view(1, 1, 1, -1)
    try:
        return given.score(zeros, given.b, given.h, given.i, j).to(torch.float64)
    except _BEHIND_ITS_END:
        return given.modified(torch.zeros_like(given.x))[..., -1:]


_LOG2E = math.log2(math.e)
_COUNTS = (2, 3, 4, 7, 8)


def _splits(given: ExactAttention) -> Iterator[tuple[dict[str, int], Tensor, Tensor]]:
    """Ways to cut the keys: what each part gives, ``(parts, batch, heads, rows[, value_dim])``.

    The last part is the sink, where there is one.
    """
    kv = given.problem.kv
    cuts: dict[tuple[int, ...], tuple[int, int]] = {}
    for size in given.key_tiles:
        blocks = -(-kv // size)
        for count in dict.fromkeys((*_COUNTS, blocks)):
            if 1 < count <= blocks:
                edges = tuple(min(kv, blocks * n // count * size) for n in range(count + 1))
                cuts.setdefault(edges, (count, size))
        if blocks > 1:  # a first tile, and all others
            cuts.setdefault((0, size, kv), (2, size))
    for edges, (count, size) in cuts.items():
        outs, lses = [], []
        for start, stop in pairwise(edges):
            part = given.softmax(given.z[..., start:stop], given.v[:, :, start:stop], sink=None)
            outs.append(part.out)
            lses.append(part.lse)
        if given.sink is not None:
            lses.append(given.sink.expand(lses[0].shape))
            outs.append(torch.zeros_like(outs[0]))
        yield {"splits": count, "tile": size}, torch.stack(outs), torch.stack(lses)


def _merged(outs: Tensor, lses: Tensor, base: float = 1.0) -> Outputs:
    """Merged by LSE, times ``base``."""
    lse = (lses * base).logsumexp(0)
    shift = torch.where(lse == -math.inf, 0.0, lse)
    weights = (lses * base - shift).exp()
    return Outputs((weights[..., None] * outs).sum(0), lse)


def _more_keys(problem: Problem) -> bool:
    return problem.operation == "attention" and problem.kv > 1


def _averaged_at_all(problem: Problem) -> bool:
    return _more_keys(problem) or (problem.operation == "attention" and problem.sink)


@model(
    "splits-averaged",
    "splits of the keys are averaged, not weighted by their sums",
    group="splits",
    applies=_averaged_at_all,
)
def _averaged(given: ExactAttention) -> Iterator[Prediction]:
    exact = given.parts.lse
    if given.sink is not None:  # of one split, too: the sink has no part in what is averaged
        yield Prediction(
            outputs=Outputs(given.softmax(given.z, sink=None).out, exact), parameters={"splits": 1}
        )
    for parameters, outs, lses in _splits(given):
        # The sink is one of them, or has no part in it.
        for some in dict.fromkeys((len(outs), parameters["splits"])):
            there = lses[:some] != -math.inf
            alive = there.sum(0).clamp(min=1)[..., None]
            for out in (outs[:some].mean(0), outs[:some].sum(0) / alive):
                for lse in (exact, lses[:some].mean(0)):
                    yield Prediction(outputs=Outputs(out, lse), parameters=parameters)


@model(
    "split-merge-base",
    "splits of the keys are merged by powers of another base than their LSE is of",
    group="splits",
    applies=_more_keys,
)
def _base(given: ExactAttention) -> Iterator[Prediction]:
    exact = given.parts.lse
    for parameters, outs, lses in _splits(given):
        for base in (_LOG2E, 1.0 / _LOG2E):
            found = _merged(outs, lses, base)
            largest = lses.amax(0)
            safe = torch.where(largest == -math.inf, 0.0, largest)
            mixed = safe + ((lses - safe) * base).exp().sum(0).log()
            assert found.lse is not None, "as it was made"
            for lse in (found.lse, found.lse / base, mixed, exact):
                yield Prediction(outputs=Outputs(found.out, lse), parameters=parameters)


@model(
    "lse-of-one-split",
    "LSE is that of one split of the keys",
    group="splits",
    applies=_more_keys,
)
def _one(given: ExactAttention) -> Iterator[Prediction]:
    out = given.parts.out
    for parameters, _, lses in _splits(given):
        for lse in (lses[0], lses[-1], lses.amax(0)):
            yield Prediction(outputs=Outputs(out, lse), parameters=parameters)


@model(
    "split-dropped",
    "a split of the keys is left out",
    group="splits",
    applies=_more_keys,
    order=1,
)
def _dropped_of_splits(given: ExactAttention) -> Iterator[Prediction]:
    for parameters, outs, lses in _splits(given):
        for gone in range(parameters["splits"]):
            left = [n for n in range(len(outs)) if n != gone]
            found = _merged(outs[left], lses[left])
            yield Prediction(outputs=found, parameters=parameters | {"number": gone})


@model(
    "empty-split-nan",
    "a split of the keys in which a row sees none makes it NaN",
    group="splits",
    applies=attention,
)
def _nan(given: ExactAttention) -> Iterator[Prediction]:
    exact = given.parts.outputs
    assert exact.lse is not None, "of attention"
    for parameters, _, lses in _splits(given):
        empty = (lses == -math.inf).any(0)
        out = torch.where(empty[..., None], math.nan, exact.out)
        for lse in (torch.where(empty, math.nan, exact.lse), exact.lse):
            yield Prediction(outputs=Outputs(out, lse), parameters=parameters)
    for parameters, empty in _halves(given):
        out = torch.where(empty[..., None], math.nan, exact.out)
        yield Prediction(
            outputs=Outputs(out, torch.where(empty, math.nan, exact.lse)), parameters=parameters
        )


def _halves(given: ExactAttention) -> Iterator[tuple[dict[str, int], Tensor]]:
    """Rows that see nothing in one half of a tile, its padding too: of any, or of one in sight."""
    for rows, size in given.tiles:
        count = -(-given.problem.kv // size)
        shape = (*given.shape[:3], count, 2, size // 2)
        pad = torch.zeros((*given.shape[:3], count * size - given.problem.kv), dtype=torch.bool)
        halves = torch.cat([given.seen, pad], -1).view(shape)
        sight = torch.cat([tile_visibility(given, rows, size)[0], pad], -1).view(shape)
        visited = sight.flatten(-2).any(-1)
        blind = ~halves.any(-1).all(-1)
        for empty in (blind.any(-1), (blind & visited).any(-1)):
            yield {"splits": 2 * count, "tile": size}, empty
