"""Our Triton FlashAttention-1 forward as a subject."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.subjects.contract import Tiling
from attncheck.subjects.flash import HOPPER, Flash, Tiles

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from attncheck.problem import Problem

__all__ = ["Flash1"]

# It holds O and the product at once: where FlashAttention-2's tiles spill, smaller ones do not.
_SIXTEEN_BITS = {**HOPPER["bf16"], 256: (32, 64, 8, 1)}
_FP8 = {**HOPPER["e4m3"], 128: (64, 64, 8, 1), 256: (32, 64, 8, 1)}
_HOPPER: Tiles = {
    **HOPPER,
    "fp16": _SIXTEEN_BITS,
    "bf16": _SIXTEEN_BITS,
    "e4m3": _FP8,
    "e5m2": _FP8,
}


class Flash1(Flash):
    """FlashAttention-1 forward: key blocks outermost, O, l and m in memory between them."""

    name = "triton-flash1"
    summary = "our FlashAttention-1 forward in Triton (key blocks outermost), any mask and score"
    hopper = _HOPPER

    def tiling(self, problem: Problem, device: str) -> Tiling:
        """Its tile sizes, and that its weights are relative to each step's own maximum."""
        chosen = self.launch(problem, device)
        return Tiling(block_query=chosen.block_query, block_kv=chosen.block_kv, recurrence="flash1")

    def forward(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """``kernels.flash1_forward.flash1_forward``."""
        from attncheck.kernels import flash1_forward

        return flash1_forward.flash1_forward
