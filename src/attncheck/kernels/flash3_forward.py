"""FlashAttention-3 forward for Hopper in Gluon: full attention, causal masks and windows.

Shah et al. 2024 (arXiv:2407.08608): one warp copies tiles by TMA, warpgroups of four warps each own
64 query rows and do the arithmetic. A warpgroup starts the product of the next scores before it
waits for the last P·V, and warpgroups take turns: while one does its softmax the tensor cores work
for another. A program that takes one block of rows after the other (``Shape.persistent``) has the
next block's keys under way while it stores the last one's.

Keys are walked over from those that a mask may touch to those that every row of the block sees, of
which none is masked. Under a mask a block of rows whose sums are not finite is done again by
``flash2_forward``'s careful launch.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from functools import cache, lru_cache
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
from attncheck.kernels.flash2_forward import flash2_forward
from attncheck.kernels.launch import COUNTS, LOG2E, Band, Launch, needs_careful_launch
from attncheck.kernels.tile import number_of, place
from attncheck.mods.to_triton import TritonMod

# Triton 3.8 or so renamed both.
load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Compile-time choices of one launch."""

    keys: int  # of a tile
    stages: int  # tiles of keys, and as many of values, in shared memory
    groups: int = 2  # warpgroups that do arithmetic, of ``OWN`` rows each
    registers: int = 240  # of each of their threads
    pingpong: bool = True  # whether they take turns at the tensor cores
    # Whether a program takes one block of rows after the other, or each has its own. Blocks of a
    # causal mask take unlike times: in a graph on an H100 it is 1.09 times as fast by their own at
    # 16,384 keys, 1.4 times at 4,096, and without a mask as fast.
    persistent: bool = False

    @property
    def rows(self) -> int:
        """Rows of a block, all warpgroups' together."""
        return OWN * self.groups


OWN = 64  # rows of a warpgroup, as many as its matrix instruction has
WIDEST_BACKWARD = 128  # beyond it dK and dV of a warpgroup are more than its registers
SHAPES = {
    64: Shape(keys=128, stages=4),
    128: Shape(keys=128, stages=2, pingpong=False),
    256: Shape(keys=64, stages=2),
}
# Without a mask, where a third group spills before and after its loop alone.
WHOLE_SHAPES = {**SHAPES, 64: Shape(keys=128, stages=3, groups=3, registers=160)}


def shape_for(head_dim: int, band: Band | None) -> Shape:
    """Return how rows of ``head_dim`` numbers are taken, which see keys within ``band``."""
    return (WHOLE_SHAPES if band == Band() else SHAPES)[tile_width(head_dim)]


def unsupported_by_kernel(
    dtype: torch.dtype,
    dims: tuple[int, int],
    band: Band | None,
    *,
    others: bool,
    backward: bool = False,
) -> str | None:
    """Return why the kernel does not take these, in one line; None if it does.

    With ``backward``, why that of its gradients does not.
    """
    if dtype not in _ELEMENTS:
        return "it takes fp16 and bf16"
    if others:
        return "it takes no score mod, scale of fp8, sink or pages"
    if band is None:
        return "it takes masks that go by distance alone: causal ones and windows"
    if any(dim % 8 or dim > max(SHAPES) for dim in dims) or tile_width(dims[0]) != tile_width(
        dims[1]
    ):
        return (
            f"head dims {dims[0]} and {dims[1]}: it takes multiples of 8 up to {max(SHAPES)}, both "
            f"within the same of {', '.join(map(str, SHAPES))}"
        )
    if backward and max(dims) > WIDEST_BACKWARD:
        return f"head dims {dims[0]} and {dims[1]}: its backward takes up to {WIDEST_BACKWARD}"
    return None


def flash3_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    mask: TritonMod,
    launch: Launch,
    score: TritonMod | None = None,
    band: Band | None = None,
    shape: Shape | None = None,
    redo: bool = True,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of ``q`` over ``k`` and ``v``, and its log-sum-exp: as ``flash2_forward``.

    Which does it wherever this kernel does not take what it is given: on another GPU, too.

    Args:
        q: ``(batch, heads, query, head_dim)``, any strides; copied where TMA cannot read them.
        k: ``(batch, kv_heads, kv, head_dim)``; kv_heads divides heads.
        v: ``(batch, kv_heads, kv, value_dim)``.
        scale: Factor of q·k, an fp32 number.
        mask: The mask, for what is done by the other kernel.
        launch: Of the other kernel.
        score: A score mod, for the other kernel.
        band: The same mask, if it goes by distance alone; None if it does not.
        shape: How this one is launched (default: ``shape_for`` the head dim).
        others: What ``flash2_forward`` takes besides.

    Returns:
        out and LSE, as ``flash2_forward``.
    """
    refused = not on_hopper(q.device) or unsupported_by_kernel(
        q.dtype,
        (q.shape[3], v.shape[3]),
        band,
        others=others.get("out_dtype", q.dtype) not in {None, q.dtype}
        or score is not None
        or any(others.get(name) is not None for name in ("descale", "sink", "pages")),
    )
    if refused or band is None:
        return flash2_forward(q, k, v, scale=scale, mask=mask, score=score, launch=launch, **others)
    batch, heads, query, head_dim = q.shape
    kv_heads, kv = k.shape[1:3]
    band = band.within(query, kv)
    shape = shape or shape_for(head_dim, band)
    out = torch.empty((batch, heads, query, v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, query), dtype=torch.float32, device=q.device)
    blocks, together = -(-query // shape.rows), batch * heads
    again = torch.empty((-(-query // OWN), together), dtype=torch.int32, device=q.device)
    programs = blocks * together
    if shape.persistent:
        programs = min(programs, _multiprocessors(q.device))
    with sound_assembler(q.device.type):
        # fmt: off
        _forward[(programs,)](
            descriptor(q, OWN), descriptor(k, shape.keys), descriptor(v, shape.keys),
            descriptor(out, OWN), lse, again, blocks, together, heads, heads // kv_heads, query,
            kv, band.least or 0, band.most or 0, scale * LOG2E, GROUPS=shape.groups,
            STAGES=shape.stages, REGISTERS=shape.registers, PINGPONG=shape.pingpong,
            UPPER=band.most is not None, LOWER=band.least is not None, num_warps=4,
            # Fused, score · factor − maximum is not 0 where the score is the maximum, which is
            # rounded: from 2^30 on its weight is infinite, or 0.
            enable_fp_fusion=False,
        )
        # fmt: on
    if redo and band != Band() and needs_careful_launch(again):
        own = replace(launch, block_query=OWN, registers=None)
        flash2_forward(
            q, k, v, scale=scale, mask=mask, score=None, launch=own, redo=(out, lse, again)
        )
    return out, lse


_ELEMENTS = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def tile_width(dim: int) -> int:
    """Columns of a tile for rows of ``dim`` numbers."""
    return max(min(SHAPES), int(triton.next_power_of_2(dim)))


_ALIGNED = 16  # bytes: what TMA takes addresses and strides by


def descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """What TMA knows of ``x``, or of a copy where it cannot read it: tiles of ``rows``."""
    if not _is_readable(x.shape, x.stride(), x.element_size()):
        x = x.contiguous()
    if x.data_ptr() % _ALIGNED:
        x = x.clone(memory_format=torch.contiguous_format)
    # Checking it takes Triton longer than the rest of a launch, and only the address is new.
    own = copy(_descriptor_of(x.shape, x.stride(), x.dtype, rows))
    own.base = x
    return own


@lru_cache(maxsize=256)
def _is_readable(shape: torch.Size, strides: tuple[int, ...], size: int) -> bool:
    """Return whether TMA can read a tensor of elements of ``size`` bytes."""
    ahead = _ALIGNED // size
    steps = [step for step, length in zip(strides, shape, strict=True) if length > 1]
    return strides[3] == 1 and all(step > 0 and step % ahead == 0 for step in steps if step != 1)


@lru_cache(maxsize=256)
def _descriptor_of(
    shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, rows: int
) -> TensorDescriptor:
    """The descriptor of any such tensor, without its memory."""
    width = tile_width(shape[3])
    # Along an axis of one a tensor's stride means nothing, and may be what TMA refuses.
    own = [step if length > 1 else width for step, length in zip(strides, shape, strict=True)]
    nothing, block = torch.empty(0, dtype=dtype), [1, 1, rows, width]
    return TensorDescriptor(
        nothing, list(shape), [*own[:3], 1], block, layout_of(dtype, rows, width)
    )


@cache
def layout_of(dtype: torch.dtype, rows: int, width: int) -> gl.NVMMASharedLayout:
    """Return how a tile of ``rows`` lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], _ELEMENTS[dtype])


# A column of twenty names says less than three lines of them.
# fmt: off
@triton.jit
def walk(
    block, query, kv, least, most, ROWS: tl.constexpr, KEYS: tl.constexpr, UPPER: tl.constexpr,
    LOWER: tl.constexpr,
):
    """The tiles of keys that a block of rows visits: the first, and how many there are.

    And how many of them, from the last and from the first, hold a key that some row may not see. A
    block that sees nothing visits one tile, which is masked.
    """
    row = block * ROWS
    end = kv
    whole = kv
    if UPPER:
        end = tl.minimum(kv, tl.minimum(row + ROWS, query) + most)
        whole = tl.minimum(kv, row + most + 1)
    first = 0
    whole_from = 0
    if LOWER:
        first = tl.maximum(row + least, 0) // KEYS
        whole_from = tl.cdiv(tl.maximum(row + ROWS - 1 + least, 0), KEYS)
    first = tl.minimum(first, (kv - 1) // KEYS)
    count = tl.maximum(tl.cdiv(tl.maximum(end, 0), KEYS) - first, 1)
    late = tl.minimum(first + count - tl.maximum(tl.maximum(whole, 0) // KEYS, first), count)
    late = tl.maximum(late, 0)
    early = tl.minimum(tl.maximum(whole_from - first, 0), count - late)
    return first, count, late, early


@triton.jit
def tile_of(turn, first, count, late, early):
    """The tile of a walk's ``turn``: the late ones backwards, the early ones, and then the rest."""
    back = first + count - 1 - turn
    masked = tl.where(turn < late, back, first + turn - late)
    return tl.where(turn < late + early, masked, back + early)


@gluon.jit
def _copy(memory, GROUPS: gl.constexpr, UPPER: gl.constexpr, LOWER: gl.constexpr):
    """Every block's rows, and its keys and values tile by tile, on their way to shared memory."""
    (
        q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty,
        blocks, together, heads, group, query, kv, least, most,
    ) = memory
    STAGES: gl.constexpr = k_s.shape[0]
    ROWS: gl.constexpr = q_s.shape[3]
    KEYS: gl.constexpr = k_s.shape[3]
    done = 0
    turn_of_q = 0
    for number in range(gl.program_id(0), blocks * together, gl.num_programs(0)):
        block, bh = place(number, blocks, together)
        b = bh // heads
        h = bh % heads
        first, count, late, early = walk(
            block, query, kv, least, most, ROWS * GROUPS, KEYS, UPPER, LOWER
        )
        for turn in range(count):
            key = tile_of(turn, first, count, late, early) * KEYS
            stage = done % STAGES
            phase = (done // STAGES) & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            load(k_desc, [b, h // group, key, 0], k_full.index(stage), k_s.index(stage))
            if turn == 0:
                for own in gl.static_range(GROUPS):
                    row = (block * GROUPS + own) * ROWS
                    mbarrier.wait(q_empty.index(own), turn_of_q ^ 1)
                    mbarrier.expect(q_full.index(own), q_desc.block_type.nbytes)
                    load(q_desc, [b, h, row, 0], q_full.index(own), q_s.index(own))
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            load(v_desc, [b, h // group, key, 0], v_full.index(stage), v_s.index(stage))
            done += 1
        turn_of_q ^= 1


@gluon.jit
def _hidden(
    s, key, rows, kv, least, most, UPPER: gl.constexpr, LOWER: gl.constexpr, SCORES: gl.constexpr,
):
    """Scores, −inf where a row does not see a key."""
    keys = key + gl.arange(0, s.shape[1], gl.SliceLayout(0, SCORES))
    last = gl.full([s.shape[0]], 0, gl.int32, gl.SliceLayout(1, SCORES)) + (kv - 1)
    if UPPER:
        last = gl.minimum(last, rows + most)
    seen = keys[None, :] <= last[:, None]
    if LOWER:
        seen = seen & (keys[None, :] >= (rows + least)[:, None])
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _advanced(s, m):
    """The new maximum, a tile's weights, and the factor of what was summed before it."""
    m_new = gl.maximum(m, gl.max(s, 1))
    # A row that has seen nothing keeps m = −inf; 0 stands in so that −inf − −inf never happens.
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    return m_new, gl.exp2(s - shift[:, None]), gl.exp2(m - shift)


@gluon.jit
def _step(
    turn, done, passed, q, k_s, v_s, k_full, k_empty, v_full, v_empty, turns, m, total, acc, p,
    rows, first, count, late, early, kv, least, most, factor, OWN: gl.constexpr,
    GROUPS: gl.constexpr, PINGPONG: gl.constexpr, MASKED: gl.constexpr, UPPER: gl.constexpr,
    LOWER: gl.constexpr, SCORES: gl.constexpr, SUMS: gl.constexpr, WEIGHTS: gl.constexpr,
):
    """One tile: its scores are begun, then the last tile's P·V; its softmax is done beside that."""
    STAGES: gl.constexpr = k_s.shape[0]
    KEYS: gl.constexpr = k_s.shape[3]
    stage = done % STAGES
    phase = (done // STAGES) & 1
    before = (done - 1) % STAGES
    phase_before = ((done - 1) // STAGES) & 1
    k = k_s.index(stage).reshape([KEYS, k_s.shape[4]])
    v = v_s.index(before).reshape([KEYS, v_s.shape[4]])
    mbarrier.wait(k_full.index(stage), phase)
    if PINGPONG:
        mbarrier.wait(turns.index(OWN), (passed & 1) ^ (1 if OWN == 0 else 0))
    zeros = gl.full([m.shape[0], KEYS], 0.0, gl.float32, SCORES)
    product = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), phase_before)
    summed = warpgroup_mma(p, v, acc, is_async=True)
    if PINGPONG:
        mbarrier.arrive(turns.index((OWN + 1) % GROUPS), count=1)
    s = warpgroup_mma_wait(1, deps=[product])
    mbarrier.arrive(k_empty.index(stage), count=1)
    s = s * factor
    if MASKED:
        key = tile_of(turn, first, count, late, early) * KEYS
        s = _hidden(s, key, rows, kv, least, most, UPPER, LOWER, SCORES)
    m, weights, alpha = _advanced(s, m)
    total = total * alpha + gl.sum(weights, 1)
    rounded = weights.to(v_s.dtype)
    # It was waited for above: without a barrier here ptxas moves the wait for P·V in front of the
    # softmax.
    mbarrier.wait(k_full.index(stage), phase)
    acc = warpgroup_mma_wait(0, deps=[summed])
    mbarrier.arrive(v_empty.index(before), count=1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))[:, None]
    return m, total, acc, gl.convert_layout(rounded, WEIGHTS)


@gluon.jit
def _attend(
    memory, OWN: gl.constexpr, GROUPS: gl.constexpr, PINGPONG: gl.constexpr, UPPER: gl.constexpr,
    LOWER: gl.constexpr,
):
    """A warpgroup's rows of every block: the OWN-th of its groups of rows."""
    (
        out_desc, lse_ptr, again_ptr, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full,
        v_empty, turns, blocks, together, heads, query, kv, least, most, factor,
    ) = memory
    STAGES: gl.constexpr = k_s.shape[0]
    ROWS: gl.constexpr = q_s.shape[3]
    KEYS: gl.constexpr = k_s.shape[3]
    WIDTH: gl.constexpr = q_s.shape[4]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    q = q_s.index(OWN).reshape([ROWS, WIDTH])
    done = 0
    passed = 0
    turn_of_q = 0
    for number in range(gl.program_id(0), blocks * together, gl.num_programs(0)):
        block, bh = place(number, blocks, together)
        first, count, late, early = walk(
            block, query, kv, least, most, ROWS * GROUPS, KEYS, UPPER, LOWER
        )
        row = (block * GROUPS + OWN) * ROWS
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        mbarrier.wait(q_full.index(OWN), turn_of_q)
        stage = done % STAGES
        mbarrier.wait(k_full.index(stage), (done // STAGES) & 1)
        k = k_s.index(stage).reshape([KEYS, WIDTH])
        zeros = gl.full([ROWS, KEYS], 0.0, gl.float32, SCORES)
        product = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(k_empty.index(stage), count=1)
        s = s * factor
        key = tile_of(0, first, count, late, early) * KEYS
        s = _hidden(s, key, rows, kv, least, most, UPPER, LOWER, SCORES)
        m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        m, weights, _ = _advanced(s, m)
        total = gl.sum(weights, 1)
        p = gl.convert_layout(weights.to(v_s.dtype), WEIGHTS)
        acc = gl.full([ROWS, WIDTH], 0.0, gl.float32, SUMS)
        done += 1
        masked = late + early
        # Without a limit one tile alone may reach beyond the last key, and it was the first.
        if UPPER or LOWER:
            for turn in range(1, masked):
                m, total, acc, p = _step(
                    turn, done, passed, q, k_s, v_s, k_full, k_empty, v_full, v_empty, turns, m,
                    total, acc, p, rows, first, count, late, early, kv, least, most, factor, OWN,
                    GROUPS, PINGPONG, True, UPPER, LOWER, SCORES, SUMS, WEIGHTS,
                )
                done += 1
                passed += 1
        for turn in range(gl.maximum(masked, 1), count):
            m, total, acc, p = _step(
                turn, done, passed, q, k_s, v_s, k_full, k_empty, v_full, v_empty, turns, m, total,
                acc, p, rows, first, count, late, early, kv, least, most, factor, OWN, GROUPS,
                PINGPONG, False, UPPER, LOWER, SCORES, SUMS, WEIGHTS,
            )
            done += 1
            passed += 1
        stage = (done - 1) % STAGES
        mbarrier.wait(v_full.index(stage), ((done - 1) // STAGES) & 1)
        v = v_s.index(stage).reshape([KEYS, WIDTH])
        summed = warpgroup_mma(p, v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[summed])
        mbarrier.arrive(v_empty.index(stage), count=1)

        empty = total == 0.0
        lse = (m + gl.log2(gl.where(empty, 1.0, total))) * 0.6931471805599453
        lse = gl.where(empty, float("-inf"), lse)
        gl.store(lse_ptr + bh.to(gl.int64) * query + rows, lse, mask=rows < query)
        if UPPER or LOWER:
            finite = gl.min((gl.abs(acc) < float("inf")).to(gl.int32), 1)
            own = number_of(block * GROUPS + OWN, bh, gl.cdiv(query, ROWS), together)
            gl.store(again_ptr + own, 1 - gl.min(finite, 0), mask=row < query)
        inverse = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, total))
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, SUMS))[:, None]
        q.store(acc.to(out_desc.dtype))
        fence_async_shared()
        store(out_desc, [bh // heads, bh % heads, row, 0], q_s.index(OWN))
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index(OWN), count=1)
        turn_of_q ^= 1


@gluon.jit(do_not_specialize=("blocks", "together", "least", "most", *COUNTS))
def _forward(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, again_ptr, blocks, together, heads, group, query,
    kv, least, most, factor, GROUPS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    PINGPONG: gl.constexpr, UPPER: gl.constexpr, LOWER: gl.constexpr,
):
    """Shared memory and barriers of a program, and its warps' work."""
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    WIDTH: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, WIDTH], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, WIDTH], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, WIDTH], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    for i in gl.static_range(GROUPS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
        mbarrier.init(turns.index(i), count=1)
    copied = (
        q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty,
        blocks, together, heads, group, query, kv, least, most,
    )
    read = (
        out_desc, lse_ptr, again_ptr, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full,
        v_empty, turns, blocks, together, heads, query, kv, least, most, factor,
    )
    if GROUPS == 2:
        gl.warp_specialize([
            (_attend, (read, 0, GROUPS, PINGPONG, UPPER, LOWER)),
            (_attend, (read, 1, GROUPS, PINGPONG, UPPER, LOWER)),
            (_copy, (copied, GROUPS, UPPER, LOWER)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (_attend, (read, 0, GROUPS, PINGPONG, UPPER, LOWER)),
            (_attend, (read, 1, GROUPS, PINGPONG, UPPER, LOWER)),
            (_attend, (read, 2, GROUPS, PINGPONG, UPPER, LOWER)),
            (_copy, (copied, GROUPS, UPPER, LOWER)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])


# fmt: on
