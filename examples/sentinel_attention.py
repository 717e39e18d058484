"""Attention in Triton that hides a key with a score of -1e6, as many kernels do.

Wrong where a row sees no key at all: all its scores are -1e6, it takes them for equal ones, and
returns the mean of all values, where 0 is right.
"""

import torch
import triton
import triton.language as tl

HIDDEN = tl.constexpr(-1.0e6)


@triton.jit
def forward(
    q_ptr, k_ptr, v_ptr, seen_ptr, out_ptr, lse_ptr, scale, group, query, kv, head_dim, value_dim,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(1), tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    dim, column = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    there = (row < query)[:, None]
    q_at = q_ptr + (head * query + row[:, None]) * head_dim + dim
    q = tl.load(q_at, mask=there & (dim < head_dim), other=0.0).to(tl.float32)
    maximum = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    out = tl.zeros((BLOCK_Q, BLOCK_V), tl.float32)
    for start in range(0, kv, BLOCK_K):
        key = start + tl.arange(0, BLOCK_K)
        inside = key < kv
        at = (head // group * kv + key[:, None]) * head_dim + dim
        k = tl.load(k_ptr + at, mask=inside[:, None] & (dim < head_dim), other=0.0).to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        at = (head * query + row[:, None]) * kv + key
        seen = tl.load(seen_ptr + at, mask=there & inside, other=0) != 0
        scores = tl.where(seen, scores, HIDDEN)  # the fault
        scores = tl.where(inside, scores, -float("inf"))
        larger = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp(scores - larger[:, None])
        rescale = tl.exp(maximum - larger)
        total = total * rescale + tl.sum(weights, 1)
        at = (head // group * kv + key[:, None]) * value_dim + column
        v = tl.load(v_ptr + at, mask=inside[:, None] & (column < value_dim), other=0.0)
        rounded = weights.to(v_ptr.dtype.element_ty).to(tl.float32)
        out = out * rescale[:, None]
        out += tl.dot(rounded, v.to(tl.float32), input_precision="ieee")
        maximum = larger
    out = (out / total[:, None]).to(out_ptr.dtype.element_ty)
    at = (head * query + row[:, None]) * value_dim + column
    tl.store(out_ptr + at, out, mask=there & (column < value_dim))
    tl.store(lse_ptr + head * query + row, maximum + tl.log(total), mask=row < query)


def attention(query, key, value, *, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Out and LSE, called like torch's scaled_dot_product_attention."""
    (batch, heads, rows, dim), (kv_heads, kv), value_dim = (
        query.shape,
        key.shape[1:3],
        value.shape[3],
    )
    if heads != kv_heads and not enable_gqa:
        raise ValueError("fewer key heads than query heads need enable_gqa=True")
    seen = torch.ones((rows, kv), dtype=torch.bool, device=query.device)
    if is_causal:
        seen = seen.tril()
    if attn_mask is not None:
        seen = seen & attn_mask
    seen = seen.expand(batch, heads, rows, kv).to(torch.int8).contiguous()
    out = query.new_empty((batch, heads, rows, value_dim))
    lse = query.new_empty((batch, heads, rows), dtype=torch.float32)
    q, k, v = (tensor.contiguous() for tensor in (query, key, value))
    forward[triton.cdiv(rows, 32), batch * heads](
        q, k, v, seen, out, lse, dim**-0.5 if scale is None else scale, heads // kv_heads,
        rows, kv, dim, value_dim, BLOCK_Q=32, BLOCK_K=32,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        BLOCK_V=max(16, triton.next_power_of_2(value_dim)),
    )  # fmt: skip
    return out, lse
