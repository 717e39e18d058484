"""Fault models of the contents of memory: pages, numbers behind the last key, NaN, and 0 · ∞."""

from __future__ import annotations

import math
from itertools import permutations
from typing import TYPE_CHECKING

import torch

from attncheck.fault_models.fault_model import (
    Form,
    ModelTable,
    Parameters,
    Prediction,
    has_mask,
    is_attention,
    is_scaled,
)
from attncheck.fault_models.layout_models import (
    DOCUMENT_LENGTHS,
    key_counts,
    packed_sequences,
    read_at,
    total,
    wider,
    with_keys,
)
from attncheck.fault_models.steps import LOG2E
from attncheck.fault_models.tile_models import (
    any_in_block,
    padded_keys,
    tile_visibility,
    with_padding,
)
from attncheck.mods.page_table import draw_page_table, pack_pages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attncheck.fault_models.exact_attention import ExactAttention

MODELS = ModelTable("memory")

_model = MODELS.model


@_model(applies=lambda problem: problem.paging is not None, family="mapping")
def page_table_ignored(call: ExactAttention) -> Iterator[Form]:
    """Pages are read as if they were in order: the table is not looked at."""
    problem = call.problem
    assert problem.paging is not None, "asked of what has pages"
    size = problem.paging.size
    table = draw_page_table(
        problem.paging, problem.batch, problem.kv, (problem.kv,) * problem.batch
    )
    count = -(-problem.kv // size)
    place = torch.arange(count)
    # Consecutive pages, starting at the sequence's number times the pages of one.
    own = place + count * torch.arange(problem.batch)[:, None]
    # All sequences read the first pages, or each its consecutive ones.
    for order in (place.expand(problem.batch, -1), own):
        read = []
        for tensor in (call.inputs.k, call.inputs.v):
            pool = pack_pages(tensor, table)  # (pages, size, kv_heads, dim)
            pages = pool[order.clamp(max=len(pool) - 1)].double()
            keys = pages.flatten(1, 2)[:, : problem.kv].transpose(1, 2)
            read.append(call.by_query_head(keys.contiguous()))
        # With descales, which each head has one of, other pages are not tried.
        if call.inputs.descale is None:
            yield from with_keys(call, *read)


@_model(applies=lambda problem: problem.paging is not None, family="mapping")
def page_index_wrong(call: ExactAttention) -> Iterator[Form]:
    """A key's page, its slot there or its head is not what the table and its number say: an index
    or a stride is missing, or another's.
    """
    problem = call.problem
    assert problem.paging is not None, "asked of what has pages"
    if call.inputs.descale is not None:
        return
    size = problem.paging.size
    table = draw_page_table(problem.paging, problem.batch, problem.kv, key_counts(problem))
    pools = [pack_pages(x, table).contiguous() for x in (call.inputs.k, call.inputs.v)]
    flat, most = table.table.flatten().long(), table.table.shape[1]
    b, h, t = call.b, call.h, torch.arange(problem.kv).view(1, 1, -1, 1)
    head, page, slot = h // problem.group, t // size, t % size
    # The table may be taken to be as wide as the longest sequence needs.
    width = -(-max(key_counts(problem)) // size)
    entries = {"": b * most + page, "pages of the longest sequence for the width": b * width + page}
    entries |= {"without place": b * most, "without sequence": page}
    entries |= {"sequence not times the width": b + page, "key for place": b * most + t}
    entries |= {"slot for place": b * most + slot, "of the second": most + page}
    slots = {"missing": 0 * t, "the second": 0 * t + 1, "the page's number": page, "the key": t}
    heads = {"the query head": h, "the second": 0 * h + 1, "the sequence": b}
    heads |= {"its place in its group": h % problem.group}
    pages = {name: (_table_entries(flat, at), slot, head) for name, at in entries.items() if name}
    own = _table_entries(flat, entries[""])
    pages |= {"page 0": (0 * own, slot, head), "page 1": (0 * own + 1, slot, head)}
    pages |= {f"slot: {name}": (own, at, head) for name, at in slots.items()}
    pages |= {f"head: {name}": (own, slot, at) for name, at in heads.items()}
    # Of a load of several pages only the first may be looked up.
    for keys in call.key_tiles:
        if keys > size:
            first = t // keys * keys // size
            at = _table_entries(flat, b * most + first) + page - first
            pages[f"the first of {keys} keys, and those behind it"] = (at, slot, head)
    for name, indices in pages.items():
        yield from _at_places(call, pools, indices, (0, 1, 2), name)
    for axis, other in permutations(range(3), 2):
        axes = tuple(other if n == axis else n for n in range(3))
        name = f"stride {axis} for {other}"
        yield from _at_places(call, pools, (own, slot, head), axes, name)


@_model(applies=lambda problem: problem.paging is not None, family="mapping")
def page_0_not_read(call: ExactAttention) -> Iterator[Form]:
    """Page 0 is taken for no page: its keys do not count."""
    problem = call.problem
    assert problem.paging is not None, "asked of what has pages"
    table = draw_page_table(problem.paging, problem.batch, problem.kv, key_counts(problem))
    of_keys = table.table[:, torch.arange(problem.kv) // problem.paging.size][:, None, None]
    yield call.attend(seen=call.seen & (of_keys != 0))


def _table_entries(flat: Tensor, at: Tensor) -> Tensor:
    """Return entries of the table; beyond its end the number of a page that does not exist."""
    return torch.where(at < len(flat), flat[at.clamp(max=len(flat) - 1)], 1 << 40)


def _at_places(
    call: ExactAttention,
    pools: list[Tensor],
    indices: tuple[Tensor, ...],
    axes: tuple[int, ...],
    name: str,
) -> Iterator[Form]:
    """Yield outputs with keys and values read elsewhere in their pools.

    Args:
        indices: Of page, slot and head.
        axes: Whose strides multiply them.
    """
    read, inside = [], True
    for pool in pools:
        steps = (i * pool.stride(axis) for i, axis in zip(indices, axes, strict=True))
        values, in_memory = read_at(pool, total(steps) + torch.arange(pool.shape[3]))
        shape = (*call.shape[:2], call.problem.kv, pool.shape[3])
        read.append(values.double().expand(shape))
        inside = inside and bool(in_memory.all())
    if inside:  # The memory behind all pages is unknown.
        yield from with_keys(call, *read, which=name)


@_model(applies=lambda problem: problem.paging is not None)
def page_boundary_leak(call: ExactAttention) -> Iterator[Form]:
    """The rest of the last page counts: keys behind the last one are seen."""
    assert call.problem.paging is not None, "asked of what has pages"
    size = call.problem.paging.size
    count = padded_keys(call, size)
    if count:
        for outputs in with_padding(call, count):
            yield outputs, {"page": size}
        # Memory behind the last key is NaN, which reaches only out, or LSE, too.
        every = torch.ones(call.shape[:3], dtype=torch.bool)
        yield call.with_out(every, math.nan, lse=math.nan), {"page": size}
        yield call.with_out(every, math.nan), {"page": size}


@_model(applies=has_mask())
def hidden_values_leak(call: ExactAttention) -> Iterator[Form]:
    """The value of a key that the mask hides reaches a row: 0 times NaN is NaN."""
    wild = ~call.v.isfinite().all(-1)[:, :, None, :]  # (batch, heads, 1, kv)
    if not bool(wild.any()):
        return
    touched = (~call.v.isfinite())[:, :, None]  # (batch, heads, 1, kv, dim)
    some = call.seen.any(-1, keepdim=True)
    # Rows that see no key may be skipped before values are read.
    for reach in (torch.ones_like(call.seen), some.expand(call.seen.shape)):
        hit = (reach[..., None] & touched).any(-2)
        yield call.with_out(hit, math.nan)


@_model(applies=lambda problem: is_attention(problem) and problem.paging is None)
def values_behind_keys(call: ExactAttention) -> Iterator[Form]:
    """The last tile loads what lies in memory behind the last value: a weight of 0 times NaN is
    NaN.
    """
    kv = call.problem.kv
    for size in call.key_tiles:
        if kv % size == 0:
            continue
        for read in wider(call.inputs.v, 2, -(-kv // size) * size):
            wild = ~read[:, :, kv:].double().isfinite().all(2, keepdim=True)
            if not bool(wild.any()):
                continue
            # All rows load the last tile, or only blocks of rows that visit it.
            last = torch.ones(call.shape[:3], dtype=torch.bool)
            tiles = [(rows, keys) for rows, keys in call.tiles if keys == size]
            visiting = [tile_visibility(call, rows, size)[0][..., -1] for rows, _ in tiles]
            for rows in [last, *visiting]:
                hit = rows[..., None] & call.by_query_head(wild)
                yield call.with_out(hit, math.nan), {"tile": size}


@_model(order=1)
def rows_unwritten(call: ExactAttention) -> Iterator[Form]:
    """Some rows are never written."""
    exact = call.exact
    query = call.problem.query
    for rows in call.row_tiles:
        number = call.i[..., 0] // rows
        # A partial last block, rows without keys, or blocks of such rows.
        ragged = number == (query - 1) // rows
        dead = (~call.seen.any(-1)) & (call.parts.lse == -math.inf)
        dead_blocks = ~any_in_block(~dead, number.flatten())
        for unwritten in (ragged.expand(dead.shape), dead, dead_blocks):
            if bool(unwritten.any()) and bool(unwritten.all()):  # Else it fits any rows.
                if bool(dead.all()):
                    yield Prediction(outputs=exact, free=unwritten)
            elif bool(unwritten.any()):
                yield Prediction(outputs=exact, parameters={"rows": rows}, free=unwritten)
                yield call.with_out(unwritten, 0.0), {"rows": rows}
                yield call.with_out(unwritten, 0.0, lse=0.0), {"rows": rows}
        # Blocks are launched in whole groups.
        blocks = -(-query // rows)
        for group in _GROUPS:
            behind = (number >= (blocks // group * group or blocks)).expand(dead.shape)
            which = f"behind whole groups of {group}"
            yield from _never_written(call, behind, {"rows": rows, "blocks": which})
        # Blocks are launched for as many rows as there are keys.
        behind = (number >= -(-call.problem.kv // rows)).expand(dead.shape)
        yield from _never_written(call, behind, {"rows": rows, "blocks": "behind the keys"})
        # Each program does only its first one. Zeros in all others are ``values-missing``.
        later = (number > 0).expand(dead.shape)
        free = later if bool(later.any()) else None
        of_first: Parameters = {"rows": rows, "blocks": "behind the first"}
        yield Prediction(outputs=exact, parameters=of_first, free=free)


_GROUPS = (2, 4, 8, 16)  # blocks of rows that kernels launch together


def _never_written(
    call: ExactAttention, unwritten: Tensor, parameters: Parameters
) -> Iterator[Form]:
    """Yield outputs without some rows: what memory held, zeros, or those of a row without keys."""
    if bool(unwritten.all()):  # It would fit any rows.
        return
    if not bool(unwritten.any()):
        yield call.exact, parameters
        return
    yield Prediction(outputs=call.exact, parameters=parameters, free=unwritten)
    for lse in (0.0, -math.inf):
        yield call.with_out(unwritten, 0.0, lse=lse), parameters


@_model(applies=has_mask(*DOCUMENT_LENGTHS, "padding", "bottom_right"))
def rows_behind_an_empty_sequence(call: ExactAttention) -> Iterator[Form]:
    """Sequences behind one without rows, or without keys, are never written: the loop over them
    ends there.
    """
    parts, problem = packed_sequences(call.problem), call.problem
    for of, empty in {
        "rows": [not part.rows for part in parts],
        "keys": [not part.keys for part in parts],
        "rows or keys": [not part.rows or not part.keys for part in parts],
    }.items():
        first = empty.index(True) if True in empty else len(parts)
        # The one without keys itself may be unwritten, too; zeros are right there.
        start = parts[first].row if first < len(parts) else problem.batch * problem.query
        if not start and first + 1 < len(parts):  # all rows would be lost, which fits any
            start = parts[first + 1].row
        number = call.b * problem.query + call.i
        lost = (number >= start).expand(*call.shape[:3], 1)[..., 0]
        yield from _never_written(call, lost, {"without": of})


def _visited_places(call: ExactAttention, size: int) -> Iterator[Tensor]:
    """Yield places (batch, heads, rows, kv) in visited tiles of ``size`` keys.

    A row visits every tile, or those in which the row, or its block of rows, sees a key.
    """
    yield torch.ones(call.shape, dtype=torch.bool)
    for rows in dict.fromkeys((1, *(rows for rows, keys in call.tiles if keys == size))):
        yield tile_visibility(call, rows, size)[0]


def _ragged(call: ExactAttention, size: int) -> Tensor:
    """Return the keys (1, 1, 1, kv) of a partial last tile; none if the last tile is full."""
    kv = call.problem.kv
    return (call.j // size == kv // size) if kv % size else torch.zeros_like(call.j).bool()


def _with_nan_rows(
    call: ExactAttention, rows: Tensor, /, *, lse: bool = True, **parameters: int
) -> Form:
    """Return outputs with NaN in these rows of out, and of LSE by default, and parameters."""
    return call.with_out(rows, math.nan, lse=math.nan if lse else None), parameters


@_model(applies=is_attention, family="overflow")
def scale_of_zero_after_mask(call: ExactAttention) -> Iterator[Form]:
    """A scale that is 0 in fp32 multiplies what is −∞, hidden scores or the maximum before the
    first tile: 0 · ∞ is NaN.
    """
    for zero in _zero_factors(call):
        if not bool(zero.any()):
            continue
        # The maximum is −∞ before the first tile, whatever a row sees.
        yield _with_nan_rows(call, zero.expand(call.shape[:3]))
        for size in call.key_tiles:
            ragged = _ragged(call, size)
            for visited in _visited_places(call, size):
                hidden = (visited & (~call.seen | ragged)).any(-1)
                yield _with_nan_rows(call, hidden & zero, tile=size)


def _zero_factors(call: ExactAttention) -> Iterator[Tensor]:
    """Yield sequences and query heads ``(batch, heads, 1)`` whose factor of q·k is 0 in fp32.

    The factor is that for exp or exp2; subnormal numbers may be flushed to 0.
    """
    problem, descale = call.problem, call.inputs.descale
    products = torch.ones((problem.batch, problem.heads, 1))
    if descale is not None:
        products = products * call.by_query_head(descale.q.float() * descale.k.float())[..., None]
    # Kernels multiply by the scale, or by scale · log2 e.
    for unit in (1.0, LOG2E):
        factor = torch.tensor(call.scale * unit, dtype=torch.float32) * products
        yield factor == 0
        yield factor.abs() < torch.finfo(torch.float32).tiny


@_model(family="overflow")
def mask_times_infinity(call: ExactAttention) -> Iterator[Form]:
    """The mask is multiplied by −∞ and added to the scores: what is seen gets 0 · ∞,
    which is NaN.
    """
    yield _with_nan_rows(call, call.seen.any(-1))
    # Or the mask is applied only in tiles that need one.
    for rows, size in call.tiles:
        some, every = tile_visibility(call, rows, size)
        masked = some & (~every | _ragged(call, size))
        yield _with_nan_rows(call, (call.seen & masked).any(-1), tile=size, rows=rows)


@_model(applies=is_scaled, family="overflow")
def column_scale_of_zero(call: ExactAttention) -> Iterator[Form]:
    """A column of V that is 0 throughout has no scale: 0 · ∞ or 0 / 0 is NaN in that column."""
    v = call.v
    for size in (*call.key_tiles, call.problem.kv):
        whose = torch.arange(call.problem.kv) // size
        # (batch, heads, value_dim, tiles)
        empty = torch.stack(
            [(v[:, :, whose == n] == 0).all(-2) for n in range(int(whose[-1]) + 1)], -1
        )
        if not bool(empty.any()):
            continue
        of_keys = empty[..., whose].double()
        for visited in _visited_places(call, size):
            touched = visited.double() @ of_keys.mT > 0
            yield call.with_out(touched, math.nan), {"tile": size}


@_model(applies=is_scaled)
def tail_in_block_scale(call: ExactAttention) -> Iterator[Form]:
    """What lies behind the last key has a part in the scale of its block: NaN, if there is one."""
    for size in call.key_tiles:
        ragged = _ragged(call, size)
        if bool(ragged.any()):
            for visited in _visited_places(call, size):
                rows = (visited & ragged).any(-1)
                for of_keys in (False, True):  # whether NaN reaches the scores, and so LSE
                    yield _with_nan_rows(call, rows, lse=of_keys, tile=size)
