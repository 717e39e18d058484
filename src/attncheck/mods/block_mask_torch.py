"""Block masks to and from torch's own, which ``flex_attention`` reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.attention import flex_attention as flex

from attncheck.mods.block_mask import BlockMask

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.mods.signatures import MaskMod

__all__ = ["from_torch", "to_torch"]


def to_torch(mask: BlockMask, mask_mod: MaskMod) -> flex.BlockMask:
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


def from_torch(mask: flex.BlockMask) -> BlockMask:
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
