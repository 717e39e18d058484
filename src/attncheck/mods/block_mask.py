"""Block masks: which tiles of (query block, key block) a mask leaves empty, partial or full.

A kernel skips the empty tiles and applies the mask in the partial ones only. The mask is asked at
every index, a strip of tiles at a time, so that the whole (query, kv) mask never exists.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import pad

from attncheck.core.errors import ProblemError, TraceError
from attncheck.mods.trace import trace_mask

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from torch import Tensor

    from attncheck.mods.spec import Dimensions, MaskMod

__all__ = [
    "AT_ONCE",
    "EMPTY",
    "FULL",
    "PARTIAL",
    "BlockMask",
    "MaskStrips",
    "block_mask",
    "cut_range",
    "from_torch_block_mask",
    "list_visits",
    "to_torch_block_mask",
]


AT_ONCE = 2**20
"""Places that one call of a mask is asked about at most: a few megabytes of 64-bit numbers."""

# What torch and Python raise when a callable was written for 0-d indices only.
_NOT_BROADCAST = (RuntimeError, IndexError, TypeError, ValueError)


@dataclass(slots=True)
class MaskStrips:
    """A mask on all sequences, heads and keys, a strip of rows at a time.

    Attributes:
        mask_mod: The callable.
        batch: Sequences to ask about.
        heads: Heads to ask about.
        kv: Keys to ask about.
        device: Where.
        broadcasts: False once it turned out to be written for single indices.
    """

    mask_mod: MaskMod
    batch: int
    heads: int
    kv: int
    device: torch.device | str
    broadcasts: bool = True

    def of_rows(self, rows: range) -> tuple[Tensor, Tensor]:
        """Whether any of ``rows`` sees a key, and whether all do: uint8 ``(batch, heads, kv)``."""
        some = torch.zeros(self.batch, self.heads, self.kv, dtype=torch.uint8, device=self.device)
        every = torch.ones_like(some)
        for b, h, part, keys in self._parts(rows):
            seen = self._seen(b, h, part, keys)
            place = (_slice(b), _slice(h), _slice(keys))
            some[place] = torch.maximum(some[place], seen.amax(2))
            every[place] = torch.minimum(every[place], seen.amin(2))
        return some, every

    def _parts(self, rows: range) -> Iterator[tuple[range, ...]]:
        """All sequences, heads, ``rows`` and keys in parts of at most ``AT_ONCE`` places."""
        ranges = (range(self.batch), range(self.heads), rows, range(self.kv))
        room, cuts = AT_ONCE, []
        for whole in reversed(ranges):
            size = min(len(whole), room)
            room //= size
            cuts.append(cut_range(whole, size))
        return product(*reversed(cuts))

    def _seen(self, *ranges: range) -> Tensor:
        """Where a row sees a key: uint8, four axes, each of its range's length or of 1."""
        axes = [torch.arange(r.start, r.stop, device=self.device) for r in ranges]
        with torch.no_grad():  # a mask may capture a parameter
            seen = self._broadcast(axes) if self.broadcasts else None
            if seen is None:
                self.broadcasts = False
                seen = _mapped(self.mask_mod)(*axes)
        return seen.to(self.device, torch.bool).view(torch.uint8)

    def _broadcast(self, axes: list[Tensor]) -> Tensor | None:
        indices = [
            axis.view([-1 if i == dim else 1 for i in range(4)]) for dim, axis in enumerate(axes)
        ]
        try:
            seen = torch.as_tensor(self.mask_mod(*indices))
            seen.expand([axis.numel() for axis in axes])  # raises where it has another shape
        except _NOT_BROADCAST:
            return None
        return seen[(None,) * (4 - seen.dim())]


def _mapped(mask_mod: MaskMod) -> MaskMod:
    """A mask of single indices, mapped over four axes as FlexAttention does."""
    for axis in (3, 2, 1, 0):
        mask_mod = torch.vmap(mask_mod, in_dims=tuple(0 if i == axis else None for i in range(4)))
    return mask_mod


def cut_range(whole: range, size: int) -> list[range]:
    """``whole`` in parts of ``size``, the last one perhaps shorter."""
    return [whole[i : i + size] for i in range(0, len(whole), size)]


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)


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
    asked = MaskStrips(mask_mod, *_enumerated(mask_mod, dimensions, device), kv, device)
    strips = []
    for rows in cut_range(range(query), block_query):
        some, every = asked.of_rows(rows)
        if len(rows) < block_query:  # the places beyond the last row are hidden
            every = torch.zeros_like(every)
        strips.append(_kinds(some, every, block_kv))
    return BlockMask.from_kinds(
        torch.stack(strips, 2), query=query, kv=kv, block_query=block_query, block_kv=block_kv
    )


def list_visits(mask: BlockMask) -> tuple[Tensor, Tensor]:
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


def to_torch_block_mask(mask: BlockMask, mask_mod: MaskMod) -> flex.BlockMask:
    """The BlockMask that ``flex_attention`` takes, with the tables of the backward pass.

    Args:
        mask: Which tiles. Compiled, torch wants tiles of which its own are parts: 128 × 128, say.
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
    """What torch's BlockMask says of each tile; its mask is ``mask.mask_mod``.

    Torch says nothing of index entries beyond the counts; here they are 0. Where torch's has no
    full tiles, made without ``separate_full_blocks``, none is FULL.

    Raises:
        ProblemError: where a tile is listed as partial and as full.
    """
    query, kv = mask.seq_lengths
    block_query, block_kv = mask.BLOCK_SIZE
    partial = _four_axes(mask.kv_num_blocks, mask.kv_indices)
    if mask.full_kv_num_blocks is None or mask.full_kv_indices is None:
        full = torch.zeros_like(partial[0]), torch.zeros_like(partial[1])
    else:
        full = _four_axes(mask.full_kv_num_blocks, mask.full_kv_indices)
    as_listed = BlockMask(
        query=query,
        kv=kv,
        block_query=block_query,
        block_kv=block_kv,
        kv_num_blocks=partial[0],
        kv_indices=partial[1],
        full_kv_num_blocks=full[0],
        full_kv_indices=full[1],
    )
    return BlockMask.from_kinds(
        as_listed.kinds(), query=query, kv=kv, block_query=block_query, block_kv=block_kv
    )


def _four_axes(counts: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Torch's tables, which may lack the batch or the heads that they do not depend on."""
    missing = (None,) * (4 - indices.dim())
    return counts[missing], indices[missing]
