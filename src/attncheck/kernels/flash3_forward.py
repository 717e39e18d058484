"""FlashAttention-3 forward for Hopper in Gluon, for any mask and score mod.

Shah et al. 2024 (arXiv:2407.08608): one warp copies tiles by TMA, warpgroups of four warps each own
64 query rows and do the arithmetic. While one does its softmax the tensor cores do its own last P·V
(``Shape.overlap``), and work for another. A program takes one block of rows after the other,
whichever is next, and has the next one's rows and keys under way while it stores the last one's.

Keys are walked over from those that a mask may touch to those that every row of the block sees, of
which none is masked, if the mask goes by distance alone (``walk``). The tiles of others are listed,
as for ``flash2_forward``: the warp that copies reads the list, and lays what it says of a tile
beside its keys. Mods are called on scores in registers.

Under a mask a block of rows whose sums are not finite is done again by ``flash2_forward``'s careful
launch; what of it sees no value that is not finite keeps its own bits.
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
    ALIGNED,
    COUNTS,
    LOG2E,
    Launch,
    VisitList,
    aligned,
    needs_careful_launch,
    scales,
)
from attncheck.kernels.tile import listed, loaded, number_of, place, run_of
from attncheck.mods.masks import Band
from attncheck.mods.to_triton import TritonMod

if TYPE_CHECKING:
    from collections.abc import Callable

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
    pingpong: bool = False  # whether they take turns at the tensor cores
    overlap: bool = True  # whether they wait for P·V behind the next softmax, or before it

    @property
    def rows(self) -> int:
        """Rows of a block, all warpgroups' together."""
        return OWN * self.groups


OWN = 64  # rows of a warpgroup, as many as its matrix instruction has
WIDEST_BACKWARD = 128  # beyond it dK and dV of a warpgroup are more than its registers
# At head dim 64, and in fp8, a tile's softmax takes longer than its products: a third group of rows
# is worth more there than registers, and in 16 bits one barrier less more than overlap.
SHAPES = {
    64: Shape(keys=128, stages=3, groups=3, registers=160, pingpong=True, overlap=False),
    128: Shape(keys=128, stages=2),
    256: Shape(keys=64, stages=2, pingpong=True),
}
# A score mod needs registers: in tiles of half the keys three groups have them, and took 0.93 of
# the time of two in whole ones. A long mod's instructions must not be too many for their cache, of
# which each group has its own: a softcap took 1.45 times as long in tiles of 128 keys.
MODIFIED_SHAPES = {
    **SHAPES,
    64: Shape(keys=64, stages=6, groups=3, registers=160, pingpong=True, overlap=False),
}
LONG_SHAPES = {**SHAPES, 64: Shape(keys=64, stages=4), 128: Shape(keys=64, stages=4, overlap=False)}
FP8_SHAPES = {
    64: Shape(keys=128, stages=4, groups=3, registers=160, pingpong=True),
    128: Shape(keys=128, stages=2, groups=3, registers=160),
    256: Shape(keys=64, stages=2),
}


def shape_for(head_dim: int, dtype: torch.dtype, *, modified: bool, long: bool) -> Shape:
    """Return how rows of ``head_dim`` numbers are taken.

    Args:
        head_dim: Columns of q.
        dtype: Of q.
        modified: Whether there is a score mod.
        long: Whether that, or a mask that does not go by distance alone, is long.
    """
    if dtype == _FP8:
        shapes = FP8_SHAPES
    elif long:
        shapes = LONG_SHAPES
    else:
        shapes = MODIFIED_SHAPES if modified else SHAPES
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
    """Return why the kernel does not take these, in one line; None if it does.

    With ``backward``, why that of its gradients does not.
    """
    if dtype not in _ELEMENTS:
        return "it takes fp16, bf16 and e4m3"
    if others:
        return "it takes no sink or pages"
    if score and dtype == _FP8:
        return "in e4m3 it takes no score mod"
    ahead, most = ALIGNED // dtype.itemsize, max(SHAPES)
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
    """Attention of ``q`` over ``k`` and ``v``, and its log-sum-exp: as ``flash2_forward``.

    Which does it wherever this kernel does not take what it is given: on another GPU, too.

    Args:
        q: ``(batch, heads, query, head_dim)``, any strides; copied where TMA cannot read them.
        k: ``(batch, kv_heads, kv, head_dim)``; kv_heads divides heads.
        v: ``(batch, kv_heads, kv, value_dim)``.
        scale: Factor of q·k, an fp32 number.
        mask: The mask.
        launch: Of the other kernel.
        score: The score mod; None leaves scores as they are.
        band: The same mask, if it goes by distance alone; None if it does not.
        tiles: The tiles to visit of one that does not, in blocks of ``shape``.
        shape: How this one is launched (default: ``shape_for`` it).
        redo: Whether rows beside values that are not finite are done again.
        descale: Of e4m3, as of ``flash2_forward``. Sums are the tensor core's own, of 13 bits.
        out_dtype: Of out; of e4m3 bf16 alone.
        others: What ``flash2_forward`` takes besides.

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
    of_both: dict[str, Any] = {
        "scale": scale,
        "mask": mask,
        "descale": descale,
        "out_dtype": out_dtype,
    }
    if refused or (band is None and tiles is None):
        return flash2_forward(q, k, v, score=score, launch=launch, **of_both, **others)
    batch, heads, query, head_dim = q.shape
    kv_heads, kv = k.shape[1:3]
    mods = [mod for mod in (mask if band is None else None, score) if mod is not None]
    long = any(mod.long for mod in mods)
    shape = shape or shape_for(head_dim, q.dtype, modified=score is not None, long=long)
    of_mask: tuple[Any, ...] = ((), ())
    if band is not None:
        band = band.within(query, kv)
    elif tiles is not None:
        tiles.check("tiles", (query, shape.rows), (kv, shape.keys))
        of_mask = (*tiles.arguments(), tiles.totals, tiles.order), mask.captured
    # Of a list no limits, and of limits no mask.
    least, most, masked = (None, None, mask) if band is None else (band.least, band.most, None)
    scaled = q.dtype == _FP8
    # Not by a factor below 0, which makes the maximum of scores the minimum of products, nor in
    # fp16, which is too narrow for weights that rounding has moved far from 1.
    fused = scaled or (q.dtype == torch.bfloat16 and (score is not None or scale > 0))
    out = torch.empty(
        (batch, heads, query, v.shape[3]), dtype=out_dtype or q.dtype, device=q.device
    )
    lse = torch.empty((batch, heads, query), dtype=torch.float32, device=q.device)
    blocks, together = -(-query // shape.rows), batch * heads
    again = torch.empty((-(-query // OWN), together), dtype=torch.int32, device=q.device)
    upcoming = torch.zeros(1, dtype=torch.int32, device=q.device)
    programs = min(blocks * together, multiprocessors(q.device))
    with sound_assembler(q.device.type):
        # fmt: off
        _forward[(programs,)](
            descriptor(q, OWN), descriptor(k, shape.keys),
            _by_columns(v, shape.keys) if scaled else descriptor(v, shape.keys),
            descriptor(out, OWN), lse, *(scales(descale) or (lse,) * 3), again, upcoming, blocks,
            together, heads, heads // kv_heads, query, kv, least or 0, most or 0,
            scale * LOG2E if score is None else scale, *of_mask,
            () if score is None else score.captured,
            GROUPS=shape.groups, STAGES=shape.stages, REGISTERS=shape.registers,
            PINGPONG=shape.pingpong, OVERLAP=shape.overlap, UPPER=most is not None,
            LOWER=least is not None, SCALED=scaled, LIFT=math.log2(launch.weights_scale),
            FUSED=fused,
            MASK=None if masked is None else masked.function,
            SCORE=None if score is None else score.function, num_warps=4,
            # Of a score mod; else where ``_advanced`` says so. In fp16 a mod's last product could
            # become part of the exponent's subtraction.
            enable_fp_fusion=fused and score is not None,
        )
        # fmt: on
    if redo and band != Band() and needs_careful_launch(again):
        own = replace(launch, block_query=OWN, registers=None)
        flash2_forward(q, k, v, score=score, launch=own, redo=(out, lse, again), **of_both)
        # A graph that is recorded is spared it: there a hidden NaN may move last bits.
        if not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
            once_more: Callable[..., tuple[torch.Tensor, torch.Tensor]] = partial(
                flash3_forward, launch=launch, band=band, tiles=tiles, shape=shape, redo=False,
                **of_both,
            )  # fmt: skip
            finite = v.float().isfinite()
            kept, kept_lse = once_more(q, k, v.float().where(finite, 0.0).to(v.dtype), score=score)
            # Of scores that are all 0, the sum of marks is 0 where a row sees none of them.
            plain = None if descale is None else replace(descale, v=torch.ones_like(descale.v))
            zeros = q.new_zeros(q.shape), k.new_zeros(k.shape)
            seen, _ = once_more(*zeros, (~finite).to(v.dtype), descale=plain)
            out.copy_(out.where(seen != 0, kept))
            lse.copy_(kept_lse)
    return out, lse


_FP8 = torch.float8_e4m3fn
_ELEMENTS = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, _FP8: gl.float8e4nv}


@cache
def tile_width(dim: int) -> int:
    """Columns of a tile for rows of ``dim`` numbers."""
    return max(min(SHAPES), int(triton.next_power_of_2(dim)))


def descriptor(x: torch.Tensor, rows: int, columns: int | None = None) -> TensorDescriptor:
    """What TMA knows of ``x``, or of a copy where it cannot read it: tiles of ``rows``."""
    columns = columns or tile_width(x.shape[3])
    x = aligned(x)
    # Checking it takes Triton longer than the rest of a launch, and only the address is new.
    own = copy(_descriptor_of(x.shape, x.stride(), x.dtype, rows, columns))
    own.base = x
    return own


_TURNED = 128  # keys of a program


def _by_columns(v: torch.Tensor, keys: int) -> TensorDescriptor:
    """What TMA knows of a copy of fp8 ``v``, ``(batch, kv_heads, value_dim, kv)``.

    A product in fp8 reads the keys of a column one behind the other. There are zeros up to a whole
    16 of them.
    """
    batch, kv_heads, kv, dim = v.shape
    wide, width = -(-kv // ALIGNED) * ALIGNED, tile_width(dim)
    out = torch.empty((batch, kv_heads, dim, wide), dtype=v.dtype, device=v.device)
    # As bytes, which Triton loads and moves in the interpreter as well.
    _turn[(triton.cdiv(wide, _TURNED), batch * kv_heads)](
        v.view(torch.uint8), out.view(torch.uint8), *v.stride(), kv_heads, kv, wide, dim,
        BLOCK_K=_TURNED, BLOCK_V=width,
    )  # fmt: skip
    return descriptor(out, width, keys)


@lru_cache(maxsize=256)
def _descriptor_of(
    shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, rows: int, width: int
) -> TensorDescriptor:
    """The descriptor of any such tensor, without its memory."""
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
@triton.jit(do_not_specialize=COUNTS)
def _turn(
    v_ptr, out_ptr, v_batch, v_head, v_row, v_col, kv_heads, kv, wide, dim,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):
    """V by columns, every 16 keys in the order 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15.

    Four threads have the scores of 16 keys so, four each: each stores four bytes of P at once.
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
def _work(number, blocks, together, heads, tiles, LISTED: gl.constexpr):
    """Block, and batch and head, of what starts as ``number``; how many tiles, if LISTED."""
    # Of a list a group of heads ends later than another where its last blocks are long.
    block, bh = place(number, blocks, together, 8 if LISTED else 4)
    count = 0
    if LISTED:
        at = (bh // heads).to(gl.int64) * tiles[5] + (bh % heads).to(gl.int64) * tiles[6]
        block = gl.load(tiles[9] + at + block.to(gl.int64) * tiles[7])
        # One that sees nothing visits a tile, which is masked.
        count = gl.maximum(gl.load(tiles[8] + at + block.to(gl.int64) * tiles[7]), 1)
    return block, bh, count


@gluon.jit
def _write(slot_s, number):
    """Lays a number into shared memory; one warp."""
    slot_s.store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + number)


@gluon.jit
def _read(slot_s):
    """What is there, for a warpgroup."""
    return gl.max(slot_s.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _tell(
    number, block, count, taken, next_s, next_full, next_empty, LISTED: gl.constexpr,
):
    """Lets the warpgroups know the number of their next block, or that there is none.

    LISTED, also which block that is, and how many tiles it visits.
    """
    slot = taken % 2
    mbarrier.wait(next_empty.index(slot), ((taken // 2) & 1) ^ 1)
    _write(next_s.index(slot * 3), number)
    if LISTED:
        _write(next_s.index(slot * 3 + 1), block)
        _write(next_s.index(slot * 3 + 2), count)
    mbarrier.arrive(next_full.index(slot), count=1)


@gluon.jit
def _told(taken, next_s, next_full, next_empty, LISTED: gl.constexpr):
    """What ``_tell`` tells; not LISTED the number alone means something."""
    slot = taken % 2
    mbarrier.wait(next_full.index(slot), (taken // 2) & 1)
    number = _read(next_s.index(slot * 3))
    block = number
    count = number
    if LISTED:
        block = _read(next_s.index(slot * 3 + 1))
        count = _read(next_s.index(slot * 3 + 2))
    mbarrier.arrive(next_empty.index(slot), count=1)
    return number, block, count


@gluon.jit
def _copy(
    memory, GROUPS: gl.constexpr, UPPER: gl.constexpr, LOWER: gl.constexpr, SCALED: gl.constexpr,
    LISTED: gl.constexpr,
):
    """Every block's rows, and its keys and values tile by tile, on their way to shared memory."""
    (
        q_desc, k_desc, v_desc, next_ptr, q_s, k_s, v_s, tile_s, next_s, q_full, q_empty, k_full,
        k_empty, v_full, v_empty, next_full, next_empty, blocks, together, heads, group, query, kv,
        least, most, tiles,
    ) = memory
    STAGES: gl.constexpr = k_s.shape[0]
    ROWS: gl.constexpr = q_s.shape[3]
    KEYS: gl.constexpr = k_s.shape[3]
    done = 0
    taken = 0
    number = gl.program_id(0)
    block, bh, count = _work(number, blocks, together, heads, tiles, LISTED)
    while number < blocks * together:
        _tell(number, block, count, taken, next_s, next_full, next_empty, LISTED)
        # Blocks of a causal mask take unlike times: whoever is free takes the next.
        number = gl.num_programs(0) + gl.atomic_add(next_ptr, 1, sem="relaxed")
        last = blocks * together - 1
        following = _work(gl.minimum(number, last), blocks, together, heads, tiles, LISTED)
        b = bh // heads
        h = bh % heads
        first, every, late, early = walk(
            block, query, kv, least, most, ROWS * GROUPS, KEYS, UPPER, LOWER
        )
        runs = 1
        if LISTED:
            visits, runs = listed(tiles, b, h, block)
            runs = gl.maximum(runs, 1)
        for run in range(runs):
            beyond = every
            start = 0
            if LISTED:
                start, beyond, partial = run_of(visits, run, 0, LISTED)
                beyond = gl.maximum(beyond, start + 1)  # a block that sees nothing has no run
            for turn in range(start, beyond):
                stage = done % STAGES
                phase = (done // STAGES) & 1
                mbarrier.wait(k_empty.index(stage), phase ^ 1)
                if LISTED:
                    key = turn * KEYS
                    _write(tile_s.index(stage), 2 * turn + partial.to(gl.int32))
                else:
                    key = tile_of(turn, first, every, late, early) * KEYS
                mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
                load(k_desc, [b, h // group, key, 0], k_full.index(stage), k_s.index(stage))
                if run + turn == start:  # the first of all
                    for own in gl.static_range(GROUPS):
                        row = (block * GROUPS + own) * ROWS
                        mbarrier.wait(q_empty.index(own), (taken & 1) ^ 1)
                        mbarrier.expect(q_full.index(own), q_desc.block_type.nbytes)
                        load(q_desc, [b, h, row, 0], q_full.index(own), q_s.index(own))
                mbarrier.wait(v_empty.index(stage), phase ^ 1)
                mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
                if SCALED:
                    load(v_desc, [b, h // group, 0, key], v_full.index(stage), v_s.index(stage))
                else:
                    load(v_desc, [b, h // group, key, 0], v_full.index(stage), v_s.index(stage))
                done += 1
        taken += 1
        block, bh, count = following
    _tell(number, block, count, taken, next_s, next_full, next_empty, LISTED)


@gluon.jit
def _listed_tile(tile_s, stage, KEYS: gl.constexpr):
    """The first key of a listed tile, and whether it may hide something: what lies beside it."""
    told = _read(tile_s.index(stage))
    return (told >> 1) * KEYS, (told & 1) != 0


@gluon.jit
def _modified(s, key, rows, b, h, captured, SCORE: gl.constexpr, SCORES: gl.constexpr):
    """Scores as the score mod has them, if there is one."""
    if SCORE is not None:
        keys = key + gl.arange(0, s.shape[1], gl.SliceLayout(0, SCORES))
        modified = SCORE(s, b, h, rows[:, None], keys[None, :], captured)
        # It may give one number for all.
        s = gl.where(gl.full(s.shape, 1, gl.int1, SCORES), modified, s)
    return s


@gluon.jit
def _hidden(
    s, key, rows, kv, least, most, b, h, captured, MASK: gl.constexpr, UPPER: gl.constexpr,
    LOWER: gl.constexpr, SCORES: gl.constexpr,
):
    """Scores, −inf where a row does not see a key."""
    keys = key + gl.arange(0, s.shape[1], gl.SliceLayout(0, SCORES))
    if MASK is not None:
        shown = MASK(b, h, rows[:, None], keys[None, :], captured)
        seen = shown & (keys < kv)[None, :]
    else:
        last = gl.full([s.shape[0]], 0, gl.int32, gl.SliceLayout(1, SCORES)) + (kv - 1)
        if UPPER:
            last = gl.minimum(last, rows + most)
        seen = keys[None, :] <= last[:, None]
        if LOWER:
            seen = seen & (keys[None, :] >= (rows + least)[:, None])
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _multiplied(s, factor, ahead, FUSED: gl.constexpr, SCALED: gl.constexpr):
    """Scores times their factor, if that is done ahead of the rest."""
    # A branch that 16 bits do not need: beside the mask's the compiler selects every score.
    if SCALED:
        if ahead:
            s = s * factor
    elif not FUSED:
        s = s * factor
    return s


@gluon.jit
def _advanced(s, m, factor, LIFT: gl.constexpr, FUSED: gl.constexpr, NATURAL: gl.constexpr):
    """The new maximum, a tile's weights, and the factor of what was summed before it."""
    m_new = gl.maximum(m, _largest(s))
    own = factor + gl.zeros_like(m)
    if FUSED and LIFT == 0:
        # Fused, the exponent of the largest score is not 0 but what its product was rounded by,
        # from 2^30 on 64 and more. By a power of two nothing is rounded, and there every other
        # weight is below 2^-31 either way.
        power = (own.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
        own = gl.where(gl.abs(_scaled(m_new, factor, NATURAL)) < 1073741824.0, own, power)
    # A row that has seen nothing keeps m = −inf; 0 stands in so that −inf − −inf never happens.
    shift = gl.where(m_new == float("-inf"), 0.0, _base(_scaled(m_new, own, NATURAL), LIFT))
    if FUSED:
        factors, _ = gl.broadcast(own[:, None], s)
        subtracted, _ = gl.broadcast((0.0 - shift)[:, None], s)
        exponents = gl.fma(s, factors, subtracted)
    else:
        exponents = s - shift[:, None]
    before = _base(_scaled(m, own, NATURAL), LIFT) - shift
    if NATURAL and not FUSED:
        exponents = exponents * 1.4426950408889634
        before = before * 1.4426950408889634
    return m_new, gl.exp2(exponents), gl.exp2(before)


@gluon.jit
def _largest(s):
    """The largest score of each row: of four in turn, one comparison waits for the one before."""
    ROWS: gl.constexpr = s.shape[0]
    parts = gl.max(s.reshape([ROWS, 2, s.shape[1] // 16, 8]), 2)
    largest = gl.max(parts.reshape([ROWS, 16]), 1)
    return gl.convert_layout(largest, gl.SliceLayout(1, s.type.layout), assert_trivial=True)


@gluon.jit
def _sums(weights):
    """What the four threads of a row have of its weights: (rows, 4)."""
    of_pairs = gl.sum(weights.reshape([weights.shape[0], weights.shape[1] // 8, 4, 2]), 3)
    return gl.sum(of_pairs, 1)


@gluon.jit
def _scaled(m, factor, NATURAL: gl.constexpr):
    """``m`` · ``factor``, rounded wherever it is used.

    Fused with a subtraction, as beside a score mod it might be, it would not be: what is summed
    would lose an ulp with every tile whose maximum is the one before.
    """
    scaled = m * factor
    if NATURAL:
        zeros = gl.zeros_like(m)
        scaled = gl.fma(m, factor + zeros, zeros)
    return scaled


@gluon.jit
def _base(m, LIFT: gl.constexpr):
    """The score that has weight 1: LIFT below the largest, so that weights are not multiplied.

    From 2^22 on the largest itself: there the difference may be rounded to one so much larger that
    the weight is beyond e4m3.
    """
    if LIFT > 0:
        m = gl.where(gl.abs(m) < 4194304.0, m - LIFT, m)
    return m


@gluon.jit
def _rounded(weights, dtype: gl.constexpr, WEIGHTS: gl.constexpr, SCALED: gl.constexpr):
    """Weights in v's format, laid out as P·V reads them; in fp8 in ``_turn``'s order."""
    if SCALED:
        ROWS: gl.constexpr = weights.shape[0]
        KEYS: gl.constexpr = weights.shape[1]
        apart = weights.reshape([ROWS, KEYS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4))
        # No weight changes its thread, or it would not compile.
        ordered = gl.convert_layout(apart.reshape([ROWS, KEYS]), WEIGHTS, assert_trivial=True)
        rounded = ordered.to(dtype)
    else:
        rounded = gl.convert_layout(weights.to(dtype), WEIGHTS)
    return rounded


@gluon.jit
def _values(v_s, stage, SCALED: gl.constexpr):
    """V of a tile, (keys, columns)."""
    v = v_s.index(stage).reshape([v_s.shape[3], v_s.shape[4]])
    if SCALED:
        v = v.permute((1, 0))
    return v


@gluon.jit
def _attend(
    memory, OWN: gl.constexpr, GROUPS: gl.constexpr, PINGPONG: gl.constexpr,
    OVERLAP: gl.constexpr, UPPER: gl.constexpr, LOWER: gl.constexpr, SCALED: gl.constexpr,
    LIFT: gl.constexpr, FUSED: gl.constexpr, MASK: gl.constexpr, SCORE: gl.constexpr,
):
    """A warpgroup's rows of every block: the OWN-th of its groups of rows."""
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
    APART: gl.constexpr = has_own_memory(SCALED, WIDTH)
    # Beside a score mod the compiler would apply the mask in every tile, by selects without a
    # branch. One with a barrier in it stays: that of the rows, which are there since the first
    # tile. In tiles of 128 keys registers do not suffice for that.
    BRANCHES: gl.constexpr = NATURAL and KEYS < 128
    # Values are given back with the next keys: one wait for the slowest warp less.
    LATE: gl.constexpr = OVERLAP and SCALED
    AT_ONCE: gl.constexpr = 32 if SCALED else 16  # products that an instruction adds up
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, AT_ONCE])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, AT_ONCE])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, AT_ONCE // 8)
    q = q_s.index(OWN).reshape([ROWS, WIDTH])
    zeros = gl.full([ROWS, KEYS], 0.0, gl.float32, SCORES)
    done = 0
    passed = 0
    taken = 0
    number, told, count = _told(taken, next_s, next_full, next_empty, LISTED)
    while number < blocks * together:
        block, bh = place(number, blocks, together, 8 if LISTED else 4)
        if LISTED:
            block = told
        b = bh // heads
        h = bh % heads
        first, every, late, early = walk(
            block, query, kv, least, most, ROWS * GROUPS, KEYS, UPPER, LOWER
        )
        if not LISTED:
            count = every
        row = (block * GROUPS + OWN) * ROWS
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        of_scores = factor
        ahead = NATURAL or not FUSED
        if SCALED:
            of_scores = factor * (gl.load(q_scale + bh // group) * gl.load(k_scale + bh // group))
            # A score may be so large that a weight is beyond e4m3.
            ahead = (of_scores <= 0.0) | (of_scores * (WIDTH * 448.0 * 448.0) >= 4194304.0)
        of_rest = gl.where(ahead, 1.4426950408889634 if NATURAL and FUSED else 1.0, of_scores)
        mbarrier.wait(q_full.index(OWN), taken & 1)
        stage = done % STAGES
        mbarrier.wait(k_full.index(stage), (done // STAGES) & 1)
        key = tile_of(0, first, every, late, early) * KEYS
        if LISTED:
            key, partial = _listed_tile(tile_s, stage, KEYS)
        k = k_s.index(stage).reshape([KEYS, WIDTH])
        product = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(k_empty.index(stage), count=1)
        s = _multiplied(s, of_scores, ahead, FUSED and not NATURAL, SCALED)
        s = _modified(s, key, rows, b, h, score_captured, SCORE, SCORES)
        s = _hidden(
            s, key, rows, kv, least, most, b, h, mask_captured, MASK, UPPER, LOWER, SCORES
        )
        m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        m, weights, _ = _advanced(s, m, of_rest, LIFT, FUSED, NATURAL)
        total = _sums(weights)
        p = _rounded(weights, v_s.dtype, WEIGHTS, SCALED)
        if SCALED:
            p_s.index(OWN).store(p)
            fence_async_shared()
        acc = gl.full([ROWS, WIDTH], 0.0, gl.float32, SUMS)
        done += 1
        # One tile: its scores are begun, then the last tile's P·V; its softmax is done beside that.
        for turn in range(1, count):
            stage = done % STAGES
            phase = (done // STAGES) & 1
            before = (done - 1) % STAGES
            k = k_s.index(stage).reshape([KEYS, WIDTH])
            v = _values(v_s, before, SCALED)
            mbarrier.wait(k_full.index(stage), phase)
            if LISTED:  # before the keys are given back
                key, partial = _listed_tile(tile_s, stage, KEYS)
            if PINGPONG:
                mbarrier.wait(turns.index(OWN), (passed & 1) ^ (1 if OWN == 0 else 0))
            product = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(before), ((done - 1) // STAGES) & 1)
            summed = warpgroup_mma(p_s.index(OWN) if SCALED else p, v, acc, is_async=True)
            if PINGPONG:
                mbarrier.arrive(turns.index((OWN + 1) % GROUPS), count=1)
            if OVERLAP:
                s = warpgroup_mma_wait(1, deps=[product])
            else:
                s, acc = warpgroup_mma_wait(0, deps=[product, summed])
                mbarrier.arrive(v_empty.index(before), count=1)
            mbarrier.arrive(k_empty.index(stage), count=1)
            if LATE:
                mbarrier.arrive(v_empty.index((done - 2) % STAGES), count=1, pred=turn > 1)
            s = _multiplied(s, of_scores, ahead, FUSED and not NATURAL, SCALED)
            if not LISTED:
                key = tile_of(turn, first, every, late, early) * KEYS
                partial = turn < late + early
            s = _modified(s, key, rows, b, h, score_captured, SCORE, SCORES)
            # Without a limit one tile alone may reach beyond the last key, and it was the first.
            if UPPER or LOWER or LISTED:  # noqa: SIM102  (it is known, and then compiled)
                if partial:
                    if BRANCHES:
                        mbarrier.wait(q_full.index(OWN), taken & 1)
                    s = _hidden(
                        s, key, rows, kv, least, most, b, h, mask_captured, MASK, UPPER, LOWER,
                        SCORES,
                    )
            m, weights, alpha = _advanced(s, m, of_rest, LIFT, FUSED, NATURAL)
            of_sums: gl.constexpr = gl.SliceLayout(1, total.type.layout)
            total = total * gl.convert_layout(alpha, of_sums)[:, None] + _sums(weights)
            rounded = _rounded(weights, v_s.dtype, WEIGHTS, SCALED)
            if OVERLAP:
                # It was waited for above: without a barrier here ptxas moves the wait for P·V in
                # front of the softmax.
                mbarrier.wait(k_full.index(stage), phase)
                acc = warpgroup_mma_wait(0, deps=[summed])
                if not LATE:
                    mbarrier.arrive(v_empty.index(before), count=1)
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))[:, None]
            if SCALED:
                p_s.index(OWN).store(rounded)
                fence_async_shared()
            else:
                p = rounded
            done += 1
            passed += 1
        if APART:
            mbarrier.arrive(q_empty.index(OWN), count=1)
        if LATE:
            mbarrier.arrive(v_empty.index((done - 2) % STAGES), count=1, pred=count > 1)
        stage = (done - 1) % STAGES
        mbarrier.wait(v_full.index(stage), ((done - 1) // STAGES) & 1)
        p = p_s.index(OWN) if SCALED else p
        summed = warpgroup_mma(p, _values(v_s, stage, SCALED), acc, is_async=True)
        taken += 1
        following = _told(taken, next_s, next_full, next_empty, LISTED)
        acc = warpgroup_mma_wait(0, deps=[summed])
        mbarrier.arrive(v_empty.index(stage), count=1)

        total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, SCORES))
        empty = total == 0.0
        base = _base(_scaled(m, of_rest, NATURAL), LIFT)
        lse = gl.log2(gl.where(empty, 1.0, total))
        if NATURAL and not FUSED:
            lse = base + lse * 0.6931471805599453
        else:
            lse = (base + lse) * 0.6931471805599453
            if NATURAL:  # it may be beyond fp32 in log2 units, and then the sum is less than an ulp
                # Of NaN, which no maximum keeps, the sum is NaN.
                within = (gl.abs(base) < 1073741824.0) | ~(total < float("inf"))
                lse = gl.where(within, lse, m)
        lse = gl.where(empty, float("-inf"), lse)
        gl.store(lse_ptr + bh.to(gl.int64) * query + rows, lse, mask=rows < query)
        if UPPER or LOWER or LISTED:
            finite = gl.min((gl.abs(acc) < float("inf")).to(gl.int32), 1)
            own = number_of(block * GROUPS + OWN, bh, gl.cdiv(query, ROWS), together)
            gl.store(again_ptr + own, 1 - gl.min(finite, 0), mask=row < query)
        inverse = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, total))
        if SCALED:
            inverse *= gl.load(v_scale + bh // group)
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, SUMS))[:, None]
        tma.store_wait(0)  # of the block before
        out_s.index(OWN).reshape([ROWS, WIDTH]).store(acc.to(out_desc.dtype))
        fence_async_shared()
        store(out_desc, [bh // heads, bh % heads, row, 0], out_s.index(OWN))
        if not APART:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(OWN), count=1)
        number, told, count = following
    tma.store_wait(0)


@gluon.constexpr_function
def has_own_memory(scaled, width):
    """Return whether there is memory for out beside that of q's rows."""
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
    """Shared memory and barriers of a program, and its warps' work."""
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    WIDTH: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, WIDTH], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, WIDTH], k_desc.layout)
    TALL: gl.constexpr = v_desc.block_type.shape[2]  # keys, in fp8 columns
    WIDE: gl.constexpr = v_desc.block_type.shape[3]
    v_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, TALL, WIDE], v_desc.layout)
    out_s = q_s  # the rows are not read again
    p_s = q_s
    if has_own_memory(SCALED, WIDTH):
        out_s = gl.allocate_shared_memory(
            out_desc.dtype, [GROUPS, 1, 1, ROWS, WIDTH], out_desc.layout
        )
    if SCALED:
        # From registers, kept from one tile to the next byte by byte, it took 1.15 times as long.
        P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, KEYS], dtype)
        p_s = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, KEYS], P_LAYOUT)
    NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    next_s = gl.allocate_shared_memory(gl.int32, [6, 1], NUMBERS)
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
