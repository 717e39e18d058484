"""Gradients of packed documents on the device: a program owns rows or keys of one document."""

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
from attncheck.kernels.tile import all_finite, key_rows, loaded, loaded_keys

__all__ = ["by_keys_kernel", "by_rows_kernel", "everything"]


@triton.jit
def everything(_b, _h, _rows, keys, _captured):
    """The mask that hides nothing."""
    return keys == keys  # noqa: PLR0124  # true of every key, in their shape


@triton.jit
def _owned(programs, query_starts, kv_starts):
    """The document of a program, its own first row or key there, and where the document is."""
    document = tl.load(programs + 2 * tl.program_id(0))
    first = tl.load(programs + 2 * tl.program_id(0) + 1)
    query_start = tl.load(query_starts + document)
    query = tl.load(query_starts + document + 1) - query_start
    kv_start = tl.load(kv_starts + document)
    kv = tl.load(kv_starts + document + 1) - kv_start
    return document, first, query_start.to(tl.int64), query, kv_start.to(tl.int64), kv


@triton.jit
def _known_as(document, places, LOCAL: tl.constexpr):
    """By which b, first q_idx and first kv_idx the mods know a document."""
    if LOCAL:
        b, first_q_idx, first_kv_idx = document, 0, 0
    else:
        b = tl.load(places + 3 * document)
        first_q_idx = tl.load(places + 3 * document + 1)
        first_kv_idx = tl.load(places + 3 * document + 2)
    return b, first_q_idx, first_kv_idx


@triton.jit
def _diagonal(query, kv, BOTTOM_RIGHT: tl.constexpr):
    """Of row i the last key that a causal flag shows is i plus that."""
    diagonal = 0
    if BOTTOM_RIGHT:
        diagonal = kv - query
    return diagonal


@triton.jit
def by_rows_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, again_ptr, q_row, q_head, q_col,
    k_row, k_head, k_col, v_row, v_head, v_col, dout_row, dout_head, dout_col, group, total_query,
    head_dim, value_dim, factor, scale, query_starts, kv_starts, places, programs, mask_captured,
    score_captured, slope_captured, MASK: tl.constexpr, SCORE: tl.constexpr, SLOPE: tl.constexpr,
    ALL: tl.constexpr, IDENTITY: tl.constexpr, CAUSAL: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    LOCAL: tl.constexpr, CAREFUL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):
    """Stores dQ of some rows of a document; CAREFUL, only what was not finite without it."""
    again = again_ptr + tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    if CAREFUL:  # noqa: SIM102  # of constants ``and`` skips nothing
        if tl.load(again) == 0:
            return
    document, first_row, query_start, query, kv_start, kv = _owned(
        programs, query_starts, kv_starts
    )
    b, first_q_idx, first_kv_idx = _known_as(document, places, LOCAL)
    h = tl.program_id(1)
    h64 = h.to(tl.int64)
    rows = first_row + tl.arange(0, BLOCK_Q)
    cols = tl.arange(0, BLOCK_D)
    q_ptr += query_start * q_row + h64 * q_head
    k_ptr += kv_start * k_row + (h64 // group) * k_head
    v_ptr += kv_start * v_row + (h64 // group) * v_head
    dout_ptr += query_start * dout_row + h64 * dout_head
    of_rows = h64 * total_query + query_start
    q_block = loaded(q_ptr, rows, cols, q_row, q_col, query, head_dim)
    dout = loaded(dout_ptr, rows, tl.arange(0, BLOCK_V), dout_row, dout_col, query, value_dim)
    lse = loaded_lse(lse_ptr + of_rows, rows, query, IDENTITY)
    delta = loaded_rows(delta_ptr + of_rows, rows, query)

    ragged = first_row + BLOCK_Q > query
    diagonal = _diagonal(query, kv, BOTTOM_RIGHT)
    end = kv
    if CAUSAL:
        end = tl.minimum(kv, first_row + BLOCK_Q + diagonal)  # below 0 where no row sees a key
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for start in range(0, end, BLOCK_K):
        partial = may_hide(True, start, kv, ragged, False, ALL, BLOCK_K)
        keys = start + tl.arange(0, BLOCK_K)
        k_at = key_rows(keys, kv, k_row, 0, k_ptr, 0)
        k_block = loaded_keys(k_ptr, k_at, k_col, keys, kv, head_dim, BLOCK_D)
        v_at = key_rows(keys, kv, v_row, 0, v_ptr, 0)
        v_block = loaded_keys(v_ptr, v_at, v_col, keys, kv, value_dim, BLOCK_V)
        q_idx = (first_q_idx + rows)[:, None]
        kv_idx = (first_kv_idx + keys)[None, :]
        x = tl.dot(q_block, k_block, input_precision=PRECISION) * factor
        p = weights(
            x, partial, b, h, q_idx, kv_idx, first_q_idx + query, first_kv_idx + kv,
            lse[:, None], mask_captured, score_captured, MASK, SCORE, IDENTITY,
        )
        if CAUSAL:
            p = tl.where(keys[None, :] <= rows[:, None] + diagonal, p, 0.0)
        dp = tl.dot(dout, v_block, input_precision=PRECISION)
        dx = score_gradients(
            x, p, dp, delta[:, None], b, h, q_idx, kv_idx, slope_captured, SLOPE, IDENTITY
        )
        acc = row_gradients(dx, k_block, acc, CAREFUL, PRECISION)
    if not CAREFUL:
        tl.store(again, 1 - all_finite(acc).to(tl.int32))
    # Heads of a row lie one after the other in dQ.
    at = (query_start + rows[:, None]) * tl.num_programs(1) + h
    kept = (rows[:, None] < query) & (cols[None, :] < head_dim)
    tl.store(
        dq_ptr + at * head_dim + cols[None, :], (acc * scale).to(dq_ptr.dtype.element_ty), mask=kept
    )


@triton.jit
def by_keys_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, q_row, q_head, q_col, k_row,
    k_head, k_col, v_row, v_head, v_col, dout_row, dout_head, dout_col, group, total_query,
    head_dim, value_dim, factor, scale, query_starts, kv_starts, places, programs, mask_captured,
    score_captured, slope_captured, MASK: tl.constexpr, SCORE: tl.constexpr, SLOPE: tl.constexpr,
    ALL: tl.constexpr, IDENTITY: tl.constexpr, CAUSAL: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    LOCAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):
    """Stores dK and dV of some keys of a document, summed over the heads that share them."""
    document, first_key, query_start, query, kv_start, kv = _owned(
        programs, query_starts, kv_starts
    )
    b, first_q_idx, first_kv_idx = _known_as(document, places, LOCAL)
    kv_head = tl.program_id(1)
    keys = first_key + tl.arange(0, BLOCK_K)
    kv_idx = (first_kv_idx + keys)[:, None]
    cols = tl.arange(0, BLOCK_D)
    value_cols = tl.arange(0, BLOCK_V)
    k_ptr += kv_start * k_row + kv_head.to(tl.int64) * k_head
    v_ptr += kv_start * v_row + kv_head.to(tl.int64) * v_head
    k_block = loaded(k_ptr, keys, cols, k_row, k_col, kv, head_dim)
    v_block = loaded(v_ptr, keys, value_cols, v_row, v_col, kv, value_dim)

    ragged = first_key + BLOCK_K > kv
    diagonal = _diagonal(query, kv, BOTTOM_RIGHT)
    begin = 0
    if CAUSAL:  # the first row that sees a key
        begin = tl.maximum(0, first_key - diagonal) // BLOCK_Q * BLOCK_Q
    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    for member in range(group):
        h = kv_head * group + member
        h64 = h.to(tl.int64)
        of_rows = h64 * total_query + query_start
        of_head = q_ptr + query_start * q_row + h64 * q_head
        dout_of_head = dout_ptr + query_start * dout_row + h64 * dout_head
        for start in range(begin, query, BLOCK_Q):
            partial = may_hide(True, start, query, ragged, False, ALL, BLOCK_Q)
            rows = start + tl.arange(0, BLOCK_Q)
            q_idx = (first_q_idx + rows)[None, :]
            q_block = loaded(of_head, rows, cols, q_row, q_col, query, head_dim)
            dout = loaded(dout_of_head, rows, value_cols, dout_row, dout_col, query, value_dim)
            lse = loaded_lse(lse_ptr + of_rows, rows, query, IDENTITY)
            delta = loaded_rows(delta_ptr + of_rows, rows, query)
            # All of a tile is keys by rows, so that no product's result is transposed.
            x = tl.dot(k_block, tl.trans(q_block), input_precision=PRECISION) * factor
            p = weights(
                x, partial, b, h, q_idx, kv_idx, first_q_idx + query, first_kv_idx + kv,
                lse[None, :], mask_captured, score_captured, MASK, SCORE, IDENTITY,
            )
            if CAUSAL:
                p = tl.where(keys[:, None] <= rows[None, :] + diagonal, p, 0.0)
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
            dp = tl.dot(v_block, tl.trans(dout), input_precision=PRECISION)
            dx = score_gradients(
                x, p, dp, delta[None, :], b, h, q_idx, kv_idx, slope_captured, SLOPE, IDENTITY
            ).to(q_block.dtype)
            dk = tl.dot(dx, q_block, dk, input_precision=PRECISION)

    # Heads of a key lie one after the other in dK and dV.
    at = (kv_start + keys[:, None]) * tl.num_programs(1) + kv_head
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
