"""FlashAttention-2 forward in Triton, for any mask and score mod.

The recurrence is Dao 2023 (arXiv:2307.08691), Algorithm 1: one program owns a block of query rows
and walks over blocks of keys with a running maximum m, a running sum l and an unnormalised O.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from attncheck.kernels.assembler import sound_assembler
from attncheck.kernels.launch import block_dim, scales
from attncheck.kernels.tile import (
    factor_of,
    loaded,
    log_sum,
    power,
    scores,
    visible,
    with_values,
)

if TYPE_CHECKING:
    from attncheck.inputs import Descale
    from attncheck.kernels.launch import Launch
    from attncheck.mods.to_triton import TritonMod

__all__ = ["flash2_forward"]

_LOG2E = 1.4426950408889634


def flash2_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    mask: TritonMod,
    score: TritonMod | None,
    launch: Launch,
    descale: Descale | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of ``q`` over ``k`` and ``v``, and its log-sum-exp.

    Args:
        q: ``(batch, heads, query, head_dim)``, any strides.
        k: ``(batch, kv_heads, kv, head_dim)``; kv_heads divides heads.
        v: ``(batch, kv_heads, kv, value_dim)``; in fp8 it may well be a view of memory that holds
            the keys of a column in a row, which is how a tensor core wants it.
        scale: Factor of q·k, an fp32 number.
        mask: The traced mask.
        score: The traced score mod; None leaves scores as they are.
        launch: Tile sizes and the like.
        descale: In fp8, what the stored numbers are to be multiplied by.
        out_dtype: Of out (default: q's dtype).

    Returns:
        out ``(batch, heads, query, value_dim)`` and LSE ``(batch, heads, query)`` in fp32, natural
        log. Rows that see no key: 0 and −inf. What the keys and values hold that the mask hides
        from a row, NaN included, does not reach it. A score mod's −inf hides nothing: the key has
        weight 0, and its value, if not finite, reaches the row all the same. A row that sees an
        infinite value gets it; or NaN where it sees both signs, where the value's weight underflows
        to 0, and where a later, much larger score makes the weight of everything before it 0.
        Scores may be as large as fp32 allows with a score mod, and up to 2.36e38 (that divided by
        log2 e) without one: beyond, a row is not right.
    """
    batch, heads, query, head_dim = q.shape
    kv_heads, kv = k.shape[1], k.shape[2]
    value_dim = v.shape[3]
    shape = (batch, heads, query, value_dim)
    out = torch.empty(shape, dtype=out_dtype or q.dtype, device=q.device)
    lse = torch.empty((batch, heads, query), dtype=torch.float32, device=q.device)
    identity = score is None
    grid = (triton.cdiv(query, launch.block_query), batch * heads)
    # fmt: off
    with sound_assembler(q.device.type):
        _forward[grid](
            q, k, v, out, lse, *q.stride(), *k.stride(), *v.stride(), *out.stride(), heads,
            heads // kv_heads, query, kv, head_dim, value_dim,
            scale * _LOG2E if identity else scale, scales(descale), mask.captured,
            () if score is None else score.captured, MASK=mask.function,
            SCORE=mask.function if score is None else score.function, IDENTITY=identity,
            CAUSAL=launch.causal, FREE=launch.free, SCALED=descale is not None,
            WEIGHTS_SCALE=launch.weights_scale, BLOCK_Q=launch.block_query,
            BLOCK_K=launch.block_kv, BLOCK_D=block_dim(head_dim, q.dtype),
            BLOCK_V=block_dim(value_dim, v.dtype),
            PRECISION=launch.precision, IMPRECISE=launch.max_num_imprecise_acc,
            num_warps=launch.warps, num_stages=launch.stages,
        )
    # fmt: on
    return out, lse


# A column of forty names says less than five lines of them.
# fmt: off
@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, q_batch, q_head, q_row, q_col, k_batch, k_head, k_row,
    k_col, v_batch, v_head, v_row, v_col, out_batch, out_head, out_row, out_col, heads, group,
    query, kv, head_dim, value_dim, factor, descale, mask_captured, score_captured,
    MASK: tl.constexpr, SCORE: tl.constexpr, IDENTITY: tl.constexpr, CAUSAL: tl.constexpr,
    FREE: tl.constexpr, SCALED: tl.constexpr, WEIGHTS_SCALE: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
    IMPRECISE: tl.constexpr,
):
    first_row = tl.program_id(0) * BLOCK_Q
    b = tl.program_id(1) // heads
    h = tl.program_id(1) % heads
    rows = first_row + tl.arange(0, BLOCK_Q)
    value_cols = tl.arange(0, BLOCK_V)
    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)
    q_ptr += b64 * q_batch + h64 * q_head
    q_block = loaded(q_ptr, rows, tl.arange(0, BLOCK_D), q_row, q_col, query, head_dim)
    k_ptr += b64 * k_batch + (h64 // group) * k_head
    v_ptr += b64 * v_batch + (h64 // group) * v_head
    kv_head = tl.program_id(1) // group  # group divides heads
    factor = factor_of(factor, descale, kv_head, SCALED)

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
                start, q_block, k_ptr, v_ptr, k_row, k_col, v_row, v_col, m, total, acc, b, h,
                rows, kv, head_dim, value_dim, factor, mask_captured, score_captured, MASK, SCORE,
                IDENTITY, False, WEIGHTS_SCALE, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_V, PRECISION,
                IMPRECISE,
            )
    for start in range(whole, end, BLOCK_K):
        m, total, acc = _step(
            start, q_block, k_ptr, v_ptr, k_row, k_col, v_row, v_col, m, total, acc, b, h, rows,
            kv, head_dim, value_dim, factor, mask_captured, score_captured, MASK, SCORE, IDENTITY,
            True, WEIGHTS_SCALE, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_V, PRECISION, IMPRECISE,
        )

    empty = total == 0.0
    out = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, total)[:, None])
    if SCALED:
        out = out * (tl.load(descale[2] + kv_head) / WEIGHTS_SCALE)
    tl.store(
        out_ptr
        + b64 * out_batch
        + h64 * out_head
        + rows[:, None].to(tl.int64) * out_row
        + value_cols[None, :] * out_col,
        out.to(out_ptr.dtype.element_ty),
        mask=(rows[:, None] < query) & (value_cols[None, :] < value_dim),
    )
    tl.store(
        lse_ptr + (b64 * heads + h64) * query + rows,
        log_sum(m, total, IDENTITY),
        mask=rows < query,
    )


@triton.jit
def _step(
    start, q_block, k_ptr, v_ptr, k_row, k_col, v_row, v_col, m, total, acc, b, h, rows, kv,
    head_dim, value_dim, factor, mask_captured, score_captured, MASK: tl.constexpr,
    SCORE: tl.constexpr, IDENTITY: tl.constexpr, MASKED: tl.constexpr,
    WEIGHTS_SCALE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
    IMPRECISE: tl.constexpr,
):
    """One block of keys: scores, running maximum (in their units), rescale, P·V."""
    keys = start + tl.arange(0, BLOCK_K)
    seen = visible(b, h, rows, keys, kv, mask_captured, MASK, MASKED, BLOCK_Q, BLOCK_K)
    s = scores(
        q_block, k_ptr, k_row, k_col, head_dim, b, h, rows, keys, kv, seen, factor,
        score_captured, SCORE, IDENTITY, MASKED, BLOCK_D, PRECISION, IMPRECISE,
    )
    m_new = tl.maximum(m, tl.max(s, 1))
    # A row that has seen nothing keeps m = −inf; 0 stands in so that −inf − −inf never happens.
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = power(s - shift[:, None], IDENTITY)
    alpha = power(m - shift, IDENTITY)
    total = total * alpha + tl.sum(p, 1)
    acc = with_values(
        p, v_ptr, v_row, v_col, value_dim, keys, kv, seen, acc * alpha[:, None], MASKED, BLOCK_V,
        WEIGHTS_SCALE, PRECISION, IMPRECISE,
    )
    return m_new, total, acc


# fmt: on
