"""FlashAttention-2's forward in Triton, grown out of the tutorial: strides, GQA, any lengths."""

import torch
import triton
import triton.language as tl


@triton.jit
def _fwd_kernel(
    Q, K, V, O, LSE,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_om, stride_od,
    sm_scale, H, GROUP, M, N, D, DV,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    start_m = tl.program_id(0)
    off_b = (tl.program_id(1) // H).to(tl.int64)  # offsets of large tensors need 64 bits
    off_h = (tl.program_id(1) % H).to(tl.int64)
    off_kh = off_h // GROUP

    offs_m = start_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D).to(tl.int64)
    offs_dv = tl.arange(0, BLOCK_DV).to(tl.int64)

    q_ptrs = Q + off_b * stride_qb + off_h * stride_qh
    q_ptrs += offs_m[:, None] * stride_qm + offs_d[None, :] * stride_qd
    q = tl.load(q_ptrs, mask=(offs_m[:, None] < M) & (offs_d[None, :] < D), other=0.0)

    m_i = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    qk_scale = sm_scale * 1.4426950408889634

    hi = N
    if CAUSAL:
        hi = tl.minimum(N, (start_m + 1) * BLOCK_M)
    for start_n in range(0, hi, BLOCK_N):
        cols = start_n + offs_n
        k_ptrs = K + off_b * stride_kb + off_kh * stride_kh
        k_ptrs += cols[None, :] * stride_kn + offs_d[:, None] * stride_kd
        k = tl.load(k_ptrs, mask=(cols[None, :] < N) & (offs_d[:, None] < D), other=0.0)
        qk = tl.dot(q, k, input_precision="ieee") * qk_scale
        valid = cols[None, :] < N
        if CAUSAL:
            valid = valid & (offs_m[:, None] >= cols[None, :])
        qk = tl.where(valid, qk, float("-inf"))

        m_new = tl.maximum(m_i, tl.max(qk, 1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - m_safe)
        p = tl.exp2(qk - m_safe[:, None])
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]

        v_ptrs = V + off_b * stride_vb + off_kh * stride_vh
        v_ptrs += cols[:, None] * stride_vn + offs_dv[None, :] * stride_vd
        v = tl.load(v_ptrs, mask=(cols[:, None] < N) & (offs_dv[None, :] < DV), other=0.0)
        acc += tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m_i = m_new

    safe_l = tl.where(l_i == 0.0, 1.0, l_i)
    acc = acc / safe_l[:, None]
    lse = tl.where(l_i == 0.0, float("-inf"), (m_i + tl.log2(safe_l)) * 0.6931471805599453)

    o_ptrs = O + off_b * stride_ob + off_h * stride_oh
    o_ptrs += offs_m[:, None] * stride_om + offs_dv[None, :] * stride_od
    tl.store(
        o_ptrs, acc.to(O.dtype.element_ty), mask=(offs_m[:, None] < M) & (offs_dv[None, :] < DV)
    )
    tl.store(LSE + tl.program_id(1) * M + offs_m, lse, mask=offs_m < M)


def attention(query, key, value, is_causal=False, scale=None, enable_gqa=False, return_lse=False):
    """Out, and the log-sum-exp of each row on request; called like torch's SDPA."""
    batch, heads, rows, dim = query.shape
    kv_heads, keys, dim_v = key.shape[1], key.shape[2], value.shape[3]
    if heads != kv_heads and not enable_gqa:
        raise ValueError("key and value have fewer heads: pass enable_gqa=True")
    if scale is None:
        scale = dim**-0.5
    out = torch.empty(batch, heads, rows, dim_v, dtype=query.dtype, device=query.device)
    lse = torch.empty(batch, heads, rows, dtype=torch.float32, device=query.device)
    block_m = 64
    _fwd_kernel[(triton.cdiv(rows, block_m), batch * heads)](
        query, key, value, out, lse,
        *query.stride(), *key.stride(), *value.stride(), *out.stride(),
        scale, heads, heads // kv_heads, rows, keys, dim, dim_v,
        CAUSAL=is_causal, BLOCK_M=block_m, BLOCK_N=32,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        BLOCK_DV=max(16, triton.next_power_of_2(dim_v)),
    )  # fmt: skip
    return (out, lse) if return_lse else out
