"""FlashAttention-1 forward in Triton, for any mask and score mod.

The recurrence is Dao et al. 2022 (arXiv:2205.14135), Algorithm 1: key blocks outermost. There is
one launch per key block. Each of its programs owns a block of query rows, reads their O, l and m
from memory, updates them by the block of keys, and writes them back. O is normalised after each
step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attncheck.inputs.input_tensors import Descale
from attncheck.kernels.compilation import sound_assembler
from attncheck.kernels.launch import COUNTS, LOG2E, Launch, block_dim, scales
from attncheck.kernels.tile import (
    factor_of,
    hidden,
    key_rows,
    loaded,
    loaded_keys,
    loaded_values,
    log_sum,
    power,
    scores,
    visible,
    with_values,
)
from attncheck.mods.to_triton import TritonMod


def flash1_forward(
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
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of ``q`` over ``k`` and ``v``, and its log-sum-exp.

    Between the launches O ``(batch, heads, query, value_dim)``, l and m ``(batch, heads, query)``
    are in memory, in fp32; m in log2 units, or natural with a score mod, and O in units of
    weights_scale / v's descale.

    Other arguments are as in ``flash2_forward``.

    Args:
        k: ``(batch, kv_heads, kv, head_dim)``; kv_heads divides heads.
        v: ``(batch, kv_heads, kv, value_dim)``.
        launch: Compile-time choices; ``free`` has no effect.

    Returns:
        As ``flash2_forward``. A row that sees an infinite value may also be NaN where a much larger
        score of another block makes the weight of its block 0.
    """
    batch, heads, query, head_dim = q.shape
    kv_heads, kv = k.shape[1], k.shape[2]
    value_dim = v.shape[3]
    shape = (batch, heads, query, value_dim)
    out = torch.empty(shape, dtype=out_dtype or q.dtype, device=q.device)
    lse = torch.empty(shape[:3], dtype=torch.float32, device=q.device)
    state = torch.zeros(shape, dtype=torch.float32, device=q.device)
    identity = score is None
    m, total = _initial_state(shape[:3], sink, LOG2E if identity else 1.0, q.device)
    grid = (triton.cdiv(query, launch.block_query), batch * heads)
    for start in range(0, kv, launch.block_kv):
        # fmt: off
        with sound_assembler(q.device.type):
            _step[grid](
                start, q, k, v, out, lse, state, total, m, *q.stride(), *k.stride(), *v.stride(),
                heads, heads // kv_heads, query, kv, head_dim, value_dim,
                scale * LOG2E if identity else scale, scales(descale), mask.captured,
                () if score is None else score.captured, MASK=mask.function,
                SCORE=mask.function if score is None else score.function, IDENTITY=identity,
                CAUSAL=launch.causal, SCALED=descale is not None,
                WEIGHTS_SCALE=launch.weights_scale, BLOCK_Q=launch.block_query,
                BLOCK_K=launch.block_kv, BLOCK_D=block_dim(head_dim, q.dtype),
                BLOCK_V=block_dim(value_dim, v.dtype), PRECISION=launch.precision,
                IMPRECISE=launch.max_num_imprecise_acc, num_warps=launch.warps,
                num_stages=launch.stages,
            )
        # fmt: on
    return out, lse


def _initial_state(
    shape: tuple[int, ...], sink: torch.Tensor | None, unit: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return maximum and sum ``(batch, heads, query)`` of rows that have seen only the sink."""
    total = torch.full(shape, 0.0 if sink is None else 1.0, dtype=torch.float32, device=device)
    m = torch.full(shape, float("-inf"), dtype=torch.float32, device=device)
    if sink is not None:
        m.copy_((sink * unit)[:, None])
    return m, total


# Forty parameters are easier to read on five lines than in a column.
# fmt: off
@triton.jit(do_not_specialize=COUNTS)
def _step(
    start, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, state_ptr, total_ptr, m_ptr, q_batch, q_head,
    q_row, q_col, k_batch, k_head, k_row, k_col, v_batch, v_head, v_row, v_col, heads, group,
    query, kv, head_dim, value_dim, factor, descale, mask_captured, score_captured,
    MASK: tl.constexpr, SCORE: tl.constexpr, IDENTITY: tl.constexpr, CAUSAL: tl.constexpr,
    SCALED: tl.constexpr, WEIGHTS_SCALE: tl.constexpr, BLOCK_Q: tl.constexpr,
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
    row_at = (b64 * heads + h64) * query + rows
    at = row_at[:, None] * value_dim + value_cols[None, :]
    here = rows < query
    inside = here[:, None] & (value_cols[None, :] < value_dim)
    kv_head = tl.program_id(1) // group  # group divides heads

    m = tl.load(m_ptr + row_at, mask=here, other=float("-inf"))
    total = tl.load(total_ptr + row_at, mask=here, other=0.0)
    end = kv
    if CAUSAL:
        end = tl.minimum(kv, first_row + BLOCK_Q)
    if start < end:
        q_ptr += b64 * q_batch + h64 * q_head
        q_block = loaded(q_ptr, rows, tl.arange(0, BLOCK_D), q_row, q_col, query, head_dim)
        k_ptr += b64 * k_batch + (h64 // group) * k_head
        v_ptr += b64 * v_batch + (h64 // group) * v_head
        keys = start + tl.arange(0, BLOCK_K)
        k_at = key_rows(keys, kv, k_row, 0, k_ptr, 0)
        k_block = loaded_keys(k_ptr, k_at, k_col, keys, kv, head_dim, BLOCK_D)
        v_at = key_rows(keys, kv, v_row, 0, v_ptr, 0)
        v_block = loaded_values(v_ptr, v_at, v_col, keys, kv, value_dim, BLOCK_V)
        seen = visible(b, h, rows, keys, kv, mask_captured, MASK, BLOCK_Q, BLOCK_K)
        s = hidden(
            scores(
                q_block, k_block, b, h, rows, keys, factor_of(factor, descale, kv_head, SCALED),
                score_captured, SCORE, IDENTITY, PRECISION, IMPRECISE,
            ),
            seen,
        )
        # Line 10: this block's own maximum, weights and sum. 0 stands in for a maximum of −inf.
        m_block = tl.max(s, 1)
        p = power(s - tl.where(m_block == float("-inf"), 0.0, m_block)[:, None], IDENTITY)
        product = with_values(
            p, v_block, seen, tl.zeros([BLOCK_Q, BLOCK_V], tl.float32), True, WEIGHTS_SCALE,
            PRECISION, IMPRECISE,
        )
        # Line 11: the new maximum and sum; line 12: O, normalised.
        m_new = tl.maximum(m, m_block)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        old_total = total * power(m - shift, IDENTITY)
        beta = power(m_block - shift, IDENTITY)
        total = old_total + beta * tl.sum(p, 1)
        divisor = tl.where(total == 0.0, 1.0, total)[:, None]
        state = tl.load(state_ptr + at, mask=inside, other=0.0)
        state = (old_total[:, None] * state + beta[:, None] * product) / divisor
        m = m_new
        tl.store(m_ptr + row_at, m, mask=here)
        tl.store(total_ptr + row_at, total, mask=here)
        tl.store(state_ptr + at, state, mask=inside)
    else:
        state = tl.load(state_ptr + at, mask=inside, other=0.0)
    if start + BLOCK_K >= kv:
        if SCALED:
            state = state * (tl.load(descale[2] + kv_head) / WEIGHTS_SCALE)
        tl.store(out_ptr + at, state.to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(lse_ptr + row_at, log_sum(m, total, IDENTITY), mask=here)


# fmt: on
