"""Masks and biases written out as tensors, and keys and values in pages, as calls take them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, cast

import torch

from attncheck.core.formats import FORMATS
from attncheck.inputs.problem import Problem
from attncheck.mods import library
from attncheck.mods.page_table import PageTable, draw_page_table, pack_pages
from attncheck.mods.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attncheck.core.formats import Format
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.mods.spec import Dimensions

__all__ = [
    "PagedInputs",
    "attention_bias",
    "attention_mask",
    "bias_is_exact",
    "inputs_page_table",
    "is_causal",
    "mask_size",
    "needs_no_mask",
    "paged_inputs",
    "row_blocks",
    "sequence_lengths",
]


_CAUSAL = Spec.of("causal")
_CAUSAL_BOTTOM_RIGHT = Spec.of("causal_bottom_right")


def attention_mask(
    problem: Problem, device: str = "cpu", rows: range | None = None
) -> torch.Tensor:
    """What ``rows`` (default: all) see, bool ``(batch or 1, heads or 1, rows, kv)``."""
    rows = rows or range(problem.query)
    seen = problem.mask_mod(device)(*_indices(problem, device, rows))
    return seen & torch.ones((1, 1, len(rows), problem.kv), dtype=torch.bool, device=device)


def attention_bias(
    problem: Problem, device: str = "cpu", rows: range | None = None
) -> torch.Tensor:
    """What an additive score mod adds, in float64: ``(batch or 1, heads or 1, rows, kv)``."""
    rows = rows or range(problem.query)
    zeros = torch.zeros((1, 1, len(rows), problem.kv), dtype=torch.float64, device=device)
    return problem.score_mod(device)(zeros, *_indices(problem, device, rows))


# Float64 numbers of a bias held at a time: 32 MiB, where the whole may be a hundred GiB.
_AT_A_TIME = 2**22


def row_blocks(problem: Problem) -> list[range]:
    """All its rows, as many at a time as may be held."""
    size = max(1, _AT_A_TIME // (problem.batch * problem.heads * problem.kv))
    starts = range(0, problem.query, size)
    return [range(start, min(start + size, problem.query)) for start in starts]


def _indices(problem: Problem, device: str, rows: range) -> tuple[torch.Tensor, ...]:
    return (
        torch.arange(problem.batch, device=device).view(-1, 1, 1, 1),
        torch.arange(problem.heads, device=device).view(1, -1, 1, 1),
        torch.arange(rows.start, rows.stop, device=device).view(1, 1, -1, 1),
        torch.arange(problem.kv, device=device).view(1, 1, 1, -1),
    )


def bias_is_exact(problem: Problem, fmt: Format, device: str) -> bool:
    """Whether an additive score mod's numbers are of ``fmt``, wherever the mask shows them."""
    exact = _exact_once if _lasting(problem) else _exact
    return exact(problem.mask, problem.score, problem.dimensions, fmt.name, device)


def mask_size(problem: Problem, device: str) -> tuple[int, ...]:
    """Of mask and score mod in one tensor, ``(batch or 1, heads or 1, query, kv)``."""
    size = _size_once if _lasting(problem) else _size
    return size(problem.mask, problem.score, problem.dimensions, device)


def _lasting(problem: Problem) -> bool:
    """Whether its mods mean the same for good."""
    parts = itertools.chain(problem.mask.walk(), problem.score.walk())
    return all(part.name in library.BUILT_IN for part in parts)


def _of_mods(mask: Spec, score: Spec, sizes: Dimensions) -> Problem:
    """A Problem of these mods and lengths, whatever else it has."""
    heads, query, kv = sizes.heads, sizes.query, sizes.kv
    return Problem(batch=sizes.batch, heads=heads, query=query, kv=kv, mask=mask, score=score)


def _exact(mask: Spec, score: Spec, sizes: Dimensions, fmt: str, device: str) -> bool:
    problem = _of_mods(mask, score, sizes)
    for rows in row_blocks(problem):
        bias = attention_bias(problem, device, rows)
        exact = bias.to(FORMATS[fmt].torch_dtype).double() == bias
        if not bool((exact | ~attention_mask(problem, device, rows)).all()):
            return False
    return True


def _size(mask: Spec, score: Spec, sizes: Dimensions, device: str) -> tuple[int, ...]:
    """By the first row."""
    problem = _of_mods(mask, score, sizes)
    row = attention_mask(problem, device, range(1))
    if score != library.NONE:
        row = row * attention_bias(problem, device, range(1))
    return (*row.shape[:2], sizes.query, sizes.kv)


# The nearest Problem that is taken is one of a hundred with the same mods, of few lengths.
_exact_once = lru_cache(maxsize=64)(_exact)
_size_once = lru_cache(maxsize=64)(_size)


def needs_no_mask(problem: Problem) -> bool:
    """Whether ``is_causal`` says all of it, or there is nothing to say."""
    return problem.score == library.NONE and (problem.mask == library.FULL or is_causal(problem))


def is_causal(problem: Problem) -> bool:
    """Whether the mask is torch's ``is_causal``, which is aligned top-left."""
    square = problem.query == problem.kv
    return problem.mask == _CAUSAL or (square and problem.mask == _CAUSAL_BOTTOM_RIGHT)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PagedInputs:
    """Keys and values in pages.

    Attributes:
        k: ``(pages, kv_heads, size, head_dim)``, a view of contiguous ``(pages, size, kv_heads,
            head_dim)``.
        v: The same of values.
        table: Where each page of each sequence lies; on their device.
    """

    k: Tensor
    v: Tensor
    table: PageTable


def paged_inputs(inputs: Inputs) -> PagedInputs:
    """The inputs' keys and values in the pages of ``table_of``: ``mods.paging.packed``."""
    table = inputs_page_table(inputs)
    k, v = (pack_pages(tensor, table).transpose(1, 2) for tensor in (inputs.k, inputs.v))
    return PagedInputs(k=k, v=v, table=table)


def inputs_page_table(inputs: Inputs) -> PageTable:
    """The page table of a Problem with paging, on the inputs' device.

    Leading pages that all sequences share are one page only as far as the numbers in them are the
    same to the last bit, which a relation may have changed.
    """
    problem = inputs.problem
    assert problem.paging is not None, "asked of what has pages"
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
    for part in _conjuncts(problem.mask):
        if part.name == "padding":
            said = cast("tuple[int, ...]", part.values["lengths"])
            lengths = [min(pair) for pair in zip(lengths, said, strict=True)]
    return tuple(lengths)


def _conjuncts(mask: Spec) -> Iterator[Spec]:
    if mask.name != "and":
        yield mask
        return
    for part in mask.parts:
        yield from _conjuncts(part)


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
