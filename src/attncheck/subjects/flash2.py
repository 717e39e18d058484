"""Our Triton FlashAttention-2 as a subject, forward and backward.

And two ways to run its forward in fp8, and one to add up its dQ.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from attncheck.mods import library
from attncheck.subjects.flash import BY_KEYS, BY_ROWS, HOPPER, Flash, Tiles, launch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from attncheck.inputs import Inputs
    from attncheck.kernels.launch import Launch, VisitList
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.subjects.contract import Call, Subject

    Gradients = tuple[
        torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None
    ]

__all__ = ["Flash2", "Flash2Atomic", "Flash2FastAccumulation", "Flash2TransposedValues"]

_SMALLEST, _LARGEST = 16, 128  # tiles in the interpreter
_FP8_SMALLEST = 32  # keys, which a tensor core contracts 32 at a time
# Not tiles of 64 rows for 8 warps: two would share a row's keys, and Triton lays scores out
# otherwise in the careful launch, which has one product more. Its row sums then differ by an ulp
# (in tf32, on an H200).
_16_BITS = {**HOPPER["bf16"], 256: (128, 32, 8, 2)}
_TILES: Tiles = {
    **HOPPER,
    "tf32": {**HOPPER["tf32"], 128: (64, 32, 4, 2)},
    "fp16": _16_BITS,
    "bf16": _16_BITS,
}
_LARGE = {9, 10}  # capabilities, by their first number, whose blocks may have 227 KiB of memory


class Flash2(Flash):
    """FlashAttention-2; in fp8 with fp32 sums, V stored as the Problem has it.

    It walks over the tiles that the mask's block mask lists. A Problem with a backward has both
    passes in one call.

    Args:
        blocks: Rows and keys of a tile, where not those that it chooses itself.
        dense: Whether it walks over all tiles instead and masks each.

    Attributes:
        atomic: Whether dQ is added up in memory, in whatever order.
    """

    name = "triton-flash2"
    summary = "our FlashAttention-2 forward in Triton, any mask and score mod"
    hopper = _TILES
    backward = True
    captured = True
    atomic = False

    def __init__(self, blocks: tuple[int, int] | None = None, *, dense: bool = False) -> None:
        self._blocks = blocks
        self._dense = dense

    def launch(self, problem: Problem, device: str) -> Launch:
        """How it is launched."""
        chosen = super().launch(problem, device)
        if device == "cuda":
            chosen = replace(chosen, **_on_hopper(problem))
        return self._in_blocks(chosen)

    def gradient_launches(self, problem: Problem, device: str) -> tuple[Launch, Launch]:
        """How dQ is launched, and how dK and dV are."""
        rows, keys = (launch(problem, device, tiles) for tiles in (BY_ROWS, BY_KEYS))
        if problem.dcaptured:
            # A table is read by score, slope and place alike: one more tile of it for each and for
            # each stage is more than there is of shared memory.
            rows = replace(rows, stages=1)
        return self._in_blocks(rows), self._in_blocks(keys)

    def _in_blocks(self, chosen: Launch) -> Launch:
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

    def _gradients_visit(self, problem: Problem, device: torch.device) -> dict[str, VisitList]:
        """The tiles of dQ and of dK and dV, as ``visited``."""
        if self._dense or problem.mask == library.FULL:
            return {}
        from attncheck.subjects.visits import visits, visits_by_keys

        rows, keys = self.gradient_launches(problem, device.type)
        return {
            "tiles": visits(problem, rows.block_query, rows.block_kv, str(device)),
            "by_keys": visits_by_keys(problem, keys.block_query, keys.block_kv, str(device)),
        }

    def prepare(self, inputs: Inputs) -> Call:
        """The launches of the forward and, where it is asked for, of the backward."""
        forward = super().prepare(inputs)
        if inputs.dout is None:
            return forward
        backward = self._prepared_backward(inputs)

        def call() -> Outputs:
            found = forward()
            dq, dk, dv, dsink, dcaptured = backward(found)
            return replace(found, dq=dq, dk=dk, dv=dv, dsink=dsink, dcaptured=dcaptured)

        return call

    def _prepared_backward(self, inputs: Inputs) -> Callable[[Outputs], Gradients]:
        """What takes the forward's results and gives the gradients, in the order of Outputs."""
        from attncheck.mods.to_triton import to_triton
        from attncheck.subjects.traced import (
            traced_mask,
            traced_reads,
            traced_score,
            traced_slope,
        )

        problem, device = inputs.problem, inputs.device.type
        identity = problem.score == library.NONE
        rows, keys = self.gradient_launches(problem, device)
        # fmt: off
        given = partial(
            self.backward_launcher(),
            scale=problem.scale,
            mask=to_triton(traced_mask(problem, device)),
            score=None if identity else to_triton(traced_score(problem, device)),
            slope=None if identity else to_triton(traced_slope(problem, device)),
            captured=traced_reads(problem, device) if problem.dcaptured else None,
            launch=rows, launch_by_keys=keys, sink=inputs.sink, atomic=self.atomic,
            **self._gradients_visit(problem, inputs.device),
        )
        # fmt: on
        tensors = inputs.q, inputs.k, inputs.v

        def backward(found: Outputs) -> Gradients:
            return given(*tensors, found.out, found.lse, inputs.dout, inputs.dlse)

        return backward

    def backward_launcher(self) -> Callable[..., Gradients]:
        """``kernels.flash2_backward.flash2_backward``."""
        from attncheck.kernels import flash2_backward

        return flash2_backward.flash2_backward

    def forward(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """``kernels.flash2_forward.flash2_forward``."""
        from attncheck.kernels import flash2_forward

        return flash2_forward.flash2_forward


class Flash2Atomic(Flash2):
    """The same with dQ added up in memory by the programs of dK and dV, in whatever order.

    As FlashAttention's backward does where it is not asked to be deterministic. No two runs need
    have the same bits, and a hidden key that is not finite reaches dQ: it promises nothing.
    """

    name = "triton-flash2-atomic"
    summary = "triton-flash2 with dQ added up by atomic additions"
    promises = frozenset()
    atomic = True

    def concerns(self, problem: Problem) -> bool:
        """Whether there are gradients: the forward is ``triton-flash2``'s."""
        return super().concerns(problem) and problem.backward


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


def _on_hopper(problem: Problem) -> dict[str, Any]:
    """What a forward in 16 bits without a score mod has besides on Hopper, as timed on an H200.

    At head dims above 64 it has a third stage, in at most 131,072 bytes of shared memory: 5.6 to
    4.6 ms without a mask. Up to 64 it has a limit of registers, by which two programs share a
    multiprocessor under masks too: of those tried a neighborhood alone spills by it, 8 bytes a
    thread (Triton 3.6).
    """
    import torch

    widest = max(problem.head_dim, problem.value_dim)
    if problem.dtype not in {"fp16", "bf16"} or problem.score != library.NONE or widest > 128:
        return {}
    # Without a GPU kernels are compiled alone, for Hopper; others may not have the memory.
    if torch.version.hip or (
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in _LARGE
    ):
        return {}
    return {"stages": 3} if widest > 64 else {"registers": 128}
