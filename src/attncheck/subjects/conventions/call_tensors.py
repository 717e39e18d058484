"""Tensors for calls: masks and biases as explicit tensors, and keys and values in pages."""

from __future__ import annotations

import functools
import itertools
import math
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


# ------------------------------------------------------------------ caching results of mods


@dataclass(frozen=True, slots=True)
class ModKey:
    """Everything on which a Problem's mods depend, without dtypes and seeds, as a cache key."""

    kind: type[Problem]
    specs: tuple[Spec, ...]  # the mods
    dimensions: Dimensions  # ranges of their indices
    device: str  # of the tensors that they capture
    problem: Problem = field(compare=False)  # any Problem with this key

    @classmethod
    def of(cls, problem: Problem, device: str, *mods: str) -> ModKey:
        """Return the key of ``mods``, which are ``mask``, ``score``, or both."""
        specs = tuple(getattr(problem, name) for name in mods)
        return cls(type(problem), specs, problem.dimensions, device, problem)


def once_for_mods(function: Callable[P, T]) -> Callable[P, T]:
    """Cache ``function(key, …)`` if all mods of the key are built in.

    Relations compute a Problem in several runs, the search for the nearest supported Problem tries
    a hundred with the same mods, and a trace costs more than a small kernel.
    """
    cached = functools.lru_cache(maxsize=64)(function)

    @functools.wraps(function)
    def by_key(*args: P.args, **kwargs: P.kwargs) -> T:
        key: ModKey = args[0]  # type: ignore[assignment]  # the first of P
        parts = itertools.chain.from_iterable(spec.walk() for spec in key.specs)
        # The name of a user's mod may refer to another function the next time.
        cacheable = all(part.name in library.BUILT_IN for part in parts)
        return cached(*args, **kwargs) if cacheable else function(*args, **kwargs)  # type: ignore[arg-type]  # hashable

    by_key.forget = cached.cache_clear  # type: ignore[attr-defined]  # for tests
    return by_key


# ------------------------------------------------------------------ masks and biases

_CAUSAL, _CAUSAL_BOTTOM_RIGHT = Spec.of("causal"), Spec.of("causal_bottom_right")

_AT_A_TIME = 2**22
"""Float64 numbers of a bias computed at a time: 32 MiB; the whole may take a hundred GiB."""


def attention_mask(
    problem: Problem, device: str = "cpu", rows: range | None = None
) -> torch.Tensor:
    """Return which keys ``rows`` (default: all) see, ``(batch or 1, heads or 1, rows, kv)``."""
    rows = rows or range(problem.query)
    seen = problem.mask_mod(device)(*index_tensors(problem, device, rows))
    # Expands rows and keys if the mask does not read their indices.
    return seen & torch.ones((1, 1, len(rows), problem.kv), dtype=torch.bool, device=device)


def attention_bias(
    problem: Problem, device: str = "cpu", rows: range | None = None
) -> torch.Tensor:
    """Return an additive score mod as float64 ``(batch or 1, heads or 1, rows, kv)``."""
    rows = rows or range(problem.query)
    zeros = torch.zeros((1, 1, len(rows), problem.kv), dtype=torch.float64, device=device)
    return problem.score_mod(device)(zeros, *index_tensors(problem, device, rows))


def index_tensors(
    problem: Problem, device: str | torch.device, rows: range, keys: range | None = None
) -> tuple[torch.Tensor, ...]:
    """Return b, h, q_idx and kv_idx of ``rows`` and ``keys`` (default: all), each on its axis."""
    ranges = range(problem.batch), range(problem.heads), rows, keys or range(problem.kv)
    shapes = (-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1)
    return tuple(
        torch.arange(each.start, each.stop, device=device).view(shape)
        for each, shape in zip(ranges, shapes, strict=True)
    )


def row_blocks(problem: Problem) -> list[range]:
    """Return ranges of a Problem's rows, of at most ``_AT_A_TIME`` scores each."""
    size = max(1, _AT_A_TIME // (problem.batch * problem.heads * problem.kv))
    starts = range(0, problem.query, size)
    return [range(start, min(start + size, problem.query)) for start in starts]


def masked_bias(problem: Problem, device: str, rows: range, fmt: Format) -> torch.Tensor:
    """Return what an additive score mod adds to scores of ``rows``, −∞ where a key is hidden."""
    seen = attention_mask(problem, device, rows)
    bias = torch.where(seen, attention_bias(problem, device, rows), -math.inf)
    return bias.to(fmt.torch_dtype)


def bias_is_exact(problem: Problem, fmt: Format, device: str) -> bool:
    """Return whether ``fmt`` represents an additive score mod exactly where the mask is True."""
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
    """Return the shape of mask and bias in one tensor, ``(batch or 1, heads or 1, query, kv)``."""
    return _mask_size(ModKey.of(problem, device, "mask", "score"))


@once_for_mods
def _mask_size(key: ModKey) -> tuple[int, ...]:
    problem = key.problem
    # One row shows which axes broadcast; the whole tensor may not fit into memory.
    row = attention_mask(problem, key.device, range(1))
    if problem.score != NONE:
        row = row * attention_bias(problem, key.device, range(1))
    return (*row.shape[:2], problem.query, problem.kv)


def needs_no_mask(problem: Problem) -> bool:
    """Return whether torch's ``is_causal`` flag expresses mask and score mod."""
    return problem.score == NONE and (problem.mask == FULL or is_causal(problem))


def is_causal(problem: Problem) -> bool:
    """Return whether the mask is torch's ``is_causal``, which is aligned top-left."""
    # With equal lengths both alignments are the same mask.
    square = problem.query == problem.kv
    return problem.mask == _CAUSAL or (square and problem.mask == _CAUSAL_BOTTOM_RIGHT)


# ------------------------------------------------------------------ keys in pages


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PagedInputs:
    """Keys and values in pages."""

    # ``(pages, kv_heads, size, head_dim)``, a view of contiguous ``(pages, size, kv_heads,
    # head_dim)``.
    k: Tensor
    v: Tensor  # ``(pages, kv_heads, size, value_dim)``, likewise a view
    table: PageTable  # the page number of each page of each sequence, on the tensors' device


def paged_inputs(inputs: Inputs) -> PagedInputs:
    """Return the inputs' keys and values in the pages of ``inputs_page_table``."""
    table = inputs_page_table(inputs)
    k, v = (pack_pages(tensor, table).transpose(1, 2) for tensor in (inputs.k, inputs.v))
    return PagedInputs(k=k, v=v, table=table)


def inputs_page_table(inputs: Inputs) -> PageTable:
    """Return the page table of a Problem with paging, on the inputs' device.

    All sequences share leading pages only as far as the tensors are bitwise equal there, because
    a relation may have changed some of them.
    """
    problem = inputs.problem
    assert problem.paging is not None
    return draw_page_table(
        problem.paging,
        problem.batch,
        problem.kv,
        sequence_lengths(problem),
        shared=_shared_pages(inputs, problem.paging.shared, problem.paging.size),
    ).to(inputs.device)


def sequence_lengths(problem: Problem) -> tuple[int, ...]:
    """Return the number of keys of each sequence: the shortest by its masks of lengths, else kv.

    These are ``padding`` and ``bottom_right``, perhaps parts of an ``and``. No row sees later keys.
    """
    lengths = [problem.kv] * problem.batch
    for part in conjuncts(problem.mask):
        if part.name in {"padding", "bottom_right"}:
            padded = cast("tuple[int, ...]", part.values["lengths"])
            lengths = [min(pair) for pair in zip(lengths, padded, strict=True)]
    return tuple(lengths)


def _shared_pages(inputs: Inputs, most: int, size: int) -> int:
    """Return in how many leading pages, up to ``most``, all sequences have the same bits."""
    same = keys = min(most * size, inputs.problem.kv)
    if keys == 0:  # empty tensors cannot be viewed as bytes
        return most
    for tensor in (inputs.k, inputs.v):
        leading = tensor[:, :, :keys].contiguous().view(torch.uint8)
        differ = (leading != leading[:1]).any(3).any(1).any(0).nonzero()
        if len(differ):
            same = min(same, int(differ[0]))
    return most if same == keys else same // size
