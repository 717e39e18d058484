"""Correct kernels of the flash_attn, varlen and paged conventions, into which tests plant faults.

They are plain torch; ``attend`` computes attention for other conventions too.
"""

# ruff: noqa: PLR0917  (signatures are those of flash-attn)

import itertools
import math

import torch


def attend(q, k, v, seen, scale=None, score_mod=None, sinks=None):
    """Out and natural-log LSE of ``(batch, heads, length, dim)``; rows without keys: 0 and −∞."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q.float() @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if score_mod is not None:
        scores = score_mod(scores, *indices(scores))
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:  # one more score, whose weight is dropped
        more = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, more], -1)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None].nan_to_num(neginf=0.0)).exp()[..., : k.shape[2]]
    return (weights @ v).to(q.dtype), lse


def indices(scores):
    return torch.meshgrid(*(torch.arange(n) for n in scores.shape), indexing="ij")


def banded(query, kv, left, right, at):
    """Whether row i sees key j, from ``i + at - left`` to ``i + at + right``; −1 is no limit."""
    distance = torch.arange(kv) - torch.arange(query)[:, None] - at
    seen = torch.ones(query, kv, dtype=torch.bool)
    seen &= (distance >= -left) if left >= 0 else True
    return seen & ((distance <= right) if right >= 0 else True)


def flash(q, k, v, scale, causal, window, softcap, slopes, fault="", sinks=None, longest=None):
    """One batch of ``(batch, length, heads, dim)`` as flash-attn computes it.

    With the fault ``longest`` its diagonal is that of the longest sequence.
    """
    query, kv = q.shape[1], k.shape[1]
    at = 0 if fault == "top_left" else kv - query if longest is None else longest
    left, right = window
    right = 0 if causal and not (fault == "right" and right > 0) else right
    left += (fault == "window") * (left >= 0)

    def modify(score, b, h, i, j):
        score = softcap * torch.tanh(score / softcap) if softcap else score
        sign = 1 if fault == "alibi" else -1
        return score if slopes is None else score + sign * slopes[h] * (i + at - j).abs()

    seen = banded(query, kv, left, right, at)
    out, lse = attend(*(x.transpose(1, 2) for x in (q, k, v)), seen, scale, modify, sinks)
    return out.transpose(1, 2), lse


def flash_attn_with(fault=""):
    """``flash_attn_func`` with a planted fault."""

    def flash_attn_func(
        q,
        k,
        v,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
    ):
        if fault == "axes":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = flash(q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, fault)
        if fault == "axes":
            out, lse = out.transpose(1, 2), lse.transpose(1, 2)
        lse = lse / math.log(2) if fault == "base2" else lse
        lse = lse.masked_fill(lse.isneginf(), math.inf)  # as flash-attn does
        return (out, lse, None) if return_attn_probs else out

    return flash_attn_func


def varlen_with(fault=""):
    """``flash_attn_varlen_func`` with a planted fault."""

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        return_attn_probs=False,
    ):
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        starts = [(0, 0), *zip(cu_seqlens_q[1:].tolist(), cu_seqlens_k[1:].tolist(), strict=True)]
        if fault == "ignores_starts":
            starts = [(0, 0), (len(q), len(k))]
        outs, lses = [], []
        for (q0, k0), (q1, k1) in itertools.pairwise(starts):
            assert q1 - q0 <= max_seqlen_q or fault
            assert k1 - k0 <= max_seqlen_k or fault
            one = (q[None, q0:q1], k[None, k0:k1], v[None, k0:k1])
            rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, fault)
            longest = max_seqlen_k - max_seqlen_q if fault == "longest" else None
            out, lse = flash(*one, *rest, longest=longest)
            outs.append(out[0])
            lses.append(lse[0])
        out, lse = torch.cat(outs), torch.cat(lses, 1)
        if fault == "padded_lse":  # no fault: the layout of flash-attn before 2.6
            lse = torch.nn.utils.rnn.pad_sequence([x.mT for x in lses], batch_first=True).mT
        lse = lse.mT if fault == "total_first" else lse
        return (out, lse, None) if return_attn_probs else out

    return flash_attn_varlen_func


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
            longest = max(lengths) - q.shape[1] if fault == "longest" else None
            out, lse = flash(q[b : b + 1].float(), keys, values, *rest, s_aux, longest)
            outs.append(out)
            lses.append(lse)
        out, lse = torch.cat(outs), torch.cat(lses)
        lse = lse.masked_fill(lse.isneginf(), math.inf)
        return (out.to(q.dtype), lse) if return_softmax_lse else out.to(q.dtype)

    return flash_attn_with_kvcache
