"""Decoding in Triton: few query rows over many keys, in splits, for any mask and score mod.

Flash-Decoding (Dao et al. 2023): the keys are cut into splits, so that one sequence fills a GPU. A
program takes the rows of all query heads that read one kv head, so that each key is loaded once for
all of them, and walks over a split's keys as FlashAttention-2 does (Dao 2023, arXiv:2307.08691,
Algorithm 1). Groups of neighbouring splits are added up like blocks of keys: maximum, row sum and
Σ weight · v. A second launch merges the groups by LSE: out = Σ e^LSE_i out_i / Σ e^LSE_i,
LSE = ln Σ e^LSE_i.

With few sequences each program does one split, and the merge adds the splits up; with many, one
program does all splits of a group, and stores one result. Both give the same bits: see ``added``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attncheck.inputs.input_tensors import Descale
from attncheck.kernels.compilation import multiprocessors, on_hopper, sound_assembler
from attncheck.kernels.launch import COUNTS, LOG2E, KernelPages, Launch, block_dim, scales
from attncheck.kernels.tile import (
    all_finite,
    factor_of,
    hidden,
    key_rows,
    loaded_keys,
    loaded_values,
    log_sum,
    normalised,
    power,
    scores,
    started,
    update_softmax,
    visible,
    with_values,
)
from attncheck.mods.to_triton import TritonMod

_MERGED_VALUES = 1024  # Most values of a row that one warp merges at a time.
_SMALLEST_PAGE: tl.constexpr = tl.constexpr(16)  # Keys of the smallest page looked up by a scalar.


def decode_forward(
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
    pages: KernelPages | None = None,
    kv: int | None = None,
    whole: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of ``q`` over ``k`` and ``v``, and its log-sum-exp.

    The query·group rows that read a kv head are packed: row r is query r // group of head
    kv_head · group + r % group. Split s of S, of which there are at most as many as key blocks,
    has the blocks from blocks·s // S to before blocks·(s + 1) // S.

    Between the launches the programs' results are in memory, in fp32: out
    ``(parts, batch, heads, query, value_dim)`` and natural LSE ``(parts, batch, heads, query)``;
    or, where splits are added up, Σ weight · v, maxima (in units of ``tile.scores``) and row sums.

    Other arguments are as in ``flash2_forward``.

    Args:
        v: ``(batch, kv_heads, kv, value_dim)``, or as k with ``pages``.
        launch: Compile-time choices, with ``splits`` and ``together``. ``block_query`` counts
            packed rows, one block per program; ``causal`` has no effect.
        whole: Number of keys, from the first on, that every row sees: there no mask is evaluated.

    Returns:
        As ``flash2_forward``. A row that sees an infinite value may also be NaN where a much larger
        score of another split makes the weight of the infinite sum 0.
    """
    batch, heads, query, head_dim = q.shape
    kv_heads, kv = k.shape[1], k.shape[2] if kv is None else kv
    value_dim, group = v.shape[3], heads // kv_heads
    rows = batch * heads * query
    splits = min(launch.splits, triton.cdiv(kv, launch.block_kv))  # none is empty
    blocks = batch * triton.cdiv(query * group, launch.block_query)
    programs = kv_heads * triton.cdiv(splits, launch.together) * blocks
    # One split per program where otherwise half of the multiprocessors would be idle.
    together = launch.together if 2 * programs > multiprocessors(q.device) else 1
    parts = triton.cdiv(splits, together)
    merged, columns = (
        int(triton.next_power_of_2(n)) for n in (triton.cdiv(splits, launch.together), value_dim)
    )
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    part = torch.empty((parts, rows, value_dim), **fp32)
    part_m, part_total = (torch.empty((parts, rows), **fp32) for _ in range(2))
    shape = (batch, heads, query)
    out = torch.empty((*shape, value_dim), dtype=out_dtype or q.dtype, device=q.device)
    lse = torch.empty(shape, **fp32)
    identity = score is None
    # Programs of the merge start while the last splits run, and wait for them (PDL).
    early = {"launch_pdl": True} if on_hopper(q.device) else {}
    # Heads vary fastest: a page holds their keys side by side.
    grid = (kv_heads * parts, batch, triton.cdiv(query * group, launch.block_query))
    # fmt: off
    with sound_assembler(q.device.type):
        _split[grid](
            q, k, v, part, part_m, part_total, *q.stride(), *k.stride(), *v.stride(), rows,
            kv_heads, group, query, kv, kv if launch.free else min(whole, kv), splits, together,
            head_dim, value_dim, scale * LOG2E if identity else scale, scales(descale),
            () if pages is None else pages.arguments(), mask.captured,
            () if score is None else score.captured, MASK=mask.function,
            SCORE=mask.function if score is None else score.function, IDENTITY=identity,
            FREE=launch.free, PAGE=0 if pages is None else pages.size, SCALED=descale is not None,
            WEIGHTS_SCALE=launch.weights_scale, BLOCK_Q=launch.block_query,
            BLOCK_K=launch.block_kv, BLOCK_D=block_dim(head_dim, q.dtype),
            BLOCK_V=block_dim(value_dim, v.dtype), PRECISION=launch.precision,
            IMPRECISE=launch.max_num_imprecise_acc, ADDED=launch.together > 1, EARLY=bool(early),
            num_warps=launch.warps, num_stages=launch.stages,
            # Fusion would turn the product and difference of unmasked scores into an FMA, but not
            # those of masked or careful ones, whose bits would then differ.
            enable_fp_fusion=False,
        )
        _merge[(rows,)](
            part, part_m, part_total, out, lse, () if sink is None else (sink,), parts, rows, heads,
            query, value_dim, IDENTITY=identity, SINK=sink is not None,
            ADDED=launch.together > 1, TOGETHER=launch.together // together,
            BLOCK_S=min(merged, max(1, _MERGED_VALUES // columns)), BLOCK_V=columns,
            EARLY=bool(early), num_warps=1, **early,
        )
    # fmt: on
    return out, lse


# Forty parameters are easier to read on five lines than in a column.
# fmt: off
@triton.jit(do_not_specialize=("whole", "together", *COUNTS))
def _split(
    q_ptr, k_ptr, v_ptr, out_ptr, m_ptr, total_ptr, q_batch, q_head, q_row, q_col, k_batch, k_head,
    k_row, k_col, v_batch, v_head, v_row, v_col, rows_of_all, kv_heads, group, query, kv, whole,
    splits, together, head_dim, value_dim, factor, descale, pages, mask_captured, score_captured,
    MASK: tl.constexpr, SCORE: tl.constexpr, IDENTITY: tl.constexpr, FREE: tl.constexpr,
    PAGE: tl.constexpr, SCALED: tl.constexpr, WEIGHTS_SCALE: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
    IMPRECISE: tl.constexpr, ADDED: tl.constexpr, EARLY: tl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
    b = tl.program_id(1)
    b64 = b.to(tl.int64)
    kv_head = tl.program_id(0) % kv_heads
    kv_head64 = kv_head.to(tl.int64)
    heads, rows, row_inside, q_block = _packed_rows(
        q_ptr, q_batch, q_head, q_row, q_col, b, kv_head, tl.program_id(2), group, query, head_dim,
        BLOCK_Q, BLOCK_D,
    )
    k_ptr += kv_head64 * k_head
    v_ptr += kv_head64 * v_head
    table = k_ptr  # without pages it is not read
    if PAGE == 0:
        k_ptr += b64 * k_batch
        v_ptr += b64 * v_batch
    else:
        table = pages[0] + b64 * pages[1]
    factor = factor_of(factor, descale, b * kv_heads + kv_head, SCALED)

    blocks = tl.cdiv(kv, BLOCK_K)
    program = (tl.program_id(0) // kv_heads).to(tl.int64)
    split = program * together
    end_split = tl.minimum(split + together, splits)
    first = (split * blocks // splits).to(tl.int32)
    last = (end_split * blocks // splits).to(tl.int32)
    end = ((split + 1) * blocks // splits).to(tl.int32)
    whole = tl.maximum(first, tl.minimum(last, whole // BLOCK_K))
    value_factor = 1.0
    if SCALED:
        value_factor = tl.load(descale[2] + b * kv_heads + kv_head) / WEIGHTS_SCALE
    # Sums over the splits before this one. The sink enters once, in the merge.
    part_m, part_total = started(q_ptr, heads, False, IDENTITY, BLOCK_Q)
    part = tl.zeros([BLOCK_Q, BLOCK_V], tl.float32)
    m, total = started(q_ptr, heads, False, IDENTITY, BLOCK_Q)
    acc = tl.zeros([BLOCK_Q, BLOCK_V], tl.float32)
    # One loop over all splits, so that their loads overlap; but unmasked blocks have their own.
    for MASKED in tl.static_range(2):
        begin = whole if MASKED else first
        beyond = last if MASKED else whole
        for block in range(begin, beyond):
            m, total, acc = _step(
                block, q_block, k_ptr, v_ptr, k_batch, k_row, k_col, v_batch, v_row, v_col, table,
                m, total, acc, b, heads, rows, kv, head_dim, value_dim, factor, mask_captured,
                score_captured, MASK, SCORE, IDENTITY, PAGE, MASKED == 1, False, WEIGHTS_SCALE,
                BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_V, PRECISION, IMPRECISE,
            )
            if ADDED:  # noqa: SIM102  (this one is decided when it is compiled)
                if block + 1 == end:
                    part_m, part_total, part = added(
                        part_m, part_total, part, m, total, acc * value_factor, IDENTITY
                    )
                    m, total = started(q_ptr, heads, False, IDENTITY, BLOCK_Q)
                    acc = tl.zeros([BLOCK_Q, BLOCK_V], tl.float32)
                    split += 1
                    end = ((split + 1) * blocks // splits).to(tl.int32)
    if not ADDED:
        part_m, part_total, part = m, total, acc * value_factor
    # A non-finite value makes every row's sum non-finite for good, also of rows that do not see it:
    # then the program computes everything again with care.
    if not FREE:  # noqa: SIM102  (this one is decided when it is compiled)
        if not all_finite(part):
            _split_with_care(
                q_ptr, k_ptr, v_ptr, out_ptr, m_ptr, total_ptr, q_batch, q_head, q_row, q_col,
                k_batch, k_row, k_col, v_batch, v_row, v_col, rows_of_all, kv_heads, group, query,
                kv, blocks, splits, program * together, end_split, program, b, kv_head,
                tl.program_id(2), head_dim, value_dim, factor, value_factor, table, mask_captured,
                score_captured, MASK, SCORE, IDENTITY, PAGE, WEIGHTS_SCALE, BLOCK_Q, BLOCK_K,
                BLOCK_D, BLOCK_V, PRECISION, IMPRECISE, ADDED,
            )
            return
    _store_part(
        out_ptr, m_ptr, total_ptr, part, part_m, part_total, program, rows_of_all, b, kv_heads,
        group, query, heads, rows, row_inside, value_dim, IDENTITY, ADDED, BLOCK_V,
    )


# Not inlined: what it needs would stay in registers during the loops of ``_split``, which spilled.
@triton.jit(noinline=True)
def _split_with_care(
    q_ptr, k_ptr, v_ptr, out_ptr, m_ptr, total_ptr, q_batch, q_head, q_row, q_col, k_page, k_row,
    k_col, v_page, v_row, v_col, rows_of_all, kv_heads, group, query, kv, blocks, splits, split,
    end_split, program, b, kv_head, block_of_rows, head_dim, value_dim, factor, value_factor, table,
    mask_captured, score_captured, MASK: tl.constexpr, SCORE: tl.constexpr, IDENTITY: tl.constexpr,
    PAGE: tl.constexpr, WEIGHTS_SCALE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, IMPRECISE: tl.constexpr,
    ADDED: tl.constexpr,
):
    """Store a program's results, of these splits, computed with care for non-finite values."""
    heads, rows, row_inside, q_block = _packed_rows(
        q_ptr, q_batch, q_head, q_row, q_col, b, kv_head, block_of_rows, group, query, head_dim,
        BLOCK_Q, BLOCK_D,
    )
    part_m, part_total = started(q_ptr, heads, False, IDENTITY, BLOCK_Q)
    part = tl.zeros([BLOCK_Q, BLOCK_V], tl.float32)
    for careful_split in range(split, end_split):
        m, total = started(q_ptr, heads, False, IDENTITY, BLOCK_Q)
        acc = tl.zeros([BLOCK_Q, BLOCK_V], tl.float32)
        first = (careful_split * blocks // splits).to(tl.int32)
        last = ((careful_split + 1) * blocks // splits).to(tl.int32)
        for block in tl.range(first, last, num_stages=1):
            m, total, acc = _step(
                block, q_block, k_ptr, v_ptr, k_page, k_row, k_col, v_page, v_row, v_col, table, m,
                total, acc, b, heads, rows, kv, head_dim, value_dim, factor, mask_captured,
                score_captured, MASK, SCORE, IDENTITY, PAGE, True, True, WEIGHTS_SCALE, BLOCK_Q,
                BLOCK_K, BLOCK_D, BLOCK_V, PRECISION, IMPRECISE,
            )
        part_m, part_total, part = added(
            part_m, part_total, part, m, total, acc * value_factor, IDENTITY
        )
    _store_part(
        out_ptr, m_ptr, total_ptr, part, part_m, part_total, program, rows_of_all, b, kv_heads,
        group, query, heads, rows, row_inside, value_dim, IDENTITY, ADDED, BLOCK_V,
    )


@triton.jit
def _packed_rows(
    q_ptr, q_batch, q_head, q_row, q_col, b, kv_head, block, group, query, head_dim,
    BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Return heads and rows of a block of packed rows, which of them exist, and their q."""
    packed = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    row_inside = packed < query * group
    rows = packed // group
    heads = kv_head * group + packed % group
    cols = tl.arange(0, BLOCK_D)
    q_at = heads.to(tl.int64) * q_head + rows.to(tl.int64) * q_row
    q_block = tl.load(
        q_ptr + b.to(tl.int64) * q_batch + q_at[:, None] + cols[None, :].to(tl.int64) * q_col,
        mask=row_inside[:, None] & (cols[None, :] < head_dim),
        other=0.0,
    )
    return heads, rows, row_inside, q_block


@triton.jit
def _store_part(
    out_ptr, m_ptr, total_ptr, part, part_m, part_total, program, rows_of_all, b, kv_heads, group,
    query, heads, rows, row_inside, value_dim, IDENTITY: tl.constexpr, ADDED: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store a program's results; those that are not to be added up as out and LSE."""
    if not ADDED:
        part = normalised(part, part_total)
        part_m = log_sum(part_m, part_total, IDENTITY)
    value_cols = tl.arange(0, BLOCK_V)
    # The rows' indices into this program's contiguous (batch, heads, query).
    row_at = program * rows_of_all + (b.to(tl.int64) * kv_heads * group + heads) * query + rows
    tl.store(
        out_ptr + row_at[:, None] * value_dim + value_cols[None, :],
        part,
        mask=row_inside[:, None] & (value_cols[None, :] < value_dim),
    )
    tl.store(m_ptr + row_at, part_m, mask=row_inside)
    tl.store(total_ptr + row_at, part_total, mask=row_inside)


@triton.jit
def added(m, total, acc, m_of, total_of, acc_of, IDENTITY: tl.constexpr):
    """Return maximum, row sum and sum of values of two parts of the keys together.

    Explicit ``fma`` fixes what is rounded, so that bits do not depend on where a part was computed.
    """
    m_new = tl.maximum(m, m_of)
    # A row that has seen nothing keeps m = −inf; 0 stands in so that −inf − −inf never happens.
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha, beta = power(m - shift, IDENTITY), power(m_of - shift, IDENTITY)
    total = tl.fma(total, alpha, total_of * beta)
    return m_new, total, tl.fma(acc, alpha[:, None], acc_of * beta[:, None])


@triton.jit
def _step(
    block, q_block, k_ptr, v_ptr, k_page, k_row, k_col, v_page, v_row, v_col, table, m, total, acc,
    b, heads, rows, kv, head_dim, value_dim, factor, mask_captured, score_captured,
    MASK: tl.constexpr, SCORE: tl.constexpr, IDENTITY: tl.constexpr, PAGE: tl.constexpr,
    MASKED: tl.constexpr, CAREFUL: tl.constexpr, WEIGHTS_SCALE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr, IMPRECISE: tl.constexpr,
):
    """Add one block of keys: scores, running maximum (in their units), rescaling, P·V.

    CAREFUL leaves non-finite values that some row does not see out of P·V.
    """
    start = block * BLOCK_K
    places = tl.arange(0, BLOCK_K)
    keys = start + places
    k_at = _block_key_rows(start, places, kv, k_row, k_page, table, PAGE, BLOCK_K)
    k_block = loaded_keys(k_ptr, k_at, k_col, keys, kv, head_dim, BLOCK_D)
    v_at = _block_key_rows(start, places, kv, v_row, v_page, table, PAGE, BLOCK_K)
    v_block = loaded_values(v_ptr, v_at, v_col, keys, kv, value_dim, BLOCK_V)
    h = heads[:, None]
    s = scores(
        q_block, k_block, b, h, rows, keys, factor, score_captured, SCORE, IDENTITY, PRECISION,
        IMPRECISE,
    )
    seen = tl.full([BLOCK_Q, BLOCK_K], True, tl.int1)
    if MASKED:
        seen = visible(b, h, rows, keys, kv, mask_captured, MASK, BLOCK_Q, BLOCK_K)
        s = hidden(s, seen)
    p, alpha, m, total = update_softmax(s, m, total, IDENTITY)
    acc = with_values(
        p, v_block, seen, acc * alpha[:, None], CAREFUL, WEIGHTS_SCALE, PRECISION, IMPRECISE
    )
    return m, total, acc


@triton.jit
def _block_key_rows(
    start, places, kv, row_stride, page_stride, table, PAGE: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Return ``tile.key_rows`` of a block; only one number of it varies from block to block.

    A page that holds the block, or a part of it, is looked up by a scalar load. Looked up per key,
    the page number would be loaded for each key and moved to the threads that load this key.
    """
    if PAGE == 0:
        at = tl.cast(start, tl.int64) * row_stride + places.to(tl.int64) * row_stride
    elif PAGE >= _SMALLEST_PAGE and (PAGE % BLOCK_K == 0 or BLOCK_K % PAGE == 0):
        number = start // PAGE
        page = tl.load(table + number)
        for i in tl.static_range(1, BLOCK_K // PAGE):
            next_page = tl.load(table + number + i, mask=start + i * PAGE < kv, other=0)
            page = tl.where(places >= i * PAGE, next_page, page)
        at = page.to(tl.int64) * page_stride + tl.cast(start % PAGE, tl.int64) * row_stride
        at += (places % PAGE).to(tl.int64) * row_stride
    else:
        at = key_rows(start + places, kv, row_stride, page_stride, table, PAGE)
    return at


@triton.jit
def _load_parts(part_ptr, m_ptr, total_ptr, numbers, parts, row, rows, cols, value_dim):
    """Return a row's partial results of these programs; those beyond ``parts`` have seen no key."""
    exists = numbers < parts
    at = numbers.to(tl.int64) * rows + row
    m = tl.load(m_ptr + at, mask=exists, other=float("-inf"))
    total = tl.load(total_ptr + at, mask=exists, other=0.0)
    part = tl.load(
        part_ptr + at[:, None] * value_dim + cols[None, :],
        mask=exists[:, None] & (cols < value_dim)[None, :],
        other=0.0,
    )
    return m, total, part


@triton.jit(do_not_specialize=("parts", *COUNTS))
def _merge(
    part_ptr, m_ptr, total_ptr, out_ptr, lse_ptr, sink, parts, rows, heads, query, value_dim,
    IDENTITY: tl.constexpr, SINK: tl.constexpr, ADDED: tl.constexpr, TOGETHER: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr, EARLY: tl.constexpr,
):
    """Store out and LSE of a row, merged by LSE from groups of TOGETHER added partial results.

    Weights are e^(LSE_i − largest). Where a row sees no key, LSE_i is −inf and out_i 0.
    """
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_V)
    sink_ptr = m_ptr
    if SINK:
        sink_ptr = sink[0]
    largest, total = started(sink_ptr, row // query % heads, SINK, False, 1)
    acc = tl.zeros([1, BLOCK_V], tl.float32)
    if EARLY:
        gdc_wait()
    for first in range(0, parts, BLOCK_S * TOGETHER):
        numbers = first + tl.arange(0, BLOCK_S) * TOGETHER
        m, sums, part = _load_parts(
            part_ptr, m_ptr, total_ptr, numbers, parts, row, rows, cols, value_dim
        )
        for i in tl.static_range(1, TOGETHER):
            m_of, sums_of, part_of = _load_parts(
                part_ptr, m_ptr, total_ptr, numbers + i, parts, row, rows, cols, value_dim
            )
            m, sums, part = added(m, sums, part, m_of, sums_of, part_of, IDENTITY)
        lse = m
        if ADDED:
            lse = log_sum(m, sums, IDENTITY)
            part = normalised(part, sums)
        weight, alpha, largest, total = update_softmax(lse[None, :], largest, total, False)
        acc = acc * alpha[:, None] + tl.sum(tl.trans(weight) * part, 0)[None, :]
    tl.store(
        out_ptr + row * value_dim + cols[None, :],
        normalised(acc, total).to(out_ptr.dtype.element_ty),
        mask=(cols < value_dim)[None, :],
    )
    tl.store(lse_ptr + row + tl.arange(0, 1), log_sum(largest, total, False))


# fmt: on
