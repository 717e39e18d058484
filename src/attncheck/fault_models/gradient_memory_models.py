"""Fault models of a backward's memory: strides, delta, LSE, sums and captured tensors."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from attncheck.fault_models.exact_attention import ExactGradients, sum_group
from attncheck.fault_models.fault_model import Form, ModelTable, has_mask, has_score
from attncheck.fault_models.gradient_models import nan_where
from attncheck.fault_models.layout_models import (
    INDICES,
    contiguous,
    read_in_place,
    read_strided,
    read_with_strides,
    same_along,
    transposed_load,
    wider,
)
from attncheck.fault_models.steps import Steps
from attncheck.mods.captured_gradients import Leaf, captured_tensors, leaf_gradients

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attncheck.inputs.problem import Problem

MODELS = ModelTable("gradient", of="backward")

_model = MODELS.model


def _last_stored(grad: ExactGradients, dz: Tensor, rows: int, keys: int) -> Iterator[Tensor]:
    """Yield captured gradients that hold only the last term written, for several orders of writes.

    A program owns a block of rows of one head and walks over tiles of keys. Programs start with the
    first block of rows or with the last, in each head or in all. A tile is written row by row, or
    in the order of matrix units: a thread has two adjacent keys, and all threads write their first
    one before their second, or their second before their first.
    """
    call, problem = grad.call, grad.call.problem
    at = (call.b, call.h, call.i, call.j)
    read = [one for one in leaf_gradients(call.score, call.x, *at) if one[1] is not None]
    if any(leaf.places is None or leaf.read.shape[2:] != dz.shape[2:] for leaf, _ in read):
        return  # A tile sums its terms of one number before it writes.
    block, tile = call.i // rows, call.j // keys
    head, heads = call.b * problem.heads + call.h, problem.batch * problem.heads
    blocks, tiles = -(-problem.query // rows), -(-problem.kv // keys)
    in_tile = (call.i % rows) * keys + call.j % keys
    halves = (call.j % 2, 1 - call.j % 2)  # the one of a thread's two keys that it writes later
    orders = [in_tile, *((2 * keys * rows) * half + in_tile for half in halves)]
    for row_block in (blocks - 1 - block, block):
        for program in (row_block * heads + head, head * blocks + row_block):
            for order in orders:
                when = (program * tiles + tile) * (4 * rows * keys) + order
                yield _last_writes(grad, dz, read, when)


def _last_writes(
    grad: ExactGradients, dz: Tensor, read: list[tuple[Leaf, Tensor]], when: Tensor
) -> Tensor:
    """Return the captured gradients, each number the last term written to it; not terms of 0."""
    call, gradients = grad.call, []
    for tensor in captured_tensors(call.score):
        gradient = torch.zeros(tensor.numel(), dtype=torch.float64)
        for leaf, slope in read:
            if leaf.tensor is tensor:
                all_terms = torch.where(call.seen, dz * slope, 0.0)
                places = torch.arange(tensor.numel()).view(tensor.shape)[leaf.places]
                written = all_terms != 0
                terms, times = all_terms[written], when.expand(dz.shape)[written]
                numbers = places.expand(dz.shape)[written]
                last = torch.full(gradient.shape, -1, dtype=torch.int64)
                last.scatter_reduce_(0, numbers, times, "amax")
                stays = times == last[numbers]
                gradient[numbers[stays]] = terms[stays]
        gradients.append(gradient)
    return torch.cat(gradients)


_PADDED_TO = (64, 128)  # rows to whose multiples kernels pad, whatever their tile


@_model(applies=lambda problem: problem.batch * problem.heads > 1)
def delta_padded_otherwise(grad: ExactGradients) -> Iterator[Form]:
    """Delta, or LSE, is written for rows padded to one length and read for another: sequences and
    heads after the first have those of other rows.
    """
    call = grad.call
    query = call.problem.query
    lengths = {query, *(-(-query // size) * size for size in _row_tiles(grad))}
    # The two kernels of a backward may pad to tiles of different sizes.
    for written in sorted(lengths):
        for read in sorted(lengths - {written}):
            parameters = {"written": written, "read": read}
            delta = _reread(grad.delta, written, read)
            lse = _reread(call.parts.lse, written, read)
            weights = grad.weights(lse=lse)
            yield grad.gradients(delta=delta), parameters
            yield grad.gradients(weights=weights), parameters
            yield grad.gradients(delta=delta, weights=weights), parameters
    yield from _misread_packed_delta(grad)


def _misread_packed_delta(grad: ExactGradients) -> Iterator[Form]:
    """Yield gradients with a misread delta of packed sequences, whose heads are adjacent in a row.

    Each sequence is padded by a whole tile, or to whole tiles. The sink's gradient uses the right
    delta, or the misread one.
    """
    query, exact = grad.call.problem.query, grad.exact
    sizes = sorted({*_row_tiles(grad), *_PADDED_TO})
    for lengths in ([query + size for size in sizes], [-(-query // s) * s for s in sizes]):
        for written, read in permutations(dict.fromkeys(lengths), 2):
            outputs = grad.gradients(delta=_reread_packed(grad.delta, written, read))
            parameters = {"written": written, "read": read}
            yield replace(outputs, dsink=exact.dsink), parameters
            if exact.dsink is not None:
                yield outputs, parameters


def _row_tiles(grad: ExactGradients) -> tuple[int, ...]:
    """Return rows to whose multiples a kernel may pad: those of a tile, half of one, and two."""
    sizes = grad.call.row_tiles
    return tuple(sorted({*sizes, *(size // 2 for size in sizes), *(2 * size for size in sizes)}))


def _reread(rows: Tensor, written: int, read: int) -> Tensor:
    """Return ``(batch, heads, query)`` written in ``written`` rows a head, but read in ``read``."""
    query = rows.shape[2]
    memory = pad(rows, (0, written - query)).flatten()
    more = rows.shape[0] * rows.shape[1] * read - memory.numel()
    memory = pad(memory, (0, max(0, more)))[: memory.numel() + more]
    return memory.view(*rows.shape[:2], read)[:, :, :query]


def _reread_packed(rows: Tensor, written: int, read: int) -> Tensor:
    """Return ``_reread`` for a buffer in which the heads of a row are adjacent."""
    batch, heads, query = rows.shape
    by_row = rows.transpose(1, 2).reshape(batch, 1, query * heads)
    read_rows = _reread(by_row, written * heads, read * heads)
    return read_rows.view(batch, query, heads).transpose(1, 2)


@_model(order=1, family="memory")
def backward_rows_behind(grad: ExactGradients) -> Iterator[Form]:
    """LSE and delta behind the last row are what the memory holds: NaN in dK and dV, if that is NaN
    or makes exp overflow.
    """
    call, exact = grad.call, grad.exact
    if all(call.problem.query % rows == 0 for rows, _ in call.tiles):
        return
    # Padded rows see every key, or the last row's keys.
    for seen in (torch.ones_like(call.seen[:, :, -1]), call.seen[:, :, -1]):
        keys = _of_key_heads(grad, seen)[..., None]
        dk, dv = (nan_where(keys, x) for x in (exact.dk, exact.dv))
        yield replace(exact, dk=dk, dv=dv)
        yield replace(exact, dk=dk)
        yield replace(exact, dv=dv)


def _of_key_heads(grad: ExactGradients, keys: Tensor) -> Tensor:
    """Return keys ``(batch, kv_heads, kv)`` that are set for any query head of the key head."""
    batch, _, kv = keys.shape
    return keys.view(batch, -1, grad.call.problem.group, kv).any(2)


@_model(applies=lambda problem: has_mask()(problem) and has_score()(problem))
def slope_of_hidden_scores(grad: ExactGradients) -> Iterator[Form]:
    """The score mod's derivative at hidden scores, which is not finite, multiplies what was masked:
    0 · NaN in dQ and dK.
    """
    call, exact = grad.call, grad.exact
    wild = ~call.seen & ~grad.slopes.isfinite()
    if not bool(wild.any()):
        return
    dq = nan_where(wild.any(-1)[..., None], exact.dq)
    dk = nan_where(_of_key_heads(grad, wild.any(-2))[..., None], exact.dk)
    yield replace(exact, dq=dq, dk=dk)
    yield replace(exact, dq=dq)
    yield replace(exact, dk=dk)


@_model(order=1)
def gradient_added_again(grad: ExactGradients) -> Iterator[Form]:
    """A gradient is a whole number of times what it should be: what is added to is not cleared
    between runs of a kernel.
    """
    # Kernels accumulate different gradients: dQ by atomics, dK and dV together.
    some = (("dq",), ("dk", "dv"), ("dq", "dk", "dv"), ("dk",), ("dv",))
    for names, times in product(some, (2, 3, 4, 5, 8)):
        yield grad.times(float(times), *names), {"of": ", ".join(names), "times": times}


@_model(applies=lambda problem: problem.dcaptured)
def captured_not_summed(grad: ExactGradients) -> Iterator[Form]:
    """What several scores read has the gradient that the last of them wrote, not the sum."""
    call, exact = grad.call, grad.exact
    dz = grad.weights() * (grad.dp - grad.off)
    grid = (call.problem.query, call.problem.kv)
    for rows, keys in dict.fromkeys((grid, *call.tiles, *((grid[0], n) for _, n in call.tiles))):
        assert exact.dcaptured is not None, "asked of what has it"
        stored = torch.zeros_like(exact.dcaptured)
        for part in _head_tiles(grad, rows, keys):
            summed = grad.captured(dz, part)
            stored = torch.where(summed != 0, summed, stored)
        for gradient in (stored, *_last_stored(grad, dz, rows, keys)):
            yield replace(exact, dcaptured=gradient), {"rows": rows, "keys": keys}


def _head_tiles(grad: ExactGradients, rows: int, keys: int) -> Iterator[Tensor]:
    """Yield tiles of each head of each sequence, in order, as bool that broadcast to the scores."""
    call, problem = grad.call, grad.call.problem
    for row, key in product(range(-(-problem.query // rows)), range(-(-problem.kv // keys))):
        tile = (call.i // rows == row) & (call.j // keys == key)
        for b, h in product(range(problem.batch), range(problem.heads)):
            yield tile & (call.b == b) & (call.h == h)


def _read_groups(grad: ExactGradients) -> dict[str, dict[str, Tensor]]:
    """Return the tensors that a backward reads, single or grouped by a shared index, by names."""
    call = grad.call
    each = {name: getattr(call, name) for name in "qkv"} | {"dout": grad.dout}
    each |= {"lse": call.parts.lse, "delta": grad.delta}
    groups: list[tuple[str, ...]] = [(name,) for name in each]
    groups += [("k", "v"), ("q", "dout"), ("lse", "delta"), ("q", "dout", "lse", "delta")]
    return {", ".join(names): {name: each[name] for name in names} for names in groups}


@_model()
def backward_operand_swapped(grad: ExactGradients) -> Iterator[Form]:
    """The backward reads one of q, k, v and dO in place of another."""
    inputs, call = grad.call.inputs, grad.call
    for mine, other in permutations(("q", "k", "v", "dout"), 2):
        own, theirs = getattr(inputs, mine), getattr(inputs, other)
        for read, inside in read_in_place(own, theirs):
            # The memory behind the other tensor is unknown.
            if bool(inside.all()):
                operand = read.double()
                operand = call.by_query_head(operand) if mine in "kv" else operand
                yield grad.reading({mine: operand}), {"of": f"{other} for {mine}"}


@_model()
def backward_operand_missing(grad: ExactGradients) -> Iterator[Form]:
    """The backward reads one of q, k, v, dO and LSE as 0, or its last row."""
    for whose, tensors in _read_groups(grad).items():
        for of, start in {"all of it": 0, "its last row": -1}.items():
            read = {name: x.clone() for name, x in tensors.items()}
            for x in read.values():
                x[:, :, start:] = 0.0
            # A missing delta, or missing dO and delta, has a model of its own.
            if whose != "delta" and not (start == 0 and {"dout", "delta"} <= {*tensors}):
                yield grad.reading(read), {"of": whose, "rows": of}


@_model()
def backward_index_missing(grad: ExactGradients) -> Iterator[Form]:
    """An index is missing where the backward reads: all that it tells apart get the same
    numbers.
    """
    for whose, tensors in _read_groups(grad).items():
        for number, (name, axes) in product((0, 1), INDICES.items()):
            if all(axes[-1] < x.dim() and number < x.shape[axes[-1]] for x in tensors.values()):
                read = {n: same_along(x, axes, number) for n, x in tensors.items()}
                yield grad.reading(read), {"of": whose, "index": name}
        # Or no index is multiplied by the number of columns.
        if all(x.dim() == 4 for x in tensors.values()):
            read = {}
            for name, x in tensors.items():
                own = x.contiguous()
                b, h, _, _ = own.stride()
                columns = own.shape[3]
                read[name] = read_strided(own, (b // columns, h // columns, 1, 1))[0]
            yield grad.reading(read), {"of": whose, "index": "not times the columns"}


@_model()
def backward_first_tile_again(grad: ExactGradients) -> Iterator[Form]:
    """The backward reads the first tile again in place of every other: its pointer, or index, does
    not move on.
    """
    call = grad.call
    for whose, tensors in _read_groups(grad).items():
        length = next(iter(tensors.values())).shape[2]
        for size in call.key_tiles:
            place = torch.arange(length) % size
            read = {name: x[:, :, place] for name, x in tensors.items()}
            yield grad.reading(read), {"of": whose, "tile": size}
            # Or the first row of each tile takes the place of all its rows.
            first = torch.arange(length) // size * size
            read = {name: x[:, :, first] for name, x in tensors.items()}
            yield grad.reading(read), {"of": whose, "tile": size, "index": "within a tile"}
    # The mask may be applied at the first tile's places, too, which then counts once a tile.
    for of, index in {"all of keys": call.j, "all of rows": call.i}.items():
        for size in call.key_tiles:
            count = -(-index.numel() // size)
            weights = count * grad.weights(seen=call.seen & (index < size))
            yield grad.gradients(weights=weights), {"of": of, "tile": size}


@_model()
def backward_load_transposed(grad: ExactGradients) -> Iterator[Form]:
    """A row index stands where a column's belongs in a load of the backward, or in what
    bounds it.
    """
    call, out = grad.call, grad.call.parts.out
    for whose, tensors in _read_groups(grad).items():
        # Only square tiles can be transposed.
        wides = {1 << (x.shape[-1] - 1).bit_length() for x in tensors.values() if x.dim() == 4}
        if len(wides) != 1 or any(x.dim() != 4 for x in tensors.values()):
            continue
        (wide,) = wides
        if wide not in (*call.row_tiles, *call.key_tiles):
            continue
        for form in ("the end of the rows", "the tile", "rows by columns"):
            read = {name: transposed_load(x, wide)[form] for name, x in tensors.items()}
            yield grad.reading(read), {"of": whose, "which": form}
            # Or only one product has the transposed operand.
            if whose == "q":
                s = call.modified(read["q"] @ call.k.mT * call.scale)
                yield grad.gradients(weights=grad.weights(s=s)), {"of": "scores", "which": form}
            if whose == "dout":
                yield grad.gradients(dp=read["dout"] @ call.v.mT), {"of": "dP", "which": form}
                delta = (read["dout"] * out).sum(-1)
                yield grad.gradients(delta=delta), {"of": "delta", "which": form}
                delta = (grad.dout * transposed_load(out, wide)[form]).sum(-1)
                yield grad.gradients(delta=delta), {"of": "delta", "which": form}


@_model(order=1, family="mapping")
def dout_strides(grad: ExactGradients) -> Iterator[Form]:
    """DO is read with other strides than its own."""
    dout = grad.call.inputs.dout
    assert dout is not None, "asked of a backward"
    _, h, i, d = dout.shape
    # The strides of a contiguous dO, or of one with rows before heads.
    for stride in (contiguous(dout.shape), (h * i * d, d, h * d, 1)):
        if stride != dout.stride():
            for read in map(torch.Tensor.double, read_with_strides(dout, stride)):
                # A separate kernel for delta may read dO correctly.
                for delta in ((read * grad.call.parts.out).sum(-1), grad.delta):
                    yield grad.gradients(dout=read, dp=read @ grad.call.v.mT, delta=delta)


@_model(applies=lambda problem: problem.head_dim != problem.value_dim)
def backward_columns(grad: ExactGradients) -> Iterator[Form]:
    """The backward reads as many columns of V and dO as q has, not as they have."""
    inputs, problem = grad.call.inputs, grad.call.problem
    assert inputs.dout is not None, "asked of a backward"
    if inputs.descale is not None:
        return
    own, most = problem.value_dim, problem.head_dim
    # Also no more columns than a tile as wide as a power of two.
    for columns in dict.fromkeys((most, min(most, 1 << (own - 1).bit_length()))):
        both = (wider(x, 3, columns) for x in (inputs.dout, inputs.v))
        for read in zip(*both, strict=False):
            dout, v = (x.double() for x in read)
            dp = dout @ grad.call.by_query_head(v).mT
            parameters = {"columns": columns}
            yield grad.gradients(dp=dp), parameters
            if columns < own:
                padded_dout = pad(dout, (0, own - columns))
                delta = (padded_dout * grad.call.parts.out).sum(-1)
                yield grad.gradients(dp=dp, dout=padded_dout, delta=delta), parameters


def _heads_by_key_heads(problem: Problem) -> Tensor:
    """Return the query heads of a key head, from its index times ``kv_heads``, not ``group``."""
    head = torch.arange(problem.kv_heads)[:, None]
    return (head * problem.kv_heads + torch.arange(problem.group)) % problem.heads


@_model(applies=lambda problem: problem.kv_heads > 1, steps=Steps(group_heads=_heads_by_key_heads))
def group_other_heads(grad: ExactGradients) -> Iterator[Form]:
    """DK and dV of a key head are summed over other query heads than those that share it."""
    problem, exact = grad.call.problem, grad.exact
    head = torch.arange(problem.kv_heads)[:, None]
    member = torch.arange(problem.group)
    for name, heads in {
        "by the number of key heads": head * problem.kv_heads + member,
        "interleaved": member * problem.kv_heads + head,
        "the first": member + 0 * head,
        "the next": (head + 1) * problem.group + member,
        "as key heads": head + 0 * member,
    }.items():
        others = heads % problem.heads
        sums = grad.summed_over(others)
        yield replace(exact, **sums), {"heads": name}
        for of, gradient in sums.items():
            yield replace(exact, **{of: gradient}), {"heads": name, "of": of}
        yield replace(exact, **_with_other_heads(grad, others.flatten())), {"heads": name}


def _with_other_heads(grad: ExactGradients, heads: Tensor) -> dict[str, Tensor]:
    """Return dK and dV of each key head from the rows of other query ``heads`` and its own keys.

    LSE and delta of these rows belong to other keys, so that the weights are no softmax.
    """
    call, index = grad.call, heads.view(1, -1, 1, 1)
    q, dout = call.q[:, heads], grad.dout[:, heads]
    x = q @ call.k.mT * call.scale
    seen = call.visible(call.mask, h=index)
    lse = call.parts.lse[:, heads]
    p = grad.weights(s=call.modified(x, h=index), seen=seen, lse=lse)
    dx = p * (dout @ call.v.mT - grad.off[:, heads]) * grad.slopes_at(x, index)
    dx = torch.where(p == 0, 0.0, dx)
    sums = {"dk": dx.mT @ q * call.scale, "dv": p.mT @ dout}
    return {name: sum_group(each, call.problem.group) for name, each in sums.items()}
