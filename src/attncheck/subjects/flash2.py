"""Our Triton FlashAttention-2 forward as a subject, and two ways to run it in fp8."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.subjects.flash import Flash

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from attncheck.problem import Problem

__all__ = ["Flash2", "Flash2FastAccumulation", "Flash2TransposedValues"]


class Flash2(Flash):
    """FlashAttention-2 forward; in fp8 with fp32 sums, V stored as the Problem has it."""

    name = "triton-flash2"
    summary = "our FlashAttention-2 forward in Triton, any mask and score mod"

    def forward(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """``kernels.flash2_forward.flash2_forward``."""
        from attncheck.kernels import flash2_forward

        return flash2_forward.flash2_forward


class Flash2TransposedValues(Flash2):
    """The same with V stored transposed, as an fp8 tensor core on Hopper wants its operands.

    V ``(batch, kv_heads, value_dim, kv)`` is contiguous, and written before the call that is timed.
    """

    name = "triton-flash2-vt"
    summary = "triton-flash2 in fp8, V stored transposed"

    def concerns(self, problem: Problem) -> bool:
        """Whether there is fp8: 16-bit operands are multiplied in either order alike."""
        return super().concerns(problem) and problem.formats.scaled

    def values(self, v: torch.Tensor) -> torch.Tensor:
        """A view of the transposed copy."""
        return v.mT.contiguous().mT


class Flash2FastAccumulation(Flash2):
    """The same with the tensor core's own accumulator of about 13 bits, Triton's default on Hopper.

    It has to differ from ``triton-flash2`` there; elsewhere it is the same kernel.
    """

    name = "triton-flash2-fastacc"
    summary = "triton-flash2 in fp8, sums in the tensor core's own accumulator (13 bits on Hopper)"
    max_num_imprecise_acc = None

    def absent(self, device: str) -> str | None:
        """The interpreter adds up in fp32, whatever it is asked."""
        if device == "cpu":
            return "the interpreter has no such accumulator: needs a CUDA GPU"
        return super().absent(device)

    def concerns(self, problem: Problem) -> bool:
        """Whether there is fp8: other products are added up in fp32."""
        return super().concerns(problem) and problem.formats.scaled
