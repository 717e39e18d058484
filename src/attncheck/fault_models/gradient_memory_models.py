"""Fault models of what a backward reads and keeps: strides, delta, sums, captured gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attncheck.fault_models.fault_model import Prediction, masked, scored
from attncheck.fault_models.gradient_models import slip, summed
from attncheck.fault_models.memory_models import contiguous, read_as, wider
from attncheck.mods.captured_gradients import captured_tensors, leaf_gradients

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attncheck.core.outputs import Outputs
    from attncheck.fault_models.gradient_models import ExactGradients
    from attncheck.mods.captured_gradients import Leaf

__all__ = ["last_stored"]


def last_stored(of: ExactGradients, dz: Tensor, rows: int, keys: int) -> Iterator[Tensor]:
    """What each number has of the last score that wrote to it, in the orders of programs there are.

    A program owns a block of rows of one head and walks over tiles of keys. Programs start with the
    first block of rows or with the last, in each head or in all. A tile is written row by row, or
    as matrix units leave it: a thread has two keys beside one another, and all threads write the
    first of theirs before the second, or the second before the first.

    Args:
        of: The backward.
        dz: Gradients of the scores after the mod.
        rows: Of a tile.
        keys: Likewise.
    """
    given, problem = of.given, of.given.problem
    at = (given.b, given.h, given.i, given.j)
    read = [one for one in leaf_gradients(given.score, given.x, *at) if one[1] is not None]
    if any(leaf.places is None or leaf.read.shape[2:] != dz.shape[2:] for leaf, _ in read):
        return  # a tile sums what it has of one number before it writes
    block, tile = given.i // rows, given.j // keys
    head, heads = given.b * problem.heads + given.h, problem.batch * problem.heads
    blocks, tiles = -(-problem.query // rows), -(-problem.kv // keys)
    in_tile = (given.i % rows) * keys + given.j % keys
    orders = [in_tile, *((2 * keys * rows) * half + in_tile for half in _halves(given.j))]
    for row_block in (blocks - 1 - block, block):
        for program in (row_block * heads + head, head * blocks + row_block):
            for order in orders:
                when = (program * tiles + tile) * (4 * rows * keys) + order
                yield _stored(of, dz, read, when)


def _halves(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Which of a thread's two keys it writes later."""
    return keys % 2, 1 - keys % 2


def _stored(
    of: ExactGradients, dz: Tensor, read: list[tuple[Leaf, Tensor]], when: Tensor
) -> Tensor:
    """All numbers, each the one that was written last."""
    given, found = of.given, []
    for tensor in captured_tensors(given.score):
        mine = torch.zeros(tensor.numel(), dtype=torch.float64)
        for leaf, slope in read:
            if leaf.tensor is tensor:
                terms = torch.where(given.seen, dz * slope, 0.0)
                numbers = torch.arange(tensor.numel()).view(tensor.shape)[leaf.places]
                _store(mine, numbers.expand(dz.shape), terms, when.expand(dz.shape))
        found.append(mine)
    return torch.cat(found)


def _store(to: Tensor, numbers: Tensor, terms: Tensor, when: Tensor) -> None:
    """Each number's last of ``terms``; one of 0 is not written."""
    written = terms != 0
    numbers, terms, when = numbers[written], terms[written], when[written]
    last = torch.full(to.shape, -1, dtype=torch.int64)
    last.scatter_reduce_(0, numbers, when, "amax")
    stays = when == last[numbers]
    to[numbers[stays]] = terms[stays]


@slip("dout-strides", "dO is read with other strides than its own", order=1)
def _strides(of: ExactGradients) -> Iterator[Outputs]:
    dout = of.given.inputs.dout
    assert dout is not None, "asked of a backward"
    _, h, i, d = dout.shape
    for stride in (contiguous(dout.shape), (h * i * d, d, h * d, 1)):
        if stride != dout.stride():
            for found in read_as(dout, stride):
                yield from _of_dout(of, found.double())


def _of_dout(of: ExactGradients, dout: Tensor) -> Iterator[Outputs]:
    """With another dO, and the delta of it, or the right one."""
    for delta in ((dout * of.given.parts.out).sum(-1), of.delta):
        yield of.gradients(dout=dout, dp=dout @ of.given.v.mT, delta=delta)


@slip(
    "backward-columns",
    "the backward reads as many columns of V and dO as q has, not as they have",
    lambda problem: problem.head_dim != problem.value_dim,
)
def _columns(of: ExactGradients) -> Iterator[Prediction]:
    inputs, problem = of.given.inputs, of.given.problem
    assert inputs.dout is not None, "asked of a backward"
    if inputs.descale is not None:
        return
    own, most = problem.value_dim, problem.head_dim
    # Of a tile that is as wide as a power of two no more than that.
    for columns in dict.fromkeys((most, min(most, 1 << (own - 1).bit_length()))):
        both = (wider(x, 3, columns) for x in (inputs.dout, inputs.v))
        for read in zip(*both, strict=False):
            dout, v = (x.double() for x in read)
            dp = dout @ of.given.by_query_head(v).mT
            parameters = {"columns": columns}
            yield Prediction(outputs=of.gradients(dp=dp), parameters=parameters)
            if columns < own:
                there = torch.nn.functional.pad(dout, (0, own - columns))
                delta = (there * of.given.parts.out).sum(-1)
                fewer = of.gradients(dp=dp, dout=there, delta=delta)
                yield Prediction(outputs=fewer, parameters=parameters)


@slip(
    "group-other-heads",
    "dK and dV of a key head are summed over other query heads than those that share it",
    lambda problem: problem.kv_heads > 1,
)
def _group(of: ExactGradients) -> Iterator[Prediction]:
    given, problem = of.given, of.given.problem
    p, exact = of.weights(), of.gradients()
    dx = p * (of.dp - (of.delta - of.dlse)[..., None]) * of.slopes
    each = {"dk": dx.mT @ given.q * given.scale, "dv": p.mT @ of.dout}
    head = torch.arange(problem.kv_heads)[:, None]
    member = torch.arange(problem.group)
    for name, heads in {
        "by the number of key heads": head * problem.kv_heads + member,
        "interleaved": member * problem.kv_heads + head,
        "the first": member + 0 * head,
        "the next": (head + 1) * problem.group + member,
        "as key heads": head + 0 * member,
    }.items():
        of_heads = (heads % problem.heads).flatten()
        sums = {n: summed(x[:, of_heads], problem.group) for n, x in each.items()}
        yield Prediction(outputs=replace(exact, **sums), parameters={"heads": name})
        met = _of_other_heads(of, of_heads)
        yield Prediction(outputs=replace(exact, **met), parameters={"heads": name})


def _of_other_heads(of: ExactGradients, heads: Tensor) -> dict[str, Tensor]:
    """DK and dV of each key head with rows of ``heads``: what they give with its own keys.

    Their LSE and delta are of keys that they have seen: these weights are no softmax.
    """
    given, index = of.given, heads.view(1, -1, 1, 1)
    q, dout = given.q[:, heads], of.dout[:, heads]
    x = q @ given.k.mT * given.scale
    seen = given.visible(given.mask, h=index)
    lse = given.parts.lse[:, heads]
    p = of.weights(s=given.modified(x, h=index), seen=seen, lse=lse)
    off = (of.delta - of.dlse)[:, heads]
    dx = p * (dout @ given.v.mT - off[..., None]) * of.slopes_at(x, index)
    dx = torch.where(p == 0, 0.0, dx)
    sums = {"dk": dx.mT @ q * given.scale, "dv": p.mT @ dout}
    return {name: summed(each, given.problem.group) for name, each in sums.items()}


_TIMES = (2, 3, 4, 5, 8)
_PADDED_TO = (64, 128)  # rows, whatever a tile has


@slip(
    "delta-padded-otherwise",
    "delta, or LSE, is written for rows padded to one length and read for another: sequences and "
    "heads after the first have those of other rows",
    lambda problem: problem.batch * problem.heads > 1,
)
def _padded(of: ExactGradients) -> Iterator[Prediction]:
    given = of.given
    query = given.problem.query
    lengths = {query, *(-(-query // size) * size for size in _row_tiles(of))}
    for written in sorted(lengths):
        for read in sorted(lengths - {written}):
            parameters = {"written": written, "read": read}
            delta = _reread(of.delta, written, read)
            lse = _reread(given.parts.lse, written, read)
            weights = of.weights(lse=lse)
            yield Prediction(outputs=of.gradients(delta=delta), parameters=parameters)
            yield Prediction(outputs=of.gradients(weights=weights), parameters=parameters)
            both = of.gradients(delta=delta, weights=weights)
            yield Prediction(outputs=both, parameters=parameters)
    yield from _packed(of)


def _packed(of: ExactGradients) -> Iterator[Prediction]:
    """Delta with heads beside one another and sequences one behind the other, each with padding.

    A whole tile of it behind each, or what a whole number of tiles lacks. The sink's gradient has
    the right one, or the same.
    """
    query, exact = of.given.problem.query, of.gradients()
    sizes = sorted({*_row_tiles(of), *_PADDED_TO})
    for lengths in ([query + size for size in sizes], [-(-query // s) * s for s in sizes]):
        for written in dict.fromkeys(lengths):
            for read in dict.fromkeys(lengths):
                if read != written:
                    found = of.gradients(delta=_reread_packed(of.delta, written, read))
                    parameters = {"written": written, "read": read}
                    yield Prediction(
                        outputs=replace(found, dsink=exact.dsink), parameters=parameters
                    )
                    if exact.dsink is not None:
                        yield Prediction(outputs=found, parameters=parameters)


def _row_tiles(of: ExactGradients) -> tuple[int, ...]:
    """Rows that a kernel may pad to a whole number of: half of a tile and two of them, too."""
    sizes = {rows for rows, _ in of.given.tiles}
    return tuple(sorted({*sizes, *(size // 2 for size in sizes), *(2 * size for size in sizes)}))


def _reread(rows: Tensor, written: int, read: int) -> Tensor:
    """``(batch, heads, query)`` in a buffer of ``written`` rows each, read as if of ``read``."""
    query = rows.shape[2]
    memory = torch.nn.functional.pad(rows, (0, written - query)).flatten()
    more = rows.shape[0] * rows.shape[1] * read - memory.numel()
    memory = torch.nn.functional.pad(memory, (0, max(0, more)))[: memory.numel() + more]
    return memory.view(*rows.shape[:2], read)[:, :, :query]


def _reread_packed(rows: Tensor, written: int, read: int) -> Tensor:
    """The same with the heads of a row beside one another."""
    batch, heads, query = rows.shape
    by_row = rows.transpose(1, 2).reshape(batch, 1, query * heads)
    found = _reread(by_row, written * heads, read * heads)
    return found.view(batch, query, heads).transpose(1, 2)


@slip(
    "backward-rows-behind",
    "LSE and delta behind the last row are what the memory holds: NaN in dK and dV, if that is NaN "
    "or makes exp overflow",
    order=1,
)
def _behind(of: ExactGradients) -> Iterator[Prediction]:
    given, exact = of.given, of.gradients()
    if all(given.problem.query % rows == 0 for rows, _ in given.tiles):
        return
    # Padding is asked about as the last row, or sees every key.
    for seen in (torch.ones_like(given.seen[:, :, -1]), given.seen[:, :, -1]):
        keys = _of_key_heads(of, seen)[..., None]
        dk, dv = (torch.where(keys, math.nan, x) for x in (exact.dk, exact.dv) if x is not None)
        yield Prediction(outputs=replace(exact, dk=dk, dv=dv))
        yield Prediction(outputs=replace(exact, dk=dk))
        yield Prediction(outputs=replace(exact, dv=dv))


def _of_key_heads(of: ExactGradients, keys: Tensor) -> Tensor:
    """Keys ``(batch, heads, kv)`` of any query head that shares a key head."""
    batch, _, kv = keys.shape
    return keys.view(batch, -1, of.given.problem.group, kv).any(2)


@slip(
    "slope-of-hidden-scores",
    "the score mod's derivative at hidden scores, which is not finite, multiplies what was masked: "
    "0 · NaN in dQ and dK",
    lambda problem: masked()(problem) and scored()(problem),
)
def _hidden(of: ExactGradients) -> Iterator[Outputs]:
    given, exact = of.given, of.gradients()
    wild = ~given.seen & ~of.slopes.isfinite()
    if not bool(wild.any()):
        return
    assert exact.dq is not None, "of a backward"
    assert exact.dk is not None, "of a backward"
    rows, keys = wild.any(-1), _of_key_heads(of, wild.any(-2))
    dq = torch.where(rows[..., None], math.nan, exact.dq)
    dk = torch.where(keys[..., None], math.nan, exact.dk)
    yield replace(exact, dq=dq, dk=dk)
    yield replace(exact, dq=dq)
    yield replace(exact, dk=dk)


@slip(
    "gradient-added-again",
    "a gradient is a whole number of times what it should be: what is added to is not cleared "
    "between runs of a kernel",
    order=1,
)
def _again(of: ExactGradients) -> Iterator[Prediction]:
    exact = of.gradients()
    for names in (("dq",), ("dk", "dv"), ("dq", "dk", "dv"), ("dk",), ("dv",)):
        for times in _TIMES:
            more = {name: getattr(exact, name) * times for name in names}
            said: dict[str, int | float | str] = {"of": ", ".join(names), "times": times}
            yield Prediction(outputs=replace(exact, **more), parameters=said)


@slip(
    "captured-not-summed",
    "what several scores read has the gradient that the last of them wrote, not the sum",
    lambda problem: problem.dcaptured,
)
def _captured(of: ExactGradients) -> Iterator[Prediction]:
    given, exact = of.given, of.gradients()
    dz = of.weights() * (of.dp - (of.delta - of.dlse)[..., None])
    whole = (given.problem.query, given.problem.kv)
    for rows, keys in dict.fromkeys(
        (whole, *given.tiles, *((whole[0], n) for _, n in given.tiles))
    ):
        found = torch.zeros_like(exact.dcaptured) if exact.dcaptured is not None else None
        assert found is not None, "of what has it"
        for part in _parts(of, rows, keys):
            mine = of.captured(dz, part)
            found = torch.where(mine != 0, mine, found)
        for one in (found, *last_stored(of, dz, rows, keys)):
            outputs = replace(exact, dcaptured=one)
            yield Prediction(outputs=outputs, parameters={"rows": rows, "keys": keys})


def _parts(of: ExactGradients, rows: int, keys: int) -> Iterator[Tensor]:
    """Tiles of each head of each sequence, in order: bool that broadcast to the scores."""
    given = of.given
    problem = given.problem
    for row in range(-(-problem.query // rows)):
        for key in range(-(-problem.kv // keys)):
            tile = (given.i // rows == row) & (given.j // keys == key)
            for b in range(problem.batch):
                for h in range(problem.heads):
                    yield tile & (given.b == b) & (given.h == h)
