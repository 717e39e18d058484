"""dK and dV on the device: a program owns a block of keys and walks over blocks of query rows."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The body of a Triton function is another language: its arguments have no Python types.
# A column of forty names says less than five lines of them.
# fmt: off

from __future__ import annotations

import triton
import triton.language as tl

from attncheck.kernels.gradient_tile import (
    loaded_lse,
    loaded_rows,
    may_hide,
    score_gradients,
    weights,
)
from attncheck.kernels.tile import listed, loaded, run_of

__all__ = ["by_keys_kernel"]


@triton.jit
def by_keys_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, dq, q_batch, q_head, q_row,
    q_col, k_batch, k_head, k_row, k_col, v_batch, v_head, v_row, v_col, dout_batch, dout_head,
    dout_row, dout_col, heads, group, query, kv, head_dim, value_dim, factor, scale, tiles,
    mask_captured, score_captured, slope_captured, MASK: tl.constexpr, SCORE: tl.constexpr,
    SLOPE: tl.constexpr, IDENTITY: tl.constexpr, LISTED: tl.constexpr, FREE: tl.constexpr,
    ATOMIC: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):
    """Stores dK and dV of a block of keys; adds to ``dq``, if ATOMIC, what they give its rows."""
    block = tl.program_id(0)
    b = tl.program_id(1) // (heads // group)
    kv_head = tl.program_id(1) % (heads // group)
    keys = block * BLOCK_K + tl.arange(0, BLOCK_K)
    cols = tl.arange(0, BLOCK_D)
    value_cols = tl.arange(0, BLOCK_V)
    b64 = b.to(tl.int64)
    k_ptr += b64 * k_batch + kv_head.to(tl.int64) * k_head
    v_ptr += b64 * v_batch + kv_head.to(tl.int64) * v_head
    k_block = loaded(k_ptr, keys, cols, k_row, k_col, kv, head_dim)
    v_block = loaded(v_ptr, keys, value_cols, v_row, v_col, kv, value_dim)

    ragged = (block + 1) * BLOCK_K > kv
    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    for member in range(group):
        h = kv_head * group + member
        h64 = h.to(tl.int64)
        first = (b64 * heads + h64) * query
        of_head = q_ptr + b64 * q_batch + h64 * q_head
        dout_of_head = dout_ptr + b64 * dout_batch + h64 * dout_head
        visits = q_ptr
        runs = 1
        if LISTED:
            visits, runs = listed(tiles, b, h, block)
        for run in range(runs):
            first_tile, beyond, of_run = run_of(visits, run, tl.cdiv(query, BLOCK_Q), LISTED)
            for tile in range(first_tile, beyond):
                start = tile * BLOCK_Q
                partial = may_hide(of_run, start, query, ragged, LISTED, FREE, BLOCK_Q)
                rows = start + tl.arange(0, BLOCK_Q)
                q_block = loaded(of_head, rows, cols, q_row, q_col, query, head_dim)
                dout = loaded(
                    dout_of_head, rows, value_cols, dout_row, dout_col, query, value_dim
                )
                lse = loaded_lse(lse_ptr + first, rows, query, IDENTITY)
                delta = loaded_rows(delta_ptr + first, rows, query)
                # All of a tile is keys by rows, so that no product's result is transposed.
                x = tl.dot(k_block, tl.trans(q_block), input_precision=PRECISION) * factor
                p = weights(
                    x, partial, b, h, rows[None, :], keys[:, None], query, kv, lse[None, :],
                    mask_captured, score_captured, MASK, SCORE, IDENTITY,
                )
                dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
                dp = tl.dot(v_block, tl.trans(dout), input_precision=PRECISION)
                dx = score_gradients(
                    x, p, dp, delta[None, :], b, h, rows[None, :], keys[:, None], slope_captured,
                    SLOPE, IDENTITY,
                ).to(q_block.dtype)
                dk = tl.dot(dx, q_block, dk, input_precision=PRECISION)
                if ATOMIC:
                    # Transposed too, for the same reason; fp32, rows one after the other.
                    of_rows = tl.dot(tl.trans(k_block), dx, input_precision=PRECISION)
                    at = (first + rows[None, :].to(tl.int64)) * head_dim + cols[:, None]
                    there = (rows[None, :] < query) & (cols[:, None] < head_dim)
                    tl.atomic_add(dq[0] + at, of_rows, mask=there, sem="relaxed")

    # Keys lie one after the other in dK and dV.
    at = tl.program_id(1).to(tl.int64) * kv + keys[:, None].to(tl.int64)
    inside = keys[:, None] < kv
    tl.store(
        dk_ptr + at * head_dim + cols[None, :],
        (dk * scale).to(dk_ptr.dtype.element_ty),
        mask=inside & (cols[None, :] < head_dim),
    )
    tl.store(
        dv_ptr + at * value_dim + value_cols[None, :],
        dv.to(dv_ptr.dtype.element_ty),
        mask=inside & (value_cols[None, :] < value_dim),
    )


# fmt: on
