"""The inputs of a Problem with paging as a kernel reads them: in pages, behind a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from attncheck.mods.paging import PageTable, packed, page_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attncheck.inputs import Inputs
    from attncheck.mods.spec import Spec
    from attncheck.problem import Problem

__all__ = ["Cached", "cached", "lengths_of", "table_of"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Cached:
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


def cached(inputs: Inputs) -> Cached:
    """The inputs' keys and values in the pages of ``table_of``: ``mods.paging.packed``."""
    table = table_of(inputs)
    k, v = (packed(tensor, table).transpose(1, 2) for tensor in (inputs.k, inputs.v))
    return Cached(k=k, v=v, table=table)


def table_of(inputs: Inputs) -> PageTable:
    """The page table of a Problem with paging, on the inputs' device.

    Leading pages that all sequences share are one page only as far as the numbers in them are the
    same to the last bit, which a relation may have changed.
    """
    problem = inputs.problem
    assert problem.paging is not None, "asked of what has pages"
    return page_table(
        problem.paging,
        problem.batch,
        problem.kv,
        lengths_of(problem),
        shared=_shared(inputs, problem.paging.shared, problem.paging.size),
    ).to(inputs.device)


def lengths_of(problem: Problem) -> tuple[int, ...]:
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
