"""Kernels that read keys in splits or through a page table, with faults in how they do."""

import math

import torch
from tests import planted_kernels
from tests.planted_kernels.inputs_read import as_class
from tests.planted_kernels.outputs_given import by_query_head

from attncheck.core.mod_spec import FULL, Spec
from attncheck.core.outputs import Outputs
from attncheck.inputs.problem import Problem
from attncheck.mods.page_table import PageTable
from attncheck.subjects.conventions.call_tensors import paged_inputs
from attncheck.subjects.ideal import Ideal

BLOCK = 16  # keys of a split


class Splits(Ideal):
    """Right for finite values: attention over splits of 16 keys in float64, merged by LSE."""

    sinks = False

    def tiling(self, problem, device):
        return None

    def prepare(self, inputs):
        return super().prepare(inputs) if inputs.x is not None else lambda: self.splits(inputs)

    def splits(self, inputs):
        parts = [self.part(inputs, start) for start in range(0, inputs.problem.kv, BLOCK)]
        given, total = self.merged(*(torch.stack(each) for each in zip(*parts, strict=True)))
        return Outputs(given.to(inputs.problem.formats.output.torch_dtype), total.float())

    def part(self, inputs, start):
        """Out and LSE of the keys of one split."""
        problem = inputs.problem
        q, k, v = inputs.promoted()
        k, v = (by_query_head(inputs, x[:, :, start : start + BLOCK]) for x in (k, v))
        sizes = (problem.batch, problem.heads, problem.query, k.shape[2])
        b, h, row, key = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
        scores = problem.score_mod()(q @ k.mT * problem.scale, b, h, row, key + start)
        seen = problem.mask_mod()(b, h, row, self.key(key, start)).expand(sizes)
        scores = torch.where(seen, scores, -math.inf)
        total = scores.logsumexp(-1)
        return torch.where(seen, (scores - total[..., None]).exp(), 0.0) @ v, total

    def key(self, key, start):
        """The index that the mask gets for a key of a split."""
        return key + start

    def merged(self, outs, lses):
        total = lses.logsumexp(0)
        weights = torch.where(lses == -math.inf, 0.0, (lses - total).exp())
        return (weights[..., None] * outs).sum(0), total


def last_dropped(self, outs, lses):
    kept = max(1, len(lses) - 1)
    return Splits.merged(self, outs[:kept], lses[:kept])


DECODING = {
    "Splits": {},
    "MergedWithoutWeights": {
        "merged": lambda self, outs, lses: (outs.mean(0), Splits.merged(self, outs, lses)[1])
    },
    # A split without visible keys has LSE 0, as if its sum were 1.
    "EmptySplitCounts": {
        "merged": lambda self, outs, lses: Splits.merged(
            self, outs, torch.where(lses == -math.inf, 0.0, lses)
        )
    },
    "LastSplitDropped": {"merged": last_dropped},
    "LocalKeys": {"key": lambda _, key, start: key},
    "OtherLaunchDropsKeys": {
        "launches": lambda *_: {
            "one split": planted_kernels.kernel("Splits"),
            "splits": planted_kernels.kernel("LastSplitDropped"),
        }
    },
}


class Gathering(Ideal):
    """Right: gathers keys and values from pages by the table, then computes ideal attention."""

    def concerns(self, problem):
        return problem.paging is not None

    def places(self, table, kv):
        """Page and slot of each logical key, ``(batch, kv)`` each."""
        keys = torch.arange(kv)
        slots = (keys % table.size).expand(len(table.lengths), -1)
        return table.table[:, keys // table.size].long(), slots

    def read(self, inputs, cache):
        """The inputs with keys and values gathered from the cache."""
        pages, slots = self.places(cache.table, inputs.problem.kv)
        found = {}
        for name, stored in (("k", cache.k), ("v", cache.v)):
            bits = stored.view(torch.uint8) if stored.element_size() == 1 else stored
            found[name] = bits[pages, :, slots].transpose(1, 2).contiguous().view(stored.dtype)
        return inputs.replace(**found)

    def prepare(self, inputs):
        return super().prepare(self.read(inputs, paged_inputs(inputs)))


def transposed(self, table, kv):
    """Reads entry (j, b) of a table for (b, j), as with a wrong stride."""
    _, slots = Gathering.places(self, table, kv)
    batch, most = table.table.shape
    b, j = torch.arange(batch)[:, None], torch.arange(kv) // table.size
    return table.table.flatten()[(j * batch + b) % (batch * most)].long(), slots


def page_one_longer(_, table, kv):
    """Assumes pages of one key more than they have."""
    keys, size = torch.arange(kv), table.size + 1
    place = table.table[:, keys // size].long() * table.size + keys % size
    place = place.clamp(max=table.pages * table.size - 1)
    return place // table.size, place % table.size


def shared_is_the_first_ones(self, inputs, cache):
    """Takes one page more than is shared from the first sequence."""
    of, shared = cache.table, inputs.problem.paging.shared
    table = of.table.clone()
    table[:, : shared and shared + 1] = table[:1, : shared and shared + 1]
    other = PageTable(table=table, pages=of.pages, size=of.size, lengths=of.lengths)
    return Gathering.read(self, inputs, type(cache)(k=cache.k, v=cache.v, table=other))


def padding_read_as(change):
    """Replace a padding mask by ``change(lengths, page size, problem)``."""

    def read(self, inputs, cache):
        given, problem = Gathering.read(self, inputs, cache), inputs.problem
        if problem.mask.name != "padding":
            return given
        mask = change(problem.mask.values["lengths"], cache.table.size, problem)
        return given.replace(problem=problem.replace(mask=mask))

    return {"read": read}


def to_the_end_of_a_page(lengths, size, problem):
    """A sequence ends where its last page does, so that stale values are seen."""
    return Spec.of("padding", lengths=[min(problem.kv, -(-n // size) * size) for n in lengths])


def stale_times_zero(self, inputs, cache):
    """Values behind the end of a sequence's last page count with weight 0, and 0 · NaN is NaN."""
    given, table = Gathering.read(self, inputs, cache), cache.table
    ends = -(-torch.tensor(table.lengths) // table.size) * table.size
    inside = torch.arange(inputs.problem.kv) < ends[:, None]
    nan = (given.v.isnan() & inside[:, None, :, None]).any(2, keepdim=True)
    return given.replace(v=torch.where(nan, torch.nan, given.v.float()).to(given.v.dtype))


def mask_of_places(self, inputs, cache):
    """The mask gets a key's place in memory rather than in its sequence."""
    table = cache.table

    class Placed(Problem):
        __slots__ = ()

        def mask_mod(self, device="cpu"):
            right = super().mask_mod(device)

            def mask(b, h, q_idx, kv_idx):
                page = table.table[b, kv_idx // table.size]
                return right(b, h, q_idx, page * table.size + kv_idx % table.size)

            return mask

    given = Gathering.read(self, inputs, cache)
    return given.replace(problem=as_class(Placed, inputs.problem))


def kept_by_page(self, inputs, cache):
    """The first content of each page is kept by its number, and later content is ignored."""
    kept = vars(self).setdefault("kept", {})
    for name, pages in (("k", cache.k), ("v", cache.v)):
        for page in range(cache.table.pages):
            key = (page, hash((name, *pages.shape[1:])), pages.dtype)
            pages[page] = kept.setdefault(key, pages[page].clone())
    return Gathering.read(self, inputs, cache)


PAGES = {
    "Gathering": {},
    "PagesTransposed": {"places": transposed},
    "PageOneLonger": {"places": page_one_longer},
    "SharedIsTheFirstOnes": {"read": shared_is_the_first_ones},
    "TailRead": padding_read_as(to_the_end_of_a_page),
    "EntriesBeyondRead": padding_read_as(lambda *_: FULL),
    "StaleTimesZero": {"read": stale_times_zero},
    "MaskOfPlaces": {"read": mask_of_places},
    "KeptByPage": {"read": kept_by_page},
}
