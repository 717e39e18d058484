"""Page tables of keys and values, and masks of where keys lie in memory.

A logical key is one that masks and score mods speak of: 0 is a sequence's first. A physical key is
its place in memory: slot s of page p is ``p · size + s``. Kernels that walk over pages in the order
of memory need masks and score mods of physical keys: FlexAttention's way to paged attention (Dong
et al. 2024, arXiv:2412.05496, section 4; torch.nn.attention.experimental.PagedAttention).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attncheck.core.draws import Draws
from attncheck.core.errors import ProblemError
from attncheck.core.paged_layout import Paging
from attncheck.mods.block_mask import EMPTY, FULL, PARTIAL, BlockMask
from attncheck.mods.signatures import MaskMod, ScoreMod

_FREE_SHARE = 4  # one page in so many is free, and two more


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PageTable:
    """The page of memory of each page of each sequence."""

    # int32 ``(batch, most)``: the page of keys ``j · size`` to ``(j + 1) · size − 1`` of sequence
    # b is ``table[b, j]``. Entries beyond a sequence's last page are free pages: they may be
    # read, and what they hold may not be used.
    table: Tensor
    pages: int  # pages of memory, the free ones included; the last one is free
    size: int  # keys in a page
    lengths: tuple[int, ...]  # keys of each sequence

    @property
    def own(self) -> Tensor:
        """True for entries that are a sequence's pages, bool ``(batch, most)``."""
        counts = [-(-length // self.size) for length in self.lengths]
        places = torch.arange(self.table.shape[1], device=self.table.device)
        return places < torch.tensor(counts, device=self.table.device)[:, None]

    def inverse(self) -> Tensor:
        """Return which page of sequence b page p is, −1 if none: int32 ``(batch, pages)``."""
        batch, most = self.table.shape
        logical = torch.arange(most, dtype=torch.int32, device=self.table.device)
        # What is not a sequence's own marks one page behind the others, which is cut off.
        at = torch.where(self.own, self.table.long(), self.pages)
        marks = torch.full((batch, self.pages + 1), -1, dtype=torch.int32, device=at.device)
        return marks.scatter_(1, at, logical.expand(batch, most))[:, : self.pages].contiguous()

    def to(self, device: torch.device | str) -> PageTable:
        """Return the same with its table on ``device``."""
        return replace(self, table=self.table.to(device))


def draw_page_table(
    paging: Paging,
    batch: int,
    kv: int,
    lengths: Sequence[int] | None = None,
    *,
    shared: int | None = None,
) -> PageTable:
    """Return the pages of ``batch`` sequences in an order that follows from ``paging.seed`` alone.

    Pages of all sequences are mixed, with free pages between them and one behind. The same bits on
    every machine.

    Args:
        kv: Keys of the longest that there may be: each row of the table is for one page more, as
            a serving engine's is for the longest sequence that it takes.
        lengths: Keys of each sequence, 0 to ``kv`` (default: ``kv``).
        shared: How many leading pages all sequences share (default: ``paging.shared``).

    Raises:
        ProblemError: for lengths that are not one a sequence, or beyond ``kv``.
    """
    lengths = tuple([kv] * batch if lengths is None else lengths)
    if len(lengths) != batch or not all(0 <= length <= kv for length in lengths):
        raise ProblemError(f"lengths={list(lengths)} must be {batch} numbers, each 0–{kv}.")
    shared = paging.shared if shared is None else shared
    # One entry more than is needed, as in a server: a kernel may not read by the table's width.
    most = -(-kv // paging.size) + 1
    counts = torch.tensor([-(-length // paging.size) for length in lengths])
    places = torch.arange(most)
    own = places < counts[:, None]
    which, used = _number_pages(own, shared)
    order, free = _order(paging.seed, used)
    # An engine that gives pages back leaves their numbers in the table.
    free_pages = free[torch.arange(batch * most).view(batch, most) % len(free)]
    table = torch.where(own, order[which], free_pages)
    return PageTable(
        table=table.to(torch.int32), pages=len(order) + len(free), size=paging.size, lengths=lengths
    )


def _number_pages(own: Tensor, shared: int) -> tuple[Tensor, int]:
    """Return the number of each entry among the used pages, 0 of none; and their count.

    Those that all sequences share come first, then each sequence's own in turn.
    """
    places = torch.arange(own.shape[1])
    alone = own & (places >= shared)
    # Fewer pages than are shared: nobody has the rest.
    common = min(shared, int(own.sum(1).max()))
    in_turn = common + alone.flatten().cumsum(0).view(own.shape) - 1
    which = torch.where(alone, in_turn, places)
    return torch.where(own, which, 0), common + int(alone.sum())


def _order(seed: int, used: int) -> tuple[Tensor, Tensor]:
    """Numbers of ``used`` pages, at least one, and of the free ones; the largest is free."""
    used = max(used, 1)
    others = used // _FREE_SHARE + 1
    # Sorted by drawn numbers: no library's shuffle is the same in its next version.
    keys = Draws(seed).integers("pages", (used + others,), 2**32 - 1)
    order = torch.from_numpy(keys).argsort(stable=True)
    last = torch.tensor([used + others])
    return order[:used], torch.cat((order[used:], last))


def pack_pages(tensor: Tensor, table: PageTable) -> Tensor:
    """Return keys or values in their pages, contiguous; NaN in free pages and slots without a key.

    A page of several sequences must hold the same numbers in all of them.

    Args:
        tensor: ``(batch, kv_heads, kv, dim)``, any strides.
        table: Of these sequences, on the tensor's device.

    Returns:
        ``(pages, size, kv_heads, dim)``. A sequence's last page also holds what ``tensor`` has
        there beyond the sequence's length, up to kv: what was there before, as stale values are.

    Raises:
        ProblemError: for another number of sequences, or fewer keys than they have.
    """
    batch, heads, kv, dim = tensor.shape
    if batch != len(table.lengths) or max(table.lengths) > kv:
        raise ProblemError(
            f"a tensor of {batch} sequences of {kv} keys is not that of the lengths "
            f"{list(table.lengths)}."
        )
    blocks = -(-kv // table.size)
    # NaN, not 0: whoever uses a slot without a key shows it.
    rows = _nan(tensor, (batch, blocks * table.size, heads, dim))
    rows[:, :kv] = tensor.transpose(1, 2)
    cache = _nan(tensor, (table.pages, table.size, heads, dim))
    b, j = table.own[:, :blocks].nonzero(as_tuple=True)
    _indexable(cache)[table.table[b, j].long()] = _indexable(
        rows.view(batch, blocks, table.size, heads, dim)
    )[b, j]
    return cache


def _nan(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.tensor(math.nan, device=like.device).to(like.dtype).expand(shape).contiguous()


def _indexable(tensor: Tensor) -> Tensor:
    """The same memory; torch gathers and scatters no fp8, but its bytes."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def physical_block_mask(mask: BlockMask, table: PageTable) -> BlockMask:
    """Return the block mask of logical keys as one of physical keys: ``(batch, heads', …)``.

    Its keys are all of memory, free pages included, whose tiles are empty, as those of other
    sequences are. A full tile that a sequence's end cuts becomes a partial one.

    Args:
        mask: Of logical keys, its ``block_kv`` the size of a page.
        table: On the mask's device.

    Raises:
        ProblemError: for blocks that are no pages, another number of sequences, or more keys than
            the table has entries for.
    """
    batch, most = table.table.shape
    if mask.block_kv != table.size:
        raise ProblemError(
            f"block_kv={mask.block_kv} is not the size of a page, {table.size}: make the block "
            "mask with blocks of a page."
        )
    sequences, heads, query_blocks, blocks = mask.kinds.shape
    if sequences not in {1, batch} or blocks > most:
        raise ProblemError(
            f"a block mask of {sequences} sequences and {blocks} key blocks is none "
            f"of {batch} sequences of {most} pages."
        )
    ends = (torch.arange(blocks, device=mask.kinds.device) + 1) * table.size
    # A full tile is applied without a mask: past a sequence's end there must be one.
    cut = ends > torch.tensor(table.lengths, device=ends.device)[:, None]
    kinds = torch.where(cut[:, None, None] & (mask.kinds == FULL), PARTIAL, mask.kinds)
    at = torch.where(table.own, table.table.long(), table.pages)[:, None, None, :blocks]
    there = torch.full(
        (batch, heads, query_blocks, table.pages + 1), EMPTY, dtype=torch.uint8, device=at.device
    )
    there.scatter_(3, at.expand(kinds.shape), kinds.to(torch.uint8))
    return BlockMask(
        kinds=there[..., : table.pages],
        query=mask.query,
        kv=table.pages * table.size,
        block_query=mask.block_query,
        block_kv=table.size,
    )


def physical_mask(mask_mod: MaskMod, table: PageTable) -> MaskMod:
    """Return the mask of physical keys: b sees its own pages, and there what ``mask_mod`` shows.

    Pages that are not a sequence's, and slots beyond its length, are hidden from it; ``mask_mod``
    is never called with a key that is not there, but with key 0 instead.

    Args:
        mask_mod: Of logical keys.
        table: On the device of the indices.
    """
    logical = _logical(table)

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        key, there = logical(b, kv_idx)
        return mask_mod(b, h, q_idx, key) & there

    return mask


def physical_score(score_mod: ScoreMod, table: PageTable) -> ScoreMod:
    """Return the score mod of physical keys; −∞ where sequence b has no key.

    Args:
        score_mod: Of logical keys.
        table: On the device of the indices.
    """
    logical = _logical(table)

    def changed(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        key, there = logical(b, kv_idx)
        return torch.where(there, score_mod(score, b, h, q_idx, key), -math.inf)

    return changed


def _logical(table: PageTable) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(b, physical key) → the logical key, 0 where sequence b has none there; whether it has."""
    inverse, size = table.inverse(), table.size
    lengths = torch.tensor(table.lengths, dtype=torch.int32, device=inverse.device)

    def logical(b: Tensor, kv_idx: Tensor) -> tuple[Tensor, Tensor]:
        page = inverse[b, kv_idx // size]
        # Of page −1 this is negative: hidden by ``there``, and replaced by 0 below.
        key = page * size + kv_idx % size
        there = (page >= 0) & (key < lengths[b])
        return torch.where(there, key, 0), there

    return logical
