"""Block masks: which tiles of (query block, key block) a mask leaves empty, partial or full.

A kernel skips the empty tiles and applies the mask in the partial ones only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import pad

from attncheck.core.errors import ProblemError, TraceError
from attncheck.core.mod_spec import Dimensions
from attncheck.mods.index_ranges import index_parts
from attncheck.mods.signatures import MaskMod
from attncheck.mods.trace import trace_mask

EMPTY, PARTIAL, FULL = 0, 1, 2
"""Kinds of tile: no element is visible; some are; all are, and the tile is not cut off."""

AT_ONCE = 2**20
"""Most elements that one call of a mask computes: a few megabytes of 64-bit numbers."""


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockMask:
    """The tiles of (query, key) blocks that a mask leaves empty, partial or full.

    A tile is FULL if all its elements are visible. Elements beyond ``query`` or ``kv`` count as
    hidden, as in torch's ``create_block_mask``: a ragged tile is never FULL.

    ``batch'`` and ``heads'`` are 1 where the mask does not depend on b or h.

    Raises:
        ProblemError: for sizes that are not positive, or that do not fit the shape of ``kinds``.
    """

    kinds: Tensor  # EMPTY, PARTIAL or FULL, uint8 ``(batch', heads', query_blocks, kv_blocks)``
    query: int
    kv: int
    block_query: int
    block_kv: int

    def __post_init__(self) -> None:
        kinds = self.kinds
        query_blocks = _count_blocks(self.query, self.block_query, "query")
        blocks = query_blocks, _count_blocks(self.kv, self.block_kv, "kv")
        if kinds.ndim != 4 or tuple(kinds.shape[2:]) != blocks:
            raise ProblemError(
                f"kinds of tiles have shape {tuple(kinds.shape)}: {self.query} rows in blocks of "
                f"{self.block_query} and {self.kv} keys in blocks of {self.block_kv} need (batch, "
                f"heads, {blocks[0]}, {blocks[1]})."
            )
        strange = kinds[(kinds < EMPTY) | (kinds > FULL)]
        if strange.numel():
            raise ProblemError(
                f"kinds of tiles hold {strange[0].item()}: a tile is {EMPTY} (empty), {PARTIAL} "
                f"(partial) or {FULL} (full)."
            )
        object.__setattr__(self, "kinds", kinds.to(torch.uint8).contiguous())

    @property
    def kv_num_blocks(self) -> Tensor:
        """Counts of partial tiles of each query block, int32 ``(batch', heads', query_blocks)``."""
        return self._partial[0]

    @property
    def kv_indices(self) -> Tensor:
        """Key blocks of partial tiles, ascending, then zeros, int32, in the shape of ``kinds``."""
        return self._partial[1]

    @property
    def full_kv_num_blocks(self) -> Tensor:
        """Counts of full tiles, as ``kv_num_blocks``."""
        return self._full[0]

    @property
    def full_kv_indices(self) -> Tensor:
        """Key blocks of full tiles, as ``kv_indices``."""
        return self._full[1]

    @cached_property
    def _partial(self) -> tuple[Tensor, Tensor]:
        return _list_true(self.kinds == PARTIAL)

    @cached_property
    def _full(self) -> tuple[Tensor, Tensor]:
        return _list_true(self.kinds == FULL)

    def transposed(self) -> Self:
        """Return the mask with rows and keys exchanged: query blocks per key block."""
        return replace(
            self,
            kinds=self.kinds.transpose(2, 3),
            query=self.kv,
            kv=self.query,
            block_query=self.block_kv,
            block_kv=self.block_query,
        )

    def sparsity(self) -> float:
        """Return the share of tiles that are empty, from 0 to 1."""
        return float((self.kinds == EMPTY).double().mean())


def _count_blocks(length: int, block: int, axis: str) -> int:
    """Return the number of blocks that ``length`` fills, the last one perhaps in part."""
    for what, size in (("length", length), ("block size", block)):
        if size < 1:
            raise ProblemError(f"{axis} {what} is {size}: it must be at least 1.")
    return -(-length // block)


def _list_true(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return counts and positions of True along the last axis: ascending, then zeros; int32."""
    counts = chosen.sum(-1, dtype=torch.int32)
    # A stable sort puts True first, and keeps the order of each part.
    order = chosen.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(chosen.shape[-1], device=chosen.device)
    return counts, torch.where(places < counts[..., None], order, 0).to(torch.int32)


# --- from a mask ------------------------------------------------------------------------------


def block_mask(
    mask_mod: MaskMod,
    dimensions: Dimensions,
    *,
    block_query: int,
    block_kv: int,
    device: torch.device | str = "cpu",
) -> BlockMask:
    """Return the block mask of a FlexAttention mask, from its value at every index.

    The mask is called a strip of tiles at a time: the whole (query, kv) mask never exists.

    Args:
        mask_mod: Called with index tensors that broadcast; by vmap if that fails.
        block_query: Rows of a tile, any positive number.
        block_kv: Keys of a tile, any positive number.
        device: The device of the indices, the tables and the mask's captured tensors.

    Raises:
        ProblemError: for a block size that is not positive.
    """
    query, kv = dimensions.query, dimensions.kv
    _count_blocks(query, block_query, "query")
    kv_blocks = _count_blocks(kv, block_kv, "kv")
    batch, heads = dimensions.batch, dimensions.heads
    try:
        traced = trace_mask(mask_mod, str(device))
    except TraceError:  # it may read every index
        pass
    else:
        batch, heads = batch if traced.reads("b") else 1, heads if traced.reads("h") else 1
    visible = _mask_of_ranges(mask_mod, device)
    strips = []
    for first in range(0, query, block_query):
        rows = range(first, min(first + block_query, query))
        some = torch.zeros(batch, heads, kv, dtype=torch.uint8, device=device)
        every = torch.ones_like(some)
        for parts in index_parts((range(batch), range(heads), rows, range(kv)), AT_ONCE):
            visible_keys = visible(parts)
            b, h, _, keys = (slice(part.start, part.stop) for part in parts)
            some[b, h, keys] = torch.maximum(some[b, h, keys], visible_keys.amax(2))
            every[b, h, keys] = torch.minimum(every[b, h, keys], visible_keys.amin(2))
        if len(rows) < block_query:  # the places beyond the last row are hidden
            every = torch.zeros_like(every)
        # The kind is the count of true ones among some and every; padding counts as hidden.
        shape, beyond = (batch, heads, kv_blocks, block_kv), (0, kv_blocks * block_kv - kv)
        kinds = pad(some, beyond).view(shape).amax(-1) + pad(every, beyond).view(shape).amin(-1)
        strips.append(kinds)
    return BlockMask(
        kinds=torch.stack(strips, 2), query=query, kv=kv, block_query=block_query, block_kv=block_kv
    )


def _mask_of_ranges(
    mask_mod: MaskMod, device: torch.device | str
) -> Callable[[tuple[range, ...]], Tensor]:
    """Return a function from index ranges to the mask: uint8, axes of their lengths or of 1."""
    broadcasts = True

    def visible(ranges: tuple[range, ...]) -> Tensor:
        nonlocal broadcasts
        axes = [torch.arange(r.start, r.stop, device=device) for r in ranges]
        with torch.no_grad():  # a mask may capture a parameter
            if broadcasts:
                try:
                    visible_keys = _broadcast(mask_mod, axes)
                # Raised by torch or Python if a callable was written for 0-d indices only.
                except (RuntimeError, IndexError, TypeError, ValueError):
                    broadcasts = False
            if not broadcasts:
                mapped = mask_mod
                for axis in (3, 2, 1, 0):  # as FlexAttention maps it
                    in_dims = tuple(0 if i == axis else None for i in range(4))
                    mapped = torch.vmap(mapped, in_dims=in_dims)
                visible_keys = mapped(*axes)
        return visible_keys.to(device, torch.bool).view(torch.uint8)

    return visible


def _broadcast(mask_mod: MaskMod, axes: list[Tensor]) -> Tensor:
    shapes = [[-1 if i == dim else 1 for i in range(4)] for dim in range(4)]
    indices = [axis.view(shape) for axis, shape in zip(axes, shapes, strict=True)]
    visible_keys = torch.as_tensor(mask_mod(*indices))
    visible_keys.expand([axis.numel() for axis in axes])  # raises if the shape does not broadcast
    return visible_keys[(None,) * (4 - visible_keys.dim())]


def list_visits(mask: BlockMask, groups: int = 1) -> tuple[Tensor, Tensor]:
    """Return the tiles of each query block that are not empty, in runs, as our kernels read them.

    A run is a maximal sequence of consecutive tiles of the same kinds; runs are in order.

    Args:
        mask: The tiles.
        groups: How many query blocks of ``mask`` visit their tiles together, as one block: those
            that any of them sees.

    Returns:
        Runs, int32 ``(batch', heads', query_blocks, most, 2)``: first_key_block · 4^groups plus
        the kind for each group g times 4^g, and the number of tiles; key blocks ascending, then
        zeros; ``most`` is the largest number of runs of a block, at least 1. And the number of
        runs, int32 ``(batch', heads', query_blocks)``. ``query_blocks`` counts whole blocks.
    """
    missing = -mask.kinds.shape[2] % groups  # groups beyond the last row, which see nothing
    kinds = pad(mask.kinds.int(), (0, 0, 0, missing), value=EMPTY)
    shifts = 2 * torch.arange(groups, dtype=torch.int32, device=kinds.device)
    of_groups = kinds.view(*kinds.shape[:2], -1, groups, kinds.shape[3])
    codes = (of_groups << shifts[:, None]).sum(3, dtype=torch.int32)
    changes = (codes[..., 1:] != codes[..., :-1]).to(torch.uint8)
    visited = codes != 0
    counts, first = _list_true(visited & pad(changes, (1, 0), value=1).bool())
    last = _list_true(visited & pad(changes, (0, 1), value=1).bool())[1]
    heads = (first << 2 * groups) + codes.gather(3, first.long())
    most = max(1, int(counts.max()))
    runs = torch.stack([heads, last - first + 1], -1)[..., :most, :]
    listed = torch.arange(most, device=runs.device) < counts[..., None]
    return torch.where(listed[..., None], runs, 0).to(torch.int32).contiguous(), counts


# --- torch's block masks ----------------------------------------------------------------------


def to_torch_block_mask(mask: BlockMask, mask_mod: MaskMod) -> flex.BlockMask:
    """Return torch's BlockMask for ``flex_attention``, with the tables of the backward pass.

    Args:
        mask: The tiles. Compiled, torch needs multiples of its own kernel's tiles, as 128 × 128.
        mask_mod: The mask itself, which torch applies in partial tiles.
    """
    return flex.BlockMask.from_kv_blocks(
        mask.kv_num_blocks,
        mask.kv_indices,
        mask.full_kv_num_blocks,
        mask.full_kv_indices,
        BLOCK_SIZE=(mask.block_query, mask.block_kv),
        mask_mod=mask_mod,
        seq_lengths=(mask.query, mask.kv),
    )


def from_torch_block_mask(mask: flex.BlockMask) -> BlockMask:
    """Return torch's BlockMask as a BlockMask of ours, without its mask ``mask.mask_mod``.

    If it was made without ``separate_full_blocks`` it has no full tiles, and no tile is FULL.

    Raises:
        ProblemError: where a tile is listed as partial and as full.
    """
    query, kv = mask.seq_lengths
    block_query, block_kv = mask.BLOCK_SIZE
    blocks = _count_blocks(kv, block_kv, "kv")
    kinds = PARTIAL * _mark(mask.kv_num_blocks, mask.kv_indices, blocks)
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        kinds = kinds + FULL * _mark(mask.full_kv_num_blocks, mask.full_kv_indices, blocks)
    return BlockMask(kinds=kinds, query=query, kv=kv, block_query=block_query, block_kv=block_kv)


def _mark(counts: Tensor, indices: Tensor, blocks: int) -> Tensor:
    """Return which of ``blocks`` are listed, as uint8 0 and 1, four axes.

    Torch's tables may lack the axes of batch or heads if they do not depend on them; index entries
    beyond the counts are arbitrary.
    """
    places = torch.arange(indices.shape[-1], device=indices.device)
    # Entries that are not listed mark an extra position at the end, which is cut off.
    chosen = torch.where(places < counts[..., None], indices.long(), blocks)
    marks = torch.zeros(*indices.shape[:-1], blocks + 1, dtype=torch.uint8, device=indices.device)
    return marks.scatter_(-1, chosen, 1)[(None,) * (4 - indices.dim())][..., :blocks]
