"""Fault models of tiles and splits of the keys: which are visited, and how they are merged."""

from __future__ import annotations

import math
from contextlib import suppress
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from attncheck.core.outputs import Outputs
from attncheck.fault_models.exact_attention import NOT_BROADCAST, TRIED_TILES, SoftmaxParts, merged
from attncheck.fault_models.fault_model import (
    Form,
    ModelTable,
    Parameters,
    has_mask,
    has_score,
    is_attention,
)
from attncheck.fault_models.layout_models import key_counts
from attncheck.fault_models.steps import LOG2E, round_to_format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from attncheck.fault_models.exact_attention import ExactAttention
    from attncheck.inputs.problem import Problem

MODELS = ModelTable("tile")  # faults in the visited tiles of keys, and the last one's padding
SPLITS = ModelTable("rescaling")  # faults in splits of the keys, and in their merge

_model = MODELS.model
_MOST_TILES = 12  # most tiles of keys, one of which is skipped or counts twice
_COUNTS = (2, 3, 4, 7, 8)  # numbers of splits that kernels choose


def padded_keys(call: ExactAttention, size: int) -> int:
    """Return the number of padded keys in the last tile of ``size``."""
    return -call.problem.kv % size


def with_padding(call: ExactAttention, count: int) -> Iterator[Outputs]:
    """Yield outputs with ``count`` further keys of score 0 and value 0.

    They are seen by every row, or by rows that see the last key, or any key. The score mod is
    applied to them as to the last key, or not.
    """
    zero = call.x.new_zeros((*call.shape[:3], 1))
    last = call.seen[..., -1:]
    as_last = call.modified(torch.zeros_like(call.x))[..., -1:]
    some = call.seen.any(-1, keepdim=True)
    plain = call.problem.score.name == "none"
    # The mask may be applied at the last key's place, or not at all.
    for seen in (torch.ones_like(last), last, some):
        for score in (zero,) if plain else (zero, as_last):
            more = torch.where(seen, score, -math.inf)
            yield call.with_extra_keys(more.expand(*call.shape[:3], count))


@_model()
def tail_unmasked(call: ExactAttention) -> Iterator[Form]:
    """The padding of the last tile of keys is not masked: it counts as keys of score 0
    and value 0.
    """
    # All sizes count here: those that hold every key differ in their padding.
    for size in dict.fromkeys(size for _, size in call.tiles):
        count = padded_keys(call, size)
        if any(spec.name == "padding" for spec in call.problem.mask.walk()):
            yield _with_sequence_padding(call, size), {"tile": size}
        if count:
            for outputs in with_padding(call, count):
                yield outputs, {"tile": size}
            # The mask may hide some of the padding, at its places behind the last key.
            if first_key(call.problem) is not None:
                with suppress(IndexError):  # A mask that reads a tensor has no such places.
                    yield _with_masked_padding(call, count), {"tile": size}
        else:
            yield call.exact, {"tile": size}
        # If a key's place in its tile is compared with the end, only a single tile is right.
        every = with_padding(call, count) if count and call.problem.kv > size else (call.exact,)
        for outputs in every:
            yield outputs, {"tile": size}


def _with_masked_padding(call: ExactAttention, count: int) -> Outputs:
    """Return outputs with padding to which the mask is applied behind the last key."""
    j = torch.arange(call.problem.kv, call.problem.kv + count).view(1, 1, 1, -1)
    seen = torch.as_tensor(call.mask(call.b, call.h, call.i, j))
    return call.with_extra_keys(torch.where(seen, _score_behind(call, count), -math.inf))


@_model()
def one_key_behind_the_end(call: ExactAttention) -> Iterator[Form]:
    """One key of the padding of the last tile counts, with score 0 and value 0."""
    for size in call.key_tiles:
        # A full tile has no padding.
        every = with_padding(call, 1) if padded_keys(call, size) else (call.exact,)
        for outputs in every:
            yield outputs, {"tile": size}
        # One key of padding in each split that is not whole tiles.
        for splits in _COUNTS:
            edges = [*range(0, call.problem.kv, -(-call.problem.kv // splits)), call.problem.kv]
            ragged = sum((b - a) % size > 0 for a, b in pairwise(edges))
            for outputs in with_padding(call, ragged) if ragged else (call.exact,):
                yield outputs, {"tile": size, "splits": splits}


def _with_sequence_padding(call: ExactAttention, size: int) -> Outputs:
    """Return outputs with padding behind the last key of each sequence by a padding mask."""
    (spec,) = (spec for spec in call.problem.mask.walk() if spec.name == "padding")
    lengths = torch.tensor(spec.values["lengths"]).view(-1, 1, 1)
    return call.with_extra_keys((-lengths % size).double().log()[..., None])


def _without_keys(
    call: ExactAttention, keys: Tensor, **parameters: int | str
) -> tuple[Outputs, Parameters]:
    """Return outputs without the given keys, and the parameters."""
    return call.attend(seen=call.seen & ~keys), parameters


@_model()
def last_tile_dropped(call: ExactAttention) -> Iterator[Form]:
    """The last tile of keys is never visited."""
    kv, paging = call.problem.kv, call.problem.paging
    for size in dict.fromkeys((*call.key_tiles, *([paging.size] if paging else []))):
        tile = call.j // size
        outputs, parameters = _without_keys(call, tile == (kv - 1) // size, tile=size)
        yield outputs, parameters
        # If the number of tiles is rounded down, only a partial tile is lost.
        yield outputs if kv % size else call.exact, {**parameters, "when": "not full"}
        # A full tile is lost if the keys in the last one are their number modulo the tile.
        counts = torch.tensor(key_counts(call.problem)).view(-1, 1, 1, 1)
        full = (tile == (counts - 1) // size) & (counts % size == 0)
        yield _without_keys(call, full, tile=size, when="full")
    # Each block of rows loses the last tile in which it sees anything.
    for rows, size in call.tilings:
        edge = edge_tiles(call, rows, size, last=True)
        yield _without_keys(call, edge, tile=size, rows=rows)


@_model()
def first_tile_dropped(call: ExactAttention) -> Iterator[Form]:
    """The first tile of keys is never visited."""
    for size in call.key_tiles:
        yield _without_keys(call, call.j < size, tile=size)
    for rows, size in call.tilings:
        edge = edge_tiles(call, rows, size, last=False)
        yield _without_keys(call, edge, tile=size, rows=rows)
        # If the first key is rounded up to a tile, blocks that begin with a tile lose nothing.
        begins = edge & any_in_block(call.seen, call.i.flatten() // rows) & (call.j % size == 0)
        ragged = edge & ~begins.any(-1, keepdim=True)
        yield _without_keys(call, ragged, tile=size, rows=rows, when="it begins within one")


def any_in_block(what: Tensor, number: Tensor) -> Tensor:
    """Return what holds in any row of the same block: bool ``(batch, heads, rows[, kv])``.

    Args:
        number: Number of each row's block.
    """
    any_row = torch.zeros_like(what)
    for block in sorted(set(number.tolist())):
        in_block = number == block
        any_row[:, :, in_block] = what[:, :, in_block].any(2, keepdim=True)
    return any_row


@_model()
def loop_bounds(call: ExactAttention) -> Iterator[Form]:
    """The loop over keys ends too early, or begins too late: what lies outside counts in no row, or
    not in those of its block.
    """
    kv = call.problem.kv
    # In steps of the smallest tile, which divides all others. A loop that is one such tile short
    # has a model of its own; one over all keys is right.
    step = TRIED_TILES[0]
    for end in range(step, max(kv, 2 * step) + step, step):
        if not kv - step <= end < kv:
            yield _without_keys(call, call.j >= end, tile=end)
    for rows in call.row_tiles:
        # The loop begins at the block's own rows.
        yield _without_keys(call, call.j < call.i // rows * rows, rows=rows)
        # A causal loop ends where the block's own rows begin.
        if has_mask("causal", "causal_bottom_right", "sliding_window")(call.problem):
            yield _without_keys(call, call.j >= call.i // rows * rows, rows=rows)
    of_keys = once_for_each(lambda visited: call.attend(seen=call.seen & visited))
    for visited, parameters in (*bounded_loops(call), *_begun_by_last_rows(call)):
        yield of_keys(visited), parameters
    # The loop visits as many keys as there are rows, rounded up to tiles.
    for size in (1, *call.key_tiles):
        end = -(-call.problem.query // size) * size
        yield of_keys(call.j < end), {"tile": size, "ends with": "the number of rows"}
    # The bound of a causal loop is used for every mask.
    for rows, size in call.any_tiles if first_key(call.problem) is None else ():
        visited = call.j // size * size < (call.i // rows + 1) * rows
        yield of_keys(visited), {"tile": size, "rows": rows, "ends with": "its last row"}


def once_for_each(outputs: Callable[[Tensor], Outputs]) -> Callable[[Tensor], Outputs]:
    """Return ``outputs``, a function of the visited keys, with a cache of its results."""
    cache: dict[bytes, Outputs] = {}

    def get(visited: Tensor) -> Outputs:
        content = visited.numpy().tobytes()
        if content not in cache:
            cache[content] = outputs(visited)
        return cache[content]

    return get


def first_key(problem: Problem) -> int | None:
    """Return the key on the diagonal in row 0; None for a mask without one diagonal."""
    parts = {spec.name: spec for spec in problem.mask.walk()}
    if not {*parts} & {"causal", "causal_bottom_right", "sliding_window"}:
        return None
    if {*parts} & {"bottom_right", "documents_bottom_right"}:  # several
        return None
    own = problem.kv - problem.query if "causal_bottom_right" in parts else 0
    offset: Any = parts["offset"].values["rows"] if "offset" in parts else 0
    return own + int(offset)


def bounded_loops(call: ExactAttention) -> Iterator[tuple[Tensor, Parameters]]:
    """Yield the keys ``(1, 1, rows, kv)`` that loops with wrong bounds visit, and parameters.

    For a mask with a diagonal a block of rows visits tiles up to its last key, or from its first.
    """
    problem = call.problem
    later = first_key(problem)
    if later is None:
        return
    other = 0 if later else problem.kv - problem.query
    for rows, size in call.any_tiles:
        block, tile = call.i // rows, call.j // size * size
        first = block * rows + later
        for name, end in {
            "its first row": first,
            "the block before": first - rows,
            "its number": block + 1,
            "one block": torch.full_like(block, rows),
            "a whole tile": (first + rows) // size * size,
            "another diagonal": first - later + rows + other,
            "another diagonal, after a tile": (first - later + rows + other).clamp(min=1),
        }.items():
            yield tile < end, {"tile": size, "rows": rows, "ends with": name}
        yield tile + size > first, {"tile": size, "rows": rows, "begins with": "its first row"}


def _begun_by_last_rows(call: ExactAttention) -> Iterator[tuple[Tensor, Parameters]]:
    """Yield the keys that loops visit which begin with the first key of a block's last row."""
    if not has_mask("sliding_window")(call.problem):
        return
    query = call.problem.query
    firsts: dict[int, Tensor] = {}
    of_all: list[tuple[int, int, Parameters]] = [(query, size, {}) for size in call.key_tiles]
    of_blocks = [(rows, size, {"rows": rows}) for rows, size in call.any_tiles]
    for rows, size, parameters in (*of_all, *of_blocks):
        if rows not in firsts:
            last = ((call.i // rows + 1) * rows - 1).clamp(max=query - 1)
            shown = call.visible(call.mask, i=last - call.i).to(torch.uint8)
            firsts[rows] = shown.argmax(-1, keepdim=True)
        visited = call.j // size * size + size > firsts[rows]
        which = "its last row" if parameters else "the last row"
        yield visited, {**parameters, "tile": size, "begins with": which}


@_model()
def edge_key_dropped(call: ExactAttention) -> Iterator[Form]:
    """One key at an edge does not count: the first or last of all, or of each tile or split."""
    kv, j = call.problem.kv, call.j
    yield _without_keys(call, j == 0, of="all", key="first")
    yield _without_keys(call, j == kv - 1, of="all", key="last")
    ends = {f"each {size}": j // size for size in call.key_tiles if size < kv}
    ends |= {f"each of {n}": j // -(-kv // n) for n in _COUNTS if n < kv}
    for name, part in ends.items():
        numbers = part.flatten()
        changes = numbers[1:] != numbers[:-1]
        edge = torch.ones(1, dtype=torch.bool)
        yield _without_keys(call, torch.cat([edge, changes]).view(j.shape), of=name, key="first")
        yield _without_keys(call, torch.cat([changes, edge]).view(j.shape), of=name, key="last")


@_model(applies=has_mask())
def partial_tile_dropped(call: ExactAttention) -> Iterator[Form]:
    """Tiles that the mask hides a part of are not visited."""
    for rows, size in call.tiles:
        some, every = tile_visibility(call, rows, size)
        yield _without_keys(call, some & ~every, tile=size, rows=rows)


@_model(applies=has_mask(), family="mask")
def partial_tile_as_full(call: ExactAttention) -> Iterator[Form]:
    """Tiles that the mask hides a part of count as seen throughout."""
    for rows, size in call.any_tiles:
        some, _ = tile_visibility(call, rows, size)
        yield call.attend(seen=some), {"tile": size, "rows": rows}


@_model(applies=has_mask(), family="mask")
def mask_skipped_by_one_row(call: ExactAttention) -> Iterator[Form]:
    """A tile counts as seen throughout if one row of its block, the first or the last, sees all of
    it.
    """
    of_keys = once_for_each(lambda seen: call.attend(seen=seen))
    visible: dict[tuple[int, str], Tensor] = {}
    for rows in dict.fromkeys(rows for rows, _ in call.any_tiles):
        first = call.i // rows * rows
        last = (first + rows - 1).clamp(max=call.problem.query - 1)
        for name, row in {"the first": first, "the last": last}.items():
            visible[rows, name] = call.visible(call.mask, i=row - call.i)
    for rows, size in call.any_tiles:
        for name in ("the first", "the last"):
            hidden = pad(~visible[rows, name], (0, padded_keys(call, size)))
            full = ~hidden.view(*call.shape[:3], -1, size).any(-1).repeat_interleave(size, -1)
            outputs = of_keys(call.seen | full[..., : call.problem.kv])
            yield outputs, {"tile": size, "rows": rows, "row": name}


@_model(applies=has_mask("prefix_lm", "not", "or", "expression"))
def tiles_above_diagonal_skipped(call: ExactAttention) -> Iterator[Form]:
    """Tiles behind the diagonal are skipped, although rows see keys there."""
    for rows, size in call.tiles:
        # The bound of a causal loop is used for every mask.
        last_row = (call.i // rows + 1) * rows - 1
        above = (call.j // size) * size > last_row
        yield _without_keys(call, above.expand(call.shape), tile=size, rows=rows)


@_model(order=1)
def tile_skipped(call: ExactAttention) -> Iterator[Form]:
    """One tile of keys is skipped."""
    yield from _for_each_tile(call, lambda tile: call.attend(seen=call.seen & ~tile))


@_model(order=1)
def tile_twice(call: ExactAttention) -> Iterator[Form]:
    """One tile of keys counts twice."""
    yield from _for_each_tile(call, lambda tile: call.attend(s=call.s + math.log(2.0) * tile))


def _for_each_tile(call: ExactAttention, outputs: Callable[[Tensor], Outputs]) -> Iterator[Form]:
    for size in call.key_tiles:
        count = -(-call.problem.kv // size)
        # One of very many tiles would explain anything.
        if 1 < count <= _MOST_TILES:
            for number in range(count):
                tile = (call.j // size == number).expand(call.shape)
                yield outputs(tile), {"tile": size, "number": number}


def tile_visibility(call: ExactAttention, rows: int, size: int) -> tuple[Tensor, Tensor]:
    """Return, for each row and key, whether its tile is seen at all, and in full."""
    seen = call.visible(call.mask)
    # Number the tiles; there are fewer than 2²⁰ along the keys.
    tiles = (call.i // rows) * (1 << 20) + call.j // size
    flat, which = tiles[0, 0].reshape(-1), seen.reshape(*seen.shape[:2], -1)
    place = torch.unique(flat, return_inverse=True)[1]
    count = int(place.max()) + 1
    sums = which.new_zeros((*seen.shape[:2], count), dtype=torch.float64)
    sums.index_add_(2, place, which.double())
    sizes = torch.zeros(count, dtype=torch.float64).index_add_(
        0, place, torch.ones(len(place), dtype=torch.float64)
    )
    some, every = sums > 0, sums == sizes
    return some[..., place].view(seen.shape), every[..., place].view(seen.shape)


def edge_tiles(call: ExactAttention, rows: int, size: int, *, last: bool) -> Tensor:
    """Return the places of the last, or first, tile in which a block of rows sees anything."""
    some, _ = tile_visibility(call, rows, size)
    tile = (call.j // size).expand(call.shape)
    if last:
        edge = torch.where(some, tile, -1).amax(-1, keepdim=True)
    else:
        edge = torch.where(some, tile, 1 << 20).amin(-1, keepdim=True)
    return some & (tile == edge)


@_model(applies=is_attention, family="memory")
def values_stale(call: ExactAttention) -> Iterator[Form]:
    """The values of an earlier tile are used again."""
    for parameters, place in _earlier_keys(call):
        yield call.attend(v=call.v[:, :, place]), parameters


@_model(applies=is_attention, family="memory")
def keys_stale(call: ExactAttention) -> Iterator[Form]:
    """The keys of an earlier tile are used again."""
    for parameters, place in _earlier_keys(call):
        yield call.attend(x=call.x[..., place]), parameters


def _earlier_keys(call: ExactAttention) -> Iterator[tuple[Parameters, Tensor]]:
    """Yield parameters, and for each key its counterpart in an earlier tile, or itself.

    That is the tile before, or as many before as a ring of buffers has.
    """
    keys, kv = torch.arange(call.problem.kv), call.problem.kv
    for size in call.key_tiles:
        if size < kv:
            yield {"tile": size}, torch.where(keys >= size, keys - size, keys)
    for size, stages in product(call.key_tiles, (2, 3, 4)):
        back = stages * size
        # All tiles that do not fit into the ring, or the last one alone.
        for which, some in {
            "all": keys >= back,
            "the last": keys // size == (kv - 1) // size,
        }.items():
            place = torch.where(some & (keys >= back), keys - back, keys)
            yield {"tile": size, "stages": stages, "which": which}, place


@_model(applies=has_mask(), order=1, family="mask")
def mask_dropped_in_whole_tiles(call: ExactAttention) -> Iterator[Form]:
    """Where rows and keys are whole tiles the mask is not applied in what is visited: the path
    without bounds has none.
    """
    # Defined before the model that it equals on whole tiles: that one fails on ragged tiles, too.
    problem = call.problem
    for rows, size in call.tiles:
        parameters = {"tile": size, "rows": rows}
        if problem.query % rows or problem.kv % size:
            yield call.exact, parameters
            continue
        # A kernel visits the tiles in its list, or all tiles.
        some = _tiled(_whole_tiles(call, rows, size), rows, size).any(5).any(3)
        for visited in (some, torch.ones_like(some)):
            yield _with_full_tiles(call, visited, rows, size), parameters


@_model(order=1, family="mask")
def tile_mostly_seen_as_full(call: ExactAttention) -> Iterator[Form]:
    """A tile of which more than half is seen counts as seen throughout."""
    for rows, size in call.tiles:
        shown, inside = _whole_tiles(call, rows, size), _inside(call, rows, size)
        parameters = {"tile": size, "rows": rows}
        tried: list[Tensor] = []
        # The mask may be applied to padded rows like to any, or hide them.
        for seen in (shown & inside.any(2, keepdim=True), shown & inside):
            tiles = _tiled(seen, rows, size)
            # More than half of all places, or of the columns that all rows see.
            for share in (tiles.double().mean((3, 5)), tiles.all(3).double().mean(4)):
                full = share > 0.5
                if any(torch.equal(full, other) for other in tried):
                    continue
                tried.append(full)
                yield _with_full_tiles(call, full, rows, size), parameters
                yield _with_full_tiles(call, full, rows, size, behind=False), parameters


@_model(applies=has_mask(), order=1, family="mask")
def full_tile_beyond_the_end(call: ExactAttention) -> Iterator[Form]:
    """A tile that is seen as far as the keys go counts as full: what lies behind the last key
    counts there, as by a list of tiles that was made for a longer sequence.
    """
    for rows, size in call.tiles:
        if padded_keys(call, size):
            shown = _whole_tiles(call, rows, size)
            # The mask may be applied to padded rows like to any, or not at all.
            for seen in (shown, shown | ~_inside(call, rows, size).any(-1, keepdim=True)):
                full = _tiled(seen, rows, size).all(5).all(3)
                yield _with_full_tiles(call, full, rows, size), {"tile": size, "rows": rows}


@_model(applies=has_mask(), family="mask")
def mask_within_the_tile(call: ExactAttention) -> Iterator[Form]:
    """The mask, and perhaps the end of the keys, is asked about a key's place in its tile or split:
    where that starts is missing.
    """
    kv, shape = call.problem.kv, call.shape
    for size in call.key_tiles:
        if size >= kv:
            yield call.exact, {"tile": size}
            continue
        count = padded_keys(call, size)
        visible = call.visible(call.mask)[..., torch.arange(kv + count) % size]
        s = torch.cat([call.s, _score_behind(call, count).expand(*shape[:3], count)], -1)
        # The loop visits all tiles, or those in which a block of rows sees anything.
        blocks = (tile_visibility(call, rows, size)[0] for rows in TRIED_TILES)
        for visited in (torch.ones(shape, dtype=torch.bool), *blocks):
            visited_padded = torch.cat([visited, visited[..., -1:].expand(*shape[:3], count)], -1)
            # The end of the keys may be checked, or not.
            for end in (kv, kv + count) if count else (kv,):
                seen = visible & visited_padded & (torch.arange(kv + count) < end)
                z = torch.where(seen, s, -math.inf)
                yield call.with_extra_keys(z[..., kv:], z[..., :kv]), {"tile": size}
    for parameters, start in _split_starts(call):
        seen = call.visible(call.mask)[..., (call.j - start).flatten()]
        yield call.attend(seen=seen), parameters


def _split_starts(call: ExactAttention) -> Iterator[tuple[dict[str, int], Tensor]]:
    """Yield parameters, and for each key where its split begins, ``(1, 1, 1, kv)``."""
    for edges, (count, size) in _any_cuts(call).items():
        starts = torch.tensor(edges[:-1])
        lengths = torch.tensor([stop - start for start, stop in pairwise(edges)])
        yield {"splits": count, "tile": size}, starts.repeat_interleave(lengths).view(call.j.shape)


@_model(applies=has_score(), family="score")
def score_mod_within_the_tile(call: ExactAttention) -> Iterator[Form]:
    """The score mod is asked about a key's, or a row's, place in its tile or split: where that
    starts is missing.
    """
    for size in call.key_tiles:
        start = call.j // size * size
        yield call.attend(s=call.modified(call.x, j=-start)), {"of": "a key", "tile": size}
    for parameters, start in _split_starts(call):
        yield call.attend(s=call.modified(call.x, j=-start)), {"of": "a key", **parameters}
    for rows in call.row_tiles:
        start = call.i // rows * rows
        yield call.attend(s=call.modified(call.x, i=-start)), {"of": "a row", "rows": rows}


def _whole_tiles(call: ExactAttention, rows: int, size: int) -> Tensor:
    """Return the mask in whole tiles, with padding, ``(batch', heads', rows, keys)``.

    Padding repeats the last row or key where the mask is only defined within the call.
    """
    problem = call.problem
    i = torch.arange(problem.query + -problem.query % rows).view(1, 1, -1, 1)
    j = torch.arange(problem.kv + padded_keys(call, size)).view(1, 1, 1, -1)
    try:
        seen = torch.as_tensor(call.mask(call.b, call.h, i, j)).bool()
    # A table ends with the call; beyond it a kernel reads the last entry, or masks.
    except NOT_BROADCAST:
        i, j = i.clamp(max=problem.query - 1), j.clamp(max=problem.kv - 1)
        seen = torch.as_tensor(call.mask(call.b, call.h, i, j)).bool()
    seen = seen[(None,) * (4 - seen.dim())]
    return seen.expand(*seen.shape[:2], i.shape[2], j.shape[3])


def _inside(call: ExactAttention, rows: int, size: int) -> Tensor:
    """Return which places of whole tiles are no padding, ``(1, 1, rows, keys)``."""
    problem = call.problem
    whole = torch.ones(1, 1, problem.query, problem.kv, dtype=torch.bool)
    return pad(whole, (0, padded_keys(call, size), 0, -problem.query % rows))


def _tiled(seen: Tensor, rows: int, size: int) -> Tensor:
    """Return ``seen`` in tiles, ``(batch, heads, blocks, rows, blocks, keys)``."""
    return seen.reshape(*seen.shape[:2], seen.shape[2] // rows, rows, seen.shape[3] // size, size)


def _with_full_tiles(
    call: ExactAttention, full: Tensor, rows: int, size: int, *, behind: bool = True
) -> Outputs:
    """Return outputs with nothing hidden in ``full`` tiles ``(batch', heads', blocks, blocks)``.

    With ``behind`` nor is their padding, keys of score 0 before the score mod and value 0.
    """
    full = full[:, :, call.rows // rows].repeat_interleave(size, -1)
    kv = call.problem.kv
    z = torch.where(call.seen | full[..., :kv], call.s, -math.inf)
    count = padded_keys(call, size)
    if not count or not behind:
        return call.softmax(z, sink=call.sink).outputs
    return call.with_extra_keys(
        torch.where(full[..., kv:], _score_behind(call, count), -math.inf), z
    )


def _score_behind(call: ExactAttention, count: int) -> Tensor:
    """Return scores of padded keys of zeros, by their places or, if that fails, the last key's."""
    zeros = call.x.new_zeros((*call.shape[:3], count))
    if call.problem.score.name == "none":
        return zeros
    j = torch.arange(call.problem.kv, call.problem.kv + count).view(1, 1, 1, -1)
    try:
        return call.score(zeros, call.b, call.h, call.i, j).to(torch.float64)
    except NOT_BROADCAST:
        return call.modified(torch.zeros_like(call.x))[..., -1:]


def _cuts(call: ExactAttention) -> dict[tuple[int, ...], tuple[int, int]]:
    """Return where splits of the keys begin and end: edges → number of splits, and their tile."""
    kv = call.problem.kv
    cuts: dict[tuple[int, ...], tuple[int, int]] = {}
    for size in call.key_tiles:
        blocks = -(-kv // size)
        # Numbers of splits that kernels choose, and one split for each tile.
        for count in dict.fromkeys((*_COUNTS, blocks)):
            if 1 < count <= blocks:
                edges = tuple(min(kv, blocks * n // count * size) for n in range(count + 1))
                cuts.setdefault(edges, (count, size))
                # Or all but the last have the same number of tiles, and may be fewer.
                edges = (*range(0, kv, -(-blocks // count) * size), kv)
                cuts.setdefault(edges, (len(edges) - 1, size))
        if blocks > 1:  # the first tile, and all others
            cuts.setdefault((0, size, kv), (2, size))
    return cuts


def _any_cuts(call: ExactAttention) -> dict[tuple[int, ...], tuple[int, int]]:
    """Return ``_cuts``, and those of equal parts of the keys, which need not be whole tiles."""
    kv, cuts = call.problem.kv, _cuts(call)
    for count in _COUNTS:
        edges = (*range(0, kv, -(-kv // count)), kv)
        if count <= kv:
            cuts.setdefault(edges, (len(edges) - 1, 1))
    return cuts


def _splits(
    call: ExactAttention, cuts: Mapping[tuple[int, ...], tuple[int, int]] | None = None
) -> Iterator[tuple[dict[str, int], Tensor, Tensor]]:
    """Yield parameters, out and LSE of splits, ``(parts, batch, heads, rows[, value_dim])``.

    If there is a sink, it is the last part. For ``cuts`` see ``_cuts``.
    """
    for edges, (count, size) in (_cuts(call) if cuts is None else cuts).items():
        outs, lses = [], []
        for start, stop in pairwise(edges):
            part = call.softmax(call.z[..., start:stop], call.v[:, :, start:stop], sink=None)
            outs.append(part.out)
            lses.append(part.lse)
        if call.sink is not None:
            lses.append(call.sink.expand(lses[0].shape))
            outs.append(torch.zeros_like(outs[0]))
        yield {"splits": count, "tile": size}, torch.stack(outs), torch.stack(lses)


def _several_keys(problem: Problem) -> bool:
    return problem.operation == "attention" and problem.kv > 1


@SPLITS.model(applies=lambda p: _several_keys(p) or (is_attention(p) and p.sink))
def splits_averaged(call: ExactAttention) -> Iterator[Form]:
    """Splits of the keys are averaged, not weighted by their sums."""
    exact = call.parts.lse
    if call.sink is not None:  # Also one split: the average leaves out the sink.
        yield Outputs(call.softmax(call.z, sink=None).out, exact), {"splits": 1}
    for parameters, outs, lses in _splits(call):
        # The sink may be one of the parts, or be left out.
        for count in dict.fromkeys((len(outs), parameters["splits"])):
            not_empty = lses[:count] != -math.inf
            divisor = not_empty.sum(0).clamp(min=1)[..., None]
            for out in (outs[:count].mean(0), outs[:count].sum(0) / divisor):
                for lse in (exact, lses[:count].mean(0)):
                    yield Outputs(out, lse), parameters


@SPLITS.model(applies=_several_keys)
def split_merge_base(call: ExactAttention) -> Iterator[Form]:
    """Splits of the keys are merged by powers of another base than their LSE is of."""
    exact = call.parts.lse
    for parameters, outs, lses in _splits(call):
        for base in (LOG2E, 1.0 / LOG2E):
            by_base = merged(outs, lses, base)
            # The sum and the maximum of LSE may have different bases.
            largest = lses.amax(0)
            safe = torch.where(largest == -math.inf, 0.0, largest)
            mixed = safe + ((lses - safe) * base).exp().sum(0).log()
            assert by_base.lse is not None, "as it was made"
            for lse in (by_base.lse, by_base.lse / base, mixed, exact):
                yield Outputs(by_base.out, lse), parameters


@SPLITS.model(applies=lambda p: _several_keys(p) and not p.sink)
def split_weights_wrong(call: ExactAttention) -> Iterator[Form]:
    """Splits of the keys are merged with other weights than powers of their maximum less the
    largest, or not by their sum: in the output, in the row sum, or in both.
    """
    for parameters, parts in _split_parts(call):
        m = torch.stack([one.maximum for one in parts])
        sums = torch.stack([one.total for one in parts])
        values = torch.stack([one.values for one in parts])
        top = m.amax(0)
        top = torch.where(top == -math.inf, 0.0, top)
        right = (m - top).exp()
        others = {"of 1": torch.ones_like(right), "of the maximum alone": m.exp()}
        others |= {"of the sum": (m + top).exp(), "of the reverse": (top - m).exp()}
        weighted = {"right": (sums * right).sum(0), "largest": (sums * right).amax(0)}
        weighted |= {name: (sums * w).sum(0) for name, w in others.items()}
        weighted["without sums"] = right.sum(0)
        # An LSE of 0, not −∞, of a split in which a row sees no key.
        weighted["of empty ones"] = weighted["right"] + (m == -math.inf).sum(0) * (-top).exp()
        outs = {"right": (values * right[..., None]).sum(0)}
        normalised = values / torch.where(sums == 0, 1.0, sums)[..., None]
        outs["without sums"] = (normalised * right[..., None]).sum(0)
        outs["largest"] = (values * right[..., None]).amax(0)
        outs |= {name: (values * w[..., None]).sum(0) for name, w in others.items()}
        # The number of splits may be padded to a power of two with empty ones.
        outs["largest with empty ones"] = outs["largest"].clamp(min=0.0)
        for name in sorted({*weighted, *outs} - {"right"}):
            pairs = {"both": (outs.get(name), weighted.get(name))}
            pairs |= {"out": (outs.get(name), weighted["right"])}
            pairs |= {"the sum": (outs["right"], weighted.get(name))}
            for of, (out, total) in pairs.items():
                if out is not None and total is not None:
                    empty = total == 0
                    safe = torch.where(empty, 1.0, total)
                    lse = torch.where(empty, -math.inf, top + safe.log())
                    words = {"weights": name, "of": of}
                    yield Outputs(out / safe[..., None], lse), {**parameters, **words}
    # Splits may end with tiles, and a row may see nothing at all.
    for parameters, each, lses in _splits(call, _any_cuts(call)):
        counted = torch.where(lses == -math.inf, 0.0, lses)
        yield merged(each, counted), {**parameters, "weights": "of empty ones", "of": "both"}


def _split_parts(call: ExactAttention) -> Iterator[tuple[dict[str, int], list[SoftmaxParts]]]:
    """Yield parameters and the softmax of each of several equal parts of the keys."""
    kv = call.problem.kv
    for count in _COUNTS:
        length = -(-kv // count)
        if count <= kv:
            starts = [min(kv, n * length) for n in range(count + 1)]
            if starts[-2] < kv:
                yield (
                    {"splits": count},
                    [
                        call.softmax(call.z[..., a:b], call.v[:, :, a:b], sink=None)
                        for a, b in pairwise(starts)
                    ],
                )


@SPLITS.model(applies=lambda problem: _several_keys(problem) and not problem.sink, family="tile")
def split_bounds_wrong(call: ExactAttention) -> Iterator[Form]:
    """Splits of the keys overlap, or leave keys out: where they begin or end is computed
    otherwise.
    """
    kv, j = call.problem.kv, call.j
    for count in _COUNTS:
        length = -(-kv // count)
        begins = {"": [n * length for n in range(count)], "at its number": list(range(count))}
        begins |= {"at 0": [0] * count, "at the second": [length] * count}
        for begin, starts in begins.items():
            # Each split may end after its length, or all end with the last or the first split.
            ends = {"": [start + length for start in starts], "with the last": [kv] * count}
            ends |= {"with the first": [length] * count}
            for end, stops in ends.items():
                pairs = zip(starts, stops, strict=True)
                times = torch.as_tensor(sum(((j >= a) & (j < b)).double() for a, b in pairs))
                # If no key counts, every row is empty, which has a model of its own.
                if (begin or end) and bool(times.any()):
                    outputs = call.attend(s=call.s + times.log())
                    yield outputs, {"splits": count, "begins": begin, "ends": end}


@SPLITS.model(applies=_several_keys)
def split_lse_not_accumulated(call: ExactAttention) -> Iterator[Form]:
    """Splits of the keys are merged one after another, each with the LSE of the one before it
    alone, not of all before it.
    """
    for parameters, outs, lses in _splits(call, _any_cuts(call)):
        both = Outputs(outs[0], lses[0])
        if len(outs) < 3:  # their merge is right
            continue
        for n in range(1, len(outs)):
            both = merged(torch.stack([both.out, outs[n]]), lses[n - 1 : n + 1])
        for lse in (lses[-1], both.lse, call.parts.lse):
            yield Outputs(both.out, lse), parameters


@SPLITS.model(applies=_several_keys, family="lse")
def lse_of_one_split(call: ExactAttention) -> Iterator[Form]:
    """LSE is that of one split of the keys."""
    out = call.parts.out
    for parameters, _, lses in _splits(call, _any_cuts(call)):
        # LSE may be that of the first split, the last one, or the largest.
        for lse in (lses[0], lses[-1], lses.amax(0)):
            yield Outputs(out, lse), parameters


@SPLITS.model(applies=_several_keys, order=1, family="tile")
def split_dropped(call: ExactAttention) -> Iterator[Form]:
    """A split of the keys is left out."""
    for parameters, outs, lses in _splits(call):
        for dropped in range(parameters["splits"]):
            others = [n for n in range(len(outs)) if n != dropped]
            yield merged(outs[others], lses[others]), parameters | {"number": dropped}


@SPLITS.model(applies=_several_keys, order=1, family="precision")
def split_results_rounded(call: ExactAttention) -> Iterator[Form]:
    """What splits of the keys leave to be merged, their output or LSE, is rounded to too few
    bits.
    """
    cuts = _cuts(call)
    # Few keys fill one split alone, whose results are stored and merged all the same.
    if call.key_tiles[-1] >= call.problem.kv:
        cuts[(0, call.problem.kv)] = (1, call.key_tiles[-1])
    for edges, (parameters, outs, lses) in zip(cuts, _splits(call, cuts), strict=True):
        tops = [call.z[..., start:stop].amax(-1) for start, stop in pairwise(edges)]
        tops += [] if call.sink is None else [lses[-1]]
        # Outputs may be stored before they are divided by the split's sum.
        totals = (lses - torch.stack(tops)).exp().nan_to_num(nan=1.0)[..., None]
        for name in ("bf16", "fp16"):
            rounded = round_to_format(name)
            before = rounded(outs * totals) / totals
            for of, one in {
                "LSE": merged(outs, rounded(lses)),
                "output": merged(rounded(outs), lses),
                "output before its sum divides it": merged(before, lses),
                "output and LSE": merged(rounded(outs), rounded(lses)),
            }.items():
                yield one, {**parameters, "format": name, "of": of}


@SPLITS.model(applies=is_attention, family="overflow")
def empty_split_nan(call: ExactAttention) -> Iterator[Form]:
    """A split of the keys in which a row sees none makes it NaN."""
    for parameters, _, lses in _splits(call):
        empty = (lses == -math.inf).any(0)
        yield call.with_out(empty, math.nan, lse=math.nan), parameters
        yield call.with_out(empty, math.nan), parameters
    for parameters, empty in _halves(call):
        yield call.with_out(empty, math.nan, lse=math.nan), parameters


def _halves(call: ExactAttention) -> Iterator[tuple[dict[str, int], Tensor]]:
    """Yield parameters, and rows that see nothing in a half of any, or any visited, tile."""
    for rows, size in call.tiles:
        count = -(-call.problem.kv // size)
        shape = (*call.shape[:3], count, 2, size // 2)
        missing = (0, count * size - call.problem.kv)
        halves = pad(call.seen, missing).view(shape)
        visited = pad(tile_visibility(call, rows, size)[0], missing).view(shape).flatten(-2).any(-1)
        blind = ~halves.any(-1).all(-1)
        for empty in (blind.any(-1), (blind & visited).any(-1)):
            yield {"splits": 2 * count, "tile": size}, empty
