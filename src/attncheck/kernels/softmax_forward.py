"""Row softmax in Triton: naive, safe, online, and online over tiles of rows and columns.

Safe is the three-pass softmax (maximum, sum, write), online the one with a running maximum and sum
(Milakov and Gimelshein 2018, arXiv:1805.02867, Algorithm 3). A row that fits one block is read once
and stays in registers; then all kinds but naive are the same, since nothing needs rescaling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# The start of a running maximum: finite, so that −inf − m is −inf even in a row of −inf alone.
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_VECTOR = 16  # Bytes of a thread's widest load and store.


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Compile-time choices of one launch."""

    # block_rows, block_columns: tile sizes, powers of two. A row of at most ``block_columns`` is
    # read once.
    block_rows: int = 1
    block_columns: int
    warps: int = 4
    # Tiles of a row in flight at once, through shared memory; with 1 a tile is loaded when it is
    # needed, through registers and the first-level cache.
    stages: int = 1
    # Whether rows that do not start on a 16-byte boundary are read and written in vectors from
    # their first boundary to their last one, and their two ends separately.
    aligned: bool = True


def softmax(x: torch.Tensor, kind: str, launch: Launch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the softmax of ``x`` over its last axis, and its log-sum-exp.

    Arithmetic is in fp32: exp(x − m), summed before it is rounded to x's dtype, times the
    reciprocal of the sum; naive is exp(x) divided by the sum.

    Args:
        x: ``(rows, columns)`` or ``(batch, heads, query, kv)`` in fp32, fp16 or bf16, any strides.
        kind: A name of ``KINDS``.

    Returns:
        out, contiguous, of x's shape and dtype, and the natural-log LSE of each row in fp32. A row
        of −inf alone gives 0 and −inf; a row with a NaN or +inf is NaN throughout, LSE included.
        Naive differs: a row of −inf alone gives NaN (0/0) and −inf. Logits from 88.7 on overflow
        exp and give NaN, 0 elsewhere in the row and an LSE of inf; where only the sum overflows,
        out is 0 throughout and LSE inf. Below −87.3 exp is subnormal, which is 0 on a GPU.
    """
    rows = x if x.dim() == 4 else x[None, None]
    batch, heads, query, columns = rows.shape
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    lse = torch.empty(rows.shape[:3], dtype=torch.float32, device=x.device)
    align, ends = _alignment(rows, out, aligned=launch.aligned)
    grid = (triton.cdiv(batch * heads * query, launch.block_rows),)
    # fmt: off
    _softmax[grid](
        rows, out, lse, *rows.stride(), heads, query, batch * heads * query, columns,
        STATISTICS=KINDS[kind], NAIVE=kind == "naive", ONE_BLOCK=launch.block_columns >= columns,
        FLAT=_is_flat(rows), UNIT=rows.stride(3) == 1, ALIGN=align, ENDS=ends,
        BLOCK_R=launch.block_rows, BLOCK_C=launch.block_columns,
        STAGES=launch.stages, num_warps=launch.warps,
    )
    # fmt: on
    return out.view(x.shape), lse.view(x.shape[:-1])


def _is_flat(x: torch.Tensor) -> bool:
    """Return whether one stride leads from each row to the next."""
    (_, heads, query, _), (b, h, q, _) = x.shape, x.stride()
    return (heads == 1 or h == query * q) and (x.shape[0] == 1 or b == heads * query * q)


def _alignment(x: torch.Tensor, out: torch.Tensor, *, aligned: bool) -> tuple[int, bool]:
    """Return the elements of a vector, and whether rows begin or end inside of a vector.

    A vector is one element where x's rows are offset from 16-byte boundaries otherwise than out's.
    """
    vector = _VECTOR // x.element_size()
    if x.stride(3) != 1 or x.data_ptr() % _VECTOR or out.data_ptr() % _VECTOR:
        return 1, False
    strides = [(x.stride(i), out.stride(i)) for i in range(3) if x.shape[i] > 1]
    if x.shape[3] % vector == 0 and all(s % vector == 0 for s, _ in strides):
        return vector, False
    if aligned and all((s - o) % vector == 0 for s, o in strides):
        return vector, True
    return 1, False


# Thirty parameters are easier to read on five lines than in a column.
# fmt: off
@triton.jit(do_not_specialize=["x_batch", "x_head", "x_row", "heads", "query", "rows", "columns"])
def _softmax(
    x_ptr, out_ptr, lse_ptr, x_batch, x_head, x_row, x_col, heads, query, rows, columns,
    STATISTICS: tl.constexpr, NAIVE: tl.constexpr, ONE_BLOCK: tl.constexpr, FLAT: tl.constexpr,
    UNIT: tl.constexpr, ALIGN: tl.constexpr, ENDS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = (row < rows)[:, None]
    # 64-bit: rows · columns passes 2^31 in ordinary use.
    row64 = row.to(tl.int64)[:, None]
    x_at = row64 * x_row
    if not FLAT:
        x_at = row64 // query // heads * x_batch + row64 // query % heads * x_head
        x_at += row64 % query * x_row
    out_at = row64 * columns
    # From here on columns count from the row's first 16-byte boundary. Without ENDS the divisions
    # change nothing, but show the compiler that offsets and lengths are multiples of a vector.
    x_start = (x_at + (ALIGN - 1)) // ALIGN * ALIGN
    out_start = (out_at + (ALIGN - 1)) // ALIGN * ALIGN
    length = (x_at + columns) // ALIGN * ALIGN - x_start
    length = tl.where(inside & (length > 0), length, 0).to(tl.int32)
    x_rows = x_ptr + x_start
    out_rows = out_ptr + out_start
    tiles = tl.cdiv(columns, BLOCK_C)

    ends = tl.full([BLOCK_R, 1], float("-inf"), tl.float32)
    if ENDS:
        end = tl.arange(0, 2 * ALIGN)[None, :]
        end = tl.where(end < ALIGN, end - ALIGN, length + end - ALIGN)
        first = (x_at - x_start).to(tl.int32)
        end_inside = inside & (end >= first) & (end < first + columns)
        ends = tl.load(x_rows + end, mask=end_inside, other=float("-inf")).to(tl.float32)

    if ONE_BLOCK:
        x = _read(x_rows, 0, length, x_col, UNIT, BLOCK_C, "evict_first")
        if NAIVE:
            m = tl.zeros([BLOCK_R], tl.float32)
        else:
            m = tl.maximum(tl.maximum(tl.max(x, 1), tl.max(ends, 1)), _LOWEST)
        weights = _exp(x - m[:, None])
        total = tl.sum(weights, 1) + tl.sum(_exp(ends - m[:, None]), 1)
        weights = _normalised(weights, total, NAIVE)
        _write(out_rows, 0, length, weights, BLOCK_C)
    else:
        m, total = STATISTICS(
            x_rows, ends, length, x_col, tiles, UNIT, BLOCK_R, BLOCK_C, STAGES
        )
        for tile in tl.range(tiles, num_stages=STAGES):
            x = _read(x_rows, tile * BLOCK_C, length, x_col, UNIT, BLOCK_C, "evict_first")
            weights = _normalised(_exp(x - m[:, None]), total, NAIVE)
            _write(out_rows, tile * BLOCK_C, length, weights, BLOCK_C)
    if ENDS:
        weights = _normalised(_exp(ends - m[:, None]), total, NAIVE)
        tl.store(out_rows + end, weights.to(out_ptr.dtype.element_ty), mask=end_inside)
    lse = tl.where(total == 0.0, float("-inf"), m + tl.log(total))
    tl.store(lse_ptr + row, lse, mask=row < rows)


@triton.jit
def _exp(z):
    return tl.exp2(z * 1.4426950408889634)


@triton.jit
def _read(
    x_rows, start, length, x_col, UNIT: tl.constexpr, BLOCK_C: tl.constexpr, KEEP: tl.constexpr
):
    cols = start + tl.arange(0, BLOCK_C)[None, :]
    place = cols
    if not UNIT:
        place = cols.to(tl.int64) * x_col
    seen = cols < length
    x = tl.load(x_rows + place, mask=seen, other=float("-inf"), eviction_policy=KEEP)
    return x.to(tl.float32)


@triton.jit
def _write(out_rows, start, length, weights, BLOCK_C: tl.constexpr):
    cols = start + tl.arange(0, BLOCK_C)[None, :]
    weights = weights.to(out_rows.dtype.element_ty)
    tl.store(out_rows + cols, weights, mask=cols < length, eviction_policy="evict_first")


@triton.jit
def _normalised(weights, total, NAIVE: tl.constexpr):
    if NAIVE:
        # The reciprocal of a subnormal sum would be infinite.
        return weights / total[:, None]
    return weights * tl.where(total == 0.0, 0.0, 1.0 / total)[:, None]


@triton.jit
def _naive(
    x_rows, ends, length, x_col, tiles, UNIT: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):
    """Return a maximum of 0 and the sum of exponentials; each lane adds up its own columns."""
    lanes = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for back in tl.range(tiles, num_stages=STAGES):
        start = (tiles - 1 - back) * BLOCK_C
        lanes += _exp(_read(x_rows, start, length, x_col, UNIT, BLOCK_C, "evict_last"))
    m = tl.zeros([BLOCK_R], tl.float32)
    return m, tl.sum(lanes, 1) + tl.sum(_exp(ends), 1)


@triton.jit
def _safe(
    x_rows, ends, length, x_col, tiles, UNIT: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):
    """Return maximum and sum, in a pass for each, each lane over its own columns.

    tl.max drops NaN; the sum is NaN nevertheless, through exp(NaN − m).
    """
    lanes = tl.full([BLOCK_R, BLOCK_C], _LOWEST, tl.float32)
    for tile in tl.range(tiles, num_stages=STAGES):
        x = _read(x_rows, tile * BLOCK_C, length, x_col, UNIT, BLOCK_C, "evict_last")
        lanes = tl.maximum(lanes, x)
    m = tl.maximum(tl.max(lanes, 1), tl.max(ends, 1))
    lanes = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    # Backwards, since the last tiles are still in the cache. The write goes forwards again.
    for back in tl.range(tiles, num_stages=STAGES):
        start = (tiles - 1 - back) * BLOCK_C
        x = _read(x_rows, start, length, x_col, UNIT, BLOCK_C, "evict_last")
        lanes += _exp(x - m[:, None])
    return m, tl.sum(lanes, 1) + tl.sum(_exp(ends - m[:, None]), 1)


@triton.jit
def _online(
    x_rows, ends, length, x_col, tiles, UNIT: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):
    """Return maximum and sum, merged at the end from a running maximum and sum in each lane.

    Of the two exponentials of a step, exp(m − m') and exp(x − m'), one is always 1.
    """
    lane_m = tl.full([BLOCK_R, BLOCK_C], _LOWEST, tl.float32)
    lanes = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for back in tl.range(tiles, num_stages=STAGES):
        start = (tiles - 1 - back) * BLOCK_C
        x = _read(x_rows, start, length, x_col, UNIT, BLOCK_C, "evict_last")
        smaller = _exp(-tl.abs(x - lane_m))
        lanes = tl.where(x > lane_m, lanes * smaller + 1.0, lanes + smaller)
        lane_m = tl.maximum(lane_m, x)
    m = tl.maximum(tl.max(lane_m, 1), tl.max(ends, 1))
    total = tl.sum(lanes * _exp(lane_m - m[:, None]), 1)
    return m, total + tl.sum(_exp(ends - m[:, None]), 1)


@triton.jit
def _blocked(
    x_rows, ends, length, x_col, tiles, UNIT: tl.constexpr,
    BLOCK_R: tl.constexpr,  # noqa: ARG001  # all kinds have the same signature
    BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):
    """Return maximum and sum of each row, updated once per tile."""
    m = tl.maximum(tl.max(ends, 1), _LOWEST)
    total = tl.sum(_exp(ends - m[:, None]), 1)
    for back in tl.range(tiles, num_stages=STAGES):
        start = (tiles - 1 - back) * BLOCK_C
        x = _read(x_rows, start, length, x_col, UNIT, BLOCK_C, "evict_last")
        m_new = tl.maximum(m, tl.max(x, 1))
        total = total * _exp(m - m_new) + tl.sum(_exp(x - m_new[:, None]), 1)
        m = m_new
    return m, total


# fmt: on
KINDS = {"naive": _naive, "safe": _safe, "online": _online, "blocked": _blocked}
