"""What ``scaled_dot_product_attention`` takes, brought to (batch, heads, length, dim)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["batch_axes", "four_axes", "mask_axes"]


def batch_axes(*tensors: Tensor) -> tuple[int, ...]:
    """The axes before heads, length and dim; raises RuntimeError where they do not go together."""
    before = (tensor.shape[:-3] for tensor in tensors)
    return tuple(torch.broadcast_shapes(*before))  # type: ignore[no-untyped-call]  # torch leaves it untyped


def four_axes(q: Tensor, k: Tensor, v: Tensor, *, gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The three as torch reads them: q (batch, heads, query, dim), k, v (batch, kv_heads, kv, dim).

    Two axes are one head of one sequence, three are heads of one sequence, and axes before the
    heads are folded into the batch. An axis of 1 that torch broadcasts is written out, but for
    heads that k and v share: those are few key heads for many query heads.

    Raises RuntimeError for shapes that do not go together.
    """
    q, k, v = (tensor if tensor.dim() > 2 else tensor.unsqueeze(0) for tensor in (q, k, v))
    batch = batch_axes(q, k, v)
    each = [tensor.shape[-3] for tensor in (q, k, v)]
    heads = each[0] if gqa else max(each)
    kv_heads = each[1] if each[1] == each[2] else heads
    return (
        _folded(q, batch, heads),
        _folded(k, batch, kv_heads),
        _folded(v, batch, kv_heads),
    )


def mask_axes(mask: Tensor, batch: tuple[int, ...]) -> Tensor:
    """A mask with four axes; each has the scores' size, or 1 where it is the same for all.

    Args:
        mask: Up to the scores' axes, missing ones in front.
        batch: ``batch_axes`` of the call.
    """
    mask = mask[(None,) * (len(batch) + 3 - mask.dim())]
    if math.prod(mask.shape[:-3]) == 1:
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*batch, -1, -1, -1).reshape(math.prod(batch), *mask.shape[-3:])


def _folded(tensor: Tensor, batch: tuple[int, ...], heads: int) -> Tensor:
    repeated = tensor.repeat_interleave(heads // tensor.shape[-3], dim=-3)
    whole = repeated.expand(*batch, heads, -1, -1)
    return whole.reshape(math.prod(batch), *whole.shape[-3:])
