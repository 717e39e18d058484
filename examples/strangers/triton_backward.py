"""Fused attention, in the manner of Triton's tutorial: forward, and backward through autograd."""

import torch
import triton
import triton.language as tl


@triton.jit
def _attn_fwd(Q, K, V, sm_scale, M, Out,
              stride_qz, stride_qh, stride_qm, stride_kz, stride_kh, stride_kn,
              stride_vz, stride_vh, stride_vn, H, N_CTX,
              HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
              CAUSAL: tl.constexpr):  # fmt: skip
    start_m = tl.program_id(0)
    off_hz = tl.program_id(1)
    off_z = (off_hz // H).to(tl.int64)
    off_h = (off_hz % H).to(tl.int64)
    offs_m = start_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N).to(tl.int64)
    offs_d = tl.arange(0, HEAD_DIM)
    q_ptrs = (
        Q + off_z * stride_qz + off_h * stride_qh + offs_m[:, None] * stride_qm + offs_d[None, :]
    )
    k_ptrs = K + off_z * stride_kz + off_h * stride_kh + offs_d[:, None]
    v_ptrs = V + off_z * stride_vz + off_h * stride_vh + offs_d[None, :]
    m_i = tl.zeros([BLOCK_M], dtype=tl.float32) - float("inf")
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    qk_scale = sm_scale * 1.44269504  # 1/log(2)
    q = tl.load(q_ptrs, mask=offs_m[:, None] < N_CTX, other=0.0)
    hi = N_CTX
    if CAUSAL:
        hi = tl.minimum((start_m + 1) * BLOCK_M, N_CTX)
    for start_n in range(0, hi, BLOCK_N):
        cols = start_n + offs_n
        k = tl.load(k_ptrs + cols[None, :] * stride_kn, mask=cols[None, :] < N_CTX, other=0.0)
        qk = tl.dot(q, k, input_precision="ieee") * qk_scale
        mask = cols[None, :] < N_CTX
        if CAUSAL:
            mask = mask & (offs_m[:, None] >= cols[None, :])
        qk = tl.where(mask, qk, float("-inf"))
        # -- running maximum
        m_ij = tl.maximum(m_i, tl.max(qk, 1))
        p = tl.math.exp2(qk - m_ij[:, None])
        # -- correction of what was added up before
        alpha = tl.math.exp2(m_i - m_ij)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = tl.load(v_ptrs + cols[:, None] * stride_vn, mask=cols[:, None] < N_CTX, other=0.0)
        acc += tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m_i = m_ij
    # epilogue
    m_i += tl.math.log2(l_i)
    acc = acc / l_i[:, None]
    o_ptrs = Out + (off_hz * N_CTX + offs_m[:, None]) * HEAD_DIM + offs_d[None, :]
    tl.store(o_ptrs, acc.to(Out.type.element_ty), mask=offs_m[:, None] < N_CTX)
    tl.store(M + off_hz * N_CTX + offs_m, m_i, mask=offs_m < N_CTX)


@triton.jit
def _attn_bwd_preprocess(O, DO, Delta, N_CTX, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr):
    off_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    off_hz = tl.program_id(1)
    off_n = tl.arange(0, HEAD_DIM)
    at = (off_hz * N_CTX + off_m[:, None]) * HEAD_DIM + off_n[None, :]
    o = tl.load(O + at, mask=off_m[:, None] < N_CTX, other=0.0).to(tl.float32)
    do = tl.load(DO + at, mask=off_m[:, None] < N_CTX, other=0.0).to(tl.float32)
    delta = tl.sum(o * do, axis=1)
    tl.store(Delta + off_hz * N_CTX + off_m, delta, mask=off_m < N_CTX)


@triton.jit
def _attn_bwd_dkdv(Q, K, V, sm_scale, DO, DK, DV, M, Delta, N_CTX,
                   HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                   CAUSAL: tl.constexpr):  # fmt: skip
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    off_hz = tl.program_id(1)
    offs_k = tl.arange(0, HEAD_DIM)
    base = off_hz * N_CTX
    kv_at = (base + offs_n[:, None]) * HEAD_DIM + offs_k[None, :]
    k = tl.load(K + kv_at, mask=offs_n[:, None] < N_CTX, other=0.0)
    v = tl.load(V + kv_at, mask=offs_n[:, None] < N_CTX, other=0.0)
    dk = tl.zeros([BLOCK_N, HEAD_DIM], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, HEAD_DIM], dtype=tl.float32)
    lo = 0
    if CAUSAL:
        lo = (tl.program_id(0) * BLOCK_N // BLOCK_M) * BLOCK_M
    for start_m in range(lo, N_CTX, BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        q_at = (base + offs_m[:, None]) * HEAD_DIM + offs_k[None, :]
        q = tl.load(Q + q_at, mask=offs_m[:, None] < N_CTX, other=0.0)
        do = tl.load(DO + q_at, mask=offs_m[:, None] < N_CTX, other=0.0)
        m = tl.load(M + base + offs_m, mask=offs_m < N_CTX, other=0.0)
        Di = tl.load(Delta + base + offs_m, mask=offs_m < N_CTX, other=0.0)
        qkT = tl.dot(k, tl.trans(q), input_precision="ieee") * (sm_scale * 1.44269504)
        pT = tl.math.exp2(qkT - m[None, :])
        keep = offs_m[None, :] < N_CTX
        if CAUSAL:
            keep = keep & (offs_m[None, :] >= offs_n[:, None])
        pT = tl.where(keep, pT, 0.0)
        dv += tl.dot(pT.to(do.dtype), do, input_precision="ieee")
        dpT = tl.dot(v, tl.trans(do), input_precision="ieee")
        dsT = pT * (dpT - Di[None, :])
        dk += tl.dot(dsT.to(q.dtype), q, input_precision="ieee")
    dk *= sm_scale
    tl.store(DV + kv_at, dv.to(DV.type.element_ty), mask=offs_n[:, None] < N_CTX)
    tl.store(DK + kv_at, dk.to(DK.type.element_ty), mask=offs_n[:, None] < N_CTX)


@triton.jit
def _attn_bwd_dq(Q, K, V, sm_scale, DO, DQ, M, Delta, N_CTX,
                 HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                 CAUSAL: tl.constexpr):  # fmt: skip
    start_m = tl.program_id(0) * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    off_hz = tl.program_id(1)
    offs_k = tl.arange(0, HEAD_DIM)
    base = off_hz * N_CTX
    q_at = (base + offs_m[:, None]) * HEAD_DIM + offs_k[None, :]
    q = tl.load(Q + q_at, mask=offs_m[:, None] < N_CTX, other=0.0)
    do = tl.load(DO + q_at, mask=offs_m[:, None] < N_CTX, other=0.0)
    m = tl.load(M + base + offs_m, mask=offs_m < N_CTX, other=0.0)
    Di = tl.load(Delta + base + offs_m, mask=offs_m < N_CTX, other=0.0)
    dq = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    hi = tl.minimum(start_m + BLOCK_M, N_CTX) if CAUSAL else N_CTX
    for start_n in range(0, hi, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        kv_at = (base + offs_n[:, None]) * HEAD_DIM + offs_k[None, :]
        k = tl.load(K + kv_at, mask=offs_n[:, None] < N_CTX, other=0.0)
        v = tl.load(V + kv_at, mask=offs_n[:, None] < N_CTX, other=0.0)
        qk = tl.dot(q, tl.trans(k), input_precision="ieee") * (sm_scale * 1.44269504)
        p = tl.math.exp2(qk - m[:, None])
        keep = offs_n[None, :] < N_CTX
        if CAUSAL:
            keep = keep & (offs_m[:, None] >= offs_n[None, :])
        p = tl.where(keep, p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - Di[:, None])
        dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    dq *= sm_scale
    tl.store(DQ + q_at, dq.to(DQ.type.element_ty), mask=offs_m[:, None] < N_CTX)


BLOCK_M, BLOCK_N = 64, 32


class _attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, sm_scale):
        B, H, N_CTX, HEAD_DIM = q.shape
        o = torch.empty((B, H, N_CTX, HEAD_DIM), dtype=q.dtype, device=q.device)
        M = torch.empty((B, H, N_CTX), dtype=torch.float32, device=q.device)
        grid = (triton.cdiv(N_CTX, BLOCK_M), B * H)
        _attn_fwd[grid](
            q, k, v, sm_scale, M, o, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], H, N_CTX,
            HEAD_DIM=HEAD_DIM, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, CAUSAL=causal,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, o, M)
        ctx.causal = causal
        ctx.sm_scale = sm_scale
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, M = ctx.saved_tensors
        q, k, v, do = q.contiguous(), k.contiguous(), v.contiguous(), do.contiguous()
        B, H, N_CTX, HEAD_DIM = q.shape
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        delta = torch.empty_like(M)
        rows = (triton.cdiv(N_CTX, BLOCK_M), B * H)
        cols = (triton.cdiv(N_CTX, BLOCK_N), B * H)
        _attn_bwd_preprocess[rows](o, do, delta, N_CTX, BLOCK_M=BLOCK_M, HEAD_DIM=HEAD_DIM)
        sizes = {"HEAD_DIM": HEAD_DIM, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N}
        _attn_bwd_dkdv[cols](
            q, k, v, ctx.sm_scale, do, dk, dv, M, delta, N_CTX, CAUSAL=ctx.causal, **sizes
        )
        _attn_bwd_dq[rows](
            q, k, v, ctx.sm_scale, do, dq, M, delta, N_CTX, CAUSAL=ctx.causal, **sizes
        )
        return dq, dk, dv, None, None


def attention(q, k, v, causal=False, sm_scale=None):
    """q, k, v (batch, heads, length, dim), all of one shape."""
    if not q.shape == k.shape == v.shape:
        raise ValueError("q, k and v must have one shape")
    dim = q.shape[-1]
    if dim not in {16, 32, 64, 128}:
        raise ValueError(f"head_dim {dim} is not 16, 32, 64 or 128")
    if q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return _attention.apply(q, k, v, causal, dim**-0.5 if sm_scale is None else sm_scale)
