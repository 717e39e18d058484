"""Which tiles of (query block, key block) a mask leaves empty, partial or full: FlexAttention's.

A kernel skips the empty tiles and applies the mask in the partial ones only. The mask is asked at
every index, a strip of tiles at a time, so that the whole (query, kv) mask never exists.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from attncheck.errors import ProblemError, TraceError
from attncheck.mods.strips import Strips, cut
from attncheck.mods.trace import trace_mask

if TYPE_CHECKING:
    from typing import Self

    from torch import Tensor

    from attncheck.mods.signatures import MaskMod
    from attncheck.mods.spec import Dimensions

__all__ = ["EMPTY", "FULL", "PARTIAL", "BlockMask", "block_mask", "visit_list"]

EMPTY, PARTIAL, FULL = 0, 1, 2
"""Kinds of tile: no element is visible; some are; all of a whole tile are."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BlockMask:
    """Which tiles of (query, key) blocks a mask leaves empty, partial or full.

    A tile is FULL when all its elements are visible, where places beyond ``query`` or ``kv`` count
    as hidden, as in torch's ``create_block_mask``: a ragged tile is never FULL.

    ``batch'`` and ``heads'`` are 1 where the mask does not depend on b or h.

    Attributes:
        query: Rows.
        kv: Keys.
        block_query: Rows of a tile.
        block_kv: Keys of a tile.
        kv_num_blocks: How many partial tiles a query block has, int32
            ``(batch', heads', query_blocks)``.
        kv_indices: Their key blocks, ascending, then zeros, int32
            ``(batch', heads', query_blocks, kv_blocks)``.
        full_kv_num_blocks: How many full tiles, as ``kv_num_blocks``.
        full_kv_indices: Their key blocks, as ``kv_indices``.
    """

    query: int
    kv: int
    block_query: int
    block_kv: int
    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor

    @classmethod
    def from_kinds(
        cls, kinds: Tensor, *, query: int, kv: int, block_query: int, block_kv: int
    ) -> Self:
        """The block mask of tiles given one by one.

        Args:
            kinds: EMPTY, PARTIAL or FULL, ``(batch', heads', query_blocks, kv_blocks)``.
            query: Rows.
            kv: Keys.
            block_query: Rows of a tile.
            block_kv: Keys of a tile.

        Raises:
            ProblemError: for sizes that are not positive, or that give other numbers of blocks.
        """
        blocks = _blocks(query, block_query, "query"), _blocks(kv, block_kv, "kv")
        if kinds.ndim != 4 or tuple(kinds.shape[2:]) != blocks:
            raise ProblemError(
                f"kinds of tiles have shape {tuple(kinds.shape)}: {query} rows in blocks of "
                f"{block_query} and {kv} keys in blocks of {block_kv} need (batch, heads, "
                f"{blocks[0]}, {blocks[1]})."
            )
        strange = kinds[(kinds < EMPTY) | (kinds > FULL)]
        if strange.numel():
            raise ProblemError(
                f"kinds of tiles hold {strange[0].item()}: a tile is {EMPTY} (empty), {PARTIAL} "
                f"(partial) or {FULL} (full)."
            )
        partial_count, partial = _listed(kinds == PARTIAL)
        full_count, full = _listed(kinds == FULL)
        return cls(
            query=query,
            kv=kv,
            block_query=block_query,
            block_kv=block_kv,
            kv_num_blocks=partial_count,
            kv_indices=partial,
            full_kv_num_blocks=full_count,
            full_kv_indices=full,
        )

    def kinds(self) -> Tensor:
        """EMPTY, PARTIAL or FULL, uint8 ``(batch', heads', query_blocks, kv_blocks)``."""
        blocks = _blocks(self.kv, self.block_kv, "kv")
        partial = _marked(self.kv_num_blocks, self.kv_indices, blocks)
        full = _marked(self.full_kv_num_blocks, self.full_kv_indices, blocks)
        return partial * PARTIAL + full * FULL

    def transposed(self) -> Self:
        """Query blocks per key block, for a backward pass: rows and keys have changed places."""
        return self.from_kinds(
            self.kinds().transpose(2, 3),
            query=self.kv,
            kv=self.query,
            block_query=self.block_kv,
            block_kv=self.block_query,
        )

    def sparsity(self) -> float:
        """The share of tiles that are empty, from 0 to 1."""
        return float((self.kinds() == EMPTY).double().mean())

    def to(self, device: torch.device | str) -> Self:
        """The same with its tables on ``device``."""
        return replace(
            self,
            kv_num_blocks=self.kv_num_blocks.to(device),
            kv_indices=self.kv_indices.to(device),
            full_kv_num_blocks=self.full_kv_num_blocks.to(device),
            full_kv_indices=self.full_kv_indices.to(device),
        )


def block_mask(
    mask_mod: MaskMod,
    dimensions: Dimensions,
    *,
    block_query: int,
    block_kv: int,
    device: torch.device | str = "cpu",
) -> BlockMask:
    """The block mask of a FlexAttention mask, from its value at every index.

    Args:
        mask_mod: Called with index tensors that broadcast; mapped over them if it cannot.
        dimensions: Ranges of its indices.
        block_query: Rows of a tile, any positive number.
        block_kv: Keys of a tile, likewise.
        device: Where the indices are made and the tables stay; the mask's captured tensors too.

    Raises:
        ProblemError: for a block size that is not positive.
    """
    query, kv = dimensions.query, dimensions.kv
    for axis, length, block in (("query", query, block_query), ("kv", kv, block_kv)):
        _blocks(length, block, axis)
    asked = Strips(mask_mod, *_enumerated(mask_mod, dimensions, device), kv, device)
    strips = []
    for rows in cut(range(query), block_query):
        some, every = asked.of_rows(rows)
        if len(rows) < block_query:  # the places beyond the last row are hidden
            every = torch.zeros_like(every)
        strips.append(_kinds(some, every, block_kv))
    return BlockMask.from_kinds(
        torch.stack(strips, 2), query=query, kv=kv, block_query=block_query, block_kv=block_kv
    )


def visit_list(mask: BlockMask) -> tuple[Tensor, Tensor]:
    """What our kernels read: the tiles of each query block that are not empty, in order, by runs.

    A run is of consecutive tiles of one kind, and as long as can be.

    Returns:
        Runs, int32 ``(batch', heads', query_blocks, most, 2)``: 2·first_key_block + (1 if full),
        and how many tiles; key blocks ascending, then zeros; ``most`` is that of the query block
        with the most runs, at least 1. And how many each has, int32
        ``(batch', heads', query_blocks)``.
    """
    kinds = mask.kinds()
    changes = (kinds[..., 1:] != kinds[..., :-1]).to(torch.uint8)
    visited = kinds != EMPTY
    counts, first = _listed(visited & pad(changes, (1, 0), value=1).bool())
    last = _listed(visited & pad(changes, (0, 1), value=1).bool())[1]
    full = kinds.gather(3, first.long()) == FULL
    most = max(1, int(counts.max()))
    runs = torch.stack([2 * first + full, last - first + 1], -1)[..., :most, :]
    listed = torch.arange(most, device=runs.device) < counts[..., None]
    return torch.where(listed[..., None], runs, 0).to(torch.int32).contiguous(), counts


def _blocks(length: int, block: int, axis: str) -> int:
    """How many blocks ``length`` fills, the last one perhaps in part."""
    for what, size in (("length", length), ("block size", block)):
        if size < 1:
            raise ProblemError(f"{axis} {what} is {size}: it must be at least 1.")
    return -(-length // block)


def _enumerated(
    mask_mod: MaskMod, dimensions: Dimensions, device: torch.device | str
) -> tuple[int, int]:
    """How many of b and of h must be asked about: one where the mask does not read the index."""
    try:
        nodes = trace_mask(mask_mod, str(device)).structure.nodes
    except TraceError:
        return dimensions.batch, dimensions.heads
    read = {node.name for node in nodes if node.op == "input"}
    return dimensions.batch if "b" in read else 1, dimensions.heads if "h" in read else 1


def _kinds(some: Tensor, every: Tensor, block_kv: int) -> Tensor:
    """The tiles of a strip from its columns: uint8 ``(batch', heads', kv_blocks)``."""
    shape = (*some.shape[:-1], -(-some.shape[-1] // block_kv), block_kv)
    beyond = (0, shape[-2] * block_kv - some.shape[-1])  # hidden
    # EMPTY, PARTIAL and FULL are how many of the two are true.
    return pad(some, beyond).view(shape).amax(-1) + pad(every, beyond).view(shape).amin(-1)


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the last axis are chosen, and which: ascending, then zeros, both int32."""
    counts = chosen.sum(-1, dtype=torch.int32)
    # Stable: chosen ones first, each part in its own order.
    order = chosen.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(chosen.shape[-1], device=chosen.device)
    return counts, torch.where(places < counts[..., None], order, 0).to(torch.int32)


def _marked(counts: Tensor, indices: Tensor, blocks: int) -> Tensor:
    """What ``_listed`` listed, as uint8 0 and 1 for each of ``blocks``."""
    places = torch.arange(indices.shape[-1], device=indices.device)
    # What is not listed marks one place behind the others, which is cut off.
    chosen = torch.where(places < counts[..., None], indices.long(), blocks)
    marks = torch.zeros(*indices.shape[:-1], blocks + 1, dtype=torch.uint8, device=indices.device)
    return marks.scatter_(-1, chosen, 1)[..., :blocks]
