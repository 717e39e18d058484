"""Page tables of keys and values, and masks and score mods of keys' positions in memory.

A logical key is an index as masks and score mods take it: 0 is a sequence's first key. A physical
key is its position in memory: slot s of page p is ``p · size + s``. Kernels that walk over pages in
the order of memory need masks and score mods of physical keys, as in FlexAttention's paged
attention (Dong et al. 2024, arXiv:2412.05496, section 4;
torch.nn.attention.experimental.PagedAttention).
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

_FREE_SHARE = 4  # Used pages per free page; two more pages are free.


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PageTable:
    """The numbers of each sequence's pages in memory."""

    # int32 ``(batch, most)``: the page of keys ``j · size`` to ``(j + 1) · size − 1`` of sequence
    # b is ``table[b, j]``. Entries beyond a sequence's last page are free pages: kernels may read
    # them, but may not use their contents.
    table: Tensor
    pages: int  # pages in memory, free ones included; the last one is free
    size: int  # keys in a page
    lengths: tuple[int, ...]  # keys of each sequence

    @property
    def own(self) -> Tensor:
        """True for entries that are pages of the sequence, bool ``(batch, most)``."""
        counts = [-(-length // self.size) for length in self.lengths]
        places = torch.arange(self.table.shape[1], device=self.table.device)
        return places < torch.tensor(counts, device=self.table.device)[:, None]

    def inverse(self) -> Tensor:
        """Return page p's index in sequence b, −1 if not its page: int32 ``(batch, pages)``."""
        batch, most = self.table.shape
        logical = torch.arange(most, dtype=torch.int32, device=self.table.device)
        # Other entries mark an extra page at the end, which is cut off.
        at = torch.where(self.own, self.table.long(), self.pages)
        marks = torch.full((batch, self.pages + 1), -1, dtype=torch.int32, device=at.device)
        return marks.scatter_(1, at, logical.expand(batch, most))[:, : self.pages].contiguous()

    def to(self, device: torch.device | str) -> PageTable:
        """Return the page table with its tensor on ``device``."""
        return replace(self, table=self.table.to(device))


def draw_page_table(
    paging: Paging,
    batch: int,
    kv: int,
    lengths: Sequence[int] | None = None,
    *,
    shared: int | None = None,
) -> PageTable:
    """Return the pages of ``batch`` sequences in an order that depends only on ``paging.seed``.

    Pages of all sequences are mixed, with free pages between them and one at the end. The result is
    bit-identical on every machine.

    Args:
        kv: Keys of the longest possible sequence: each row of the table has entries for one page
            more, as a serving engine sizes it for the longest sequence that it accepts.
        lengths: Keys of each sequence, 0 to ``kv`` (default: ``kv``).
        shared: Number of leading pages that all sequences share (default: ``paging.shared``).

    Raises:
        ProblemError: unless there is one length per sequence, from 0 to ``kv``.
    """
    lengths = tuple([kv] * batch if lengths is None else lengths)
    if len(lengths) != batch or not all(0 <= length <= kv for length in lengths):
        raise ProblemError(f"lengths={list(lengths)} must be {batch} numbers, each 0–{kv}.")
    shared = paging.shared if shared is None else shared
    # One entry more than is needed, as in a server: kernels must not rely on the table's width.
    most = -(-kv // paging.size) + 1
    counts = torch.tensor([-(-length // paging.size) for length in lengths])
    places = torch.arange(most)
    own = places < counts[:, None]
    which, used = _number_pages(own, shared)
    order, free = _shuffle_pages(paging.seed, used)
    # Unused entries are free pages: an engine that frees pages leaves their numbers in the table.
    free_pages = free[torch.arange(batch * most).view(batch, most) % len(free)]
    table = torch.where(own, order[which], free_pages)
    return PageTable(
        table=table.to(torch.int32), pages=len(order) + len(free), size=paging.size, lengths=lengths
    )


def _number_pages(own: Tensor, shared: int) -> tuple[Tensor, int]:
    """Return each entry's number among the used pages, 0 if unused; and the count of used pages.

    Pages that all sequences share come first, then each sequence's own pages in turn.
    """
    places = torch.arange(own.shape[1])
    alone = own & (places >= shared)
    # Fewer are shared if no sequence has that many pages.
    common = min(shared, int(own.sum(1).max()))
    in_turn = common + alone.flatten().cumsum(0).view(own.shape) - 1
    which = torch.where(alone, in_turn, places)
    return torch.where(own, which, 0), common + int(alone.sum())


def _shuffle_pages(seed: int, used: int) -> tuple[Tensor, Tensor]:
    """Return numbers of ``used`` pages, at least one, and of free ones; the largest is free."""
    used = max(used, 1)
    others = used // _FREE_SHARE + 1
    # Sort by drawn numbers, since a library's shuffle may change in its next version.
    keys = Draws(seed).integers("pages", (used + others,), 2**32 - 1)
    order = torch.from_numpy(keys).argsort(stable=True)
    last = torch.tensor([used + others])
    return order[:used], torch.cat((order[used:], last))


def pack_pages(tensor: Tensor, table: PageTable) -> Tensor:
    """Return keys or values in their pages, contiguous; NaN in free pages and slots without a key.

    A page of several sequences must hold the same numbers in all of them.

    Args:
        tensor: ``(batch, kv_heads, kv, dim)``, any strides.
        table: The page table of these sequences, on the tensor's device.

    Returns:
        ``(pages, size, kv_heads, dim)``. A sequence's last page also holds the keys of ``tensor``
        beyond the sequence's length, up to kv, like stale values.

    Raises:
        ProblemError: for another number of sequences, or fewer keys than their lengths.
    """
    batch, heads, kv, dim = tensor.shape
    if batch != len(table.lengths) or max(table.lengths) > kv:
        raise ProblemError(
            f"a tensor of {batch} sequences of {kv} keys is not that of the lengths "
            f"{list(table.lengths)}."
        )
    blocks = -(-kv // table.size)
    # NaN, not 0, so that using a slot without a key shows.
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
    """Return fp8 as a view of bytes, since torch cannot gather or scatter fp8; others unchanged."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def physical_block_mask(mask: BlockMask, table: PageTable) -> BlockMask:
    """Return the block mask of logical keys as one of physical keys: ``(batch, heads', …)``.

    Its keys are all slots of memory. Tiles of free pages and of other sequences' pages are empty. A
    full tile that contains a sequence's end becomes partial.

    Args:
        mask: The block mask of logical keys, its ``block_kv`` the size of a page.
        table: The page table, on the mask's device.

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
    # Full tiles are not masked, but slots past a sequence's end must be.
    cut = ends > torch.tensor(table.lengths, device=ends.device)[:, None]
    kinds = torch.where(cut[:, None, None] & (mask.kinds == FULL), PARTIAL, mask.kinds)
    at = torch.where(table.own, table.table.long(), table.pages)[:, None, None, :blocks]
    physical_kinds = torch.full(
        (batch, heads, query_blocks, table.pages + 1), EMPTY, dtype=torch.uint8, device=at.device
    )
    physical_kinds.scatter_(3, at.expand(kinds.shape), kinds.to(torch.uint8))
    return BlockMask(
        kinds=physical_kinds[..., : table.pages],
        query=mask.query,
        kv=table.pages * table.size,
        block_query=mask.block_query,
        block_kv=table.size,
    )


def physical_mask(mask_mod: MaskMod, table: PageTable) -> MaskMod:
    """Return the mask of physical keys: ``mask_mod`` on the keys of sequence b's own pages.

    Other pages, and slots beyond the length, are hidden; there ``mask_mod`` is called with key 0.

    Args:
        mask_mod: The mask of logical keys.
        table: The page table, on the device of the indices.
    """
    logical = _to_logical(table)

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        key, there = logical(b, kv_idx)
        return mask_mod(b, h, q_idx, key) & there

    return mask


def physical_score(score_mod: ScoreMod, table: PageTable) -> ScoreMod:
    """Return the score mod of physical keys; −∞ where sequence b has no key.

    Args:
        score_mod: The score mod of logical keys.
        table: The page table, on the device of the indices.
    """
    logical = _to_logical(table)

    def changed(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        key, there = logical(b, kv_idx)
        return torch.where(there, score_mod(score, b, h, q_idx, key), -math.inf)

    return changed


def _to_logical(table: PageTable) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return a function: (b, physical key) → (logical key or 0, whether b has a key there)."""
    inverse, size = table.inverse(), table.size
    lengths = torch.tensor(table.lengths, dtype=torch.int32, device=inverse.device)

    def logical(b: Tensor, kv_idx: Tensor) -> tuple[Tensor, Tensor]:
        page = inverse[b, kv_idx // size]
        # Negative for page −1: ``there`` is then False, and the key replaced by 0 below.
        key = page * size + kv_idx % size
        there = (page >= 0) & (key < lengths[b])
        return torch.where(there, key, 0), there

    return logical
