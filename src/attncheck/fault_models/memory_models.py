"""Fault models of memory: heads, strides, pages, and what is read outside a tensor."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

from attncheck.core.outputs import Outputs
from attncheck.fault_models.fault_model import Prediction, attention, model
from attncheck.fault_models.tile_models import padded_keys, tile_visibility, with_padding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attncheck.fault_models.exact_attention import ExactAttention
    from attncheck.inputs.problem import Problem

__all__ = ["contiguous", "places", "read_as", "read_at", "wider", "with_keys"]


def contiguous(shape: torch.Size) -> tuple[int, ...]:
    """Strides of a tensor that is."""
    return torch.empty(shape, device="meta").stride()


def read_as(
    tensor: Tensor, stride: tuple[int, ...], shape: tuple[int, ...] | None = None
) -> Iterator[Tensor]:
    """What is read with other strides; beyond its memory the last number there, or else 0.

    Args:
        tensor: Whose memory.
        stride: As many numbers as it has axes.
        shape: Its own unless told.
    """
    steps = places(shape or tuple(tensor.shape), stride)
    found, inside = read_at(tensor, sum(steps, torch.zeros((), dtype=torch.int64)))
    yield found
    if not bool(inside.all()):
        yield torch.where(inside, found, torch.zeros((), dtype=found.dtype))


def places(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[Tensor]:
    """Along each axis, in elements: int64 that broadcast to ``shape`` together."""
    found = []
    for axis, (length, step) in enumerate(zip(shape, stride, strict=True)):
        along = [-1 if other == axis else 1 for other in range(len(shape))]
        found.append((torch.arange(length) * step).view(along))
    return found


def read_at(tensor: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """What its memory holds ``at`` elements behind the first, clamped to it; and where it does."""
    at = at + int(tensor.storage_offset())
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    found = tensor.as_strided((size,), (1,), 0)[at.clamp(0, size - 1)]
    return found, (at >= 0) & (at < size)


def wider(tensor: Tensor, axis: int, length: int) -> Iterator[Tensor]:
    """The same with another length of one axis: what lies behind its own in memory."""
    shape = list(tensor.shape)
    shape[axis] = length
    yield from read_as(tensor, tensor.stride(), tuple(shape))


_WHOSE = ("keys and values", "keys", "values")


def with_keys(
    given: ExactAttention, k: Tensor, v: Tensor, **parameters: str | int
) -> Iterator[Prediction]:
    """With other k and v ``(batch, heads, kv, …)``: both, and each alone."""
    for whose in _WHOSE:
        x = given.q @ k.mT * given.scale if "keys" in whose else None
        outputs = given.attend(x=x, v=v if "values" in whose else None)
        yield Prediction(outputs=outputs, parameters=parameters | {"of": whose})


def _shared(problem: Problem) -> bool:
    return attention(problem) and problem.kv_heads > 1


def _of_heads(given: ExactAttention, heads: Tensor) -> tuple[Tensor, Tensor]:
    """K and v of the key heads of indices ``heads``, one a query head."""
    _, k, v = given.inputs.promoted()
    return k[:, heads], v[:, heads]


@model(
    "kv-heads-interleaved",
    "query head h reads key head h mod kv_heads, not h // group",
    group="heads",
    applies=lambda problem: _shared(problem) and problem.group > 1,
)
def _interleaved(given: ExactAttention) -> Iterator[Prediction]:
    problem, h = given.problem, given.h.flatten()
    for heads in (h % problem.kv_heads, (h % problem.group) % problem.kv_heads):
        yield from with_keys(given, *_of_heads(given, heads))


@model(
    "kv-heads-first",
    "every query head reads the first key head",
    group="heads",
    applies=_shared,
)
def _first(given: ExactAttention) -> Iterator[Prediction]:
    yield from with_keys(given, *_of_heads(given, 0 * given.h.flatten()))


@model(
    "heads-swapped",
    "query heads read each other's key heads",
    group="heads",
    applies=_shared,
)
def _swapped(given: ExactAttention) -> Iterator[Prediction]:
    problem, own = given.problem, given.h.flatten() // given.problem.group
    for name, heads in {
        "in reverse order": problem.kv_heads - 1 - own,
        "the next": (own + 1) % problem.kv_heads,
        "the one before": (own - 1) % problem.kv_heads,
        "by number": given.h.flatten().clamp(max=problem.kv_heads - 1),
    }.items():
        yield from with_keys(given, *_of_heads(given, heads), head=name)


def _batched(problem: Problem) -> bool:
    return attention(problem) and problem.batch > 1


@model(
    "batches-swapped",
    "sequences of a batch read each other's keys",
    group="heads",
    applies=_batched,
)
def _batches(given: ExactAttention) -> Iterator[Prediction]:
    count = given.problem.batch
    b = torch.arange(count)
    for name, of in {"in reverse order": count - 1 - b, "the next": (b + 1) % count}.items():
        yield from with_keys(given, given.k[of], given.v[of], batch=name)


@model(
    "batch-first",
    "every sequence of a batch reads the keys of the first",
    group="heads",
    applies=_batched,
)
def _batch(given: ExactAttention) -> Iterator[Prediction]:
    of = torch.zeros(given.problem.batch, dtype=torch.int64)
    yield from with_keys(given, given.k[of], given.v[of])


@model(
    "query-heads-swapped",
    "the output of one head is that of another",
    group="heads",
    applies=lambda problem: problem.heads > 1,
)
def _query(given: ExactAttention) -> Iterator[Prediction]:
    heads, exact = given.problem.heads, given.parts.outputs
    assert exact.lse is not None, "of attention"
    h = torch.arange(heads)
    for name, of in {
        "in reverse order": heads - 1 - h,
        "the next": (h + 1) % heads,
        "the first": 0 * h,
        "by groups": h.view(given.problem.kv_heads, -1).T.flatten(),
    }.items():
        out = Outputs(exact.out[:, of], exact.lse[:, of])
        yield Prediction(outputs=out, parameters={"head": name})
        yield Prediction(outputs=Outputs(exact.out[:, of], exact.lse), parameters={"head": name})


@model(
    "contiguous-assumed",
    "a tensor is read as if it were contiguous: its strides are not looked at",
    group="memory",
    applies=attention,
)
def _strides(given: ExactAttention) -> Iterator[Prediction]:
    names = ("q", "k", "v")
    for wrong in (names, ("q",), ("k",), ("v",), ("k", "v")):
        read = {}
        for name in wrong:
            tensor = getattr(given.inputs, name)
            stride = contiguous(tensor.shape)
            if stride != tensor.stride():
                read[name] = list(read_as(tensor, stride))
        for way in range(max(map(len, read.values()), default=0)):
            yield _reading(given, {name: ways[way % len(ways)] for name, ways in read.items()})


@model(
    "values-of-keys-strides",
    "values are read with the strides of the keys",
    group="memory",
    applies=attention,
)
def _of_keys(given: ExactAttention) -> Iterator[Prediction]:
    inputs = given.inputs
    for name, other in (("v", inputs.k), ("k", inputs.v), ("k", inputs.q), ("v", inputs.q)):
        own: Tensor = getattr(inputs, name)
        if other.stride() != own.stride():
            for read in read_as(own, other.stride()):
                yield _reading(given, {name: read})


def _reading(given: ExactAttention, changed: dict[str, Tensor]) -> Prediction:
    read = dataclasses.replace(given.inputs, **changed)  # type: ignore[arg-type]  # q, k and v
    q, k, v = read.promoted()
    k, v = given.by_query_head(k), given.by_query_head(v)
    x = q[:, :, given.rows] @ k.mT * given.scale
    return Prediction(outputs=given.attend(x=x, v=v), parameters={"of": ", ".join(changed)})


@model(
    "out-transposed",
    "the output is written in another layout: heads and rows are exchanged",
    group="memory",
    applies=lambda problem: attention(problem) and problem.heads > 1 and problem.query > 1,
)
def _transposed(given: ExactAttention) -> Iterator[Prediction]:
    if given.whole:
        exact = given.parts.outputs
        out = exact.out.transpose(1, 2).reshape(exact.out.shape)
        yield Prediction(outputs=Outputs(out, exact.lse))


@model(
    "columns-swapped",
    "the columns of v, or of the output, are in another order",
    group="memory",
    applies=attention,
)
def _columns(given: ExactAttention) -> Iterator[Prediction]:
    exact, v = given.parts.outputs, given.v
    halves = v.shape[-1] // 2
    yield Prediction(outputs=Outputs(exact.out.flip(-1), exact.lse))
    yield Prediction(outputs=Outputs(exact.out.roll(halves, -1), exact.lse))


@model(
    "columns-missing",
    "columns of the values beyond the head dim, or of the head dim beyond that of the values, are "
    "not read",
    group="memory",
    applies=attention,
)
def _missing(given: ExactAttention) -> Iterator[Prediction]:
    problem, exact = given.problem, given.parts.outputs
    dims = {min(problem.head_dim, problem.value_dim)}
    dims |= {1 << (dim.bit_length() - 1) for dim in (problem.head_dim, problem.value_dim)}
    for kept in sorted(dims):
        if kept < problem.value_dim:
            there = torch.arange(problem.value_dim) < kept
            out = torch.where(there, exact.out, 0.0)
            yield Prediction(outputs=Outputs(out, exact.lse), parameters={"columns": kept})
        if kept < problem.head_dim:
            x = given.q[..., :kept] @ given.k[..., :kept].mT * given.scale
            yield Prediction(outputs=given.attend(x=x), parameters={"columns": kept})


@model(
    "page-table-ignored",
    "pages are read as if they were in order: the table is not looked at",
    group="memory",
    applies=lambda problem: problem.paging is not None,
)
def _table(given: ExactAttention) -> Iterator[Prediction]:
    from attncheck.mods.page_table import draw_page_table, pack_pages

    problem = given.problem
    assert problem.paging is not None, "asked of what has pages"
    size = problem.paging.size
    table = draw_page_table(
        problem.paging, problem.batch, problem.kv, (problem.kv,) * problem.batch
    )
    count = -(-problem.kv // size)
    place = torch.arange(count)
    # The first pages, or those of the sequence's number.
    own = place + count * torch.arange(problem.batch)[:, None]
    for order in (place.expand(problem.batch, -1), own):
        read = []
        for tensor in (given.inputs.k, given.inputs.v):
            pool = pack_pages(tensor, table)  # (pages, size, kv_heads, dim)
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
def _page(given: ExactAttention) -> Iterator[Prediction]:
    assert given.problem.paging is not None, "asked of what has pages"
    size = given.problem.paging.size
    count = padded_keys(given, size)
    if count:
        for outputs in with_padding(given, count):
            yield Prediction(outputs=outputs, parameters={"page": size})
        yield from _unwritten_slots(given, size)


def _unwritten_slots(given: ExactAttention, size: int) -> Iterator[Prediction]:
    """What lies behind the last key is NaN: it reaches out alone, or LSE too."""
    lse = given.parts.lse
    nan = torch.full_like(given.parts.out, math.nan)
    for each in (torch.full_like(lse, math.nan), lse):
        yield Prediction(outputs=Outputs(nan, each), parameters={"page": size})


@model(
    "hidden-values-leak",
    "the value of a key that the mask hides reaches a row: 0 times NaN is NaN",
    group="memory",
    applies=attention,
)
def _leak(given: ExactAttention) -> Iterator[Prediction]:
    exact = given.parts.outputs
    wild = ~given.v.isfinite().all(-1)[:, :, None, :]  # (batch, heads, 1, kv)
    if not bool(wild.any()):
        return
    touched = (~given.v.isfinite())[:, :, None]  # (batch, heads, 1, kv, dim)
    some = given.seen.any(-1, keepdim=True)
    for reach in (torch.ones_like(given.seen), some.expand(given.seen.shape)):
        hit = (reach[..., None] & touched).any(-2)
        yield Prediction(outputs=Outputs(torch.where(hit, math.nan, exact.out), exact.lse))


@model(
    "values-behind-keys",
    "the last tile loads what lies in memory behind the last value: a weight of 0 times NaN is NaN",
    group="memory",
    applies=lambda problem: attention(problem) and problem.paging is None,
)
def _behind(given: ExactAttention) -> Iterator[Prediction]:
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
                yield Prediction(outputs=Outputs(out, exact.lse), parameters={"tile": size})


def _visiting(given: ExactAttention, size: int) -> Iterator[Tensor]:
    """Rows ``(batch, heads, rows)`` of blocks that visit the last tile of keys."""
    for rows, keys in given.tiles:
        if keys == size:
            yield tile_visibility(given, rows, size)[0][..., -1]


@model(
    "rows-unwritten",
    "some rows are never written",
    group="tiles",
    order=1,
)
def _unwritten(given: ExactAttention) -> Iterator[Prediction]:
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
                    yield Prediction(outputs=exact, free=gone)
            elif bool(gone.any()):
                yield Prediction(outputs=exact, parameters={"rows": rows}, free=gone)
                for lse in (exact.lse, torch.where(gone, 0.0, exact.lse)):
                    out = torch.where(gone[..., None], 0.0, exact.out)
                    yield Prediction(outputs=Outputs(out, lse), parameters={"rows": rows})


def _dead_blocks(dead: Tensor, number: Tensor) -> Tensor:
    """Rows of blocks in which no row is alive."""
    found = torch.zeros_like(dead)
    for block in sorted(set(number.flatten().tolist())):
        mine = (number == block).expand(dead.shape)
        all_dead = (dead | ~mine).all(-1, keepdim=True)
        found |= mine & all_dead
    return found


_FAR = 2**31
_BLOCKS = (8, 16, 32, 64)  # columns that a head dim is read in whole numbers of


def _columns_of_memory_beside(problem: Problem) -> tuple[int, ...]:
    """How many columns may be read where there are ``head_dim``: more of them."""
    dim = problem.head_dim
    some = {1 << (dim - 1).bit_length(), *(-(-dim // block) * block for block in _BLOCKS)}
    return tuple(sorted(columns for columns in some if columns > dim))


@model(
    "head-dim-padding-read",
    "columns behind the head dim are read from memory, where they are other rows, and have a part "
    "in the scores",
    group="memory",
    applies=lambda problem: attention(problem) and bool(_columns_of_memory_beside(problem)),
)
def _read(given: ExactAttention) -> Iterator[Prediction]:
    inputs, problem = given.inputs, given.problem
    for columns in _columns_of_memory_beside(problem):
        as_wide = problem.replace(head_dim=columns, value_dim=problem.value_dim)
        both = (wider(x, 3, columns) for x in (inputs.q, inputs.k))
        for read in zip(*both, strict=False):
            wide = dataclasses.replace(inputs, problem=as_wide, q=read[0], k=read[1])
            q, k, _ = wide.promoted()
            x = q[:, :, given.rows] @ given.by_query_head(k).mT * given.scale
            yield Prediction(outputs=given.attend(x=x), parameters={"columns": columns})


@model(
    "offsets-of-32-bits",
    "offsets are 32-bit integers: a row 2³¹ elements or more behind the first is read elsewhere",
    group="memory",
    applies=attention,
)
def _wrapped(given: ExactAttention) -> Iterator[Prediction]:
    for name in ("q", "k", "v"):
        tensor: Tensor = getattr(given.inputs, name)
        if _reach(tensor) < _FAR:
            continue
        for each in (True, False):
            changed: dict[str, Any] = {name: _read_wrapped(tensor, each=each)}
            read = dataclasses.replace(given.inputs, **changed)
            q, k, v = read.promoted()
            k, v = given.by_query_head(k), given.by_query_head(v)
            x = q[:, :, given.rows] @ k.mT * given.scale
            yield Prediction(outputs=given.attend(x=x, v=v), parameters={"of": name})


def _reach(tensor: Tensor) -> int:
    """How far behind its first element the last one lies."""
    return sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _read_wrapped(tensor: Tensor, *, each: bool) -> Tensor:
    """What is read where an int32 counts: the steps along each axis, or all together."""
    steps = places(tuple(tensor.shape), tensor.stride())
    start = torch.zeros((), dtype=torch.int64)
    at = sum(map(_wrap, steps), start) if each else _wrap(sum(steps, start))
    found, inside = read_at(tensor, at)
    return torch.where(inside, found, torch.zeros((), dtype=found.dtype))


def _wrap(offsets: Tensor) -> Tensor:
    """As an int32 has them."""
    return offsets.to(torch.int32).long()


def _halves(given: ExactAttention) -> Iterator[tuple[dict[str, str | int], Tensor]]:
    """Rows (1, 1, rows) that a second launch was to write: the first or last half of something."""
    query = given.problem.query
    half = query // 2
    number = given.i[..., 0]
    for name, first in {"the first half": number < half, "the last half": number >= half}.items():
        yield {"rows": name}, first
    for size in dict.fromkeys(rows for rows, _ in given.tiles):
        if size < query:
            for late in (False, True):
                yield {"tile": size}, (number // size % 2 == int(late))


@model(
    "half-unwritten",
    "half of the rows are never written: what was in the memory of out is left there",
    group="memory",
    order=2,
)
def _unwritten_of_memory_beside(given: ExactAttention) -> Iterator[Prediction]:
    exact = given.parts.outputs
    shape = given.parts.lse.shape
    for parameters, rows in _halves(given):
        gone = rows.expand(shape)
        if bool(gone.any()) and not bool(gone.all()):  # or it would explain anything
            yield Prediction(outputs=exact, parameters=parameters, free=gone)
