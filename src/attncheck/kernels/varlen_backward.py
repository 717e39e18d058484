"""FlashAttention-2 backward of packed documents in Triton, for any mask and score mod.

Dao 2023 (arXiv:2307.08691), Algorithm 2, in three launches, as ``flash2_backward`` has them: what
is known of a row before it meets a key; dQ, whose program owns some rows of one document and walks
over that document's keys; dK and dV, whose program owns some keys of one document and key head and
walks over that document's rows in every head that shares it. No program reads or writes what is
another document's, and every sum has one order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from attncheck.errors import UsageError
from attncheck.kernels.assembler import sound_assembler
from attncheck.kernels.delta import row_deltas, sink_gradient
from attncheck.kernels.launch import LOG2E, block_dim, careful_asked
from attncheck.kernels.varlen_forward import program_list
from attncheck.kernels.varlen_gradients import by_keys_kernel, by_rows_kernel, everything

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.kernels.launch import Launch
    from attncheck.kernels.varlen_forward import Causal
    from attncheck.mods.to_triton import TritonMod

__all__ = ["key_program_list", "varlen_backward"]

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def key_program_list(kv_lengths: Sequence[int], block_kv: int) -> torch.Tensor:
    """Which keys each program owns: int32 ``(programs, 2)``, (document, its first key).

    Keys count from the document's own first. None where no document has a key.
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
    """Gradients of a loss with respect to q, k, v and the sink, from those of out and LSE.

    Args:
        q: ``(total_query, heads, head_dim)``, any strides, as all others with three axes.
        k: ``(total_kv, kv_heads, head_dim)``; kv_heads divides heads.
        v: ``(total_kv, kv_heads, value_dim)``.
        out: ``(total_query, heads, value_dim)``: what the forward gave.
        lse: ``(heads, total_query)``, fp32, natural log: likewise.
        dout: The loss's gradient with respect to out, as out; strides may be 0.
        dlse: With respect to LSE, as lse; None for 0.
        cu_seqlens_q: Where each document's rows begin, as in the forward.
        cu_seqlens_k: The same of its keys.
        programs: ``program_list`` of the documents' query lengths and ``launch.block_query``.
        key_programs: ``key_program_list`` of their key lengths and ``launch_by_keys.block_kv``.
        scale: Factor of q·k, an fp32 number.
        launch: Tile sizes and the like of dQ.
        launch_by_keys: Of dK and dV (default: the same); ``block_kv`` keys are a program's.
        causal: Which keys a row sees of its document, beside ``mask``.
        mask: The traced mask within documents; None for all their keys.
        score: The traced score mod; None leaves scores as they are.
        slope: Its derivative with respect to the score, a function of the same arguments.
        places: By which numbers the mods know a document, as in the forward.
        sink: As in the forward.

    Returns:
        dq, dk and dv, each like q, k and v in shape and dtype, and dsink, fp32 ``(heads,)`` or
        None. Rows that see no key, unless their q or dout is not finite, and keys that no row sees
        or that are in no document: 0, as ``flash2_backward`` has them. What other documents hold,
        NaN included, moves no bit of a document's dq, dk and dv.

    Raises:
        UsageError: if one of score and slope is given without the other.
    """
    if (score is None) != (slope is None):
        raise UsageError("a score mod needs its slope, and a slope its score mod: give both.")
    lse = lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()[None]
    starts = cu_seqlens_q, cu_seqlens_k
    with sound_assembler(q.device.type):
        # All rows as those of one sequence: they meet no key there.
        one_out, one_dout = (x.transpose(0, 1)[None] for x in (out, dout))
        delta = row_deltas(
            one_out, one_dout, lse[None], dlse, block=launch.block_query, warps=launch.warps
        )
        known = _Known(q, k, v, dout, lse, delta, starts, places, scale, causal, mask, score, slope)
        dk, dv = _by_keys(known, launch_by_keys or launch, key_programs)
        dq = _by_rows(known, launch, programs)
        dsink = None if sink is None else sink_gradient(sink, lse[None], delta)
    return dq, dk, dv, dsink


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """What both launches read."""

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
        """Whether every row sees all keys of its document."""
        return self.mask is None and not self.causal

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """In the order of the kernels' pointers."""
        return self.q, self.k, self.v, self.dout, self.lse, self.delta

    def numbers(self) -> tuple[int | float, ...]:
        """Strides, sizes and factors."""
        strides = (*self.q.stride(), *self.k.stride(), *self.v.stride(), *self.dout.stride())
        total, heads, head_dim = self.q.shape
        group, value_dim = heads // self.k.shape[1], self.v.shape[2]
        factor = self.scale * LOG2E if self.score is None else self.scale
        return (*strides, group, total, head_dim, value_dim, factor, self.scale)

    def documents(self, programs: torch.Tensor) -> tuple[object, ...]:
        """Where they are, and what each program owns of them."""
        return (*self.starts, self.places, programs)

    def captured(self) -> tuple[tuple[object, ...], ...]:
        """Of mask, score mod and slope."""
        mods = self.mask, self.score, self.slope
        return tuple(() if mod is None else mod.captured for mod in mods)

    def constants(self, launch: Launch) -> dict[str, object]:
        """What the kernels are compiled for."""
        # An identity is not called.
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


def _by_rows(known: _Known, launch: Launch, programs: torch.Tensor) -> torch.Tensor:
    """dQ; blocks of rows that are not finite once more, without the keys that are not."""
    q = known.q
    grid = (len(programs), q.shape[1])
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    again = torch.empty(grid, dtype=torch.int32, device=q.device)
    run = partial(
        by_rows_kernel[grid], *known.tensors(), dq, again, *known.numbers(),
        *known.documents(programs), *known.captured(), **known.constants(launch),
    )  # fmt: skip
    run(CAREFUL=False, num_stages=launch.stages)
    if not known.free and careful_asked(again):
        run(CAREFUL=True, num_stages=1)
    return dq


def _by_keys(
    known: _Known, launch: Launch, programs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """DK and dV; 0 for keys in no document, which no program owns."""
    dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (known.k, known.v))
    if len(programs):
        by_keys_kernel[len(programs), known.k.shape[1]](
            *known.tensors(), dk, dv, *known.numbers(), *known.documents(programs),
            *known.captured(), **known.constants(launch), num_stages=launch.stages,
        )  # fmt: skip
    return dk, dv
