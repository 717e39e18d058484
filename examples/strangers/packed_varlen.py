"""Packed sequences in Triton: causal, sliding windows, soft-capped scores and ALiBi."""

import torch
import triton
import triton.language as tl


@triton.jit
def _packed_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, cu_q, cu_k, slopes,
    scale, softcap, left, right, total_q, group, dim,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh,
    HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(2)
    head = tl.program_id(1).to(tl.int64)
    q_begin = tl.load(cu_q + seq)
    k_begin = tl.load(cu_k + seq)
    q_len = tl.load(cu_q + seq + 1) - q_begin
    k_len = tl.load(cu_k + seq + 1) - k_begin
    first_row = tl.program_id(0) * TILE_Q
    if first_row >= q_len:
        return

    row = first_row + tl.arange(0, TILE_Q).to(tl.int64)
    d = tl.arange(0, TILE_D)
    in_q = (row < q_len)[:, None] & (d < dim)[None, :]
    q_at = (q_begin + row)[:, None] * stride_qt + head * stride_qh + d[None, :]
    q = tl.load(q_ptr + q_at, mask=in_q, other=0.0).to(tl.float32) * scale
    kv_head = head // group
    diagonal = row + k_len - q_len  # of a row: the key that is its own

    top = tl.full((TILE_Q,), -float("inf"), tl.float32)
    norm = tl.zeros((TILE_Q,), tl.float32)
    acc = tl.zeros((TILE_Q, TILE_D), tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes + head)

    begin = 0
    if left >= 0:
        begin = tl.maximum(0, (first_row + k_len - q_len - left) // TILE_K * TILE_K)
    end = k_len
    if right >= 0:
        end = tl.minimum(k_len, first_row + TILE_Q + k_len - q_len + right)
    for start in range(begin, end, TILE_K):
        col = start + tl.arange(0, TILE_K).to(tl.int64)
        in_k = (col < k_len)[:, None] & (d < dim)[None, :]
        k_at = (k_begin + col)[:, None] * stride_kt + kv_head * stride_kh + d[None, :]
        k = tl.load(k_ptr + k_at, mask=in_k, other=0.0).to(tl.float32)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HAS_CAP:
            # tanh, of an argument that cannot overflow; its series where 1 - z would cancel
            x = s / softcap
            z = tl.exp(-2.0 * tl.abs(x))
            t = (1.0 - z) / (1.0 + z)
            t = tl.where(tl.abs(x) < 0.02, x - x * x * x / 3.0, tl.where(x < 0, -t, t))
            s = softcap * t
        distance = diagonal[:, None] - col[None, :]
        if HAS_SLOPES:
            s -= slope * tl.abs(distance)
        seen = (row < q_len)[:, None] & (col < k_len)[None, :]
        if left >= 0:
            seen = seen & (distance <= left)
        if right >= 0:
            seen = seen & (distance >= -right)
        s = tl.where(seen, s, -float("inf"))

        new_top = tl.maximum(top, tl.max(s, 1))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        w = tl.exp(s - base[:, None])
        shrink = tl.exp(top - base)
        norm = norm * shrink + tl.sum(w, 1)
        v_at = (k_begin + col)[:, None] * stride_vt + kv_head * stride_vh + d[None, :]
        v = tl.load(v_ptr + v_at, mask=in_k, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(w.to(v.dtype), v, input_precision="ieee")
        top = new_top

    dead = norm == 0.0
    acc = tl.where(dead[:, None], 0.0, acc / tl.where(dead, 1.0, norm)[:, None])
    lse = tl.where(dead, -float("inf"), top + tl.log(tl.where(dead, 1.0, norm)))
    o_at = (q_begin + row)[:, None] * stride_ot + head * stride_oh + d[None, :]
    tl.store(o_ptr + o_at, acc.to(o_ptr.dtype.element_ty), mask=in_q)
    tl.store(lse_ptr + head * total_q + q_begin + row, lse, mask=row < q_len)


def packed_attention(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    return_attn_probs=False,
):  # fmt: skip
    """Out (total, heads, dim) and LSE (heads, total), called like flash_attn_varlen_func."""
    total, heads, dim = q.shape
    if v.shape[2] != dim:
        raise ValueError("values have the keys' head dim")
    if alibi_slopes is not None and alibi_slopes.dim() > 1:
        raise ValueError("one slope a head, for all sequences")
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    left, right = window_size
    if causal:
        right = 0
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(heads, total, dtype=torch.float32, device=q.device)
    tile_q = 32
    grid = (triton.cdiv(max_seqlen_q, tile_q), heads, cu_seqlens_q.numel() - 1)
    _packed_kernel[grid](
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k,
        q if alibi_slopes is None else alibi_slopes,
        dim**-0.5 if softmax_scale is None else softmax_scale, softcap, left, right,
        total, heads // k.shape[1], dim,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2],
        HAS_CAP=softcap > 0, HAS_SLOPES=alibi_slopes is not None,
        TILE_Q=tile_q, TILE_K=64, TILE_D=max(16, triton.next_power_of_2(dim)),
    )  # fmt: skip
    return (out, lse) if return_attn_probs else out
