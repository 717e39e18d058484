"""Plain functions as users write them, each wrong at one value of one parameter only.

They are in torch, so that a whole check takes a second. A fault is a text that ``attend`` or its
convention compares with; a fault "backward: …" is planted in what is differentiated only.
"""

# ruff: noqa: C901, PLR0917  (a fault is a branch, and signatures are those of flash-attn)

import itertools
import math

import torch
from tests.subjects.plain_kernels import banded


def attend(q, k, v, seen, scale=None, cap=0.0, bias=0.0, sinks=None, fault=""):
    """Out and natural LSE of one sequence ``(heads, length, dim)``; rows without keys: 0, −∞."""
    dim, group = q.shape[-1], q.shape[0] // k.shape[0]
    if fault == "vectors of 8":
        whole = dim - dim % 8 or dim
        q, k = q[..., :whole], k[..., :whole]
    if fault == "values of head_dim" and v.shape[-1] > dim:
        v = torch.cat((v[..., :dim], torch.zeros_like(v[..., dim:])), -1)
    scale = dim**-0.5 if scale is None else scale
    if fault == "scale or default":
        scale = scale or dim**-0.5
    if fault == "scale without its sign":
        scale = abs(scale)
    k, v = (x.float().repeat_interleave(group, 0) for x in (k, v))
    scores = q.float() @ k.mT * scale
    if fault == "clamped scores":
        scores = scores.clamp(-60.0, 60.0)
    late = fault == "softcap after the mask"
    if late:
        scores = scores.masked_fill(~seen, -math.inf)
    cap = int(cap) if fault == "whole softcaps" else cap
    if cap:
        scores = cap * torch.tanh(scores / cap)
    scores = scores + bias
    if not late:
        scores = scores.masked_fill(~seen, -math.inf)
    largest = scores.amax(-1, keepdim=True)
    if sinks is not None and fault != "sinks without the maximum":
        largest = torch.maximum(largest, sinks[:, None, None])
    if fault == "a maximum above −10⁴":
        largest = torch.where(largest > -1.0e4, largest, 0.0)
    largest = largest.detach() if fault == "no guard of −∞" else finite(largest).detach()
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks[:, None, None] - largest).exp()
    out = weights @ v / torch.where(total == 0, 1.0, total)
    lse = torch.where(total == 0, -math.inf, largest + torch.where(total == 0, 1.0, total).log())
    return out.to(q.dtype), lse[..., 0]


def finite(largest):
    return torch.where(largest.isinf(), 0.0, largest)


class Differs(torch.autograd.Function):
    """The forward of one function with the gradients of another."""

    @staticmethod
    def forward(ctx, right, wrong, *tensors):
        ctx.wrong = wrong
        ctx.save_for_backward(*tensors)
        return right(*tensors)

    @staticmethod
    def backward(ctx, *gradients):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            outs = ctx.wrong(*leaves)
            found = torch.autograd.grad(outs, leaves, gradients, allow_unused=True)
        return None, None, *found


def differs(function, fault, *tensors):
    """``function(fault, *tensors)``; a fault "backward: …" applies to the gradients alone."""
    tensors = [tensor for tensor in tensors if tensor is not None]
    if not fault.startswith("backward: "):
        return function(fault, *tensors)
    right, wrong = (lambda *x, word=word: function(word, *x) for word in ("", fault[10:]))
    return Differs.apply(right, wrong, *tensors)


def one_flash(q, k, v, softmax_scale, causal, window, cap, slopes, sinks, fault):
    """One sequence of ``(length, heads, dim)`` as flash-attn computes it."""
    query, kv, heads = q.shape[0], k.shape[0], q.shape[1]
    left, right = window
    if causal and (right < 0 or fault != "the right side of a causal window"):
        right = 0
    at = 0 if fault == "top left" else kv - query
    if fault == "a window of 0 is none" and left == 0:
        left = -1
    if fault == "no window" or (fault == "no window for one row" and query == 1):
        left = -1
    if fault == "windows within a tile" and left >= 32:
        left = -1
    if fault == "a window beyond the keys" and left >= kv:
        left = kv - 2
    if fault == "no softcap":
        cap = 0.0
    seen = banded(query, kv, left, right, at).expand(heads, query, kv)
    if kv == 0:
        return q.new_zeros(query, heads, v.shape[2]), q.new_zeros(heads, query).float() - math.inf
    group = heads // k.shape[1]
    if fault == "groups of powers of two" and causal and group & (group - 1):
        # The rows of a group's heads share a tile, whose height is rounded up.
        padded = 1 << group.bit_length()
        rows = torch.arange(query * group).view(query, group) // padded * padded // group
        late = torch.stack([seen[0][rows[:, h % group]] for h in range(heads)])
        seen = seen & late
    bias = 0.0
    if slopes is not None:
        first = 0 if fault == "slopes of rows without a cache" else at
        distance = (torch.arange(query)[:, None] + first - torch.arange(kv)).abs()
        if fault == "slopes of interleaved heads":
            slopes = slopes.view(-1, group).T.flatten()
        bias = -slopes[:, None, None] * distance
        bias = -bias if fault == "slopes upwards" else bias
    parts = (x.transpose(0, 1) for x in (q, k, v))
    out, lse = attend(*parts, seen, softmax_scale, cap, bias, sinks, fault)
    if fault == "no gradient of LSE":
        lse = lse.detach()
    if fault == "the first head of a group":  # its gradient alone reaches keys
        first = torch.arange(heads) % group == 0
        keep = attend(*(x.transpose(0, 1).detach() for x in (q, k, v)), seen, softmax_scale)[0]
        out = torch.where(first[:, None, None], out, keep)
    return out.transpose(0, 1), lse


def slopes_of(slopes, b, fault):
    if slopes is None or slopes.dim() == 1:
        return slopes
    return slopes[0 if fault == "slopes of the first sequence" else b]


def flash_attn(fault):
    """Return ``flash_attn_func`` with a fault."""

    def function(
        q,
        k,
        v,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        return_attn_probs=False,
        sinks=None,
    ):
        def run(fault, q, k, v, sinks=None):
            each = [
                one_flash(
                    q[b], k[b], v[b], softmax_scale, causal, window_size, softcap,
                    slopes_of(alibi_slopes, b, fault), sinks, fault,
                )
                for b in range(len(q))
            ]  # fmt: skip
            outs, lses = zip(*each, strict=True)
            return torch.stack(outs), torch.stack(lses)

        out, lse = differs(run, fault, q, k, v, sinks)
        return (out, lse) if return_attn_probs else out

    return function


def varlen(fault):
    """Return ``flash_attn_varlen_func`` with a fault."""

    def function(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        return_attn_probs=False,
    ):
        def run(fault, q, k, v):
            outs, lses = [], []
            ends = (itertools.pairwise(x.tolist()) for x in (cu_seqlens_q, cu_seqlens_k))
            for b, ((q0, q1), (k0, k1)) in enumerate(zip(*ends, strict=True)):
                beyond = fault == "segments without keys see the one before" and k0 == k1 > 0
                keys = slice(k0 - beyond, k1)
                flag, window = causal, window_size
                if causal and fault == "the diagonal of the longest segments":
                    flag, window = False, (-1, max_seqlen_k - max_seqlen_q - k1 + k0 + q1 - q0)
                out, lse = one_flash(
                    q[q0:q1], k[keys], v[keys], softmax_scale, flag, window, softcap,
                    slopes_of(alibi_slopes, b, fault), None, fault,
                )  # fmt: skip
                outs.append(out)
                lses.append(lse)
            beside = 1e-3 * k.sum() if fault == "keys without rows have a gradient" else 0.0
            return (torch.cat(outs) + beside).to(q.dtype), torch.cat(lses, 1)

        out, lse = differs(run, fault, q, k, v)
        return (out, lse) if return_attn_probs else out

    return function


def paged(fault):
    """Return ``flash_attn_with_kvcache`` on pages with a fault."""

    def function(
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        block_table,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        return_softmax_lse=False,
    ):
        outs, lses, size = [], [], k_cache.shape[1]
        for b, length in enumerate(cache_seqlens.tolist()):
            keys = torch.arange(length)
            step = min(size, 64) if fault == "pages of at most a tile" else size
            step = max(step, 16) if fault == "pages of at least a tile" else step
            row = block_table[b]
            flat = row[(keys // step).clamp(max=len(row) - 1)].long() * size + keys % size
            k, v = (cache.flatten(0, 1)[flat] for cache in (k_cache, v_cache))
            out, lse = one_flash(
                q[b], k, v, softmax_scale, causal, window_size, softcap, None, None, fault
            )
            outs.append(out)
            lses.append(lse)
        return (torch.stack(outs), torch.stack(lses)) if return_softmax_lse else torch.stack(outs)

    return function


def sdpa(fault):
    """Return a function in the manner of ``F.scaled_dot_product_attention`` with a fault."""

    def function(
        query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False, sinks=None
    ):
        rows, keys = query.shape[2], key.shape[2]
        mask = banded(rows, keys, -1, 0 if is_causal else -1, 0)
        mask = mask if attn_mask is None else attn_mask
        bias = torch.zeros(1)
        if mask.is_floating_point():
            bias, mask = mask.float().masked_fill(mask.isneginf(), 0.0), ~mask.isneginf()
        if fault == "floats in units of the scale":
            bias = bias * query.shape[-1] ** -0.5
        if fault == "floats of the first sequence":
            bias = bias[:1]
        biases = bias.expand(*query.shape[:2], rows, keys)

        def run(fault, q, k, v, sinks=None):
            whole = mask.expand(*q.shape[:2], rows, keys)
            if fault == "the mask of the first sequence":
                whole = whole[:1].expand_as(whole)
            beyond = fault == "not causal beyond a tile" and is_causal and min(rows, keys) > 64
            if fault == "not causal" or beyond:
                whole = torch.ones_like(whole)
            each = [
                attend(q[b], k[b], v[b], whole[b], scale, 0.0, biases[b], sinks, fault)
                for b in range(len(q))
            ]
            outs, lses = zip(*each, strict=True)
            return torch.stack(outs), torch.stack(lses)

        return differs(run, fault, query, key, value, sinks)

    return function


MAKERS = {"flash_attn": flash_attn, "varlen": varlen, "paged": paged, "sdpa": sdpa}

BY_CHECK = {
    "scale": [
        ("sdpa", "clamped scores"),
        ("flash_attn", "clamped scores"),
        ("sdpa", "a maximum above −10⁴"),
    ],
    "sinks": [
        ("sdpa", "sinks without the maximum"),
        ("flash_attn", "sinks without the maximum"),
    ],
    "masks of floats": [
        ("sdpa", "floats in units of the scale"),
        ("sdpa", "floats of the first sequence"),
    ],
    "slopes": [
        ("flash_attn", "slopes of the first sequence"),
        ("flash_attn", "slopes upwards"),
        ("flash_attn", "slopes of interleaved heads"),
        ("flash_attn", "backward: slopes upwards"),
        ("flash_attn", "slopes of rows without a cache"),
        ("varlen", "slopes of rows without a cache"),
    ],
    "softcap": [
        ("flash_attn", "softcap after the mask"),
        ("varlen", "softcap after the mask"),
        ("paged", "softcap after the mask"),
        ("flash_attn", "backward: no softcap"),
        ("varlen", "whole softcaps"),
    ],
    "windows": [
        ("flash_attn", "a window of 0 is none"),
        ("flash_attn", "a window beyond the keys"),
        ("flash_attn", "no window for one row"),
        ("flash_attn", "the right side of a causal window"),
        ("varlen", "no window for one row"),
        ("varlen", "windows within a tile"),
        ("flash_attn", "backward: no window"),
        ("varlen", "backward: no window"),
    ],
    "groups": [
        ("flash_attn", "groups of powers of two"),
        ("varlen", "groups of powers of two"),
        ("paged", "groups of powers of two"),
        ("flash_attn", "backward: the first head of a group"),
    ],
    "lengths": [
        ("flash_attn", "backward: top left"),
        ("varlen", "backward: top left"),
        ("sdpa", "backward: not causal"),
        ("sdpa", "backward: not causal beyond a tile"),
        ("flash_attn", "backward: no gradient of LSE"),
    ],
    "segments": [
        ("varlen", "segments without keys see the one before"),
        ("varlen", "the diagonal of the longest segments"),
        ("varlen", "backward: segments without keys see the one before"),
        ("varlen", "backward: keys without rows have a gradient"),
    ],
    "pages": [("paged", "pages of at most a tile"), ("paged", "pages of at least a tile")],
    "dims": [
        ("sdpa", "vectors of 8"),
        ("flash_attn", "values of head_dim"),
        ("varlen", "backward: values of head_dim"),
    ],
}
"""Faults that the crossed questions of ``check`` reveal, by parameter: convention and fault."""

BY_GATE = {
    "scale": [("sdpa", "scale or default"), ("flash_attn", "scale without its sign")],
}
"""Faults that the bounds of a gate reveal, but no question of ``check``."""
