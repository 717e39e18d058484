"""Our Triton FlashAttention-2 forward as a subject, and two ways to run it in fp8."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attncheck.mods import library
from attncheck.subjects.flash import Flash

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from attncheck.kernels.launch import Launch, VisitList
    from attncheck.problem import Problem
    from attncheck.subjects.contract import Subject

__all__ = ["Flash2", "Flash2FastAccumulation", "Flash2TransposedValues"]

_SMALLEST, _LARGEST = 16, 128  # tiles in the interpreter
_FP8_SMALLEST = 32  # keys, which a tensor core contracts 32 at a time


class Flash2(Flash):
    """FlashAttention-2 forward; in fp8 with fp32 sums, V stored as the Problem has it.

    It walks over the tiles that the mask's block mask lists.

    Args:
        blocks: Rows and keys of a tile, where not those that it chooses itself.
        dense: Whether it walks over all tiles instead and masks each.
    """

    name = "triton-flash2"
    summary = "our FlashAttention-2 forward in Triton, any mask and score mod"

    def __init__(self, blocks: tuple[int, int] | None = None, *, dense: bool = False) -> None:
        self._blocks = blocks
        self._dense = dense

    def launch(self, problem: Problem, device: str) -> Launch:
        """How it is launched."""
        chosen = super().launch(problem, device)
        if self._blocks is None:
            return chosen
        return replace(chosen, block_query=self._blocks[0], block_kv=self._blocks[1])

    def visited(self, problem: Problem, device: torch.device) -> dict[str, VisitList]:
        """The tiles of the block mask; all of them where nothing is hidden."""
        if self._dense or problem.mask == library.FULL:
            return {}
        from attncheck.subjects.visits import visits

        chosen = self.launch(problem, device.type)
        return {"tiles": visits(problem, chosen.block_query, chosen.block_kv, str(device))}

    def launches(self, problem: Problem, device: str) -> Mapping[str, Subject]:
        """With tiles half as long or half as wide, in the interpreter twice as large, and dense."""
        own = self.launch(problem, device)
        rows, keys = own.block_query, own.block_kv
        sizes = [(rows // 2, keys), (rows, keys // 2)]
        if device == "cpu":  # on a GPU larger ones do not fit
            sizes.append((2 * rows, 2 * keys))
        least = _FP8_SMALLEST if problem.formats.scaled else _SMALLEST
        other: dict[str, Subject] = {
            f"{of[0]}×{of[1]}": type(self)(of)
            for of in sizes
            if _SMALLEST <= of[0] <= _LARGEST and least <= of[1] <= _LARGEST
        }
        if problem.mask != library.FULL:
            other["dense"] = type(self)(self._blocks, dense=True)
        return other

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
