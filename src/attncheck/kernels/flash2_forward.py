"""FlashAttention-2 forward in Triton, for any mask and score mod.

The recurrence is Dao 2023 (arXiv:2307.08691), Algorithm 1: one program owns a block of query rows
and walks over blocks of keys with a running maximum m, a running sum l and an unnormalised O. The
blocks may be listed, as in FlexAttention's block mask (Dong et al. 2024, arXiv:2412.05496): wholly
hidden blocks are not visited, and wholly visible ones not masked. The list holds runs of blocks, so
that the inner loop computes each address from the last, as without a list: loads of later blocks do
not wait for reads of the list.

A non-finite value makes the sums of every row of its tile non-finite for good: 0 · NaN is NaN.
Where the mask may hide such a value from a row, a second launch computes those blocks of rows again
with care: see ``tile.with_values``. In the first launch that would cost registers, and so the
second program on a multiprocessor, even where all values are finite.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from attncheck.inputs.input_tensors import Descale
from attncheck.kernels.compilation import sound_assembler
from attncheck.kernels.launch import (
    COUNTS,
    LOG2E,
    KernelPages,
    Launch,
    VisitList,
    block_dim,
    needs_careful_launch,
    scales,
)
from attncheck.kernels.tile import (
    all_finite,
    blocks_to_check,
    factor_of,
    hidden,
    is_due,
    key_rows,
    listed,
    loaded,
    loaded_keys,
    loaded_values,
    log_sum,
    normalised,
    place,
    run_of,
    scores,
    started,
    update_softmax,
    visible,
    with_values,
)
from attncheck.mods.to_triton import TritonMod

# Programs of the careful launch, which check blocks' flags: about one per multiprocessor of an
# H200. They take most of its registers: one per block took 3 % of the time of a windowed forward.
_CAREFUL_PROGRAMS = 128
_HOISTED_DIM = 128  # Largest head dim at which offsets are hoisted: see ``hoists_offsets``.


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
    sink: torch.Tensor | None = None,
    tiles: VisitList | None = None,
    pages: KernelPages | None = None,
    kv: int | None = None,
    redo: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of ``q`` over ``k`` and ``v``, and its log-sum-exp.

    Args:
        q: ``(batch, heads, query, head_dim)``, any strides.
        k: ``(batch, kv_heads, kv, head_dim)``; kv_heads divides heads. With ``pages``
            ``(pages, kv_heads, size, head_dim)``.
        v: ``(batch, kv_heads, kv, value_dim)``, or as k with ``pages``; in fp8 it may be a view of
            transposed memory, with the keys of a column contiguous, as tensor cores need them.
        scale: Factor of q·k, an fp32 number.
        score: The traced score mod; None leaves scores as they are.
        launch: Compile-time choices; ``causal`` has no effect.
        descale: In fp8, the factors of the stored numbers.
        out_dtype: The dtype of out (default: q's).
        sink: fp32 ``(heads,)``, natural: one more key of value 0 with this score, which every row
            sees and no mod changes.
        tiles: The tiles to visit, which must hold all visible keys; None visits all.
        pages: The page table, if keys and values are paged.
        kv: The number of keys, with ``pages``.
        redo: Contiguous out and LSE of another kernel, and int32 flags by ``tile.number_of`` of
            the blocks to compute again; only the careful launch runs.

    Returns:
        out ``(batch, heads, query, value_dim)`` and LSE ``(batch, heads, query)`` in fp32, natural
        log. Rows that see no key: 0 and −inf, or the sink. Keys and values that the mask hides from
        a row, NaN included, do not affect it. A score mod's −inf hides nothing: the key has weight
        0, but its value, if not finite, still reaches the row. A row that sees an infinite value
        gets it; or NaN where it sees both signs, where the value's weight underflows to 0, and
        where a later, much larger score makes the weight of everything before it 0. With a score
        mod scores may be as large as fp32 allows; without one, up to 2.36e38 (fp32's largest
        divided by log2 e). Rows with larger scores are wrong.

    To record calls in a CUDA graph, see ``launch.needs_careful_launch``.

    Raises:
        UsageError: if ``tiles`` has other blocks than ``launch`` or a tile beyond the last key.
    """
    batch, heads, query, head_dim = q.shape
    kv_heads, kv = k.shape[1], k.shape[2] if kv is None else kv
    value_dim = v.shape[3]
    shape = (batch, heads, query, value_dim)
    out = torch.empty(shape, dtype=out_dtype or q.dtype, device=q.device)
    lse = torch.empty((batch, heads, query), dtype=torch.float32, device=q.device)
    if tiles is not None:
        tiles.check("tiles", (query, launch.block_query), (kv, launch.block_kv))
    identity = score is None
    grid = (triton.cdiv(query, launch.block_query), batch * heads)
    flags = torch.empty(grid, dtype=torch.int32, device=q.device)
    if redo is not None:
        out, lse, flags = redo
    # fmt: off
    arguments = (
        q, k, v, out, lse, flags, *q.stride(), *k.stride(), *v.stride(), *out.stride(), *grid,
        heads, heads // kv_heads, query, kv, head_dim, value_dim,
        scale * LOG2E if identity else scale, scales(descale), () if sink is None else (sink,),
        () if tiles is None else tiles.arguments(), () if pages is None else pages.arguments(),
        mask.captured, () if score is None else score.captured,
    )
    options: dict[str, Any] = {
        "MASK": mask.function, "SCORE": mask.function if score is None else score.function,
        "IDENTITY": identity, "LISTED": tiles is not None, "FREE": launch.free,
        "SINK": sink is not None, "PAGE": 0 if pages is None else pages.size,
        "HOISTED": pages is None and hoists_offsets(k, v),
        "SCALED": descale is not None, "WEIGHTS_SCALE": launch.weights_scale,
        "BLOCK_Q": launch.block_query, "BLOCK_K": launch.block_kv,
        "BLOCK_D": block_dim(head_dim, q.dtype), "BLOCK_V": block_dim(value_dim, v.dtype),
        "PRECISION": launch.precision, "IMPRECISE": launch.max_num_imprecise_acc,
        "num_warps": launch.warps,
    }
    # fmt: on
    limits = {} if launch.registers is None else {"maxnreg": launch.registers}
    with sound_assembler(q.device.type):
        if redo is None:
            _forward[grid](*arguments, **options, CAREFUL=False, num_stages=launch.stages, **limits)
        if not launch.free and needs_careful_launch(flags):
            careful_grid = (min(_CAREFUL_PROGRAMS, flags.numel()),)
            _forward[careful_grid](*arguments, **options, CAREFUL=True, num_stages=1)
    return out, lse


def hoists_offsets(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether 64-bit offsets within a tile of keys are computed once, before the loop.

    Only in 16 bits, where it was timed; and neither where row strides are not multiples of 16,
    since loads need more registers then, nor at wide head dims: kernels would spill.
    """
    return all(
        x.element_size() == 2 and x.stride(2) % 16 == 0 and x.shape[3] <= _HOISTED_DIM
        for x in (k, v)
    )


# Forty parameters are easier to read on five lines than in a column.
# fmt: off
@triton.jit(do_not_specialize=("blocks", "together", *COUNTS))
def _forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, again_ptr, q_batch, q_head, q_row, q_col, k_batch,
    k_head, k_row, k_col, v_batch, v_head, v_row, v_col, out_batch, out_head, out_row, out_col,
    blocks, together, heads, group, query, kv, head_dim, value_dim, factor, descale, sink, tiles,
    pages, mask_captured, score_captured, MASK: tl.constexpr, SCORE: tl.constexpr,
    IDENTITY: tl.constexpr, LISTED: tl.constexpr, FREE: tl.constexpr, CAREFUL: tl.constexpr,
    SINK: tl.constexpr, PAGE: tl.constexpr, HOISTED: tl.constexpr, SCALED: tl.constexpr,
    WEIGHTS_SCALE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, IMPRECISE: tl.constexpr,
):
    """Compute a program's block of rows; CAREFUL, those blocks of its share that are flagged."""
    program = tl.program_id(1) * blocks + tl.program_id(0)
    turns = 1
    if CAREFUL:
        turns = blocks_to_check(again_ptr, program, blocks * together)
    for turn in range(turns):
        number = program + turn * tl.num_programs(0)
        if is_due(again_ptr, number, CAREFUL):
            block, bh = place(number, blocks, together)
            _block(
                block, bh, again_ptr + number, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, q_batch,
                q_head, q_row, q_col, k_batch, k_head, k_row, k_col, v_batch, v_head, v_row, v_col,
                out_batch, out_head, out_row, out_col, heads, group, query, kv, head_dim,
                value_dim, factor, descale, sink, tiles, pages, mask_captured, score_captured,
                MASK, SCORE, IDENTITY, LISTED, FREE, CAREFUL, SINK, PAGE, HOISTED, SCALED,
                WEIGHTS_SCALE, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_V, PRECISION, IMPRECISE,
            )


@triton.jit
def _block(
    block, bh, flag, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, q_batch, q_head, q_row, q_col, k_batch,
    k_head, k_row, k_col, v_batch, v_head, v_row, v_col, out_batch, out_head, out_row, out_col,
    heads, group, query, kv, head_dim, value_dim, factor, descale, sink, tiles, pages,
    mask_captured, score_captured, MASK: tl.constexpr, SCORE: tl.constexpr, IDENTITY: tl.constexpr,
    LISTED: tl.constexpr, FREE: tl.constexpr, CAREFUL: tl.constexpr, SINK: tl.constexpr,
    PAGE: tl.constexpr, HOISTED: tl.constexpr, SCALED: tl.constexpr, WEIGHTS_SCALE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr, IMPRECISE: tl.constexpr,
):
    """Compute out and LSE of a block of rows from the blocks of keys that it sees."""
    b = bh // heads
    h = bh % heads
    rows = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    value_cols = tl.arange(0, BLOCK_V)
    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)
    q_ptr += b64 * q_batch + h64 * q_head
    q_block = loaded(q_ptr, rows, tl.arange(0, BLOCK_D), q_row, q_col, query, head_dim)
    k_ptr += (h64 // group) * k_head
    v_ptr += (h64 // group) * v_head
    table = k_ptr  # without pages it is not read
    if PAGE == 0:
        k_ptr += b64 * k_batch
        v_ptr += b64 * v_batch
    else:
        table = pages[0] + b64 * pages[1]
    kv_head = bh // group  # group divides heads
    factor = factor_of(factor, descale, kv_head, SCALED)
    sink_ptr = q_ptr
    if SINK:
        sink_ptr = sink[0]
    visits = q_ptr
    runs = 1
    if LISTED:
        visits, runs = listed(tiles, b, h, block)

    m, total = started(sink_ptr, h, SINK, IDENTITY, BLOCK_Q)
    acc = tl.zeros([BLOCK_Q, BLOCK_V], tl.float32)
    for run in range(runs):
        first, beyond, run_partial = run_of(visits, run, tl.cdiv(kv, BLOCK_K), LISTED)
        for tile in range(first, beyond):
            start = tile * BLOCK_K
            partial = _may_hide(run_partial, start, kv, LISTED, FREE, BLOCK_K)
            m, total, acc = _step(
                start, partial, q_block, k_ptr, v_ptr, k_batch, k_row, k_col, v_batch, v_row,
                v_col, table, m, total, acc, b, h, rows, kv, head_dim, value_dim, factor,
                mask_captured, score_captured, MASK, SCORE, IDENTITY, PAGE, HOISTED, CAREFUL,
                WEIGHTS_SCALE, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_V, PRECISION, IMPRECISE,
            )
    if not FREE and not CAREFUL:
        tl.store(flag, 1 - all_finite(acc).to(tl.int32))
    out = normalised(acc, total)
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
def _may_hide(
    partial, start, kv, LISTED: tl.constexpr, FREE: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Return whether a tile from key ``start`` on needs masking; LISTED, its run says so."""
    if not LISTED:
        partial = not FREE or start + BLOCK_K > kv
    return partial


@triton.jit
def _step(
    start, partial, q_block, k_ptr, v_ptr, k_page, k_row, k_col, v_page, v_row, v_col, table, m,
    total, acc, b, h, rows, kv, head_dim, value_dim, factor, mask_captured, score_captured,
    MASK: tl.constexpr, SCORE: tl.constexpr, IDENTITY: tl.constexpr, PAGE: tl.constexpr,
    HOISTED: tl.constexpr, CAREFUL: tl.constexpr, WEIGHTS_SCALE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr, IMPRECISE: tl.constexpr,
):
    """Add one tile: its scores, the new running maximum (in their units), rescaling, P·V.

    CAREFUL leaves non-finite values that some row does not see out of P·V.
    """
    places = tl.arange(0, BLOCK_K)
    keys = start + places
    if HOISTED and not CAREFUL:
        # Only ``first`` changes from tile to tile; the offsets within a tile are loop-invariant.
        first = tl.cast(start, tl.int64)
        k_at = key_rows(places, kv, k_row, k_page, table, PAGE)
        k_block = loaded_keys(
            k_ptr + first * k_row, k_at, k_col, places, kv - start, head_dim, BLOCK_D
        )
        v_at = key_rows(places, kv, v_row, v_page, table, PAGE)
        v_block = loaded_values(
            v_ptr + first * v_row, v_at, v_col, places, kv - start, value_dim, BLOCK_V
        )
    else:
        k_at = key_rows(keys, kv, k_row, k_page, table, PAGE)
        k_block = loaded_keys(k_ptr, k_at, k_col, keys, kv, head_dim, BLOCK_D)
        v_at = key_rows(keys, kv, v_row, v_page, table, PAGE)
        v_block = loaded_values(v_ptr, v_at, v_col, keys, kv, value_dim, BLOCK_V)
    s = scores(
        q_block, k_block, b, h, rows, keys, factor, score_captured, SCORE, IDENTITY, PRECISION,
        IMPRECISE,
    )
    seen = tl.full([BLOCK_Q, BLOCK_K], True, tl.int1)
    if CAREFUL:
        if partial:
            seen = visible(b, h, rows, keys, kv, mask_captured, MASK, BLOCK_Q, BLOCK_K)
        s = hidden(s, seen)
    elif partial:
        s = hidden(s, visible(b, h, rows, keys, kv, mask_captured, MASK, BLOCK_Q, BLOCK_K))
    p, alpha, m, total = update_softmax(s, m, total, IDENTITY)
    acc = with_values(
        p, v_block, seen, acc * alpha[:, None], CAREFUL, WEIGHTS_SCALE, PRECISION, IMPRECISE
    )
    return m, total, acc


# fmt: on
