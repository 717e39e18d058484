"""FlashAttention-2 backward in Triton, for any mask and score mod.

Dao 2023 (arXiv:2307.08691), Algorithm 2, in three launches: ``delta`` of each row, which needs no
keys; dQ, where a program owns a block of query rows and walks over keys; dK and dV, where a program
owns a block of keys of one key head and walks over the query rows of every head that shares it, so
that their sums are in fp32 registers and in a fixed order. P is computed again from LSE; for dV it
is rounded to dO's format, and dX, the gradient of the scaled products, to K's and Q's.

The launch of dK and dV computes scores transposed, keys by rows, since Triton 3.4 to 3.7.0 may
multiply a transposed result of a product wrongly on Hopper. With ``atomic`` the third launch adds
to dQ as well, and the second is left out.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The body of a Triton function is another language: its arguments have no Python types.

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from attncheck.core.errors import UsageError
from attncheck.kernels.compilation import sound_assembler
from attncheck.kernels.gradient_terms import CapturedReads, row_deltas, sink_gradient
from attncheck.kernels.launch import LOG2E, Launch, VisitList, block_dim, needs_careful_launch
from attncheck.kernels.tile import (
    all_finite,
    key_rows,
    listed,
    loaded,
    loaded_keys,
    loaded_lse,
    loaded_rows,
    may_hide,
    row_gradients,
    run_of,
    score_gradients,
    weights,
)
from attncheck.mods.to_triton import TritonMod

# Forty parameters are easier to read on five lines than in a column.
# fmt: off


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
    """Store dQ of a block of rows; CAREFUL, only if the block is flagged as not finite.

    ``TERMS``, of ``CapturedReads``, adds each tile's part of the gradients of the numbers that the
    score mod reads; None adds nothing.
    """
    flag_ptr = again_ptr + tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    if CAREFUL:  # noqa: SIM102  # of constants ``and`` skips nothing
        if tl.load(flag_ptr) == 0:
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
        first_tile, beyond, run_partial = run_of(visits, run, tl.cdiv(kv, BLOCK_K), LISTED)
        for tile in range(first_tile, beyond):
            start = tile * BLOCK_K
            partial = may_hide(run_partial, start, kv, ragged, LISTED, FREE, BLOCK_K)
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
        tl.store(flag_ptr, 1 - all_finite(acc).to(tl.int32))
    # dQ is contiguous.
    at = (first + rows[:, None].to(tl.int64)) * head_dim + cols[None, :]
    inside = (rows[:, None] < query) & (cols[None, :] < head_dim)
    tl.store(dq_ptr + at, (acc * scale).to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit
def by_keys_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, dq, q_batch, q_head, q_row,
    q_col, k_batch, k_head, k_row, k_col, v_batch, v_head, v_row, v_col, dout_batch, dout_head,
    dout_row, dout_col, heads, group, query, kv, head_dim, value_dim, factor, scale, tiles,
    mask_captured, score_captured, slope_captured, MASK: tl.constexpr, SCORE: tl.constexpr,
    SLOPE: tl.constexpr, IDENTITY: tl.constexpr, LISTED: tl.constexpr, FREE: tl.constexpr,
    ATOMIC: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):
    """Store dK and dV of a block of keys; if ATOMIC, add the block's dX·K to ``dq``."""
    block = tl.program_id(0)
    b = tl.program_id(1) // (heads // group)
    kv_head = tl.program_id(1) % (heads // group)
    keys = block * BLOCK_K + tl.arange(0, BLOCK_K)
    cols = tl.arange(0, BLOCK_D)
    value_cols = tl.arange(0, BLOCK_V)
    b64 = b.to(tl.int64)
    k_ptr += b64 * k_batch + kv_head.to(tl.int64) * k_head
    v_ptr += b64 * v_batch + kv_head.to(tl.int64) * v_head
    k_block = loaded(k_ptr, keys, cols, k_row, k_col, kv, head_dim)
    v_block = loaded(v_ptr, keys, value_cols, v_row, v_col, kv, value_dim)

    ragged = (block + 1) * BLOCK_K > kv
    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    for member in range(group):
        h = kv_head * group + member
        h64 = h.to(tl.int64)
        first = (b64 * heads + h64) * query
        head_ptr = q_ptr + b64 * q_batch + h64 * q_head
        dout_head_ptr = dout_ptr + b64 * dout_batch + h64 * dout_head
        visits = q_ptr
        runs = 1
        if LISTED:
            visits, runs = listed(tiles, b, h, block)
        for run in range(runs):
            first_tile, beyond, run_partial = run_of(visits, run, tl.cdiv(query, BLOCK_Q), LISTED)
            for tile in range(first_tile, beyond):
                start = tile * BLOCK_Q
                partial = may_hide(run_partial, start, query, ragged, LISTED, FREE, BLOCK_Q)
                rows = start + tl.arange(0, BLOCK_Q)
                q_block = loaded(head_ptr, rows, cols, q_row, q_col, query, head_dim)
                dout = loaded(
                    dout_head_ptr, rows, value_cols, dout_row, dout_col, query, value_dim
                )
                lse = loaded_lse(lse_ptr + first, rows, query, IDENTITY)
                delta = loaded_rows(delta_ptr + first, rows, query)
                # Tiles are keys by rows, so that no product's result is transposed.
                x = tl.dot(k_block, tl.trans(q_block), input_precision=PRECISION) * factor
                p = weights(
                    x, partial, b, h, rows[None, :], keys[:, None], query, kv, lse[None, :],
                    mask_captured, score_captured, MASK, SCORE, IDENTITY,
                )
                dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
                dp = tl.dot(v_block, tl.trans(dout), input_precision=PRECISION)
                dx = score_gradients(
                    x, p, dp, delta[None, :], b, h, rows[None, :], keys[:, None], slope_captured,
                    SLOPE, IDENTITY,
                ).to(q_block.dtype)
                dk = tl.dot(dx, q_block, dk, input_precision=PRECISION)
                if ATOMIC:
                    # This product is transposed too, for the same reason; dq is fp32, contiguous.
                    dq_part = tl.dot(tl.trans(k_block), dx, input_precision=PRECISION)
                    at = (first + rows[None, :].to(tl.int64)) * head_dim + cols[:, None]
                    dq_inside = (rows[None, :] < query) & (cols[:, None] < head_dim)
                    tl.atomic_add(dq[0] + at, dq_part, mask=dq_inside, sem="relaxed")

    # dK and dV are contiguous.
    at = tl.program_id(1).to(tl.int64) * kv + keys[:, None].to(tl.int64)
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


Gradients = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None
]


def flash2_backward(
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
    score: TritonMod | None,
    slope: TritonMod | None,
    launch: Launch,
    launch_by_keys: Launch | None = None,
    sink: torch.Tensor | None = None,
    tiles: VisitList | None = None,
    by_keys: VisitList | None = None,
    atomic: bool = False,
    captured: CapturedReads | None = None,
) -> Gradients:
    """Return the gradients of a loss with respect to q, k, v and more, from those of out and LSE.

    Args:
        q: ``(batch, heads, query, head_dim)``, any strides, as all others with four axes.
        k: ``(batch, kv_heads, kv, head_dim)``; kv_heads divides heads.
        v: ``(batch, kv_heads, kv, value_dim)``.
        out: ``(batch, heads, query, value_dim)``, from the forward.
        lse: ``(batch, heads, query)``, fp32, natural log, from the forward.
        dout: The loss's gradient with respect to out, as out; strides may be 0.
        dlse: The loss's gradient with respect to LSE, as lse; None for 0.
        slope: The score mod's derivative with respect to the score, a function of its arguments.
        launch: Compile-time choices for dQ; ``causal`` has no effect.
        launch_by_keys: Those for dK and dV (default: ``launch``); a program owns ``block_kv`` keys.
        sink: As in the forward.
        tiles: The tiles that dQ visits, as in the forward; None visits all.
        by_keys: The tiles that dK and dV visit: runs of query blocks for each block of keys, in the
            blocks of ``launch_by_keys``.
        atomic: Whether dQ is added up in memory by the programs of dK and dV, in an order that
            differs from run to run. ``launch`` is then used only for deltas and dcaptured, and
            ``tiles`` has no effect.
        captured: The numbers that the score mod reads from tensors; None computes no dcaptured.

    Returns:
        dq, dk and dv, each like q, k and v in shape and dtype; dsink, fp32 ``(heads,)`` or None;
        and dcaptured, fp32 ``(numbers,)`` or None, added up in an order that may differ from run to
        run; 0 for a number that is read only for hidden keys. Rows whose LSE is −∞ have a dq of 0
        and add nothing to other gradients, unless their q or dout is not finite. With a sink no
        LSE is −∞, and a row without keys passes its dlse to the sink.
        Keys that no row sees have a dk and dv of 0. Keys and values that the mask hides from a row,
        NaN included, do not affect its dq; except that with ``atomic`` a non-finite key does. They
        never affect dcaptured.

    Raises:
        UsageError: if only one of score and slope is given, if a list has other blocks than its
            launch or a tile beyond the last, or if ``captured`` is given without a score mod.
    """
    if (score is None) != (slope is None):
        raise UsageError("a score mod needs its slope, and a slope its score mod: give both.")
    if captured is not None and score is None:
        raise UsageError("without a score mod nothing is read from tensors: give no captured.")
    by_rows, keys = launch, launch_by_keys or launch
    query, kv = q.shape[2], k.shape[2]
    if tiles is not None:
        tiles.check("tiles", (query, by_rows.block_query), (kv, by_rows.block_kv))
    if by_keys is not None:
        by_keys.check("by_keys", (kv, keys.block_kv), (query, keys.block_query))
    lse = lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    with sound_assembler(q.device.type):
        delta = row_deltas(
            out, dout, lse, dlse, block=by_rows.block_query, warps=by_rows.warps
        )  # fmt: skip
        call = _Call(q, k, v, dout, lse, delta, scale, mask, score, slope)
        dq_sums = torch.zeros(q.shape, dtype=torch.float32, device=q.device) if atomic else None
        dk, dv = _by_keys(call, keys, by_keys, dq_sums)
        dcaptured = None if captured is None else lse.new_zeros(captured.numbers)
        dq = q.new_empty(0)
        if dq_sums is None or dcaptured is not None:
            dq = _by_rows(call, by_rows, tiles, captured, dcaptured)
        if dq_sums is not None:
            dq = (dq_sums * scale).to(q.dtype)
        dsink = None if sink is None else sink_gradient(sink, lse, delta)
    return dq, dk, dv, dsink, dcaptured


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """The arguments that both launches share."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    scale: float
    mask: TritonMod
    score: TritonMod | None
    slope: TritonMod | None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors in the order of the kernels' pointers."""
        return self.q, self.k, self.v, self.dout, self.lse, self.delta

    def numbers(self) -> tuple[int | float, ...]:
        strides = (*self.q.stride(), *self.k.stride(), *self.v.stride(), *self.dout.stride())
        heads, query, head_dim = self.q.shape[1:]
        kv, value_dim = self.v.shape[2:]
        group = heads // self.k.shape[1]
        factor = self.scale * LOG2E if self.score is None else self.scale
        return (*strides, heads, group, query, kv, head_dim, value_dim, factor, self.scale)

    def captured(self) -> tuple[tuple[object, ...], ...]:
        """Return the captured arguments of mask, score mod and slope."""
        return tuple(() if mod is None else mod.captured for mod in self._mods())

    def constants(self, launch: Launch, tiles: VisitList | None) -> dict[str, object]:
        """Return the kernels' compile-time arguments."""
        mask, score, slope = (mod or self.mask for mod in self._mods())  # an identity is not called
        return {
            "MASK": mask.function, "SCORE": score.function, "SLOPE": slope.function,
            "IDENTITY": self.score is None, "LISTED": tiles is not None, "FREE": launch.free,
            "BLOCK_Q": launch.block_query, "BLOCK_K": launch.block_kv,
            "BLOCK_D": block_dim(self.q.shape[3], self.q.dtype),
            "BLOCK_V": block_dim(self.v.shape[3], self.v.dtype),
            "PRECISION": launch.precision, "num_warps": launch.warps,
        }  # fmt: skip

    def _mods(self) -> tuple[TritonMod | None, ...]:
        return self.mask, self.score, self.slope


def _by_rows(
    call: _Call,
    launch: Launch,
    tiles: VisitList | None,
    captured: CapturedReads | None,
    dcaptured: torch.Tensor | None,
) -> torch.Tensor:
    """Return dQ; blocks of rows that are not finite are computed again, non-finite keys left out.

    Terms of captured numbers are added to ``dcaptured``, if given, by the first launch alone:
    hidden keys have no terms, so these need no careful launch.
    """
    q = call.q
    grid = (triton.cdiv(q.shape[2], launch.block_query), q.shape[0] * q.shape[1])
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    flags = torch.empty(grid, dtype=torch.int32, device=q.device)
    tile_arguments = () if tiles is None else tiles.arguments()
    run = partial(
        by_rows_kernel[grid], *call.tensors(), dq, flags, *call.numbers(), tile_arguments,
        *call.captured(), **call.constants(launch, tiles),
    )  # fmt: skip
    if captured is None or dcaptured is None:
        run((), TERMS=None, CAREFUL=False, num_stages=launch.stages)
    else:
        terms = captured.arguments(dcaptured)
        run(terms, TERMS=captured.function(), CAREFUL=False, num_stages=launch.stages)
    if not launch.free and needs_careful_launch(flags):
        run((), TERMS=None, CAREFUL=True, num_stages=1)
    return dq


def redo_rows(*tensors: torch.Tensor, scale: float, mask: TritonMod, launch: Launch) -> None:
    """Compute dQ of the blocks of rows flagged in ``again`` once more, non-finite keys left out.

    Args:
        tensors: q, k, v, dout, lse and delta; dq, contiguous; again, int32 ``(batch · heads,
            blocks)`` of ``launch``.
    """
    q, k, v, dout, lse, delta, dq, again = tensors
    call = _Call(q, k, v, dout, lse, delta, scale, mask, None, None)
    by_rows_kernel[again.shape[1], again.shape[0]](
        *call.tensors(), dq, again, *call.numbers(), (), *call.captured(), (), TERMS=None,
        CAREFUL=True, num_stages=1, **call.constants(launch, None),
    )  # fmt: skip


def _by_keys(
    call: _Call, launch: Launch, tiles: VisitList | None, dq: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dK and dV; add dX·K to ``dq``, fp32, if it is given."""
    k, v = call.k, call.v
    grid = (triton.cdiv(k.shape[2], launch.block_kv), k.shape[0] * k.shape[1])
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    tile_arguments = () if tiles is None else tiles.arguments()
    by_keys_kernel[grid](
        *call.tensors(), dk, dv, () if dq is None else (dq,), *call.numbers(), tile_arguments,
        *call.captured(), **call.constants(launch, tiles), ATOMIC=dq is not None,
        num_stages=launch.stages,
    )  # fmt: skip
    return dk, dv
