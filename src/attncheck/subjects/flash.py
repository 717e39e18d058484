"""What our Triton FlashAttention forwards have in common as subjects, their tiles included."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from attncheck.judge.arithmetic import FP32
from attncheck.mods import library
from attncheck.outputs import Outputs
from attncheck.question import PROMISES
from attncheck.subjects.contract import Call, Subject, Tiling, with_full_tanh

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.inputs import Inputs
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.kernels.launch import KernelPages, Launch, VisitList
    from attncheck.mods.spec import Spec
    from attncheck.problem import Problem

__all__ = ["BY_KEYS", "BY_ROWS", "HOPPER", "Flash", "Tiles", "launch"]

_MOST_TOGETHER = 65_535
_FP8_CAPABILITY = (8, 9)  # Ada; Triton compiles no e4m3 below it


Tiles = dict[str, dict[int, tuple[int, int, int, int]]]

# (block_query, block_kv, warps, stages) for head dims up to 64, 128 and 256 on Hopper: tiles whose
# registers hardly spill (at most 80 bytes a thread in benchmarks/spills.py on Triton 3.6). Ieee
# products in fp32 hold their operands in registers: larger tiles spill kilobytes.
HOPPER: Tiles = {
    "fp32": {64: (64, 32, 8, 2), 128: (32, 32, 8, 2), 256: (16, 32, 8, 1)},
    "tf32": {64: (64, 64, 4, 2), 128: (64, 32, 8, 2), 256: (32, 32, 8, 1)},
    "fp16": {64: (128, 64, 8, 3), 128: (128, 64, 8, 2), 256: (64, 64, 8, 2)},
    "bf16": {64: (128, 64, 8, 3), 128: (128, 64, 8, 2), 256: (64, 64, 8, 2)},
    "e4m3": {64: (128, 64, 8, 3), 128: (128, 32, 8, 2), 256: (64, 32, 8, 2)},
    "e5m2": {64: (128, 64, 8, 3), 128: (128, 32, 8, 2), 256: (64, 32, 8, 2)},
}

# The same of a backward's dQ, and of its dK and dV, whose programs hold two sums.
_ROWS_IN_16_BITS = {64: (128, 64, 8, 3), 128: (128, 64, 8, 2), 256: (64, 64, 8, 2)}
_KEYS_IN_16_BITS = {64: (64, 128, 8, 2), 128: (32, 128, 8, 2), 256: (16, 64, 8, 2)}
BY_ROWS: Tiles = {
    "fp32": {64: (64, 32, 8, 2), 128: (32, 32, 8, 2), 256: (16, 32, 8, 1)},
    "tf32": {64: (64, 64, 8, 2), 128: (64, 32, 8, 2), 256: (64, 32, 8, 1)},
    "fp16": _ROWS_IN_16_BITS,
    "bf16": _ROWS_IN_16_BITS,
}
BY_KEYS: Tiles = {
    "fp32": {64: (32, 32, 8, 2), 128: (16, 32, 8, 1), 256: (16, 32, 8, 1)},
    "tf32": {64: (32, 64, 8, 2), 128: (32, 32, 8, 2), 256: (16, 32, 8, 1)},
    "fp16": _KEYS_IN_16_BITS,
    "bf16": _KEYS_IN_16_BITS,
}


class Flash(Subject):
    """A forward of ours for any mask and score mod; interpreted where there is no GPU.

    Attributes:
        hopper: Its tiles on a GPU.
        max_num_imprecise_acc: As in ``kernels.launch.Launch``.
    """

    triton = True
    hopper: Tiles = HOPPER
    promises = frozenset(PROMISES)
    promises_gradients = True
    sinks = True
    max_num_imprecise_acc: int | None = 0

    def absent(self, device: str) -> str | None:
        """Needs triton, which has wheels for Linux only."""
        del device
        return None if find_spec("triton") else "triton is not installed"

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """Takes every Problem, up to CUDA's limit of programs on the grid's second axis."""
        together = problem.batch * problem.heads
        if device == "cuda" and together > _MOST_TOGETHER:
            return f"batch · heads = {together}: at most {_MOST_TOGETHER} on a GPU"
        if device == "cuda" and problem.formats.scaled:
            capability = torch.cuda.get_device_capability()
            if capability < _FP8_CAPABILITY:
                return f"fp8 needs a GPU of capability 8.9 or more, and this one has {capability}"
        return None

    def tiling(self, problem: Problem, device: str) -> Tiling | None:
        """The tile sizes of its launch on ``device``."""
        chosen = self.launch(problem, device)
        return Tiling(block_query=chosen.block_query, block_kv=chosen.block_kv)

    def arithmetic(self, problem: Problem, device: str) -> Arithmetic:
        """Truncates tf32 operands, as Triton leaves it to tensor cores; in fp8 sums as asked for.

        The interpreter truncates too, and adds up in fp32. Its tanh is as ``triton_ulp`` says.
        """
        assumed = dataclasses.replace(
            with_full_tanh(super().arithmetic(problem, device), problem),
            truncates=problem.dtype == "tf32",
            weights_scale=problem.formats.weights_scale,
        )
        if problem.formats.scaled and self.max_num_imprecise_acc == 0:
            return dataclasses.replace(assumed, scores=FP32, values=FP32)
        return assumed

    def launch(self, problem: Problem, device: str) -> Launch:
        """How it is launched."""
        chosen = launch(problem, device, self.hopper)
        return dataclasses.replace(chosen, max_num_imprecise_acc=self.max_num_imprecise_acc)

    @abstractmethod
    def forward(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """The kernel's launcher; Triton is imported when this is called, not before."""

    def values(self, v: torch.Tensor) -> torch.Tensor:
        """V as it lies in memory when the kernel reads it."""
        return v

    def stored(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, KernelPages | None]:
        """K and v as they lie in memory when the kernel reads them, and their pages if any."""
        return inputs.k, self.values(inputs.v), None

    def visited(self, problem: Problem, device: torch.device) -> dict[str, VisitList]:
        """What its launcher gets of the tiles that it has to visit; nothing if it goes by names."""
        del problem, device
        return {}

    def prepare(self, inputs: Inputs) -> Call:
        """Trace the mods, print them as Triton functions, and bind the launches."""
        problem, device = inputs.problem, inputs.device.type
        from attncheck.kernels.compilation import prepare_triton

        prepare_triton(device)
        from attncheck.mods.to_triton import to_triton
        from attncheck.subjects.traced import traced_mask, traced_score

        forward = self.forward()
        mask = to_triton(traced_mask(problem, device))
        identity = problem.score == library.NONE
        score = None if identity else to_triton(traced_score(problem, device))
        k, v, pages = self.stored(inputs)
        paged = {} if pages is None else {"pages": pages, "kv": problem.kv}
        chosen = self.launch(problem, device)
        visited = self.visited(problem, inputs.device)

        def call() -> Outputs:
            out, lse = forward(
                inputs.q,
                k,
                v,
                scale=problem.scale,
                mask=mask,
                score=score,
                launch=chosen,
                descale=inputs.descale,
                out_dtype=problem.formats.output.torch_dtype,
                sink=inputs.sink,
                **visited,
                **paged,
            )
            return Outputs(out, lse)

        return call


def launch(problem: Problem, device: str, hopper: Tiles = HOPPER) -> Launch:
    """Tile sizes for ``problem``: those that fit without spilling on Hopper, or few programs.

    The interpreter's cost is per program and per step, almost whatever the tile: large tiles. But
    several of them at every length above 64, so that the recurrence is exercised.
    """
    from attncheck.kernels.launch import Launch

    widest = max(problem.head_dim, problem.value_dim)
    tiles = _interpreted(problem) if device == "cpu" else _compiled(hopper[problem.dtype], widest)
    return Launch(
        **tiles,
        precision="tf32" if problem.dtype == "tf32" else "ieee",
        causal=_hides_future(problem.mask),
        free=problem.mask == library.FULL,
        weights_scale=problem.formats.weights_scale,
    )


def _interpreted(problem: Problem) -> dict[str, int]:
    longest = max(problem.query, problem.kv)
    block = 32 if longest <= 64 else 64 if longest <= 256 else 128
    return {"block_query": block, "block_kv": block}


def _compiled(tiles: dict[int, tuple[int, int, int, int]], widest: int) -> dict[str, int]:
    chosen = tiles[min(dim for dim in tiles if dim >= widest)]
    return dict(zip(("block_query", "block_kv", "warps", "stages"), chosen, strict=True))


def _hides_future(mask: Spec) -> bool:
    """Whether keys after a row's own index are hidden, as far as the mask's names tell."""
    if mask.name == "and":
        return any(_hides_future(part) for part in mask.parts)
    return mask.name in {"causal", "sliding_window"}
