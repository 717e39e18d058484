"""Right kernels without a name in attncheck.

The ideal kernel at further tilings, and torch's attention by one function of each calling
convention, with gradients wherever torch has them.
"""

# ruff: noqa: ARG001, FBT002, PLR0913, PLR0917  (signatures are those of the conventions)

from __future__ import annotations

import itertools

import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal

__all__ = ["Lazy", "Reversed", "Tall", "Tiny", "flex_attention"]


class Tiny(Ideal):
    """Small tiles, of a warp's product."""

    name, summary = "ideal 16×16", "the ideal kernel, small tiles"

    def __init__(self) -> None:
        super().__init__(Tiling(block_query=16, block_kv=16))


class Tall(Ideal):
    """Tiles with more rows than keys."""

    name, summary = "ideal 128×32", "the ideal kernel, tall tiles"

    def __init__(self) -> None:
        super().__init__(Tiling(block_query=128, block_kv=32))


class Reversed(Ideal):
    """Visits keys from the last to the first."""

    name, summary = "ideal 64×64 reversed", "the ideal kernel, the last key first"

    def __init__(self) -> None:
        super().__init__(Tiling(block_query=64, block_kv=64, reverse=True))


class Lazy(Ideal):
    """Rescales seldom: the maximum may lag as much as in FlashAttention-4."""

    name, summary = "ideal 32×16 lazy", "the ideal kernel, rescaled seldom"

    def __init__(self) -> None:
        super().__init__(Tiling(block_query=32, block_kv=16, lazy_rescale=8.0))


def of_torch(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Call torch; causal by a mask, since its flag gives NaN where the scale is negative."""
    if is_causal:
        attn_mask = _seen(query.shape[2], key.shape[2], query.device)
    return scaled_dot_product_attention(
        query, key, value, attn_mask, scale=scale, enable_gqa=enable_gqa
    )


def eager(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Compute attention in plain torch in fp32, as in models without a kernel; with LSE."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(group, 1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if is_causal:
        attn_mask = _seen(query.shape[2], key.shape[2], query.device)
    scores = query.float() @ key.mT * scale
    if attn_mask is None:
        return (scores.softmax(-1) @ value).to(query.dtype), scores.logsumexp(-1)
    some = attn_mask.any(-1, keepdim=True)
    scores = scores.masked_fill(~attn_mask & some, -torch.inf)
    out = torch.where(some, scores.softmax(-1) @ value, 0.0).to(query.dtype)
    return out, torch.where(some[..., 0], scores.logsumexp(-1), -torch.inf)


def _seen(rows, keys, device, left=-1, right=0, at=0):
    """Return a mask: row i sees keys i + at - left to i + at + right; -1 means no limit."""
    distance = torch.arange(keys, device=device) - torch.arange(rows, device=device)[:, None] - at
    seen = torch.ones(rows, keys, dtype=torch.bool, device=device)
    seen &= (distance >= -left) if left >= 0 else True
    return seen & ((distance <= right) if right >= 0 else True)


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """Take ``(batch, length, heads, dim)``; causal and windows are aligned bottom-right."""
    rows, keys = q.shape[1], k.shape[1]
    left, right = window_size
    seen = _seen(rows, keys, q.device, left, 0 if causal else right, keys - rows)
    some = seen.any(1, keepdim=True)
    out = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        attn_mask=seen | ~some,
        scale=softmax_scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return torch.where(some, out, 0.0).transpose(1, 2)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    softmax_scale=None, causal=False, window_size=(-1, -1),
):  # fmt: skip
    """Compute sequence by sequence; a sequence without keys gives 0."""
    ends = (itertools.pairwise(each.tolist()) for each in (cu_seqlens_q, cu_seqlens_k))
    parts = [
        flash_attn_func(
            q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], softmax_scale, causal, window_size
        )[0]
        if k1 > k0
        else q.new_zeros(q1 - q0, q.shape[1], v.shape[2])
        for (q0, q1), (k0, k1) in zip(*ends, strict=True)
    ]
    return torch.cat(parts)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale=None, causal=False
):
    """Gather keys and values from their pages first."""
    outs = []
    for one, row, length in zip(q, block_table, cache_seqlens.tolist(), strict=True):
        k, v = (cache[row.long()].flatten(0, 1)[None, :length] for cache in (k_cache, v_cache))
        out = torch.zeros(*one.shape[:2], v.shape[3], dtype=q.dtype, device=q.device)
        outs.append(flash_attn_func(one[None], k, v, softmax_scale, causal)[0] if length else out)
    return torch.stack(outs)
