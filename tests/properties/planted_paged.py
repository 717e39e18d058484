"""Kernels that find their keys by a page table, and look where they should not."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from attncheck.core.mod_spec import FULL, Spec
from attncheck.inputs.problem import Problem
from attncheck.mods.page_table import PageTable
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.conventions.call_tensors import paged_inputs
from attncheck.subjects.ideal import Ideal

if TYPE_CHECKING:
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.mods.signatures import MaskMod
    from attncheck.subjects.capabilities.subject import Call
    from attncheck.subjects.conventions.call_tensors import PagedInputs


class Gathering(Ideal):
    """Right: keys and values from the pages that the table names, then ideal attention."""

    def __init__(self) -> None:
        super().__init__(Tiling(block_query=16, block_kv=16))
        self.name = f"planted-{type(self).__name__}"

    def concerns(self, problem: Problem) -> bool:
        return problem.paging is not None

    def places(self, table: PageTable, kv: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Page and slot of each logical key, ``(batch, kv)`` each."""
        keys = torch.arange(kv)
        return table.table[:, keys // table.size].long(), (keys % table.size).expand(
            len(table.lengths), -1
        )

    def read(self, inputs: Inputs, cache: PagedInputs) -> Inputs:
        """The Problem with keys and values as they are found."""
        pages, slots = self.places(cache.table, inputs.problem.kv)
        found = {}
        for name, stored in (("k", cache.k), ("v", cache.v)):
            bits = stored.view(torch.uint8) if stored.element_size() == 1 else stored
            found[name] = bits[pages, :, slots].transpose(1, 2).contiguous().view(stored.dtype)
        return inputs.replace(**found)

    def prepare(self, inputs: Inputs) -> Call:
        return super().prepare(self.read(inputs, paged_inputs(inputs)))


class Transposed(Gathering):
    """Entry (j, b) of a table that is (b, j), as a wrong stride gives."""

    def places(self, table: PageTable, kv: int):
        _, slots = super().places(table, kv)
        batch, most = table.table.shape
        b, j = torch.arange(batch)[:, None], torch.arange(kv) // table.size
        return table.table.flatten()[(j * batch + b) % (batch * most)].long(), slots


class PageOneLonger(Gathering):
    """Pages of one key more than they have."""

    def places(self, table: PageTable, kv: int):
        keys = torch.arange(kv)
        flat = table.table[:, keys // (table.size + 1)].long() * table.size + keys % (
            table.size + 1
        )
        flat = flat.clamp(max=table.pages * table.size - 1)
        return flat // table.size, flat % table.size


class SharedIsTheFirstOnes(Gathering):
    """As many leading pages as are shared and one more are the first sequence's, for all."""

    def read(self, inputs: Inputs, cache: PagedInputs) -> Inputs:
        table = cache.table.table.clone()
        paging = inputs.problem.paging
        shared = paging.shared + 1 if paging.shared else 0
        table[:, :shared] = table[:1, :shared]
        return super().read(inputs, _with(cache, table))


class TailRead(Gathering):
    """No length: a sequence ends where its last page does, so that stale values are seen."""

    def read(self, inputs: Inputs, cache: PagedInputs) -> Inputs:
        found, problem = super().read(inputs, cache), inputs.problem
        if problem.mask.name != "padding":
            return found
        size = cache.table.size
        longer = [min(problem.kv, -(-n // size) * size) for n in problem.mask.values["lengths"]]
        mask = Spec.of("padding", lengths=longer)
        return found.replace(problem=problem.replace(mask=mask))


class EntriesBeyondRead(Gathering):
    """Every entry of the table is a page of the sequence: free pages are, too."""

    def read(self, inputs: Inputs, cache: PagedInputs) -> Inputs:
        found, problem = super().read(inputs, cache), inputs.problem
        padded = problem.mask.name == "padding"
        return found.replace(problem=problem.replace(mask=FULL)) if padded else found


class StaleTimesZero(Gathering):
    """What a sequence's last page holds behind its end has weight 0, and 0 · NaN is NaN."""

    def read(self, inputs: Inputs, cache: PagedInputs) -> Inputs:
        found, table = super().read(inputs, cache), cache.table
        ends = -(-torch.tensor(table.lengths) // table.size) * table.size
        inside = torch.arange(inputs.problem.kv) < ends[:, None]
        nan = (found.v.isnan() & inside[:, None, :, None]).any(2, keepdim=True)
        poisoned = torch.where(nan, torch.nan, found.v.float())
        return found.replace(v=poisoned.to(found.v.dtype))


class MaskOfPlaces(Gathering):
    """The mask is asked about a key's page of memory where it is about the sequence's."""

    def read(self, inputs: Inputs, cache: PagedInputs) -> Inputs:
        found, problem = super().read(inputs, cache), inputs.problem
        return found.replace(problem=_of_places(problem, cache.table))


class KeptByPage(Gathering):
    """What was in a page once is there for good: kept by its number."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def read(self, inputs: Inputs, cache: PagedInputs) -> Inputs:
        for name in ("k", "v"):
            pages = getattr(cache, name)
            for page in range(cache.table.pages):
                key = (page, hash((name, *pages.shape[1:])), pages.dtype)
                pages[page] = self._kept.setdefault(key, pages[page].clone())
        return super().read(inputs, cache)


def _with(cache: PagedInputs, table: torch.Tensor) -> PagedInputs:
    of = cache.table
    other = PageTable(table=table, pages=of.pages, size=of.size, lengths=of.lengths)
    return type(cache)(k=cache.k, v=cache.v, table=other)


def _of_places(problem: Problem, table: PageTable) -> Problem:
    """``problem`` with a mask of where keys lie in memory."""

    class Placed(Problem):
        """A Problem of another mask than it says."""

        __slots__ = ()

        def mask_mod(self, device: str = "cpu") -> MaskMod:
            right = super().mask_mod(device)

            def mask(b, h, q_idx, kv_idx):
                page = table.table[b, kv_idx // table.size]
                return right(b, h, q_idx, page * table.size + kv_idx % table.size)

            return mask

    return Placed(**{f.name: getattr(problem, f.name) for f in dataclasses.fields(Problem)})
