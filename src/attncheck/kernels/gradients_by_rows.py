"""dQ on the device: a program owns a block of query rows and walks over blocks of keys."""

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
    row_gradients,
    score_gradients,
    weights,
)
from attncheck.kernels.tile import all_finite, key_rows, listed, loaded, loaded_keys, run_of

__all__ = ["by_rows_kernel"]


@triton.jit
def by_rows_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, again_ptr, q_batch, q_head, q_row,
    q_col, k_batch, k_head, k_row, k_col, v_batch, v_head, v_row, v_col, dout_batch, dout_head,
    dout_row, dout_col, heads, group, query, kv, head_dim, value_dim, factor, scale, tiles,
    mask_captured, score_captured, slope_captured, terms, MASK: tl.constexpr, SCORE: tl.constexpr,
    SLOPE: tl.constexpr, TERMS: tl.constexpr, IDENTITY: tl.constexpr, LISTED: tl.constexpr,
    FREE: tl.constexpr, CAREFUL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):
    """Stores dQ of a block of rows; CAREFUL, only of one that was not finite without it.

    ``TERMS``, of ``CapturedReads``, adds what each tile gives the numbers that the score mod reads;
    None adds nothing.
    """
    again = again_ptr + tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    if CAREFUL:  # noqa: SIM102  # of constants ``and`` skips nothing
        if tl.load(again) == 0:
            return
    # The last block first: under a causal mask it is the longest, and the short ones fill the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    b = tl.program_id(1) // heads
    h = tl.program_id(1) % heads
    rows = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    cols = tl.arange(0, BLOCK_D)
    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)
    q_ptr += b64 * q_batch + h64 * q_head
    k_ptr += b64 * k_batch + (h64 // group) * k_head
    v_ptr += b64 * v_batch + (h64 // group) * v_head
    dout_ptr += b64 * dout_batch + h64 * dout_head
    first = tl.program_id(1).to(tl.int64) * query
    q_block = loaded(q_ptr, rows, cols, q_row, q_col, query, head_dim)
    dout = loaded(dout_ptr, rows, tl.arange(0, BLOCK_V), dout_row, dout_col, query, value_dim)
    lse = loaded_lse(lse_ptr + first, rows, query, IDENTITY)
    delta = loaded_rows(delta_ptr + first, rows, query)
    visits = q_ptr
    runs = 1
    if LISTED:
        visits, runs = listed(tiles, b, h, block)

    ragged = (block + 1) * BLOCK_Q > query
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for run in range(runs):
        first_tile, beyond, of_run = run_of(visits, run, tl.cdiv(kv, BLOCK_K), LISTED)
        for tile in range(first_tile, beyond):
            start = tile * BLOCK_K
            partial = may_hide(of_run, start, kv, ragged, LISTED, FREE, BLOCK_K)
            keys = start + tl.arange(0, BLOCK_K)
            k_at = key_rows(keys, kv, k_row, 0, k_ptr, 0)
            k_block = loaded_keys(k_ptr, k_at, k_col, keys, kv, head_dim, BLOCK_D)
            v_at = key_rows(keys, kv, v_row, 0, v_ptr, 0)
            v_block = loaded_keys(v_ptr, v_at, v_col, keys, kv, value_dim, BLOCK_V)
            x = tl.dot(q_block, k_block, input_precision=PRECISION) * factor
            p = weights(
                x, partial, b, h, rows[:, None], keys[None, :], query, kv, lse[:, None],
                mask_captured, score_captured, MASK, SCORE, IDENTITY,
            )
            dp = tl.dot(dout, v_block, input_precision=PRECISION)
            dx = score_gradients(
                x, p, dp, delta[:, None], b, h, rows[:, None], keys[None, :], slope_captured,
                SLOPE, IDENTITY,
            )
            if TERMS is not None:
                TERMS(x, p, dp, delta[:, None], b, h, rows[:, None], keys[None, :], terms)
            acc = row_gradients(dx, k_block, acc, CAREFUL, PRECISION)
    if not FREE and not CAREFUL:
        tl.store(again, 1 - all_finite(acc).to(tl.int32))
    # Rows lie one after the other in dQ.
    at = (first + rows[:, None].to(tl.int64)) * head_dim + cols[None, :]
    kept = (rows[:, None] < query) & (cols[None, :] < head_dim)
    tl.store(dq_ptr + at, (acc * scale).to(dq_ptr.dtype.element_ty), mask=kept)


# fmt: on
