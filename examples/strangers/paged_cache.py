"""Keys and values in pages of a cache, found by a block table; decoding and short prefills."""

import torch
import triton
import triton.language as tl


@triton.jit
def paged_kernel(
    out, query, k_cache, v_cache, block_table, context_lens, scale,
    num_heads, queries_per_kv, q_rows, head_size, page_size, max_pages,
    s_qb, s_qr, s_qh, s_kp, s_ks, s_kh, s_vp, s_vs, s_vh,
    CAUSAL: tl.constexpr, Q_TILE: tl.constexpr, K_TILE: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    kv_h = h // queries_per_kv
    context = tl.load(context_lens + b)

    rows = tl.program_id(2) * Q_TILE + tl.arange(0, Q_TILE).to(tl.int64)
    dims = tl.arange(0, HEAD)
    dim_ok = dims < head_size
    q_mask = (rows[:, None] < q_rows) & dim_ok[None, :]
    q = tl.load(
        query + b * s_qb + rows[:, None] * s_qr + h * s_qh + dims[None, :], mask=q_mask, other=0.0
    )

    m = tl.full([Q_TILE], float("-inf"), tl.float32)
    l = tl.zeros([Q_TILE], tl.float32)
    o = tl.zeros([Q_TILE, HEAD], tl.float32)
    pos = rows + context - q_rows
    for start in range(0, context, K_TILE):
        token = start + tl.arange(0, K_TILE)
        alive = token < context
        page = tl.load(block_table + b * max_pages + token // page_size, mask=alive, other=0)
        slot = (token % page_size).to(tl.int64)
        k_off = page.to(tl.int64) * s_kp + slot * s_ks + kv_h * s_kh
        v_off = page.to(tl.int64) * s_vp + slot * s_vs + kv_h * s_vh
        k = tl.load(
            k_cache + k_off[:, None] + dims[None, :], mask=alive[:, None] & dim_ok[None, :],
            other=0.0,
        )  # fmt: skip
        v = tl.load(
            v_cache + v_off[:, None] + dims[None, :], mask=alive[:, None] & dim_ok[None, :],
            other=0.0,
        )  # fmt: skip
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        keep = alive[None, :]
        if CAUSAL:
            keep = keep & (token[None, :] <= pos[:, None])
        logits = tl.where(keep, logits, float("-inf"))
        m_next = tl.maximum(m, tl.max(logits, axis=1))
        m_use = tl.where(m_next == float("-inf"), 0.0, m_next)
        probs = tl.exp(logits - m_use[:, None])
        correction = tl.exp(m - m_use)
        l = l * correction + tl.sum(probs, axis=1)
        o = o * correction[:, None]
        o += tl.dot(probs.to(v.dtype), v, input_precision="ieee")
        m = m_next

    l = tl.where(l == 0.0, 1.0, l)
    o = o / l[:, None]
    at = ((b * q_rows + rows[:, None]) * num_heads + h) * head_size + dims[None, :]
    tl.store(out + at, o.to(out.dtype.element_ty), mask=q_mask)


def paged_attention(
    q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale=None, causal=False
):
    """q (batch, query, heads, dim), caches (pages, page size, kv heads, dim)."""
    batch, q_rows, heads, head_size = q.shape
    page_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    if v_cache.shape[3] != head_size:
        raise ValueError("the caches have one head size")
    q = q if q.stride(3) == 1 else q.contiguous()
    block_table = block_table.contiguous()
    out = torch.empty(batch, q_rows, heads, head_size, dtype=q.dtype, device=q.device)
    q_tile = 16
    paged_kernel[(batch, heads, triton.cdiv(q_rows, q_tile))](
        out, q, k_cache, v_cache, block_table, cache_seqlens,
        head_size**-0.5 if softmax_scale is None else softmax_scale,
        heads, heads // kv_heads, q_rows, head_size, page_size, block_table.shape[1],
        *q.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3],
        CAUSAL=causal, Q_TILE=q_tile, K_TILE=64, HEAD=max(16, triton.next_power_of_2(head_size)),
    )  # fmt: skip
    return out
