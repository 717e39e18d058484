"""FlashAttention-2 in the manner of a Triton tutorial: right on the shapes that its author tried.

* It loads whole tiles of a tall matrix (batch · heads · N, D): where N is no multiple of the tile,
  a head also reads the first keys of the next one.
* P is rounded to fp16 whatever V is, and V with it.
* It takes one length, equal head dims and powers of two.
"""

import torch
import triton
import triton.language as tl

TILE = 64


@triton.jit
def forward(
    q_ptr, k_ptr, v_ptr, out_ptr, scale, total, N,
    CAUSAL: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * N
    row, dim = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, D)
    at = (first + row)[:, None] * D + dim
    q = tl.load(q_ptr + at, mask=(first + row < total)[:, None], other=0.0)
    maximum = tl.full((TILE,), -float("inf"), tl.float32)
    weight = tl.zeros((TILE,), tl.float32)
    out = tl.zeros((TILE, D), tl.float32)
    for start in range(0, N, TILE):
        key = start + tl.arange(0, TILE)
        keys = (first + key)[:, None] * D + dim
        there = (first + key < total)[:, None]
        k = tl.load(k_ptr + keys, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.44269504)
        if CAUSAL:
            scores += tl.where(row[:, None] >= key, 0.0, -1.0e6)
        larger = tl.maximum(maximum, tl.max(scores, 1))
        p = tl.exp2(scores - larger[:, None])
        alpha = tl.exp2(maximum - larger)
        weight = weight * alpha + tl.sum(p, 1)
        v = tl.load(v_ptr + keys, mask=there, other=0.0)
        out = out * alpha[:, None] + tl.dot(p.to(tl.float16), v.to(tl.float16))
        maximum = larger
    out = (out / weight[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out, mask=(row < N)[:, None])


def attention(query, key, value, *, is_causal=False, scale=None):
    """Out, called like torch's scaled_dot_product_attention."""
    batch, heads, rows, dim = query.shape
    if not query.shape == key.shape == value.shape:
        raise ValueError("q, k and v have one shape")
    if dim < 16 or dim & (dim - 1):
        raise ValueError(f"head_dim={dim} is no power of two from 16 on")
    q, k, v = (tensor.contiguous() for tensor in (query, key, value))
    out = torch.empty_like(q)
    forward[triton.cdiv(rows, TILE), batch * heads](
        q, k, v, out, dim**-0.5 if scale is None else scale, batch * heads * rows, rows,
        CAUSAL=is_causal, TILE=TILE, D=dim,
    )  # fmt: skip
    return out
