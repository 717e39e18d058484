"""FlashAttention-3 forward for Hopper in Gluon, for any mask and score mod.

Shah et al. 2024 (arXiv:2407.08608): one warp copies tiles by TMA, and warpgroups of four warps each
own 64 query rows and do the arithmetic. During a warpgroup's softmax the tensor cores work on its
previous P·V (``Shape.overlap``) and for the other warpgroups. The kernel is persistent: a program
takes the next free block of rows, and loads its rows and keys while it stores the last block's out.

Under a ``Band`` (a mask by distance alone) a block visits its tiles from the last back (``walk``).
Under any other mask they are listed as for ``flash2_forward``, with a kind for each warpgroup: the
copying warp reads the list, and writes a tile's number and kinds next to its keys in shared memory.
Either way each warpgroup leaves out those of a block's first and last tiles that only rows of
others see. Mods are called on scores in registers.

Under a mask, blocks of rows whose sums are not finite are computed again by ``flash2_forward``'s
careful launch; elements of out that no non-finite value reaches keep their bits.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

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

from attncheck.inputs.input_tensors import Descale
from attncheck.kernels.compilation import multiprocessors, on_hopper, sound_assembler
from attncheck.kernels.flash2_forward import flash2_forward
from attncheck.kernels.launch import (
    ALIGNMENT,
    COUNTS,
    LOG2E,
    Launch,
    VisitList,
    aligned,
    needs_careful_launch,
    scales,
)
from attncheck.kernels.tile import listed, loaded, number_of, place
from attncheck.mods.masks import Band
from attncheck.mods.to_triton import TritonMod, Weight

if TYPE_CHECKING:
    from collections.abc import Callable

# Triton 3.8 or so renamed both.
load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Compile-time choices of one launch."""

    keys: int  # per tile
    stages: int  # tiles of keys, and as many of values, in shared memory; with pingpong 2 or more
    groups: int = 2  # warpgroups that do arithmetic, of ``OWN`` rows each
    registers: int = 240  # per thread of these warpgroups
    pingpong: bool = False  # whether warpgroups take turns at the tensor cores
    overlap: bool = True  # whether to wait for a tile's P·V after the next softmax, not before it

    @property
    def rows(self) -> int:
        """Query rows per block, over all warpgroups."""
        return OWN * self.groups


OWN = 64  # Query rows per warpgroup: the M of its matrix instruction (wgmma).
WIDEST_BACKWARD = 128  # Largest head dim whose dK and dV fit into a warpgroup's registers.
# At head dim 64, and in fp8, a tile's softmax takes longer than its products: a third warpgroup
# gains more than registers do, and in 16 bits one barrier less gains more than overlap.
SHAPES = {
    64: Shape(keys=128, stages=3, groups=3, registers=160, pingpong=True, overlap=False),
    128: Shape(keys=128, stages=2),
    256: Shape(keys=64, stages=2, pingpong=True),
}
# A score mod that reads or compares needs registers: three warpgroups have them in tiles of half
# as many keys. The code of a heavy mod must fit the instruction cache, which holds a copy for each
# warpgroup: a softcap took 1.45 times as long in tiles of 128 keys.
MOD_SHAPES: dict[Weight, dict[int, Shape]] = {
    "light": SHAPES,
    "medium": {
        **SHAPES,
        64: Shape(keys=64, stages=6, groups=3, registers=160, pingpong=True, overlap=False),
    },
    "heavy": {
        **SHAPES,
        64: Shape(keys=64, stages=4),
        128: Shape(keys=64, stages=4, overlap=False),
    },
}
FP8_SHAPES = {
    64: Shape(keys=128, stages=4, groups=3, registers=160, pingpong=True),
    128: Shape(keys=128, stages=2, groups=3, registers=160),
    256: Shape(keys=64, stages=2),
}


def shape_for(
    head_dim: int, dtype: torch.dtype, score: Weight | None, mask: Weight | None
) -> Shape:
    """Return the default ``Shape`` for a head dim and dtype.

    Args:
        head_dim: Columns of q.
        dtype: The dtype of q.
        score: The weight of the score mod; None without one.
        mask: The weight of a mask that is not a ``Band``, of which only "heavy" matters; else None.
    """
    if dtype == _FP8:
        shapes = FP8_SHAPES
    else:
        shapes = MOD_SHAPES["heavy" if mask == "heavy" else score or "light"]
    return shapes[tile_width(head_dim)]


def unsupported_by_kernel(
    dtype: torch.dtype,
    dims: tuple[int, int],
    band: Band | None,
    *,
    others: bool,
    score: bool,
    backward: bool = False,
) -> str | None:
    """Return in one line why the kernel does not support such a call; None if it does.

    With ``backward``, the answer is for ``flash3_backward``.
    """
    if dtype not in _ELEMENTS:
        return "it takes fp16, bf16 and e4m3"
    if others:
        return "it takes no sink or pages"
    if score and dtype == _FP8:
        return "in e4m3 it takes no score mod"
    ahead, most = ALIGNMENT // dtype.itemsize, max(SHAPES)
    if any(dim % ahead or dim > most for dim in dims) or tile_width(dims[0]) != tile_width(dims[1]):
        return (
            f"head dims {dims[0]} and {dims[1]}: it takes multiples of {ahead} up to {most}, both "
            f"within the same of {', '.join(map(str, SHAPES))}"
        )
    if backward and (score or band is None or dtype == _FP8 or max(dims) > WIDEST_BACKWARD):
        return "its backward does not take it"
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
    tiles: VisitList | None = None,
    shape: Shape | None = None,
    redo: bool = True,
    descale: Descale | None = None,
    out_dtype: torch.dtype | None = None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of ``q`` over ``k`` and ``v``, and its log-sum-exp, as ``flash2_forward``.

    Calls ``flash2_forward`` where this kernel does not support the arguments or the GPU.

    Args:
        q: ``(batch, heads, query, head_dim)``, any strides; copied where TMA cannot read them.
        k: ``(batch, kv_heads, kv, head_dim)``; kv_heads divides heads.
        v: ``(batch, kv_heads, kv, value_dim)``.
        scale: Factor of q·k, an fp32 number.
        mask: The mask.
        launch: The launch of ``flash2_forward``.
        score: The score mod; None leaves scores as they are.
        band: The same mask as a ``Band``, if it goes by distance alone; else None.
        tiles: The tiles to visit under a mask that is not a ``Band``, in blocks of ``shape``, a
            group of rows for each warpgroup.
        shape: The compile-time choices of this kernel (default: ``shape_for`` these arguments).
        redo: Whether blocks of rows with non-finite sums are computed again with care.
        descale: For e4m3, as in ``flash2_forward``. Tensor cores add its products up in 13 bits.
        out_dtype: The dtype of out; only bf16 for e4m3.
        others: Further arguments of ``flash2_forward``.

    Returns:
        out and LSE, as ``flash2_forward``.
    """
    refused = not on_hopper(q.device) or unsupported_by_kernel(
        q.dtype,
        (q.shape[3], v.shape[3]),
        band,
        others=out_dtype not in ({torch.bfloat16} if q.dtype == _FP8 else {None, q.dtype})
        or any(others.get(name) is not None for name in ("sink", "pages")),
        score=score is not None,
    )
    common: dict[str, Any] = {
        "scale": scale,
        "mask": mask,
        "descale": descale,
        "out_dtype": out_dtype,
    }
    if refused or (band is None and tiles is None):
        return flash2_forward(q, k, v, score=score, launch=launch, **common, **others)
    batch, heads, query, head_dim = q.shape
    kv_heads, kv = k.shape[1:3]
    weights = None if score is None else score.weight, mask.weight if band is None else None
    shape = shape or shape_for(head_dim, q.dtype, *weights)
    mask_arguments: tuple[Any, ...] = ((), ())
    if band is not None:
        band = band.within(query, kv)
    elif tiles is not None:
        tiles.check("tiles", (query, shape.rows), (kv, shape.keys), groups=shape.groups)
        mask_arguments = (*tiles.arguments(), tiles.spans, tiles.order), mask.captured
    # The kernel masks either by a band's limits or by calling the mask.
    least, most, masked = (None, None, mask) if band is None else (band.least, band.most, None)
    scaled = q.dtype == _FP8
    # The scale is fused into the exponent's FMA, but not if it is below 0, since the largest score
    # is then the smallest product, nor in fp16, too narrow for weights rounded far from 1.
    fused = scaled or (q.dtype == torch.bfloat16 and (score is not None or scale > 0))
    out = torch.empty(
        (batch, heads, query, v.shape[3]), dtype=out_dtype or q.dtype, device=q.device
    )
    lse = torch.empty((batch, heads, query), dtype=torch.float32, device=q.device)
    blocks, together = -(-query // shape.rows), batch * heads
    flags = torch.empty((-(-query // OWN), together), dtype=torch.int32, device=q.device)
    upcoming = torch.zeros(1, dtype=torch.int32, device=q.device)
    programs = min(blocks * together, multiprocessors(q.device))
    with sound_assembler(q.device.type):
        # fmt: off
        _forward[(programs,)](
            descriptor(q, OWN), descriptor(k, shape.keys),
            _transposed_descriptor(v, shape.keys) if scaled else descriptor(v, shape.keys),
            descriptor(out, OWN), lse, *(scales(descale) or (lse,) * 3), flags, upcoming, blocks,
            together, heads, heads // kv_heads, query, kv, least or 0, most or 0,
            scale * LOG2E if score is None else scale, *mask_arguments,
            () if score is None else score.captured,
            GROUPS=shape.groups, STAGES=shape.stages, REGISTERS=shape.registers,
            PINGPONG=shape.pingpong, OVERLAP=shape.overlap, UPPER=most is not None,
            LOWER=least is not None, SCALED=scaled, LIFT=math.log2(launch.weights_scale),
            FUSED=fused,
            MASK=None if masked is None else masked.function,
            SCORE=None if score is None else score.function, num_warps=4,
            # Only with a score mod; else ``_update_softmax`` fuses explicitly. In fp16 a mod's last
            # product could be fused into the exponent's subtraction.
            enable_fp_fusion=fused and score is not None,
        )
        # fmt: on
    if redo and band != Band() and needs_careful_launch(flags):
        careful = replace(launch, block_query=OWN, registers=None)
        flash2_forward(q, k, v, score=score, launch=careful, redo=(out, lse, flags), **common)
        # Not while a CUDA graph is recorded: there a hidden NaN may change out's last bits.
        if not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
            rerun: Callable[..., tuple[torch.Tensor, torch.Tensor]] = partial(
                flash3_forward, launch=launch, band=band, tiles=tiles, shape=shape, redo=False,
                **common,
            )  # fmt: skip
            finite = v.float().isfinite()
            clean, clean_lse = rerun(q, k, v.float().where(finite, 0.0).to(v.dtype), score=score)
            # With scores of 0 and non-finite values marked by 1, out is 0 where none is seen.
            unscaled = None if descale is None else replace(descale, v=torch.ones_like(descale.v))
            zeros = q.new_zeros(q.shape), k.new_zeros(k.shape)
            marks, _ = rerun(*zeros, (~finite).to(v.dtype), descale=unscaled)
            out.copy_(out.where(marks != 0, clean))
            lse.copy_(clean_lse)
    return out, lse


_FP8 = torch.float8_e4m3fn
_ELEMENTS = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, _FP8: gl.float8e4nv}


@cache
def tile_width(dim: int) -> int:
    """Return the columns of a tile for rows of ``dim`` numbers: a power of two from 64 on."""
    return max(min(SHAPES), int(triton.next_power_of_2(dim)))


def descriptor(x: torch.Tensor, rows: int, columns: int | None = None) -> TensorDescriptor:
    """Return a TMA descriptor of ``x`` in tiles of ``rows``; of a copy if TMA cannot read it."""
    columns = columns or tile_width(x.shape[3])
    x = aligned(x)
    # Triton's checks of a new descriptor take longer than the rest of a launch: copy a cached one.
    result = copy(_descriptor_of(x.shape, x.stride(), x.dtype, rows, columns))
    result.base = x
    return result


_TRANSPOSED_KEYS = 128  # Keys per program of ``_transpose_values``.


def _transposed_descriptor(v: torch.Tensor, keys: int) -> TensorDescriptor:
    """Return a TMA descriptor of fp8 ``v`` transposed to ``(batch, kv_heads, value_dim, kv)``.

    An fp8 product needs the keys of a column contiguous. Zeros pad them to a multiple of 16.
    """
    batch, kv_heads, kv, dim = v.shape
    wide, width = -(-kv // ALIGNMENT) * ALIGNMENT, tile_width(dim)
    out = torch.empty((batch, kv_heads, dim, wide), dtype=v.dtype, device=v.device)
    # As bytes, since Triton's interpreter can load and move these too.
    _transpose_values[(triton.cdiv(wide, _TRANSPOSED_KEYS), batch * kv_heads)](
        v.view(torch.uint8), out.view(torch.uint8), *v.stride(), kv_heads, kv, wide, dim,
        BLOCK_K=_TRANSPOSED_KEYS, BLOCK_V=width,
    )  # fmt: skip
    return descriptor(out, width, keys)


@lru_cache(maxsize=256)
def _descriptor_of(
    shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, rows: int, width: int
) -> TensorDescriptor:
    """Return a descriptor of any tensor of this shape, strides and dtype, on empty memory."""
    # The stride of an axis of length 1 is arbitrary, and may be one that TMA refuses.
    steps = [step if length > 1 else width for step, length in zip(strides, shape, strict=True)]
    nothing, block = torch.empty(0, dtype=dtype), [1, 1, rows, width]
    return TensorDescriptor(
        nothing, list(shape), [*steps[:3], 1], block, layout_of(dtype, rows, width)
    )


@cache
def layout_of(dtype: torch.dtype, rows: int, width: int) -> gl.NVMMASharedLayout:
    """Return the shared-memory layout of a tile of ``rows`` by ``width``."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], _ELEMENTS[dtype])


# Twenty parameters are easier to read on three lines than in a column.
# fmt: off
@triton.jit(do_not_specialize=COUNTS)
def _transpose_values(
    v_ptr, out_ptr, v_batch, v_head, v_row, v_col, kv_heads, kv, wide, dim,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):
    """Store V transposed, every 16 keys in the order 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15.

    So each of the four threads that hold 16 keys' scores stores its four bytes of P at once.
    """
    bh = tl.program_id(1)
    at = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    within = at % 16
    keys = at - within + within // 4 * 2 + within % 2 + within // 2 % 2 * 8
    cols = tl.arange(0, BLOCK_V)
    v_ptr += (bh // kv_heads).to(tl.int64) * v_batch + (bh % kv_heads).to(tl.int64) * v_head
    v = loaded(v_ptr, keys, cols, v_row, v_col, kv, dim)
    out_ptr += bh.to(tl.int64) * dim * wide
    tl.store(
        out_ptr + cols[:, None].to(tl.int64) * wide + at[None, :],
        tl.trans(v),
        mask=(cols[:, None] < dim) & (at[None, :] < wide),
    )


@triton.jit
def walk(
    block, query, kv, least, most, ROWS: tl.constexpr, KEYS: tl.constexpr, UPPER: tl.constexpr,
    LOWER: tl.constexpr,
):
    """Return the first of the tiles of keys that a block of rows visits, and the end of them.

    It visits them from the last back. A block that sees nothing visits one.
    """
    row = block * ROWS
    seen_to = kv
    if UPPER:
        seen_to = tl.minimum(kv, tl.minimum(row + ROWS, query) + most)
    first = 0
    if LOWER:
        first = tl.maximum(row + least, 0) // KEYS
    first = tl.minimum(first, (kv - 1) // KEYS)
    return first, tl.maximum(tl.cdiv(tl.maximum(seen_to, 0), KEYS), first + 1)


@gluon.jit
def _find_block(number, blocks, together, heads, tiles, LISTED: gl.constexpr):
    """Return block and batch · heads + head of work item ``number``, and (LISTED) its entry.

    The entry is the block's place in ``VisitList.counts``, and so the place of its ``spans``.
    """
    # Listed blocks differ in length: groups of 8 heads end more evenly than groups of 4.
    block, bh = place(number, blocks, together, 8 if LISTED else 4)
    entry = block.to(gl.int64)
    if LISTED:
        offset = (bh // heads).to(gl.int64) * tiles[5] + (bh % heads).to(gl.int64) * tiles[6]
        block = gl.load(tiles[9] + offset + entry * tiles[7])
        entry = offset + block.to(gl.int64) * tiles[7]
    return block, bh, entry


@gluon.jit
def _write_slot(slot_s, number):
    """Store a number into a slot of shared memory; called by one warp."""
    slot_s.store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + number)


@gluon.jit
def _read_slot(slot_s):
    """Return the number in a slot of shared memory; called by a warpgroup."""
    return gl.max(slot_s.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _publish_block(
    number, block, entry, blocks_done, next_s, next_full, next_empty, tiles, GROUPS: gl.constexpr,
    LISTED: gl.constexpr,
):
    """Publish the next block's number to the warpgroups; a number past the last block ends them.

    LISTED, also which block it is, and each warpgroup's span of its tiles.
    """
    SIZE: gl.constexpr = next_s.shape[0] // 2
    slot = blocks_done % 2
    mbarrier.wait(next_empty.index(slot), ((blocks_done // 2) & 1) ^ 1)
    _write_slot(next_s.index(slot * SIZE), number)
    if LISTED:
        _write_slot(next_s.index(slot * SIZE + 1), block)
        for i in gl.static_range(3 * GROUPS):
            length = gl.load(tiles[8] + entry * (3 * GROUPS) + i)
            _write_slot(next_s.index(slot * SIZE + 2 + i), length)
    mbarrier.arrive(next_full.index(slot), count=1)


@gluon.jit
def _await_block(
    blocks_done, next_s, next_full, next_empty, WARPGROUP: gl.constexpr, LISTED: gl.constexpr
):
    """Wait for ``_publish_block``; return number and, if LISTED, block and the warpgroup's span.

    The span is how many tiles the warpgroup leaves out at first, visits, and leaves out at last.
    """
    SIZE: gl.constexpr = next_s.shape[0] // 2
    slot = blocks_done % 2
    mbarrier.wait(next_full.index(slot), (blocks_done // 2) & 1)
    number = _read_slot(next_s.index(slot * SIZE))
    block = number
    before = number
    count = number
    after = number
    if LISTED:
        block = _read_slot(next_s.index(slot * SIZE + 1))
        before = _read_slot(next_s.index(slot * SIZE + 2 + 3 * WARPGROUP))
        count = _read_slot(next_s.index(slot * SIZE + 3 + 3 * WARPGROUP))
        after = _read_slot(next_s.index(slot * SIZE + 4 + 3 * WARPGROUP))
    mbarrier.arrive(next_empty.index(slot), count=1)
    return number, block, before, count, after


@gluon.jit
def _copy(
    memory, GROUPS: gl.constexpr, UPPER: gl.constexpr, LOWER: gl.constexpr, SCALED: gl.constexpr,
    LISTED: gl.constexpr,
):
    """Copy each block's rows, and its keys and values tile by tile, to shared memory by TMA."""
    (
        q_desc, k_desc, v_desc, next_ptr, q_s, k_s, v_s, tile_s, next_s, q_full, q_empty, k_full,
        k_empty, v_full, v_empty, next_full, next_empty, blocks, together, heads, group, query, kv,
        least, most, tiles,
    ) = memory
    STAGES: gl.constexpr = k_s.shape[0]
    ROWS: gl.constexpr = q_s.shape[3]
    KEYS: gl.constexpr = k_s.shape[3]
    tiles_done = 0
    blocks_done = 0
    number = gl.program_id(0)
    block, bh, entry = _find_block(number, blocks, together, heads, tiles, LISTED)
    while number < blocks * together:
        _publish_block(
            number, block, entry, blocks_done, next_s, next_full, next_empty, tiles, GROUPS, LISTED
        )
        # Blocks of a causal mask take different times: a program that is free takes the next.
        number = gl.num_programs(0) + gl.atomic_add(next_ptr, 1, sem="relaxed")
        last = blocks * together - 1
        next_block = _find_block(gl.minimum(number, last), blocks, together, heads, tiles, LISTED)
        b = bh // heads
        h = bh % heads
        first, end = walk(block, query, kv, least, most, ROWS * GROUPS, KEYS, UPPER, LOWER)
        runs = 1
        if LISTED:
            visits, runs = listed(tiles, b, h, block)
            runs = gl.maximum(runs, 1)
        for run in range(runs):
            start = 0
            stop = end - first
            if LISTED:
                packed = gl.load(visits + 2 * run)
                start = packed >> (2 * GROUPS)
                # A block that sees nothing has no run, and visits one tile.
                stop = start + gl.maximum(gl.load(visits + 2 * run + 1), 1)
            for turn in range(start, stop):
                stage = tiles_done % STAGES
                phase = (tiles_done // STAGES) & 1
                mbarrier.wait(k_empty.index(stage), phase ^ 1)
                if LISTED:
                    key = turn * KEYS
                    _write_slot(tile_s.index(stage), packed)
                    packed = packed + (1 << (2 * GROUPS))
                else:
                    key = (end - 1 - turn) * KEYS
                mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
                load(k_desc, [b, h // group, key, 0], k_full.index(stage), k_s.index(stage))
                if run + turn == start:  # the block's first tile
                    for warpgroup in gl.static_range(GROUPS):
                        row = (block * GROUPS + warpgroup) * ROWS
                        mbarrier.wait(q_empty.index(warpgroup), (blocks_done & 1) ^ 1)
                        mbarrier.expect(q_full.index(warpgroup), q_desc.block_type.nbytes)
                        load(q_desc, [b, h, row, 0], q_full.index(warpgroup), q_s.index(warpgroup))
                mbarrier.wait(v_empty.index(stage), phase ^ 1)
                mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
                if SCALED:
                    load(v_desc, [b, h // group, 0, key], v_full.index(stage), v_s.index(stage))
                else:
                    load(v_desc, [b, h // group, key, 0], v_full.index(stage), v_s.index(stage))
                tiles_done += 1
        blocks_done += 1
        block, bh, entry = next_block
    _publish_block(
        number, block, entry, blocks_done, next_s, next_full, next_empty, tiles, GROUPS, LISTED
    )


@gluon.jit
def _listed_tile(
    tile_s, stage, KEYS: gl.constexpr, WARPGROUP: gl.constexpr, GROUPS: gl.constexpr
):
    """Return a listed tile's first key, and whether this warpgroup has to mask it."""
    packed = _read_slot(tile_s.index(stage))
    return (packed >> (2 * GROUPS)) * KEYS, (packed & (2 << (2 * WARPGROUP))) == 0


@gluon.jit
def _offsets(s, SCORES: gl.constexpr):
    """Return two int32 tensors whose sum is column less row of each element of a tile.

    The first differs between threads, the second only between a thread's registers, where it has
    few values: what depends on the sum alone is computed once for all elements of one distance.
    """
    rows = gl.arange(0, s.shape[0], gl.SliceLayout(1, SCORES))[:, None]
    columns = gl.arange(0, s.shape[1], gl.SliceLayout(0, SCORES))[None, :]
    return (columns & 7) - (rows & ~8), (columns & ~7) - (rows & 8)


@gluon.jit
def _apply_score_mod(s, key, row, b, h, captured, SCORE: gl.constexpr, SCORES: gl.constexpr):
    """Return the scores after the score mod, if there is one."""
    if SCORE is not None:
        rows = row + gl.arange(0, s.shape[0], gl.SliceLayout(1, SCORES))
        keys = key + gl.arange(0, s.shape[1], gl.SliceLayout(0, SCORES))
        of_thread, of_register = _offsets(s, SCORES)
        of_thread += key - row
        modified = SCORE(
            s, b, h, rows[:, None], keys[None, :], captured, of_thread + of_register,
            of_thread.to(gl.float32) + of_register.to(gl.float32),
        )
        # The mod may return a scalar.
        s = gl.where(gl.full(s.shape, 1, gl.int1, SCORES), modified, s)
    return s


@gluon.jit
def _apply_mask(
    s, key, row, kv, least, most, b, h, captured, MASK: gl.constexpr, UPPER: gl.constexpr,
    LOWER: gl.constexpr, RAGGED: gl.constexpr, SCORES: gl.constexpr,
):
    """Return the scores, −inf where a row does not see a key."""
    if MASK is not None:
        keys = key + gl.arange(0, s.shape[1], gl.SliceLayout(0, SCORES))
        rows = row + gl.arange(0, s.shape[0], gl.SliceLayout(1, SCORES))
        of_thread, of_register = _offsets(s, SCORES)
        offset = of_thread + (key - row) + of_register
        unmasked = MASK(b, h, rows[:, None], keys[None, :], captured, offset)
        s = gl.where(unmasked & (keys < kv)[None, :], s, float("-inf"))
    else:
        of_thread, of_register = _offsets(s, SCORES)
        if RAGGED:
            columns = gl.arange(0, s.shape[1], gl.SliceLayout(0, SCORES))
            within = (columns & ~7) < kv - key - (columns & 7)
            s = gl.where(within[None, :], s, float("-inf"))
        if UPPER and LOWER:
            # One comparison of unsigned numbers for both limits.
            past = (of_register + (of_thread + (key - row - least))).to(gl.uint32, bitcast=True)
            width = gl.maximum(most - least + 1, 0).to(gl.uint32)
            s = gl.where(past < width, s, float("-inf"))
        elif UPPER:
            s = gl.where(of_register <= most - (key - row) - of_thread, s, float("-inf"))
        elif LOWER:
            s = gl.where(of_register >= least - (key - row) - of_thread, s, float("-inf"))
    return s


@gluon.jit
def _scale_scores(s, factor, ahead, FUSED: gl.constexpr, SCALED: gl.constexpr):
    """Return the scores times ``factor``, unless a later FMA multiplies them."""
    # Only fp8 branches on ``ahead``: next to the mask's branch it becomes a select on every score.
    if SCALED:
        if ahead:
            s = s * factor
    elif not FUSED:
        s = s * factor
    return s


@gluon.jit
def _update_softmax(s, m, factor, LIFT: gl.constexpr, FUSED: gl.constexpr, NATURAL: gl.constexpr):
    """Return the new row maxima, a tile's weights, and the factor of the sums so far."""
    m_new = gl.maximum(m, _row_maxima(s))
    scale = factor + gl.zeros_like(m)
    if FUSED and LIFT == 0:
        # Fused, the exponent of the largest score is not 0 but the rounding error of its product:
        # 64 or more from 2^30 on. There the factor is cut to a power of two, whose products are
        # exact; every other weight is below 2^-31 either way.
        power = (scale.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
        scale = gl.where(gl.abs(_scale_max(m_new, factor, NATURAL)) < 1073741824.0, scale, power)
    # A row that has seen nothing keeps m = −inf; 0 stands in so that −inf − −inf never happens.
    shift = gl.where(m_new == float("-inf"), 0.0, _base(_scale_max(m_new, scale, NATURAL), LIFT))
    if FUSED:
        factors, _ = gl.broadcast(scale[:, None], s)
        subtracted, _ = gl.broadcast((0.0 - shift)[:, None], s)
        exponents = gl.fma(s, factors, subtracted)
    else:
        exponents = s - shift[:, None]
    before = _base(_scale_max(m, scale, NATURAL), LIFT) - shift
    if NATURAL and not FUSED:
        exponents = exponents * 1.4426950408889634
        before = before * 1.4426950408889634
    return m_new, gl.exp2(exponents), gl.exp2(before)


@gluon.jit
def _row_maxima(s):
    """Return the largest score of each row, by four independent chains of comparisons."""
    ROWS: gl.constexpr = s.shape[0]
    parts = gl.max(s.reshape([ROWS, 2, s.shape[1] // 16, 8]), 2)
    largest = gl.max(parts.reshape([ROWS, 16]), 1)
    return gl.convert_layout(largest, gl.SliceLayout(1, s.type.layout), assert_trivial=True)


@gluon.jit
def _row_sums(weights):
    """Return the sums of a tile's weights that each of a row's four threads holds: (rows, 4)."""
    of_pairs = gl.sum(weights.reshape([weights.shape[0], weights.shape[1] // 8, 4, 2]), 3)
    return gl.sum(of_pairs, 1)


@gluon.jit
def _scale_max(m, factor, NATURAL: gl.constexpr):
    """Return ``m`` · ``factor``, rounded to the same number wherever it is used.

    Next to a score mod the compiler might fuse the product with a subtraction, which does not round
    it: sums would lose an ulp with every tile that does not raise the maximum.
    """
    scaled = m * factor
    if NATURAL:
        zeros = gl.zeros_like(m)
        scaled = gl.fma(m, factor + zeros, zeros)
    return scaled


@gluon.jit
def _base(m, LIFT: gl.constexpr):
    """Return the score of weight 1: LIFT below the maximum, so that no weight need be multiplied.

    From 2^22 on it is the maximum itself: there ``m - LIFT`` may be rounded down so far that the
    largest weight is beyond e4m3.
    """
    if LIFT > 0:
        m = gl.where(gl.abs(m) < 4194304.0, m - LIFT, m)
    return m


@gluon.jit
def _round_weights(weights, dtype: gl.constexpr, WEIGHTS: gl.constexpr, SCALED: gl.constexpr):
    """Return the weights as P·V's operand, in v's dtype; in fp8 in V's order of keys."""
    if SCALED:
        ROWS: gl.constexpr = weights.shape[0]
        KEYS: gl.constexpr = weights.shape[1]
        regrouped = weights.reshape([ROWS, KEYS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4))
        # No weight moves to another thread; ``assert_trivial`` would refuse to compile that.
        ordered = gl.convert_layout(regrouped.reshape([ROWS, KEYS]), WEIGHTS, assert_trivial=True)
        rounded = ordered.to(dtype)
    else:
        rounded = gl.convert_layout(weights.to(dtype), WEIGHTS)
    return rounded


@gluon.jit
def _value_tile(v_s, stage, SCALED: gl.constexpr):
    """Return the tile of V in a stage, (keys, columns)."""
    v = v_s.index(stage).reshape([v_s.shape[3], v_s.shape[4]])
    if SCALED:
        v = v.permute((1, 0))
    return v


@gluon.jit
def _leave_tile_out(
    tiles_done, turns_done, k_full, k_empty, v_full, v_empty, turns, WARPGROUP: gl.constexpr,
    GROUPS: gl.constexpr, PINGPONG: gl.constexpr,
):
    """Give back the next tile unread, pass the turn on, and return the new counts of both."""
    STAGES: gl.constexpr = k_full.shape[0]
    stage = tiles_done % STAGES
    phase = (tiles_done // STAGES) & 1
    if PINGPONG:
        mbarrier.wait(turns.index(WARPGROUP), (turns_done & 1) ^ (1 if WARPGROUP == 0 else 0))
        mbarrier.arrive(turns.index((WARPGROUP + 1) % GROUPS), count=1)
    mbarrier.wait(k_full.index(stage), phase)
    mbarrier.arrive(k_empty.index(stage), count=1)
    mbarrier.wait(v_full.index(stage), phase)
    mbarrier.arrive(v_empty.index(stage), count=1)
    return tiles_done + 1, turns_done + 1


@gluon.jit
def _attend(
    memory, WARPGROUP: gl.constexpr, GROUPS: gl.constexpr, PINGPONG: gl.constexpr,
    OVERLAP: gl.constexpr, UPPER: gl.constexpr, LOWER: gl.constexpr, SCALED: gl.constexpr,
    LIFT: gl.constexpr, FUSED: gl.constexpr, MASK: gl.constexpr, SCORE: gl.constexpr,
):
    """Compute attention of one warpgroup's rows in every block that the program takes."""
    (
        out_desc, lse_ptr, q_scale, k_scale, v_scale, again_ptr, q_s, k_s, v_s, out_s, p_s, tile_s,
        next_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns, next_full, next_empty,
        blocks, together, heads, group, query, kv, least, most, factor, mask_captured,
        score_captured,
    ) = memory
    LISTED: gl.constexpr = MASK is not None
    NATURAL: gl.constexpr = SCORE is not None
    STAGES: gl.constexpr = k_s.shape[0]
    ROWS: gl.constexpr = q_s.shape[3]
    KEYS: gl.constexpr = k_s.shape[3]
    WIDTH: gl.constexpr = q_s.shape[4]
    SEPARATE_OUT: gl.constexpr = has_own_memory(SCALED, WIDTH)
    # Next to a score mod the compiler may turn the mask's branch into selects in every tile. A
    # branch with a barrier in it stays one, so it waits for q_full, which costs nothing: q has
    # been there since the first tile.
    BRANCHES: gl.constexpr = NATURAL
    # Release values together with the next keys: one wait for the slowest warp less.
    LATE: gl.constexpr = OVERLAP and SCALED
    AT_ONCE: gl.constexpr = 32 if SCALED else 16  # products that one wgmma adds up: its K
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, AT_ONCE])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, AT_ONCE])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, AT_ONCE // 8)
    q = q_s.index(WARPGROUP).reshape([ROWS, WIDTH])
    zeros = gl.full([ROWS, KEYS], 0.0, gl.float32, SCORES)
    tiles_done = 0
    turns_done = 0
    blocks_done = 0
    number, listed_block, before, count, after = _await_block(
        blocks_done, next_s, next_full, next_empty, WARPGROUP, LISTED
    )
    while number < blocks * together:
        block, bh = place(number, blocks, together, 8 if LISTED else 4)
        if LISTED:
            block = listed_block
        b = bh // heads
        h = bh % heads
        row = (block * GROUPS + WARPGROUP) * ROWS
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        first, end = walk(block, query, kv, least, most, ROWS * GROUPS, KEYS, UPPER, LOWER)
        # Of the block's tiles this warpgroup leaves out those that only rows of others see.
        own_first, own_end = walk(
            block * GROUPS + WARPGROUP, query, kv, least, most, ROWS, KEYS, UPPER, LOWER
        )
        # Rows beyond the last one, which nobody stores, may see later tiles than the block's.
        own_first = gl.minimum(own_first, end - 1)
        own_end = gl.minimum(own_end, end)
        key = (own_end - 1) * KEYS
        if not LISTED:
            before = end - own_end
            count = own_end - own_first
            after = own_first - first
        if UPPER or LISTED:
            for _ in range(before):
                tiles_done, turns_done = _leave_tile_out(
                    tiles_done, turns_done, k_full, k_empty, v_full, v_empty, turns, WARPGROUP,
                    GROUPS, PINGPONG,
                )
        s_factor = factor
        ahead = NATURAL or not FUSED
        if SCALED:
            s_factor = factor * (gl.load(q_scale + bh // group) * gl.load(k_scale + bh // group))
            # Scores may be so large that a fused weight is beyond e4m3.
            ahead = (s_factor <= 0.0) | (s_factor * (WIDTH * 448.0 * 448.0) >= 4194304.0)
        exp_factor = gl.where(ahead, 1.4426950408889634 if NATURAL and FUSED else 1.0, s_factor)
        mbarrier.wait(q_full.index(WARPGROUP), blocks_done & 1)
        stage = tiles_done % STAGES
        mbarrier.wait(k_full.index(stage), (tiles_done // STAGES) & 1)
        if LISTED:
            key, partial = _listed_tile(tile_s, stage, KEYS, WARPGROUP, GROUPS)
        k = k_s.index(stage).reshape([KEYS, WIDTH])
        product = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(k_empty.index(stage), count=1)
        s = _scale_scores(s, s_factor, ahead, FUSED and not NATURAL, SCALED)
        s = _apply_score_mod(s, key, row, b, h, score_captured, SCORE, SCORES)
        s = _apply_mask(
            s, key, row, kv, least, most, b, h, mask_captured, MASK, UPPER, LOWER, True, SCORES
        )
        m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        m, weights, _ = _update_softmax(s, m, exp_factor, LIFT, FUSED, NATURAL)
        total = _row_sums(weights)
        p = _round_weights(weights, v_s.dtype, WEIGHTS, SCALED)
        if SCALED:
            p_s.index(WARPGROUP).store(p)
            fence_async_shared()
        acc = gl.full([ROWS, WIDTH], 0.0, gl.float32, SUMS)
        tiles_done += 1
        # Per tile: start its scores, then the tile before's P·V, and do its softmax meanwhile.
        for turn in range(1, count):
            stage = tiles_done % STAGES
            phase = (tiles_done // STAGES) & 1
            last_stage = (tiles_done - 1) % STAGES
            k = k_s.index(stage).reshape([KEYS, WIDTH])
            v = _value_tile(v_s, last_stage, SCALED)
            mbarrier.wait(k_full.index(stage), phase)
            if LISTED:  # before the keys are released
                key, partial = _listed_tile(tile_s, stage, KEYS, WARPGROUP, GROUPS)
            if PINGPONG:
                mbarrier.wait(
                    turns.index(WARPGROUP), (turns_done & 1) ^ (1 if WARPGROUP == 0 else 0)
                )
            product = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(last_stage), ((tiles_done - 1) // STAGES) & 1)
            summed = warpgroup_mma(p_s.index(WARPGROUP) if SCALED else p, v, acc, is_async=True)
            if PINGPONG:
                mbarrier.arrive(turns.index((WARPGROUP + 1) % GROUPS), count=1)
            if OVERLAP:
                s = warpgroup_mma_wait(1, deps=[product])
            else:
                s, acc = warpgroup_mma_wait(0, deps=[product, summed])
                mbarrier.arrive(v_empty.index(last_stage), count=1)
            mbarrier.arrive(k_empty.index(stage), count=1)
            if LATE:
                mbarrier.arrive(v_empty.index((tiles_done - 2) % STAGES), count=1, pred=turn > 1)
            s = _scale_scores(s, s_factor, ahead, FUSED and not NATURAL, SCALED)
            if not LISTED:
                # No key is below 0, but as a plain difference LLVM would keep a number in step with
                # it for each column.
                key = gl.maximum(key - KEYS, 0)
                partial = False
                if UPPER:
                    partial |= key - row > most + 1 - KEYS
                if LOWER:
                    partial |= key - row < least + ROWS - 1
            s = _apply_score_mod(s, key, row, b, h, score_captured, SCORE, SCORES)
            # Tiles go back, so that only the first may have reached beyond the last key.
            if UPPER or LOWER or LISTED:  # noqa: SIM102  (it is known, and then compiled)
                if partial:
                    if BRANCHES:
                        mbarrier.wait(q_full.index(WARPGROUP), blocks_done & 1)
                    s = _apply_mask(
                        s, key, row, kv, least, most, b, h, mask_captured, MASK, UPPER, LOWER,
                        False, SCORES,
                    )
            m, weights, alpha = _update_softmax(s, m, exp_factor, LIFT, FUSED, NATURAL)
            TOTALS: gl.constexpr = gl.SliceLayout(1, total.type.layout)
            total = total * gl.convert_layout(alpha, TOTALS)[:, None] + _row_sums(weights)
            rounded = _round_weights(weights, v_s.dtype, WEIGHTS, SCALED)
            if OVERLAP:
                # This phase has ended already (see above), but without a barrier here ptxas moves
                # the wait for P·V in front of the softmax.
                mbarrier.wait(k_full.index(stage), phase)
                acc = warpgroup_mma_wait(0, deps=[summed])
                if not LATE:
                    mbarrier.arrive(v_empty.index(last_stage), count=1)
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))[:, None]
            if SCALED:
                p_s.index(WARPGROUP).store(rounded)
                fence_async_shared()
            else:
                p = rounded
            tiles_done += 1
            turns_done += 1
        if SEPARATE_OUT:
            mbarrier.arrive(q_empty.index(WARPGROUP), count=1)
        if LATE:
            mbarrier.arrive(v_empty.index((tiles_done - 2) % STAGES), count=1, pred=count > 1)
        stage = (tiles_done - 1) % STAGES
        mbarrier.wait(v_full.index(stage), ((tiles_done - 1) // STAGES) & 1)
        p = p_s.index(WARPGROUP) if SCALED else p
        summed = warpgroup_mma(p, _value_tile(v_s, stage, SCALED), acc, is_async=True)
        blocks_done += 1
        if not (LOWER or LISTED):  # while the last P·V is added up
            next_block = _await_block(
                blocks_done, next_s, next_full, next_empty, WARPGROUP, LISTED
            )
        acc = warpgroup_mma_wait(0, deps=[summed])
        mbarrier.arrive(v_empty.index(stage), count=1)
        if LOWER or LISTED:
            for _ in range(after):
                tiles_done, turns_done = _leave_tile_out(
                    tiles_done, turns_done, k_full, k_empty, v_full, v_empty, turns, WARPGROUP,
                    GROUPS, PINGPONG,
                )
            # Not before: the next block is published when all tiles of this one are on their way.
            next_block = _await_block(
                blocks_done, next_s, next_full, next_empty, WARPGROUP, LISTED
            )

        total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, SCORES))
        sees_none = total == 0.0
        base = _base(_scale_max(m, exp_factor, NATURAL), LIFT)
        lse = gl.log2(gl.where(sees_none, 1.0, total))
        if NATURAL and not FUSED:
            lse = base + lse * 0.6931471805599453
        else:
            lse = (base + lse) * 0.6931471805599453
            if NATURAL:  # in log2 units it may overflow fp32; then the sum is below an ulp of m
                # A NaN score is not in the maximum, but makes the sum NaN.
                in_range = (gl.abs(base) < 1073741824.0) | ~(total < float("inf"))
                lse = gl.where(in_range, lse, m)
        lse = gl.where(sees_none, float("-inf"), lse)
        gl.store(lse_ptr + bh.to(gl.int64) * query + rows, lse, mask=rows < query)
        if UPPER or LOWER or LISTED:
            row_finite = gl.min((gl.abs(acc) < float("inf")).to(gl.int32), 1)
            slot = number_of(block * GROUPS + WARPGROUP, bh, gl.cdiv(query, ROWS), together)
            gl.store(again_ptr + slot, 1 - gl.min(row_finite, 0), mask=row < query)
        inverse = gl.where(sees_none, 0.0, 1.0 / gl.where(sees_none, 1.0, total))
        if SCALED:
            inverse *= gl.load(v_scale + bh // group)
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, SUMS))[:, None]
        tma.store_wait(0)  # until out_s is free of the block before
        out_s.index(WARPGROUP).reshape([ROWS, WIDTH]).store(acc.to(out_desc.dtype))
        fence_async_shared()
        store(out_desc, [bh // heads, bh % heads, row, 0], out_s.index(WARPGROUP))
        if not SEPARATE_OUT:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(WARPGROUP), count=1)
        number, listed_block, before, count, after = next_block
    tma.store_wait(0)


@gluon.constexpr_function
def has_own_memory(scaled, width):
    """Return whether shared memory has room for out besides q."""
    return scaled or width < 256


@gluon.jit(do_not_specialize=("blocks", "together", "least", "most", *COUNTS))
def _forward(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, q_scale, k_scale, v_scale, again_ptr, next_ptr,
    blocks, together, heads, group, query, kv, least, most, factor, tiles, mask_captured,
    score_captured, GROUPS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    PINGPONG: gl.constexpr, OVERLAP: gl.constexpr, UPPER: gl.constexpr, LOWER: gl.constexpr,
    SCALED: gl.constexpr, LIFT: gl.constexpr, FUSED: gl.constexpr, MASK: gl.constexpr,
    SCORE: gl.constexpr,
):
    """Allocate a program's shared memory and barriers, and start its warps."""
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    WIDTH: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, WIDTH], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, WIDTH], k_desc.layout)
    TALL: gl.constexpr = v_desc.block_type.shape[2]  # keys; columns in fp8
    WIDE: gl.constexpr = v_desc.block_type.shape[3]
    v_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, TALL, WIDE], v_desc.layout)
    out_s = q_s  # q is not read again when out is written
    p_s = q_s
    if has_own_memory(SCALED, WIDTH):
        out_s = gl.allocate_shared_memory(
            out_desc.dtype, [GROUPS, 1, 1, ROWS, WIDTH], out_desc.layout
        )
    if SCALED:
        # With P in registers, carried to the next tile byte by byte, it took 1.15 times as long.
        P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, KEYS], dtype)
        p_s = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, KEYS], P_LAYOUT)
    NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    next_s = gl.allocate_shared_memory(gl.int32, [2 * (2 + 3 * GROUPS), 1], NUMBERS)
    tile_s = gl.allocate_shared_memory(gl.int32, [STAGES, 1], NUMBERS)
    q_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    next_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    next_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    for i in gl.static_range(GROUPS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(next_full.index(i), count=1)
        mbarrier.init(next_empty.index(i), count=GROUPS)
    LISTED: gl.constexpr = MASK is not None
    copied = (
        q_desc, k_desc, v_desc, next_ptr, q_s, k_s, v_s, tile_s, next_s, q_full, q_empty, k_full,
        k_empty, v_full, v_empty, next_full, next_empty, blocks, together, heads, group, query, kv,
        least, most, tiles,
    )
    read = (
        out_desc, lse_ptr, q_scale, k_scale, v_scale, again_ptr, q_s, k_s, v_s, out_s, p_s, tile_s,
        next_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns, next_full, next_empty,
        blocks, together, heads, group, query, kv, least, most, factor, mask_captured,
        score_captured,
    )
    if GROUPS == 2:
        gl.warp_specialize([
            (_attend, (
                read, 0, GROUPS, PINGPONG, OVERLAP, UPPER, LOWER, SCALED, LIFT, FUSED, MASK, SCORE,
            )),
            (_attend, (
                read, 1, GROUPS, PINGPONG, OVERLAP, UPPER, LOWER, SCALED, LIFT, FUSED, MASK, SCORE,
            )),
            (_copy, (copied, GROUPS, UPPER, LOWER, SCALED, LISTED)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (_attend, (
                read, 0, GROUPS, PINGPONG, OVERLAP, UPPER, LOWER, SCALED, LIFT, FUSED, MASK, SCORE,
            )),
            (_attend, (
                read, 1, GROUPS, PINGPONG, OVERLAP, UPPER, LOWER, SCALED, LIFT, FUSED, MASK, SCORE,
            )),
            (_attend, (
                read, 2, GROUPS, PINGPONG, OVERLAP, UPPER, LOWER, SCALED, LIFT, FUSED, MASK, SCORE,
            )),
            (_copy, (copied, GROUPS, UPPER, LOWER, SCALED, LISTED)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])


# fmt: on
