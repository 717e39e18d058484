"""A correct kernel of the paged convention in plain torch, into which tests plant faults."""

# ruff: noqa: PLR0917  (the signature is that of flash-attn)

import math

import torch
from tests.subjects.plain_kernels import flash


def gather(cache, row, length, fault):
    """A sequence's keys or values ``(length, kv_heads, dim)``, by its row of the block table."""
    size = cache.shape[1] + (fault == "page_size")
    keys = torch.arange(length)
    flat = row[keys // size].long() * cache.shape[1] + keys % size
    return cache.flatten(0, 1)[flat.clamp(max=cache.shape[0] * cache.shape[1] - 1)]


def with_kvcache(fault=""):
    """``flash_attn_with_kvcache`` on pages, with a planted fault; it appends no keys."""

    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        cache_seqlens=None,
        block_table=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        num_splits=0,
        return_softmax_lse=False,
        s_aux=None,
    ):
        assert k is None
        assert v is None
        assert cache_seqlens.dtype == block_table.dtype == torch.int32
        size, (batch, most) = k_cache.shape[1], block_table.shape
        table, lengths = block_table, cache_seqlens.tolist()
        if fault == "transposed":
            table = table.flatten()[
                (torch.arange(most) * batch + torch.arange(batch)[:, None]) % table.numel()
            ]
        if fault == "shared":  # the first sequence's first two pages for all
            table = torch.cat((table[:1, :2].expand(batch, 2), table[:, 2:]), 1)
        if fault == "tail":  # whole pages
            lengths = [-(-n // size) * size for n in lengths]
        if fault == "beyond":
            lengths = [most * size] * batch
        outs, lses = [], []
        for b, length in enumerate(lengths):
            keys, values = (
                gather(cache, table[b], length, fault)[None].float() for cache in (k_cache, v_cache)
            )
            rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, fault)
            out, lse = flash(q[b : b + 1].float(), keys, values, *rest, s_aux)
            outs.append(out)
            lses.append(lse)
        out, lse = torch.cat(outs), torch.cat(lses)
        lse = lse.masked_fill(lse.isneginf(), math.inf)
        return (out.to(q.dtype), lse) if return_softmax_lse else out.to(q.dtype)

    return flash_attn_with_kvcache
