"""Faults of what lies beside a tensor's numbers: read, or not written over."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from attncheck.hypotheses.model import Variant, attention, model
from attncheck.hypotheses.reading import places, read_at, wider

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attncheck.hypotheses.given import Given
    from attncheck.problem import Problem

_FAR = 2**31
_BLOCKS = (8, 16, 32, 64)  # columns that a head dim is read in whole numbers of


def _columns(problem: Problem) -> tuple[int, ...]:
    """How many columns may be read where there are ``head_dim``: more of them."""
    dim = problem.head_dim
    some = {1 << (dim - 1).bit_length(), *(-(-dim // block) * block for block in _BLOCKS)}
    return tuple(sorted(columns for columns in some if columns > dim))


@model(
    "head-dim-padding-read",
    "columns behind the head dim are read from memory, where they are other rows, and have a part "
    "in the scores",
    group="memory",
    applies=lambda problem: attention(problem) and bool(_columns(problem)),
)
def _read(given: Given) -> Iterator[Variant]:
    inputs, problem = given.inputs, given.problem
    for columns in _columns(problem):
        as_wide = problem.replace(head_dim=columns, value_dim=problem.value_dim)
        both = (wider(x, 3, columns) for x in (inputs.q, inputs.k))
        for read in zip(*both, strict=False):
            wide = dataclasses.replace(inputs, problem=as_wide, q=read[0], k=read[1])
            q, k, _ = wide.promoted()
            x = q[:, :, given.rows] @ given.by_query_head(k).mT * given.scale
            yield Variant(outputs=given.attend(x=x), parameters={"columns": columns})


@model(
    "offsets-of-32-bits",
    "offsets are 32-bit integers: a row 2³¹ elements or more behind the first is read elsewhere",
    group="memory",
    applies=attention,
)
def _wrapped(given: Given) -> Iterator[Variant]:
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
            yield Variant(outputs=given.attend(x=x, v=v), parameters={"of": name})


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


def _halves(given: Given) -> Iterator[tuple[dict[str, str | int], Tensor]]:
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
def _unwritten(given: Given) -> Iterator[Variant]:
    exact = given.parts.outputs
    shape = given.parts.lse.shape
    for parameters, rows in _halves(given):
        gone = rows.expand(shape)
        if bool(gone.any()) and not bool(gone.all()):  # or it would explain anything
            yield Variant(outputs=exact, parameters=parameters, free=gone)
