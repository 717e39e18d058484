"""Our FlashAttention-2 forward and backward as a function that torch differentiates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from attncheck.core.errors import UsageError
from attncheck.kernels.flash2_backward import flash2_backward
from attncheck.kernels.flash2_forward import flash2_forward
from attncheck.kernels.gradient_terms import CapturedReads
from attncheck.kernels.launch import Launch, VisitList
from attncheck.mods.to_triton import TritonMod


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Plan:
    """Arguments of both passes but tensors: see ``flash2_forward`` and ``flash2_backward``."""

    scale: float  # factor of q·k, an fp32 number
    mask: TritonMod
    launch: Launch  # of the forward
    score: TritonMod | None = None  # the traced score mod; None leaves scores as they are
    slope: TritonMod | None = None  # its derivative with respect to the score
    # The numbers that the score mod reads from tensors, if it is to be differentiated with respect
    # to them. The kernels read a contiguous fp32 tensor of several numbers in place. Of another
    # tensor, and of a single number, they use the value at the time of the mod's translation: a
    # learnt one needs a new plan for every step.
    captured: CapturedReads | None = None
    by_rows: Launch | None = None  # launch of dQ (default: the forward's)
    by_keys: Launch | None = None  # launch of dK and dV (default: that of dQ)
    tiles: VisitList | None = None  # tiles that the forward visits; None visits all, as below
    tiles_by_rows: VisitList | None = None  # tiles that dQ visits
    tiles_by_keys: VisitList | None = None  # tiles that dK and dV visit
    atomic: bool = False  # whether dQ is added up in memory, in no fixed order


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    plan: Plan,
    sink: torch.Tensor | None = None,
    captured: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of ``q`` over ``k`` and ``v``, and its log-sum-exp; once differentiable.

    Args:
        q: ``(batch, heads, query, head_dim)``, any strides, as k and v.
        k: ``(batch, kv_heads, kv, head_dim)``; kv_heads divides heads.
        v: ``(batch, kv_heads, kv, value_dim)``.
        sink: fp32 ``(heads,)``, natural, or None.
        captured: The float tensors that the score mod reads, in the order of ``plan.captured``.
            Those that require a gradient get one. The kernels read their values through the plan.

    Returns:
        out ``(batch, heads, query, value_dim)`` and LSE ``(batch, heads, query)`` in fp32, natural
        log; rows that see no key give 0 and −∞, and no gradient.

    Raises:
        UsageError: if the tensors captured have not as many numbers as ``plan.captured``; and in
            the backward, if the plan has a score mod and no slope.
    """
    numbers = sum(tensor.numel() for tensor in captured)
    counted = 0 if plan.captured is None else plan.captured.numbers
    if captured and numbers != counted:
        raise UsageError(f"captured tensors have {numbers} numbers, and plan.captured {counted}.")
    # torch's own ``apply`` has no types.
    out, lse = _Attention.apply(q, k, v, sink, plan, *captured)  # type: ignore[no-untyped-call]
    return out, lse


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        plan: Plan,
        *captured: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = flash2_forward(
            q, k, v, scale=plan.scale, mask=plan.mask, score=plan.score, launch=plan.launch,
            sink=sink, tiles=plan.tiles,
        )  # fmt: skip
        # Captured tensors are saved so that torch notices if one is modified before the backward.
        ctx.save_for_backward(q, k, v, sink, out, lse, *captured)
        ctx.plan = plan
        ctx.set_materialize_grads(False)  # dlse stays None if the loss does not use LSE
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sink, out, lse, *captured = ctx.saved_tensors
        plan: Plan = ctx.plan
        differentiated = any(ctx.needs_input_grad[5:])
        if dout is None:
            dout = out.new_zeros(()).expand(out.shape)
        dq, dk, dv, dsink, dcaptured = flash2_backward(
            q, k, v, out, lse, dout, dlse, scale=plan.scale, mask=plan.mask, score=plan.score,
            slope=plan.slope, launch=plan.by_rows or plan.launch, launch_by_keys=plan.by_keys,
            sink=sink, tiles=plan.tiles_by_rows, by_keys=plan.tiles_by_keys, atomic=plan.atomic,
            captured=plan.captured if differentiated else None,
        )  # fmt: skip
        return dq, dk, dv, dsink, None, *_split_gradients(dcaptured, captured)


def _split_gradients(
    gradients: torch.Tensor | None, captured: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of captured numbers as one tensor each, in its shape and dtype."""
    if gradients is None:
        return (None,) * len(captured)
    parts = torch.split(gradients, [tensor.numel() for tensor in captured])
    return tuple(
        part.view(tensor.shape).to(tensor.dtype)
        for part, tensor in zip(parts, captured, strict=True)
    )
