"""Faults of where numbers are read: heads, batches, strides, pages, and what is not finite."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from attncheck.hypotheses.model import Variant, attention, model
from attncheck.hypotheses.reading import contiguous, read_as
from attncheck.outputs import Outputs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attncheck.hypotheses.given import Given
    from attncheck.problem import Problem

__all__ = ["with_keys"]

_WHOSE = ("keys and values", "keys", "values")


def with_keys(given: Given, k: Tensor, v: Tensor, **parameters: str | int) -> Iterator[Variant]:
    """With other k and v ``(batch, heads, kv, …)``: both, and each alone."""
    for whose in _WHOSE:
        x = given.q @ k.mT * given.scale if "keys" in whose else None
        outputs = given.attend(x=x, v=v if "values" in whose else None)
        yield Variant(outputs=outputs, parameters=parameters | {"of": whose})


def _shared(problem: Problem) -> bool:
    return attention(problem) and problem.kv_heads > 1


def _of_heads(given: Given, heads: Tensor) -> tuple[Tensor, Tensor]:
    """K and v of the key heads of indices ``heads``, one a query head."""
    _, k, v = given.inputs.promoted()
    return k[:, heads], v[:, heads]


@model(
    "kv-heads-interleaved",
    "query head h reads key head h mod kv_heads, not h // group",
    group="heads",
    applies=lambda problem: _shared(problem) and problem.group > 1,
)
def _interleaved(given: Given) -> Iterator[Variant]:
    problem, h = given.problem, given.h.flatten()
    for heads in (h % problem.kv_heads, (h % problem.group) % problem.kv_heads):
        yield from with_keys(given, *_of_heads(given, heads))


@model(
    "kv-heads-first",
    "every query head reads the first key head",
    group="heads",
    applies=_shared,
)
def _first(given: Given) -> Iterator[Variant]:
    yield from with_keys(given, *_of_heads(given, 0 * given.h.flatten()))


@model(
    "heads-swapped",
    "query heads read each other's key heads",
    group="heads",
    applies=_shared,
)
def _swapped(given: Given) -> Iterator[Variant]:
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
def _batches(given: Given) -> Iterator[Variant]:
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
def _batch(given: Given) -> Iterator[Variant]:
    of = torch.zeros(given.problem.batch, dtype=torch.int64)
    yield from with_keys(given, given.k[of], given.v[of])


@model(
    "query-heads-swapped",
    "the output of one head is that of another",
    group="heads",
    applies=lambda problem: problem.heads > 1,
)
def _query(given: Given) -> Iterator[Variant]:
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
        yield Variant(outputs=out, parameters={"head": name})
        yield Variant(outputs=Outputs(exact.out[:, of], exact.lse), parameters={"head": name})


@model(
    "contiguous-assumed",
    "a tensor is read as if it were contiguous: its strides are not looked at",
    group="memory",
    applies=attention,
)
def _strides(given: Given) -> Iterator[Variant]:
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
def _of_keys(given: Given) -> Iterator[Variant]:
    inputs = given.inputs
    for name, other in (("v", inputs.k), ("k", inputs.v), ("k", inputs.q), ("v", inputs.q)):
        own: Tensor = getattr(inputs, name)
        if other.stride() != own.stride():
            for read in read_as(own, other.stride()):
                yield _reading(given, {name: read})


def _reading(given: Given, changed: dict[str, Tensor]) -> Variant:
    read = dataclasses.replace(given.inputs, **changed)  # type: ignore[arg-type]  # q, k and v
    q, k, v = read.promoted()
    k, v = given.by_query_head(k), given.by_query_head(v)
    x = q[:, :, given.rows] @ k.mT * given.scale
    return Variant(outputs=given.attend(x=x, v=v), parameters={"of": ", ".join(changed)})


@model(
    "out-transposed",
    "the output is written in another layout: heads and rows are exchanged",
    group="memory",
    applies=lambda problem: attention(problem) and problem.heads > 1 and problem.query > 1,
)
def _transposed(given: Given) -> Iterator[Variant]:
    if given.whole:
        exact = given.parts.outputs
        out = exact.out.transpose(1, 2).reshape(exact.out.shape)
        yield Variant(outputs=Outputs(out, exact.lse))


@model(
    "columns-swapped",
    "the columns of v, or of the output, are in another order",
    group="memory",
    applies=attention,
)
def _columns(given: Given) -> Iterator[Variant]:
    exact, v = given.parts.outputs, given.v
    halves = v.shape[-1] // 2
    yield Variant(outputs=Outputs(exact.out.flip(-1), exact.lse))
    yield Variant(outputs=Outputs(exact.out.roll(halves, -1), exact.lse))


@model(
    "columns-missing",
    "columns of the values beyond the head dim, or of the head dim beyond that of the values, are "
    "not read",
    group="memory",
    applies=attention,
)
def _missing(given: Given) -> Iterator[Variant]:
    problem, exact = given.problem, given.parts.outputs
    dims = {min(problem.head_dim, problem.value_dim)}
    dims |= {1 << (dim.bit_length() - 1) for dim in (problem.head_dim, problem.value_dim)}
    for kept in sorted(dims):
        if kept < problem.value_dim:
            there = torch.arange(problem.value_dim) < kept
            out = torch.where(there, exact.out, 0.0)
            yield Variant(outputs=Outputs(out, exact.lse), parameters={"columns": kept})
        if kept < problem.head_dim:
            x = given.q[..., :kept] @ given.k[..., :kept].mT * given.scale
            yield Variant(outputs=given.attend(x=x), parameters={"columns": kept})
