"""Attention as in Triton's tutorial: it takes few problems, and does not say which.

Only fp16, a head_dim that is a power of two, equal lengths, and the same head_dim for q, k and v.
One kernel is right within these limits; the others have a fault.
"""

# ruff: noqa: N803, PLR0917  (names and arguments are the tutorial's)

import torch
import triton
import triton.language as tl


@triton.jit
def forward(
    Q, K, V, Out, sm_scale, N,
    D: tl.constexpr, TILE: tl.constexpr, CAUSAL: tl.constexpr, SHIFT: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    row, dim = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, D)
    base = tl.program_id(1) * N * D
    q = tl.load(Q + base + row[:, None] * D + dim, mask=row[:, None] < N, other=0.0)
    largest = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, D], tl.float32)
    for start in range(0, N, TILE):
        key = start + tl.arange(0, TILE)
        there = key < N
        k = tl.load(K + base + key[:, None] * D + dim, mask=there[:, None], other=0.0)
        v = tl.load(V + base + key[:, None] * D + dim, mask=there[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k)) * (sm_scale * 1.44269504)
        seen = there[None, :] if MASKED else key[None, :] >= 0
        if CAUSAL:
            seen = seen & (row[:, None] + SHIFT >= key[None, :])
        scores = tl.where(seen, scores, -1.0e30)
        larger = tl.maximum(largest, tl.max(scores, 1))
        p = tl.exp2(scores - larger[:, None])
        alpha = tl.exp2(largest - larger)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(tl.float16), v)
        largest = larger
    acc = acc / total[:, None]
    tl.store(Out + base + row[:, None] * D + dim, acc.to(tl.float16), mask=row[:, None] < N)


def launch(q, k, v, causal, sm_scale, tile=64, shift=0, masked=True):
    # As a C++ binding does, it raises no ValueError.
    if not q.shape == k.shape == v.shape:
        raise RuntimeError("q, k and v must have one shape")
    batch, heads, rows, dim = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    forward[triton.cdiv(rows, tile), batch * heads](
        q.contiguous(), k.contiguous(), v.contiguous(), out, sm_scale, rows,
        D=dim, TILE=tile, CAUSAL=causal, SHIFT=shift, MASKED=masked,
    )  # fmt: skip
    return out


def right(q, k, v, causal, sm_scale):
    return launch(q, k, v, causal, sm_scale)


def sees_the_next_key(q, k, v, causal, sm_scale):
    return launch(q, k, v, causal, sm_scale, shift=1)


def whole_tiles_of_128(q, k, v, causal, sm_scale):
    return launch(q, k, v, causal, sm_scale, tile=128, masked=False)
