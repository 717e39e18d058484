"""FlashAttention-2 forward in Triton, for any mask and score mod.

The recurrence is Dao 2023 (arXiv:2307.08691), Algorithm 1: one program owns a block of query rows
and walks over blocks of keys with a running maximum m, a running sum l and an unnormalised O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from attncheck.mods.to_triton import TritonMod

__all__ = ["Launch", "flash2_forward"]

_LOG2E = 1.4426950408889634
_LN2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Compile-time choices of one launch.

    Attributes:
        block_query, block_kv: Tile sizes, powers of two of at least 16.
        warps, stages: Warps per program and depth of the load pipeline.
        precision: ``input_precision`` of fp32 products: ``ieee`` or ``tf32``.
        causal: Keys after a row's own index are never visible: their tiles are skipped.
        free: The mask hides nothing else, so that tiles it leaves whole need no mask.
    """

    block_query: int
    block_kv: int
    warps: int = 4
    stages: int = 2
    precision: str = "ieee"
    causal: bool = False
    free: bool = False


def flash2_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    mask: TritonMod,
    score: TritonMod | None,
    launch: Launch,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of ``q`` over ``k`` and ``v``, and its log-sum-exp.

    Args:
        q: ``(batch, heads, query, head_dim)``, any strides.
        k: ``(batch, kv_heads, kv, head_dim)``; kv_heads divides heads.
        v: ``(batch, kv_heads, kv, value_dim)``.
        scale: Factor of q·k, an fp32 number.
        mask: The traced mask.
        score: The traced score mod; None leaves scores as they are.
        launch: Tile sizes and the like.

    Returns:
        out ``(batch, heads, query, value_dim)`` in q's dtype and LSE ``(batch, heads, query)`` in
        fp32, natural log. Rows that see no key: 0 and −inf. What hidden keys and values hold, NaN
        included, does not reach a row. A value that is not finite makes the rows that see it NaN or
        infinite.
    """
    batch, heads, query, head_dim = q.shape
    kv_heads, kv = k.shape[1], k.shape[2]
    value_dim = v.shape[3]
    out = torch.empty((batch, heads, query, value_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, query), dtype=torch.float32, device=q.device)
    identity = score is None
    grid = (triton.cdiv(query, launch.block_query), batch * heads)
    # fmt: off
    _forward[grid](
        q, k, v, out, lse, *q.stride(), *k.stride(), *v.stride(), *out.stride(), heads,
        heads // kv_heads, query, kv, head_dim, value_dim, scale * _LOG2E if identity else scale,
        mask.captured, () if score is None else score.captured, MASK=mask.function,
        SCORE=mask.function if score is None else score.function, IDENTITY=identity,
        CAUSAL=launch.causal, FREE=launch.free, BLOCK_Q=launch.block_query,
        BLOCK_K=launch.block_kv, BLOCK_D=_block_dim(head_dim), BLOCK_V=_block_dim(value_dim),
        PRECISION=launch.precision, num_warps=launch.warps, num_stages=launch.stages,
    )
    # fmt: on
    return out, lse


def _block_dim(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))  # tl.dot contracts over at least 16


# A column of forty names says less than five lines of them.
# fmt: off
@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, q_batch, q_head, q_row, q_col, k_batch, k_head, k_row,
    k_col, v_batch, v_head, v_row, v_col, out_batch, out_head, out_row, out_col, heads, group,
    query, kv, head_dim, value_dim, factor, mask_captured, score_captured, MASK: tl.constexpr,
    SCORE: tl.constexpr, IDENTITY: tl.constexpr, CAUSAL: tl.constexpr, FREE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    first_row = tl.program_id(0) * BLOCK_Q
    b = tl.program_id(1) // heads
    h = tl.program_id(1) % heads
    rows = first_row + tl.arange(0, BLOCK_Q)
    cols = tl.arange(0, BLOCK_D)
    value_cols = tl.arange(0, BLOCK_V)
    # 64-bit from here on: batch · heads · length · dim passes 2^31 in ordinary use.
    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)
    q_block = tl.load(
        q_ptr
        + b64 * q_batch
        + h64 * q_head
        + rows[:, None].to(tl.int64) * q_row
        + cols[None, :] * q_col,
        mask=(rows[:, None] < query) & (cols[None, :] < head_dim),
        other=0.0,
    )
    k_ptr += b64 * k_batch + (h64 // group) * k_head + cols[:, None] * k_col
    v_ptr += b64 * v_batch + (h64 // group) * v_head + value_cols[None, :] * v_col

    m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_V], tl.float32)

    end = kv
    whole = 0  # keys before it are visible to every row of the block
    if CAUSAL:
        end = tl.minimum(kv, first_row + BLOCK_Q)
        if FREE:
            whole = tl.minimum(kv, first_row + 1) // BLOCK_K * BLOCK_K
    elif FREE:
        whole = kv // BLOCK_K * BLOCK_K
    if FREE:
        for start in range(0, whole, BLOCK_K):
            m, total, acc = _step(
                start, q_block, k_ptr, v_ptr, k_row, v_row, m, total, acc, b, h, rows, kv,
                head_dim, value_dim, factor, mask_captured, score_captured, MASK, SCORE,
                IDENTITY, False, BLOCK_K, BLOCK_D, BLOCK_V, PRECISION,
            )
    for start in range(whole, end, BLOCK_K):
        m, total, acc = _step(
            start, q_block, k_ptr, v_ptr, k_row, v_row, m, total, acc, b, h, rows, kv, head_dim,
            value_dim, factor, mask_captured, score_captured, MASK, SCORE, IDENTITY, True,
            BLOCK_K, BLOCK_D, BLOCK_V, PRECISION,
        )

    empty = total == 0.0
    out = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, total)[:, None])
    lse = tl.where(empty, float("-inf"), (m + tl.log2(tl.where(empty, 1.0, total))) * _LN2)
    tl.store(
        out_ptr
        + b64 * out_batch
        + h64 * out_head
        + rows[:, None].to(tl.int64) * out_row
        + value_cols[None, :] * out_col,
        out.to(out_ptr.dtype.element_ty),
        mask=(rows[:, None] < query) & (value_cols[None, :] < value_dim),
    )
    tl.store(lse_ptr + (b64 * heads + h64) * query + rows, lse, mask=rows < query)


@triton.jit
def _step(
    start, q_block, k_ptr, v_ptr, k_row, v_row, m, total, acc, b, h, rows, kv, head_dim,
    value_dim, factor, mask_captured, score_captured, MASK: tl.constexpr, SCORE: tl.constexpr,
    IDENTITY: tl.constexpr, MASKED: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):
    """One block of keys: scores, running maximum (log2 units), rescale, P·V."""
    keys = start + tl.arange(0, BLOCK_K)
    inside = keys < kv
    cols = tl.arange(0, BLOCK_D)
    value_cols = tl.arange(0, BLOCK_V)
    k_block = tl.load(
        k_ptr + keys[None, :].to(tl.int64) * k_row,
        mask=inside[None, :] & (cols[:, None] < head_dim),
        other=0.0,
    )
    s = tl.dot(q_block, k_block, input_precision=PRECISION) * factor
    if not IDENTITY:
        s = SCORE(s, b, h, rows[:, None], keys[None, :], score_captured) * 1.4426950408889634
    if MASKED:
        visible = MASK(b, h, rows[:, None], keys[None, :], mask_captured) & inside[None, :]
        s = tl.where(visible, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    # A row that has seen nothing keeps m = −inf; 0 stands in so that −inf − −inf never happens.
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s - shift[:, None])
    alpha = tl.exp2(m - shift)
    total = total * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    v_block = tl.load(
        v_ptr + keys[:, None].to(tl.int64) * v_row,
        mask=inside[:, None] & (value_cols[None, :] < value_dim),
        other=0.0,
    )
    weights = p.to(v_block.dtype)
    if MASKED:
        # A hidden value has weight 0, but 0 · NaN is NaN: values that are not finite leave the
        # product, and the rows that do see one become NaN by themselves.
        finite = tl.abs(v_block.to(tl.float32)) < float("inf")
        if tl.min(tl.min(finite.to(tl.int32), 1), 0) == 0:
            seen = tl.dot(visible.to(tl.float16), tl.where(finite, 0.0, 1.0).to(tl.float16))
            acc = tl.where(seen > 0.0, float("nan"), acc)
            v_block = tl.where(finite, v_block, tl.zeros_like(v_block))
    acc = tl.dot(weights, v_block, acc, input_precision=PRECISION)
    return m_new, total, acc


# fmt: on
