"""FlashAttention in Triton, with a fault that its author's tests have not found.

`attncheck demo` finds it.
"""

import torch
import triton
import triton.language as tl

__all__ = ["attention"]

TILE = 64


@triton.jit
def forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, scale, query, kv, head_dim,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Compute one tile of query rows of one head, over all tiles of keys in order."""
    head, row = tl.program_id(1), tl.program_id(0) * TILE + tl.arange(0, TILE)
    dim = tl.arange(0, D)
    at = (head * query + row[:, None]) * head_dim + dim
    rows = (row < query)[:, None] & (dim < head_dim)
    q = tl.load(q_ptr + at, mask=rows, other=0.0)
    maximum = tl.full((TILE,), -float("inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    out = tl.zeros((TILE, D), tl.float32)
    for start in range(0, kv, TILE):
        key = start + tl.arange(0, TILE)
        keys = (head * kv + key[:, None]) * head_dim + dim
        there = (key < kv)[:, None] & (dim < head_dim)
        k = tl.load(k_ptr + keys, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if not EVEN:  # whole tiles need no mask
            scores = tl.where(key < kv, scores, -float("inf"))
        if CAUSAL:
            scores = tl.where(row[:, None] >= key, scores, -float("inf"))
        larger = tl.maximum(maximum, tl.max(scores, 1))
        p = tl.exp(scores - larger[:, None])
        alpha = tl.exp(maximum - larger)
        total = total * alpha + tl.sum(p, 1)
        v = tl.load(v_ptr + keys, mask=there, other=0.0)
        out = out * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        maximum = larger
    out = out / total[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=rows)
    tl.store(lse_ptr + head * query + row, maximum + tl.log(total), mask=row < query)


def attention(query, key, value, *, is_causal=False, scale=None):
    """Return out and LSE, called like torch's scaled_dot_product_attention."""
    batch, heads, rows, dim = query.shape
    if key.shape != value.shape or key.shape[1] != heads:
        raise ValueError("k and v have one shape, and as many heads as q")
    q, k, v = (tensor.contiguous() for tensor in (query, key, value))
    out, lse = torch.empty_like(q), q.new_empty((batch, heads, rows), dtype=torch.float32)
    forward[triton.cdiv(rows, TILE), batch * heads](
        q, k, v, out, lse, dim**-0.5 if scale is None else scale, rows, key.shape[2], dim,
        CAUSAL=is_causal, EVEN=key.shape[2] % 32 == 0, TILE=TILE,
        D=max(16, triton.next_power_of_2(dim)),
    )  # fmt: skip
    return out, lse
