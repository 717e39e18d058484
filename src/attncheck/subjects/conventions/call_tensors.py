"""Masks and biases written out as tensors, and keys and values in pages, as calls take them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from attncheck.core.formats import FORMATS, Format
from attncheck.core.mod_spec import FULL, NONE, Dimensions, Spec
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Problem
from attncheck.mods import library
from attncheck.mods.page_table import PageTable, draw_page_table, pack_pages
from attncheck.subjects.conventions.layouts import conjuncts

P = ParamSpec("P")
T = TypeVar("T")


# ------------------------------------------------------------------ what is made of mods once


@dataclass(frozen=True, slots=True)
class ModKey:
    """All that a Problem's mods depend on: Problems of other dtypes and seeds share it."""

    kind: type[Problem]
    specs: tuple[Spec, ...]  # the mods
    dimensions: Dimensions  # ranges of their indices
    device: str  # where their captured tensors are
    problem: Problem = field(compare=False)  # one of the Problems

    @classmethod
    def of(cls, problem: Problem, device: str, *mods: str) -> ModKey:
        """The key of ``mods``: ``mask``, ``score``, or both."""
        specs = tuple(getattr(problem, name) for name in mods)
        return cls(type(problem), specs, problem.dimensions, device, problem)


def once_for_mods(function: Callable[P, T]) -> Callable[P, T]:
    """Cache ``function(key, …)`` where the key's names mean the same next time.

    A relation computes the same Problem in several runs, the nearest Problem that is taken is one
    of a hundred with the same mods, and a trace costs more than a small kernel.
    """
    cached = functools.lru_cache(maxsize=64)(function)

    @functools.wraps(function)
    def by_key(*args: P.args, **kwargs: P.kwargs) -> T:
        key: ModKey = args[0]  # type: ignore[assignment]  # the first of P
        parts = itertools.chain.from_iterable(spec.walk() for spec in key.specs)
        # A user's own mod may be another function by the same name next time.
        lasting = all(part.name in library.BUILT_IN for part in parts)
        return cached(*args, **kwargs) if lasting else function(*args, **kwargs)  # type: ignore[arg-type]  # hashable

    by_key.forget = cached.cache_clear  # type: ignore[attr-defined]  # for tests
    return by_key


# ------------------------------------------------------------------ masks and biases

_CAUSAL, _CAUSAL_BOTTOM_RIGHT = Spec.of("causal"), Spec.of("causal_bottom_right")

_AT_A_TIME = 2**22
"""Float64 numbers of a bias held at a time: 32 MiB, where the whole may be a hundred GiB."""


def attention_mask(
    problem: Problem, device: str = "cpu", rows: range | None = None
) -> torch.Tensor:
    """Keys that ``rows`` (default: all) see, bool ``(batch or 1, heads or 1, rows, kv)``."""
    rows = rows or range(problem.query)
    seen = problem.mask_mod(device)(*_indices(problem, device, rows))
    # A mask that reads neither row nor key would stay a single number.
    return seen & torch.ones((1, 1, len(rows), problem.kv), dtype=torch.bool, device=device)


def attention_bias(
    problem: Problem, device: str = "cpu", rows: range | None = None
) -> torch.Tensor:
    """Numbers that an additive score mod adds, float64 ``(batch or 1, heads or 1, rows, kv)``."""
    rows = rows or range(problem.query)
    zeros = torch.zeros((1, 1, len(rows), problem.kv), dtype=torch.float64, device=device)
    return problem.score_mod(device)(zeros, *_indices(problem, device, rows))


def _indices(problem: Problem, device: str, rows: range) -> tuple[torch.Tensor, ...]:
    return (
        torch.arange(problem.batch, device=device).view(-1, 1, 1, 1),
        torch.arange(problem.heads, device=device).view(1, -1, 1, 1),
        torch.arange(rows.start, rows.stop, device=device).view(1, 1, -1, 1),
        torch.arange(problem.kv, device=device).view(1, 1, 1, -1),
    )


def row_blocks(problem: Problem) -> list[range]:
    """All rows of a Problem, as many at a time as may be held."""
    size = max(1, _AT_A_TIME // (problem.batch * problem.heads * problem.kv))
    starts = range(0, problem.query, size)
    return [range(start, min(start + size, problem.query)) for start in starts]


def bias_is_exact(problem: Problem, fmt: Format, device: str) -> bool:
    """Return whether an additive score mod's numbers are of ``fmt`` where the mask shows them."""
    return _is_exact(ModKey.of(problem, device, "mask", "score"), fmt.name)


@once_for_mods
def _is_exact(key: ModKey, fmt: str) -> bool:
    for rows in row_blocks(key.problem):
        bias = attention_bias(key.problem, key.device, rows)
        exact = bias.to(FORMATS[fmt].torch_dtype).double() == bias
        if not bool((exact | ~attention_mask(key.problem, key.device, rows)).all()):
            return False
    return True


def mask_size(problem: Problem, device: str) -> tuple[int, ...]:
    """Shape of mask and score mod in one tensor, ``(batch or 1, heads or 1, query, kv)``."""
    return _mask_size(ModKey.of(problem, device, "mask", "score"))


@once_for_mods
def _mask_size(key: ModKey) -> tuple[int, ...]:
    problem = key.problem
    # One row shows which axes broadcast; the whole may be too large to be made.
    row = attention_mask(problem, key.device, range(1))
    if problem.score != NONE:
        row = row * attention_bias(problem, key.device, range(1))
    return (*row.shape[:2], problem.query, problem.kv)


def needs_no_mask(problem: Problem) -> bool:
    """Return whether ``is_causal`` says all of it, or there is nothing to say."""
    return problem.score == NONE and (problem.mask == FULL or is_causal(problem))


def is_causal(problem: Problem) -> bool:
    """Return whether the mask is torch's ``is_causal``, which is aligned top-left."""
    # At equal lengths both alignments are the same mask.
    square = problem.query == problem.kv
    return problem.mask == _CAUSAL or (square and problem.mask == _CAUSAL_BOTTOM_RIGHT)


# ------------------------------------------------------------------ keys in pages


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PagedInputs:
    """Keys and values in pages."""

    # ``(pages, kv_heads, size, head_dim)``, a view of contiguous ``(pages, size, kv_heads,
    # head_dim)``.
    k: Tensor
    v: Tensor  # the same of values
    table: PageTable  # where each page of each sequence lies; on their device


def paged_inputs(inputs: Inputs) -> PagedInputs:
    """Put the inputs' keys and values into the pages of ``inputs_page_table``."""
    table = inputs_page_table(inputs)
    k, v = (pack_pages(tensor, table).transpose(1, 2) for tensor in (inputs.k, inputs.v))
    return PagedInputs(k=k, v=v, table=table)


def inputs_page_table(inputs: Inputs) -> PageTable:
    """The page table of a Problem with paging, on the inputs' device.

    Leading pages that all sequences share are one page only as far as the numbers in them are the
    same to the last bit, which a relation may have changed.
    """
    problem = inputs.problem
    assert problem.paging is not None
    return draw_page_table(
        problem.paging,
        problem.batch,
        problem.kv,
        sequence_lengths(problem),
        shared=_shared(inputs, problem.paging.shared, problem.paging.size),
    ).to(inputs.device)


def sequence_lengths(problem: Problem) -> tuple[int, ...]:
    """Keys of each sequence: what a padding mask says, by itself or as a part of an ``and``.

    Of several the shortest; kv where there is none. What lies behind no row sees.
    """
    lengths = [problem.kv] * problem.batch
    for part in conjuncts(problem.mask):
        if part.name == "padding":
            padded = cast("tuple[int, ...]", part.values["lengths"])
            lengths = [min(pair) for pair in zip(lengths, padded, strict=True)]
    return tuple(lengths)


def _shared(inputs: Inputs, most: int, size: int) -> int:
    """Leading pages, up to ``most``, in which all sequences have the same bits."""
    same = keys = min(most * size, inputs.problem.kv)
    if keys == 0:  # and an empty view has no bytes to look at
        return most
    for tensor in (inputs.k, inputs.v):
        leading = tensor[:, :, :keys].contiguous().view(torch.uint8)
        differ = (leading != leading[:1]).any(3).any(1).any(0).nonzero()
        if len(differ):
            same = min(same, int(differ[0]))
    return most if same == keys else same // size
