"""Faults of what a backward keeps between its kernels: delta and LSE in padded rows, sums."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attncheck.hypotheses.captured_stores import last_stored
from attncheck.hypotheses.gradients import slip
from attncheck.hypotheses.model import Variant, masked, scored

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attncheck.hypotheses.backward import Backward
    from attncheck.outputs import Outputs

_TIMES = (2, 3, 4, 5, 8)
_PADDED_TO = (64, 128)  # rows, whatever a tile has


@slip(
    "delta-padded-otherwise",
    "delta, or LSE, is written for rows padded to one length and read for another: sequences and "
    "heads after the first have those of other rows",
    lambda problem: problem.batch * problem.heads > 1,
)
def _padded(of: Backward) -> Iterator[Variant]:
    given = of.given
    query = given.problem.query
    lengths = {query, *(-(-query // size) * size for size in _row_tiles(of))}
    for written in sorted(lengths):
        for read in sorted(lengths - {written}):
            parameters = {"written": written, "read": read}
            delta = _reread(of.delta, written, read)
            lse = _reread(given.parts.lse, written, read)
            weights = of.weights(lse=lse)
            yield Variant(outputs=of.gradients(delta=delta), parameters=parameters)
            yield Variant(outputs=of.gradients(weights=weights), parameters=parameters)
            both = of.gradients(delta=delta, weights=weights)
            yield Variant(outputs=both, parameters=parameters)
    yield from _packed(of)


def _packed(of: Backward) -> Iterator[Variant]:
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
                    yield Variant(outputs=replace(found, dsink=exact.dsink), parameters=parameters)
                    if exact.dsink is not None:
                        yield Variant(outputs=found, parameters=parameters)


def _row_tiles(of: Backward) -> tuple[int, ...]:
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
def _behind(of: Backward) -> Iterator[Variant]:
    given, exact = of.given, of.gradients()
    if all(given.problem.query % rows == 0 for rows, _ in given.tiles):
        return
    # Padding is asked about as the last row, or sees every key.
    for seen in (torch.ones_like(given.seen[:, :, -1]), given.seen[:, :, -1]):
        keys = _of_key_heads(of, seen)[..., None]
        dk, dv = (torch.where(keys, math.nan, x) for x in (exact.dk, exact.dv) if x is not None)
        yield Variant(outputs=replace(exact, dk=dk, dv=dv))
        yield Variant(outputs=replace(exact, dk=dk))
        yield Variant(outputs=replace(exact, dv=dv))


def _of_key_heads(of: Backward, keys: Tensor) -> Tensor:
    """Keys ``(batch, heads, kv)`` of any query head that shares a key head."""
    batch, _, kv = keys.shape
    return keys.view(batch, -1, of.given.problem.group, kv).any(2)


@slip(
    "slope-of-hidden-scores",
    "the score mod's derivative at hidden scores, which is not finite, multiplies what was masked: "
    "0 · NaN in dQ and dK",
    lambda problem: masked()(problem) and scored()(problem),
)
def _hidden(of: Backward) -> Iterator[Outputs]:
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
def _again(of: Backward) -> Iterator[Variant]:
    exact = of.gradients()
    for names in (("dq",), ("dk", "dv"), ("dq", "dk", "dv"), ("dk",), ("dv",)):
        for times in _TIMES:
            more = {name: getattr(exact, name) * times for name in names}
            said: dict[str, int | float | str] = {"of": ", ".join(names), "times": times}
            yield Variant(outputs=replace(exact, **more), parameters=said)


@slip(
    "captured-not-summed",
    "what several scores read has the gradient that the last of them wrote, not the sum",
    lambda problem: problem.dcaptured,
)
def _captured(of: Backward) -> Iterator[Variant]:
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
            yield Variant(outputs=outputs, parameters={"rows": rows, "keys": keys})


def _parts(of: Backward, rows: int, keys: int) -> Iterator[Tensor]:
    """Tiles of each head of each sequence, in order: bool that broadcast to the scores."""
    given = of.given
    problem = given.problem
    for row in range(-(-problem.query // rows)):
        for key in range(-(-problem.kv // keys)):
            tile = (given.i // rows == row) & (given.j // keys == key)
            for b in range(problem.batch):
                for h in range(problem.heads):
                    yield tile & (given.b == b) & (given.h == h)
