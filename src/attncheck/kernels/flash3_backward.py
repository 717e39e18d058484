"""FlashAttention-3 backward for Hopper in Gluon: full attention, causal masks and windows.

Shah et al. 2024 (arXiv:2407.08608): a program owns a block of keys, half of it for each of two
warpgroups, and walks over tiles of rows, which one warp copies by TMA. dK and dV stay in registers.
A tile's dX goes through shared memory into a product with K, which is added to dQ's sums in global
memory. Programs add to a tile in the order of their keys, so that sums are deterministic: one warp
waits for the program's turn, a tile ahead, and another passes the turn on. Rows are walked over
from last to first: so a program reaches a tile just after the one before, under causal masks too.

At head dim 128 it is bound by adding up dQ in memory: on an H100 it took three quarters of the time
without adding, and 0.96 of it without waiting for turns.

Under a mask ``flash2_backward`` computes blocks of rows with a non-finite dQ again, with care.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attncheck.kernels.compilation import on_hopper, sound_assembler
from attncheck.kernels.flash2_backward import Gradients, flash2_backward, redo_rows
from attncheck.kernels.flash3_forward import (
    OWN,
    descriptor,
    load,
    store,
    tile_width,
    unsupported_by_kernel,
)
from attncheck.kernels.gradient_terms import row_deltas
from attncheck.kernels.launch import COUNTS, LOG2E, Launch, needs_careful_launch
from attncheck.kernels.tile import all_finite, place
from attncheck.mods.masks import Band
from attncheck.mods.to_triton import TritonMod

# Triton 3.7 or so renamed it.
barrier = getattr(gl, "thread_barrier", None) or gl.barrier


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardShape:
    """Compile-time choices of one launch."""

    rows: int  # per tile
    stages: int = 2  # tiles of rows in shared memory
    registers: int = 240  # per thread of the warpgroups that do arithmetic


BACKWARD_SHAPES = {64: BackwardShape(rows=128), 128: BackwardShape(rows=64)}
KEYS = 2 * OWN  # Keys per program: each of two warpgroups owns half of them.
# The layout of one fp32 number per row, contiguous.
ROWS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def flash3_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    *,
    scale: float,
    mask: TritonMod,
    launch: Launch,
    score: TritonMod | None = None,
    band: Band | None = None,
    shape: BackwardShape | None = None,
    **others: Any,
) -> Gradients:
    """Return the gradients with respect to q, k and v, as ``flash2_backward`` with its arguments.

    Calls ``flash2_backward`` where this kernel does not support the arguments or the GPU.

    Args:
        band: The mask as a ``Band``, if it goes by distance alone; else None.
        shape: The compile-time choices of this kernel (default: ``BACKWARD_SHAPES``).
        others: Further arguments of ``flash2_backward``.
    """
    refused = not on_hopper(q.device) or unsupported_by_kernel(
        q.dtype,
        (q.shape[3], v.shape[3]),
        band,
        others=bool(others.get("atomic"))
        or any(others.get(name) is not None for name in ("sink", "captured")),
        score=score is not None,
        backward=True,
    )
    if refused or band is None:
        return flash2_backward(
            q,
            k,
            v,
            out,
            lse,
            dout,
            dlse,
            scale=scale,
            mask=mask,
            score=score,
            launch=launch,
            **others,
        )
    batch, heads, query, head_dim = q.shape
    kv_heads, kv = k.shape[1:3]
    band = band.within(query, kv)
    width = tile_width(head_dim)
    shape = shape or BACKWARD_SHAPES[width]
    tiles, blocks = -(-query // shape.rows), -(-kv // KEYS)
    lse = lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    sums = lse.new_zeros((batch * heads, tiles, shape.rows * width))
    turns = torch.zeros((batch * heads, tiles), dtype=torch.int32, device=q.device)
    next_number = torch.zeros(1, dtype=torch.int32, device=q.device)
    flags = torch.empty(
        (batch * heads, -(-query // launch.block_query)), dtype=torch.int32, device=q.device
    )
    with sound_assembler(q.device.type):
        delta = row_deltas(out, dout, lse, dlse, block=launch.block_query, warps=launch.warps)
        # fmt: off
        _backward[(blocks * batch * kv_heads,)](
            descriptor(q, shape.rows), descriptor(k, OWN), descriptor(v, OWN),
            descriptor(dout, shape.rows), _stats_descriptor(lse, delta, shape.rows),
            descriptor(dk, OWN), descriptor(dv, OWN), sums, turns, next_number, blocks,
            batch * kv_heads, kv_heads, heads // kv_heads, query, kv, band.least or 0,
            band.most or 0, scale * LOG2E, scale, STAGES=shape.stages, REGISTERS=shape.registers,
            UPPER=band.most is not None, LOWER=band.least is not None, num_warps=4,
        )
        _finish[flags.shape[1], flags.shape[0]](
            sums, dq, flags, query, tiles, head_dim, scale, ROWS=shape.rows, WIDTH=width,
            BLOCK=launch.block_query,
        )
        # fmt: on
        if band != Band() and needs_careful_launch(flags):
            redo_rows(q, k, v, dout, lse, delta, dq, flags, scale=scale, mask=mask, launch=launch)
    return dq, dk, dv, None, None


def _stats_descriptor(lse: torch.Tensor, delta: torch.Tensor, rows: int) -> TensorDescriptor:
    """Return a TMA descriptor of LSE, in log2 units, and below it −delta, in tiles of ``rows``.

    As in ``loaded_lse``, LSE is +∞ for rows that saw no key and in the padding.
    """
    padding = -lse.shape[2] % rows
    units = torch.where(lse == -torch.inf, torch.inf, lse * LOG2E)
    both = torch.cat(
        [
            torch.nn.functional.pad(x.flatten(0, 1), (0, padding), value=value)
            for x, value in ((units, torch.inf), (-delta, 0.0))
        ]
    )
    return TensorDescriptor.from_tensor(both, [1, rows], ROWS_LAYOUT)


# fmt: off
@triton.jit
def walk_rows(
    block, query, kv, least, most, ROWS: tl.constexpr, KEYS: tl.constexpr, UPPER: tl.constexpr,
    LOWER: tl.constexpr,
):
    """Return (count, beyond, early, late) of the tiles of rows that a block of keys visits.

    ``count`` tiles end before tile ``beyond``, and are visited from last to first. The first
    ``early`` and the last ``late`` of the visits are to tiles with a row that may not see a key.
    """
    key = block * KEYS
    end = tl.minimum(key + KEYS, kv)
    low = 0
    high = query
    whole = 0
    if UPPER:
        low = tl.maximum(key - most, 0)
        whole = tl.cdiv(tl.maximum(key + KEYS - 1 - most, 0), ROWS)
    if LOWER:
        high = tl.minimum(query, end - least)
    first = low // ROWS
    beyond = tl.maximum(tl.cdiv(tl.maximum(high, 0), ROWS), first)
    count = beyond - first
    late = tl.minimum(tl.maximum(whole - first, 0), count)
    if end < key + KEYS:
        late = count
    early = 0
    if LOWER:
        whole_to = tl.maximum(key - least + 1, 0) // ROWS
        early = tl.minimum(beyond - tl.minimum(tl.maximum(whole_to, first), beyond), count - late)
    return count, beyond, early, late


@triton.jit
def turn_of(block, tile, least, ROWS: tl.constexpr, KEYS: tl.constexpr, LOWER: tl.constexpr):
    """Return how many blocks of keys before ``block`` visit a tile of rows."""
    first = 0
    if LOWER:
        first = tl.maximum(tile * ROWS + least, 0) // KEYS
    return block - first


@triton.jit
def _finish(
    sums_ptr, dq_ptr, again_ptr, query, tiles, head_dim, scale, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):
    """Store dQ of a block of rows from its sums, and flag the block if they are not finite."""
    bh = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.arange(0, WIDTH)
    at = (bh * tiles + rows // ROWS) * (ROWS * WIDTH) + place_in_tile(rows % ROWS, WIDTH)
    inside = (rows < query)[:, None] & (cols < head_dim)[None, :]
    sums = tl.load(sums_ptr + at[:, None] + (cols // 8 * 64 + cols % 8)[None, :], inside, other=0.0)
    tl.store(
        again_ptr + bh * tl.num_programs(0) + tl.program_id(0), 1 - all_finite(sums).to(tl.int32)
    )
    dq_at = (bh * query + rows)[:, None] * head_dim + cols[None, :]
    tl.store(dq_ptr + dq_at, (sums * scale).to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit
def place_in_tile(i, WIDTH: tl.constexpr):
    """Return the offset of row ``i`` in a tile's sums, where 8×8 blocks are contiguous.

    These are the rows of a warp's accumulators: its atomic adds then go to adjacent addresses.
    """
    return i // 8 * (8 * WIDTH) + i % 8 * 8


@gluon.jit
def _copy(memory, block, bh, UPPER: gl.constexpr, LOWER: gl.constexpr):
    """Copy the block's keys and values, and the rows tile by tile, to shared memory by TMA."""
    (
        q_desc, k_desc, v_desc, dout_desc, stat_desc, q_s, k_s, v_s, dout_s, lse_s, delta_s,
        kv_full, q_full, dout_full, empty, together, kv_heads, group, query, kv, least, most,
    ) = memory
    STAGES: gl.constexpr = q_s.shape[0]
    ROWS: gl.constexpr = q_s.shape[3]
    HALF: gl.constexpr = k_s.shape[3]
    KEYS: gl.constexpr = 2 * HALF
    b = bh // kv_heads
    kv_head = bh % kv_heads
    count, beyond, _, _ = walk_rows(block, query, kv, least, most, ROWS, KEYS, UPPER, LOWER)
    mbarrier.expect(kv_full.index(0), 4 * k_desc.block_type.nbytes)
    for warpgroup in gl.static_range(2):
        key = block * KEYS + warpgroup * HALF
        load(k_desc, [b, kv_head, key, 0], kv_full.index(0), k_s.index(warpgroup))
        load(v_desc, [b, kv_head, key, 0], kv_full.index(0), v_s.index(warpgroup))
    tiles_done = 0
    for member in range(group):
        h = kv_head * group + member
        row_bh = b * kv_heads * group + h
        for step in range(count):
            row = (beyond - 1 - step) * ROWS
            stage = tiles_done % STAGES
            phase = (tiles_done // STAGES) & 1
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes + 4 * ROWS)
            load(q_desc, [b, h, row, 0], q_full.index(stage), q_s.index(stage))
            load(stat_desc, [row_bh, row], q_full.index(stage), lse_s.index(stage))
            mbarrier.expect(dout_full.index(stage), dout_desc.block_type.nbytes + 4 * ROWS)
            load(dout_desc, [b, h, row, 0], dout_full.index(stage), dout_s.index(stage))
            load(
                stat_desc, [together * group + row_bh, row], dout_full.index(stage),
                delta_s.index(stage),
            )
            tiles_done += 1
    # A step starts the next tile's scores. The last step needs some q for that too, of no effect.
    stage = tiles_done % STAGES
    mbarrier.wait(empty.index(stage), ((tiles_done // STAGES) & 1) ^ 1)
    mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes)
    load(q_desc, [b, kv_head * group, 0, 0], q_full.index(stage), q_s.index(stage))


@gluon.jit
def _await_turns(
    memory, block, bh, ROWS: gl.constexpr, KEYS: gl.constexpr, UPPER: gl.constexpr,
    LOWER: gl.constexpr,
):
    """Wait until the previous block of keys has added to each tile's dQ, and signal ``turn``.

    It polls a tile's counter in global memory while the program is at the tile before.
    """
    turns_ptr, turn, handed_on, _, group, query, kv, least, most = memory
    STAGES: gl.constexpr = turn.shape[0]
    tiles = gl.cdiv(query, ROWS)
    count, beyond, _, _ = walk_rows(block, query, kv, least, most, ROWS, KEYS, UPPER, LOWER)
    tiles_done = 0
    for member in range(group):
        row_bh = bh * group + member
        for step in range(count):
            tile = beyond - 1 - step
            counter = turns_ptr + row_bh.to(gl.int64) * tiles + tile
            earlier_blocks = turn_of(block, tile, least, ROWS, KEYS, LOWER)
            stage = tiles_done % STAGES
            mbarrier.wait(handed_on.index(stage), ((tiles_done // STAGES) & 1) ^ 1)
            while gl.atomic_add(counter, 0, sem="acquire", scope="gpu") < earlier_blocks:
                pass
            mbarrier.arrive(turn.index(stage), count=1)
            tiles_done += 1


@gluon.jit
def _pass_turns(
    memory, block, bh, ROWS: gl.constexpr, KEYS: gl.constexpr, UPPER: gl.constexpr,
    LOWER: gl.constexpr,
):
    """Increment each tile's counter in global memory once the program has added to its dQ."""
    turns_ptr, _, handed_on, empty, group, query, kv, least, most = memory
    STAGES: gl.constexpr = empty.shape[0]
    tiles = gl.cdiv(query, ROWS)
    count, beyond, _, _ = walk_rows(block, query, kv, least, most, ROWS, KEYS, UPPER, LOWER)
    tiles_done = 0
    for member in range(group):
        row_bh = bh * group + member
        for step in range(count):
            tile = beyond - 1 - step
            counter = turns_ptr + row_bh.to(gl.int64) * tiles + tile
            stage = tiles_done % STAGES
            mbarrier.wait(empty.index(stage), (tiles_done // STAGES) & 1)
            gl.atomic_add(counter, 1, sem="release", scope="gpu")
            mbarrier.arrive(handed_on.index(stage), count=1)
            tiles_done += 1


@gluon.jit
def _step(
    steps, tile, row_bh, s, dk, dv, k_s, v_s, q_s, dout_s, ds_s, lse_s, delta_s, q_full, dout_full,
    empty, ds_full, turn, dq_ptr, keys, query, kv, least, most, factor, WARPGROUP: gl.constexpr,
    MASKED: gl.constexpr, UPPER: gl.constexpr, LOWER: gl.constexpr, SCORES: gl.constexpr,
    WEIGHTS: gl.constexpr, DQ: gl.constexpr,
):
    """Add one tile of rows to dV, dK and dQ, and return the next tile's scores, dK and dV."""
    STAGES: gl.constexpr = q_s.shape[0]
    ROWS: gl.constexpr = q_s.shape[3]
    WIDTH: gl.constexpr = q_s.shape[4]
    HALF: gl.constexpr = k_s.shape[3]
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    # With tiles of 128 rows, dV's product before dX would leave too few registers for dX.
    EARLY: gl.constexpr = ROWS == HALF
    stage = steps % STAGES
    phase = (steps // STAGES) & 1
    # Always 0, but unknown to the compiler: it makes each step compute K's and V's addresses again.
    # Otherwise they would be spilled, and a reload waits for all earlier atomic adds to dQ.
    zero = steps >> 30
    q = q_s.index(stage).reshape([ROWS, WIDTH])
    dout = dout_s.index(stage).reshape([ROWS, WIDTH])
    zeros = gl.full([HALF, ROWS], 0.0, gl.float32, SCORES)
    mbarrier.wait(dout_full.index(stage), phase)
    v = v_s.index(WARPGROUP + zero).reshape([HALF, WIDTH])
    # The accumulator starts at −delta, so that the product is dP − delta.
    delta = delta_s.index(stage).reshape([ROWS]).load(ROW)
    begun, _ = gl.broadcast(delta[None, :], zeros)
    product = warpgroup_mma(v, dout.permute((1, 0)), begun, is_async=True)
    lse = lse_s.index(stage).reshape([ROWS]).load(ROW)
    p = gl.exp2(s * factor - lse[None, :])
    if MASKED:
        rows = tile * ROWS + gl.arange(0, ROWS, ROW)
        visible = (keys < kv)[:, None] & (rows < query)[None, :]
        if UPPER:
            visible = visible & (keys[:, None] <= (rows + most)[None, :])
        if LOWER:
            visible = visible & (keys[:, None] >= (rows + least)[None, :])
        p = gl.where(visible, p, 0.0)
    weights = gl.convert_layout(p.to(dout_s.dtype), WEIGHTS)
    if EARLY:
        dv = warpgroup_mma(weights, dout, dv, is_async=True)
        ds = p * warpgroup_mma_wait(1, deps=[product])
    else:
        ds = p * warpgroup_mma_wait(0, deps=[product])
    if MASKED:
        # 0 even where a hidden key's value is NaN or infinite.
        ds = gl.where(p == 0.0, 0.0, ds)
    rounded = ds.to(q_s.dtype)
    ds_s.index((steps & 1) * 2 + WARPGROUP).store(rounded)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(0), count=1)
    if not EARLY:
        dv = warpgroup_mma(weights, dout, dv, is_async=True)
    dk = warpgroup_mma(ds_s.index((steps & 1) * 2 + WARPGROUP), q, dk, is_async=True)
    mbarrier.wait(ds_full.index(0), steps & 1)
    dq = gl.full([HALF, HALF], 0.0, gl.float32, DQ)
    for other in gl.static_range(2):
        ds_other = ds_s.index((steps & 1) * 2 + other)
        k_other = k_s.index(other + zero).reshape([HALF, WIDTH])
        if ROWS > HALF:
            ds_other = ds_other.slice(WARPGROUP * HALF, HALF, 1)
        if WIDTH > HALF:
            k_other = k_other.slice(WARPGROUP * HALF, HALF, 1)
        dq = warpgroup_mma(
            ds_other.permute((1, 0)), k_other, dq, use_acc=other > 0, is_async=True
        )
    next_stage = (steps + 1) % STAGES
    mbarrier.wait(q_full.index(next_stage), ((steps + 1) // STAGES) & 1)
    k = k_s.index(WARPGROUP + zero).reshape([HALF, WIDTH])
    q_next = q_s.index(next_stage).reshape([ROWS, WIDTH])
    s = warpgroup_mma(k, q_next.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dv, dk, dq = warpgroup_mma_wait(1, deps=[dv, dk, dq])
    mbarrier.wait(turn.index(stage), phase)
    i = gl.arange(0, HALF, gl.SliceLayout(1, DQ))
    j = gl.arange(0, HALF, gl.SliceLayout(0, DQ))
    if ROWS > HALF:
        i += WARPGROUP * HALF
    if WIDTH > HALF:
        j += WARPGROUP * HALF
    at = place_in_tile(i, WIDTH)[:, None] + (j // 8 * 64 + j % 8)[None, :]
    tile_index = row_bh.to(gl.int64) * gl.cdiv(query, ROWS) + tile
    gl.atomic_add(dq_ptr + tile_index * (ROWS * WIDTH) + at, dq, sem="relaxed")
    barrier()
    mbarrier.arrive(empty.index(stage), count=1)
    s = warpgroup_mma_wait(0, deps=[s])
    return s, dk, dv


@gluon.jit
def _differentiate(
    memory, block, bh, WARPGROUP: gl.constexpr, UPPER: gl.constexpr, LOWER: gl.constexpr,
):
    """Compute dK and dV of one warpgroup's half of the block's keys, and its part of dQ."""
    (
        dk_desc, dv_desc, dq_ptr, q_s, k_s, v_s, dout_s, ds_s, lse_s, delta_s, kv_full, q_full,
        dout_full, empty, ds_full, turn, kv_heads, group, query, kv, least, most, factor, scale,
    ) = memory
    ROWS: gl.constexpr = q_s.shape[3]
    WIDTH: gl.constexpr = q_s.shape[4]
    HALF: gl.constexpr = k_s.shape[3]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    count, beyond, early, late = walk_rows(
        block, query, kv, least, most, ROWS, 2 * HALF, UPPER, LOWER
    )
    key = (block * 2 + WARPGROUP) * HALF
    keys = key + gl.arange(0, HALF, gl.SliceLayout(1, SCORES))
    mbarrier.wait(kv_full.index(0), 0)
    mbarrier.wait(q_full.index(0), 0)
    k = k_s.index(WARPGROUP).reshape([HALF, WIDTH])
    q = q_s.index(0).reshape([ROWS, WIDTH])
    zeros = gl.full([HALF, ROWS], 0.0, gl.float32, SCORES)
    s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    dk = gl.full([HALF, WIDTH], 0.0, gl.float32, SUMS)
    dv = gl.full([HALF, WIDTH], 0.0, gl.float32, SUMS)
    steps = 0
    for member in range(group):
        row_bh = bh * group + member
        if LOWER:
            for visit in range(early):
                s, dk, dv = _step(
                    steps, beyond - 1 - visit, row_bh, s, dk, dv, k_s, v_s, q_s, dout_s, ds_s,
                    lse_s, delta_s, q_full, dout_full, empty, ds_full, turn, dq_ptr, keys, query,
                    kv, least, most, factor, WARPGROUP, True, UPPER, LOWER, SCORES, WEIGHTS, DQ,
                )
                steps += 1
        for visit in range(early, count - late):
            s, dk, dv = _step(
                steps, beyond - 1 - visit, row_bh, s, dk, dv, k_s, v_s, q_s, dout_s, ds_s, lse_s,
                delta_s, q_full, dout_full, empty, ds_full, turn, dq_ptr, keys, query, kv, least,
                most, factor, WARPGROUP, False, UPPER, LOWER, SCORES, WEIGHTS, DQ,
            )
            steps += 1
        for visit in range(count - late, count):
            s, dk, dv = _step(
                steps, beyond - 1 - visit, row_bh, s, dk, dv, k_s, v_s, q_s, dout_s, ds_s, lse_s,
                delta_s, q_full, dout_full, empty, ds_full, turn, dq_ptr, keys, query, kv, least,
                most, factor, WARPGROUP, True, UPPER, LOWER, SCORES, WEIGHTS, DQ,
            )
            steps += 1
    # Only this warpgroup reads its half of V, whose memory can now stage dV and dK.
    own_v = v_s.index(WARPGROUP).reshape([HALF, WIDTH])
    own_v.store(dv.to(dv_desc.dtype))
    fence_async_shared()
    store(dv_desc, [bh // kv_heads, bh % kv_heads, key, 0], v_s.index(WARPGROUP))
    tma.store_wait(0)
    own_v.store((dk * scale).to(dk_desc.dtype))
    fence_async_shared()
    store(dk_desc, [bh // kv_heads, bh % kv_heads, key, 0], v_s.index(WARPGROUP))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=("blocks", "together", "least", "most", *COUNTS))
def _backward(
    q_desc, k_desc, v_desc, dout_desc, stat_desc, dk_desc, dv_desc, dq_ptr, turns_ptr, next_ptr,
    blocks, together, kv_heads, group, query, kv, least, most, factor, scale,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, UPPER: gl.constexpr, LOWER: gl.constexpr,
):
    """Allocate a program's shared memory and barriers, and start its warps."""
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    WIDTH: gl.constexpr = q_desc.block_type.shape[3]
    HALF: gl.constexpr = k_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, ROWS], dtype)
    k_s = gl.allocate_shared_memory(dtype, [2, 1, 1, HALF, WIDTH], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [2, 1, 1, HALF, WIDTH], v_desc.layout)
    q_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, WIDTH], q_desc.layout)
    dout_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, WIDTH], dout_desc.layout)
    ds_s = gl.allocate_shared_memory(dtype, [4, HALF, ROWS], DS)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], stat_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], stat_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dout_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    handed_on = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(dout_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
        mbarrier.init(turn.index(i), count=1)
        mbarrier.init(handed_on.index(i), count=1)
    mbarrier.init(kv_full.index(0), count=1)
    mbarrier.init(ds_full.index(0), count=2)
    # Programs wait for those of earlier keys, so blocks are numbered in the order of their start.
    number = gl.atomic_add(next_ptr, 1, sem="relaxed")
    # Triton 3.6 broadcasts the number through shared memory that warp_specialize then overwrites.
    barrier()
    # The more heads run side by side, the fewer programs wait for one another.
    BESIDE: gl.constexpr = 16 if UPPER or LOWER else 8
    last, bh = place(number, blocks, together, BESIDE)
    block = blocks - 1 - last
    copied = (
        q_desc, k_desc, v_desc, dout_desc, stat_desc, q_s, k_s, v_s, dout_s, lse_s, delta_s,
        kv_full, q_full, dout_full, empty, together, kv_heads, group, query, kv, least, most,
    )
    ordered = (turns_ptr, turn, handed_on, empty, group, query, kv, least, most)
    read = (
        dk_desc, dv_desc, dq_ptr, q_s, k_s, v_s, dout_s, ds_s, lse_s, delta_s, kv_full, q_full,
        dout_full, empty, ds_full, turn, kv_heads, group, query, kv, least, most, factor, scale,
    )
    gl.warp_specialize([
        (_differentiate, (read, block, bh, 0, UPPER, LOWER)),
        (_differentiate, (read, block, bh, 1, UPPER, LOWER)),
        (_copy, (copied, block, bh, UPPER, LOWER)),
        (_await_turns, (ordered, block, bh, ROWS, 2 * HALF, UPPER, LOWER)),
        (_pass_turns, (ordered, block, bh, ROWS, 2 * HALF, UPPER, LOWER)),
    ], [4, 1, 1, 1], [REGISTERS, 24, 24, 24])


# fmt: on
