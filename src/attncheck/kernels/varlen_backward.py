"""FlashAttention-2 backward of packed documents in Triton, for any mask and score mod.

Dao 2023 (arXiv:2307.08691), Algorithm 2, in three launches, as in ``flash2_backward``: ``delta`` of
each row; dQ, where a program owns some rows of one document and walks over that document's keys; dK
and dV, where a program owns some keys of one document and key head and walks over that document's
rows in every head that shares it. No program reads or writes another document's elements, and
every sum has a fixed order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The body of a Triton function is another language: its arguments have no Python types.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from attncheck.core.errors import UsageError
from attncheck.kernels.compilation import sound_assembler
from attncheck.kernels.gradient_terms import row_deltas, sink_gradient
from attncheck.kernels.launch import LOG2E, Launch, block_dim, needs_careful_launch
from attncheck.kernels.tile import (
    all_finite,
    key_rows,
    loaded,
    loaded_keys,
    loaded_lse,
    loaded_rows,
    may_hide,
    row_gradients,
    score_gradients,
    weights,
)
from attncheck.kernels.varlen_forward import Causal, program_list
from attncheck.mods.to_triton import TritonMod

# Forty parameters are easier to read on five lines than in a column.
# fmt: off


@triton.jit
def everything(_b, _h, _rows, keys, _captured):
    """The mask that hides nothing."""
    return keys == keys  # noqa: PLR0124  # true of every key, in their shape


@triton.jit
def _program_bounds(programs, query_starts, kv_starts):
    """Return a program's document and first row or key in it, and where the document lies."""
    document = tl.load(programs + 2 * tl.program_id(0))
    first = tl.load(programs + 2 * tl.program_id(0) + 1)
    query_start = tl.load(query_starts + document)
    query = tl.load(query_starts + document + 1) - query_start
    kv_start = tl.load(kv_starts + document)
    kv = tl.load(kv_starts + document + 1) - kv_start
    return document, first, query_start.to(tl.int64), query, kv_start.to(tl.int64), kv


@triton.jit
def _mod_indices(document, places, LOCAL: tl.constexpr):
    """Return the b, first q_idx and first kv_idx of a document as the mods see them."""
    if LOCAL:
        b, first_q_idx, first_kv_idx = document, 0, 0
    else:
        b = tl.load(places + 3 * document)
        first_q_idx = tl.load(places + 3 * document + 1)
        first_kv_idx = tl.load(places + 3 * document + 2)
    return b, first_q_idx, first_kv_idx


@triton.jit
def _diagonal(query, kv, BOTTOM_RIGHT: tl.constexpr):
    """Return d, where i + d is the last key that the causal flag shows to row i."""
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
    """Store dQ of some rows of a document; CAREFUL, only if they are flagged as not finite."""
    flag_ptr = again_ptr + tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    if CAREFUL:  # noqa: SIM102  # of constants ``and`` skips nothing
        if tl.load(flag_ptr) == 0:
            return
    document, first_row, query_start, query, kv_start, kv = _program_bounds(
        programs, query_starts, kv_starts
    )
    b, first_q_idx, first_kv_idx = _mod_indices(document, places, LOCAL)
    h = tl.program_id(1)
    h64 = h.to(tl.int64)
    rows = first_row + tl.arange(0, BLOCK_Q)
    cols = tl.arange(0, BLOCK_D)
    q_ptr += query_start * q_row + h64 * q_head
    k_ptr += kv_start * k_row + (h64 // group) * k_head
    v_ptr += kv_start * v_row + (h64 // group) * v_head
    dout_ptr += query_start * dout_row + h64 * dout_head
    row_start = h64 * total_query + query_start
    q_block = loaded(q_ptr, rows, cols, q_row, q_col, query, head_dim)
    dout = loaded(dout_ptr, rows, tl.arange(0, BLOCK_V), dout_row, dout_col, query, value_dim)
    lse = loaded_lse(lse_ptr + row_start, rows, query, IDENTITY)
    delta = loaded_rows(delta_ptr + row_start, rows, query)

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
        tl.store(flag_ptr, 1 - all_finite(acc).to(tl.int32))
    # In dQ the heads of a row are adjacent.
    at = (query_start + rows[:, None]) * tl.num_programs(1) + h
    here = (rows[:, None] < query) & (cols[None, :] < head_dim)
    tl.store(
        dq_ptr + at * head_dim + cols[None, :], (acc * scale).to(dq_ptr.dtype.element_ty), mask=here
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
    """Store dK and dV of some keys of a document, summed over the heads that share them."""
    document, first_key, query_start, query, kv_start, kv = _program_bounds(
        programs, query_starts, kv_starts
    )
    b, first_q_idx, first_kv_idx = _mod_indices(document, places, LOCAL)
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
        row_start = h64 * total_query + query_start
        head_ptr = q_ptr + query_start * q_row + h64 * q_head
        dout_head_ptr = dout_ptr + query_start * dout_row + h64 * dout_head
        for start in range(begin, query, BLOCK_Q):
            partial = may_hide(True, start, query, ragged, False, ALL, BLOCK_Q)
            rows = start + tl.arange(0, BLOCK_Q)
            q_idx = (first_q_idx + rows)[None, :]
            q_block = loaded(head_ptr, rows, cols, q_row, q_col, query, head_dim)
            dout = loaded(dout_head_ptr, rows, value_cols, dout_row, dout_col, query, value_dim)
            lse = loaded_lse(lse_ptr + row_start, rows, query, IDENTITY)
            delta = loaded_rows(delta_ptr + row_start, rows, query)
            # Tiles are keys by rows, so that no product's result is transposed.
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

    # In dK and dV the heads of a key are adjacent.
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


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def key_program_list(kv_lengths: Sequence[int], block_kv: int) -> torch.Tensor:
    """Return the first key of each program: int32 ``(programs, 2)``, (document, key).

    Keys count from the document's first one. The list is empty where no document has a key.
    """
    if not any(kv_lengths):
        return torch.empty((0, 2), dtype=torch.int32)
    return program_list(kv_lengths, block_kv)


def varlen_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    programs: torch.Tensor,
    key_programs: torch.Tensor,
    scale: float,
    launch: Launch,
    launch_by_keys: Launch | None = None,
    causal: Causal = "",
    mask: TritonMod | None = None,
    score: TritonMod | None = None,
    slope: TritonMod | None = None,
    places: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
) -> Gradients:
    """Return the gradients of a loss with respect to q, k, v and the sink.

    Other arguments are as in ``flash2_backward``.

    Args:
        q: ``(total_query, heads, head_dim)``, any strides, as all others with three axes.
        k: ``(total_kv, kv_heads, head_dim)``; kv_heads divides heads.
        v: ``(total_kv, kv_heads, value_dim)``.
        out: ``(total_query, heads, value_dim)``, from the forward.
        lse: ``(heads, total_query)``, fp32, natural log, from the forward.
        cu_seqlens_q: The first row of each document, as in the forward.
        cu_seqlens_k: The first key of each document, as in the forward.
        programs: ``program_list`` of the documents' query lengths and ``launch.block_query``.
        key_programs: ``key_program_list`` of their key lengths and ``launch_by_keys.block_kv``.
        launch: Compile-time choices for dQ.
        causal: A causal flag, which holds besides ``mask``.
        mask: The traced mask within documents; None shows all their keys.
        places: Each document's indices as the mods see them, as in the forward.

    Returns:
        dq, dk and dv, each like q, k and v in shape and dtype, and dsink, fp32 ``(heads,)`` or
        None. Rows that see no key, unless their q or dout is not finite, and keys that no row sees
        or that are in no document have gradients of 0, as in ``flash2_backward``. Other documents'
        elements, NaN included, change no bit of a document's dq, dk and dv.

    Raises:
        UsageError: if one of score and slope is given without the other.
    """
    if (score is None) != (slope is None):
        raise UsageError("a score mod needs its slope, and a slope its score mod: give both.")
    lse = lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()[None]
    starts = cu_seqlens_q, cu_seqlens_k
    with sound_assembler(q.device.type):
        # Deltas need no keys, so all rows are treated as one sequence.
        one_out, one_dout = (x.transpose(0, 1)[None] for x in (out, dout))
        delta = row_deltas(
            one_out, one_dout, lse[None], dlse, block=launch.block_query, warps=launch.warps
        )
        call = _Call(q, k, v, dout, lse, delta, starts, places, scale, causal, mask, score, slope)
        dk, dv = _by_keys(call, launch_by_keys or launch, key_programs)
        dq = _by_rows(call, launch, programs)
        dsink = None if sink is None else sink_gradient(sink, lse[None], delta)
    return dq, dk, dv, dsink


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """The arguments that both launches share."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    starts: tuple[torch.Tensor, torch.Tensor]
    places: torch.Tensor | None
    scale: float
    causal: Causal
    mask: TritonMod | None
    score: TritonMod | None
    slope: TritonMod | None

    @property
    def free(self) -> bool:
        """Return whether every row sees all keys of its document."""
        return self.mask is None and not self.causal

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors in the order of the kernels' pointers."""
        return self.q, self.k, self.v, self.dout, self.lse, self.delta

    def numbers(self) -> tuple[int | float, ...]:
        strides = (*self.q.stride(), *self.k.stride(), *self.v.stride(), *self.dout.stride())
        total, heads, head_dim = self.q.shape
        group, value_dim = heads // self.k.shape[1], self.v.shape[2]
        factor = self.scale * LOG2E if self.score is None else self.scale
        return (*strides, group, total, head_dim, value_dim, factor, self.scale)

    def documents(self, programs: torch.Tensor) -> tuple[object, ...]:
        """Return the documents' starts and places, and the list of programs."""
        return (*self.starts, self.places, programs)

    def captured(self) -> tuple[tuple[object, ...], ...]:
        """Return the captured arguments of mask, score mod and slope."""
        mods = self.mask, self.score, self.slope
        return tuple(() if mod is None else mod.captured for mod in mods)

    def constants(self, launch: Launch) -> dict[str, object]:
        """Return the kernels' compile-time arguments."""
        # ``everything`` stands in for an absent mod; it is called only as a mask, in ragged tiles.
        mask, score, slope = (
            everything if mod is None else mod.function
            for mod in (self.mask, self.score, self.slope)
        )
        return {
            "MASK": mask, "SCORE": score, "SLOPE": slope, "ALL": self.mask is None,
            "IDENTITY": self.score is None, "CAUSAL": self.causal != "",
            "BOTTOM_RIGHT": self.causal == "bottom_right", "LOCAL": self.places is None,
            "BLOCK_Q": launch.block_query, "BLOCK_K": launch.block_kv,
            "BLOCK_D": block_dim(self.q.shape[2], self.q.dtype),
            "BLOCK_V": block_dim(self.v.shape[2], self.v.dtype),
            "PRECISION": launch.precision, "num_warps": launch.warps,
        }  # fmt: skip


def _by_rows(call: _Call, launch: Launch, programs: torch.Tensor) -> torch.Tensor:
    """Return dQ; blocks that are not finite are computed again, non-finite keys left out."""
    q = call.q
    grid = (len(programs), q.shape[1])
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    flags = torch.empty(grid, dtype=torch.int32, device=q.device)
    run = partial(
        by_rows_kernel[grid], *call.tensors(), dq, flags, *call.numbers(),
        *call.documents(programs), *call.captured(), **call.constants(launch),
    )  # fmt: skip
    run(CAREFUL=False, num_stages=launch.stages)
    if not call.free and needs_careful_launch(flags):
        run(CAREFUL=True, num_stages=1)
    return dq


def _by_keys(
    call: _Call, launch: Launch, programs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dK and dV; 0 for keys in no document, which no program owns."""
    dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (call.k, call.v))
    if len(programs):
        by_keys_kernel[len(programs), call.k.shape[1]](
            *call.tensors(), dk, dv, *call.numbers(), *call.documents(programs),
            *call.captured(), **call.constants(launch), num_stages=launch.stages,
        )  # fmt: skip
    return dk, dv
