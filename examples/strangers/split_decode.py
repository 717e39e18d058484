"""Decoding with the keys in splits: partial results first, and a second kernel that merges them."""

import torch
import triton
import triton.language as tl


@triton.jit
def _partial(
    Q, K, V, PartOut, PartMax, PartSum,
    sm_scale, kv_len, split_len, heads, kv_heads, rows, dim,
    q_b, q_r, q_h, k_b, k_n, k_h, v_b, v_n, v_h,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    # One program: all query heads of one key head, one sequence, one split.
    kv_head = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    group = heads // kv_heads

    # Rows of the tile: query position, then head of the group.
    r = tl.arange(0, ROWS).to(tl.int64)
    position = r // group
    head = kv_head * group + r % group
    there = r < rows * group
    d = tl.arange(0, DIM)
    q_at = batch * q_b + position * q_r + head * q_h
    q = tl.load(Q + q_at[:, None] + d[None, :], mask=there[:, None] & (d[None, :] < dim), other=0.0)

    maximum = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    first = split * split_len
    last = tl.minimum(first + split_len, kv_len)
    for start in range(first, last, KEYS):
        n = start + tl.arange(0, KEYS).to(tl.int64)
        inside = (n < last)[:, None] & (d < dim)[None, :]
        k = tl.load(K + batch * k_b + n[:, None] * k_n + kv_head * k_h + d, mask=inside, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * sm_scale
        s = tl.where(n[None, :] < last, s, -float("inf"))
        if CAUSAL:
            s = tl.where(n[None, :] <= position[:, None] + kv_len - rows, s, -float("inf"))
        biggest = tl.maximum(maximum, tl.max(s, 1))
        shift = tl.where(biggest > -float("inf"), biggest, 0.0)
        p = tl.exp(s - shift[:, None])
        decay = tl.exp(maximum - shift)
        total = total * decay + tl.sum(p, 1)
        v = tl.load(V + batch * v_b + n[:, None] * v_n + kv_head * v_h + d, mask=inside, other=0.0)
        acc = acc * decay[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        maximum = biggest

    at = ((batch * rows + position) * heads + head) * splits + split
    tl.store(PartMax + at, maximum, mask=there)
    tl.store(PartSum + at, total, mask=there)
    tl.store(PartOut + at[:, None] * DIM + d[None, :], acc, mask=there[:, None])


@triton.jit
def _merge(
    PartOut, PartMax, PartSum, Out, Lse, splits, dim, heads, rows,
    SPLITS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)  # of all sequences, positions and heads
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, DIM)
    used = s < splits
    m = tl.load(PartMax + row * splits + s, mask=used, other=-float("inf"))
    l = tl.load(PartSum + row * splits + s, mask=used, other=0.0)
    largest = tl.max(m, 0)
    safe = tl.where(largest > -float("inf"), largest, 0.0)
    weight = tl.exp(m - safe)
    denominator = tl.sum(l * weight, 0)
    at = (row * splits + s)[:, None] * DIM + d[None, :]
    parts = tl.load(PartOut + at, mask=used[:, None], other=0.0)
    merged = tl.sum(parts * weight[:, None], 0)
    divisor = tl.where(denominator > 0.0, denominator, 1.0)
    tl.store(Out + row * dim + d, (merged / divisor).to(Out.dtype.element_ty), mask=d < dim)
    lse = tl.where(denominator > 0.0, safe + tl.log(divisor), -float("inf"))
    where = row // (heads * rows) * heads * rows + row % heads * rows + row // heads % rows
    tl.store(Lse + where, lse)


def flash_decode(q, k, v, softmax_scale=None, causal=False, num_splits=3, return_lse=True):
    """Out (batch, query, heads, dim) and LSE (batch, heads, query) of a few new rows."""
    batch, rows, heads, dim = q.shape
    kv_len, kv_heads = k.shape[1], k.shape[2]
    group = heads // kv_heads
    if rows * group > 64:
        raise ValueError("a decoding kernel: at most 64 rows of all heads that share a key head")
    if v.shape[3] != dim:
        raise ValueError("v must have the head dim of q and k")
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    scale = softmax_scale if softmax_scale is not None else dim**-0.5
    padded = max(16, triton.next_power_of_2(dim))
    split_len = max(1, triton.cdiv(kv_len, num_splits))
    shape = (batch, rows, heads, num_splits)
    part_max, part_sum = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in "ml")
    part_out = torch.empty((*shape, padded), dtype=torch.float32, device=q.device)
    _partial[(kv_heads, batch, num_splits)](
        q, k, v, part_out, part_max, part_sum,
        scale, kv_len, split_len, heads, kv_heads, rows, dim,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        CAUSAL=causal, ROWS=max(16, triton.next_power_of_2(rows * group)), KEYS=32, DIM=padded,
    )  # fmt: skip
    out = torch.empty(batch, rows, heads, dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, rows, dtype=torch.float32, device=q.device)
    _merge[(batch * rows * heads,)](
        part_out, part_max, part_sum, out, lse, num_splits, dim, heads, rows,
        SPLITS=triton.next_power_of_2(num_splits), DIM=padded,
    )  # fmt: skip
    return (out, lse) if return_lse else out
