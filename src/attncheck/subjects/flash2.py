"""Our Triton FlashAttention-2 forward as a subject."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from attncheck.mods import library
from attncheck.mods.spec import Spec
from attncheck.outputs import Outputs
from attncheck.subjects.contract import Call, Subject, Tiling

if TYPE_CHECKING:
    from attncheck.inputs import Inputs
    from attncheck.kernels.flash2_forward import Launch
    from attncheck.problem import Problem

__all__ = ["Flash2"]

_MOST_TOGETHER = 65_535


class Flash2(Subject):
    """FlashAttention-2 forward for any mask and score mod; interpreted where there is no GPU."""

    name = "triton-flash2"
    summary = "our FlashAttention-2 forward in Triton, any mask and score mod"
    triton = True

    def absent(self, device: str) -> str | None:
        """Needs triton, which has wheels for Linux only."""
        del device
        return None if find_spec("triton") else "triton is not installed"

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """Takes every Problem, up to CUDA's limit of programs on the grid's second axis."""
        together = problem.batch * problem.heads
        if device == "cuda" and together > _MOST_TOGETHER:
            return f"batch · heads = {together}: at most {_MOST_TOGETHER} on a GPU"
        return None

    def tiling(self, problem: Problem, device: str) -> Tiling:
        """The tile sizes of its launch on ``device``."""
        chosen = launch(problem, device)
        return Tiling(block_query=chosen.block_query, block_kv=chosen.block_kv)

    def prepare(self, inputs: Inputs) -> Call:
        """Trace the mods, print them as Triton functions, and bind one launch."""
        problem, device = inputs.problem, inputs.q.device.type
        from attncheck.kernels.compilation import prepare_triton

        prepare_triton(device)
        from attncheck.kernels.flash2_forward import flash2_forward
        from attncheck.mods.to_triton import to_triton
        from attncheck.subjects.traced import traced_mask, traced_score

        mask = to_triton(traced_mask(problem, device))
        identity = problem.score == library.NONE
        score = None if identity else to_triton(traced_score(problem, device))
        chosen = launch(problem, device)

        def call() -> Outputs:
            out, lse = flash2_forward(
                inputs.q,
                inputs.k,
                inputs.v,
                scale=problem.scale,
                mask=mask,
                score=score,
                launch=chosen,
            )
            return Outputs(out, lse)

        return call


def launch(problem: Problem, device: str) -> Launch:
    """Tile sizes for ``problem``: those that fit without spilling on Hopper, or few programs.

    The interpreter's cost is per program and per step, almost whatever the tile: large tiles. But
    several of them at every length above 64, so that the recurrence is exercised.
    """
    from attncheck.kernels.flash2_forward import Launch

    widest = max(problem.head_dim, problem.value_dim)
    tiles = _interpreted(problem) if device == "cpu" else _compiled(problem.dtype, widest)
    return Launch(
        **tiles,
        precision="tf32" if problem.dtype == "tf32" else "ieee",
        causal=_hides_future(problem.mask),
        free=problem.mask in (library.FULL, Spec.of("causal")),
    )


def _interpreted(problem: Problem) -> dict[str, int]:
    longest = max(problem.query, problem.kv)
    block = 32 if longest <= 64 else 64 if longest <= 256 else 128
    return {"block_query": block, "block_kv": block}


# (block_query, block_kv, warps, stages) for head dims up to 64, 128 and 256 on Hopper: tiles whose
# registers hardly spill (at most 80 bytes a thread in benchmarks/spills.py on Triton 3.6). Ieee
# products in fp32 hold their operands in registers: larger tiles spill kilobytes.
_HOPPER = {
    "fp32": {64: (64, 32, 8, 2), 128: (32, 32, 8, 2), 256: (16, 32, 8, 1)},
    "tf32": {64: (64, 64, 4, 2), 128: (64, 32, 8, 2), 256: (32, 32, 8, 1)},
    "fp16": {64: (128, 64, 8, 3), 128: (128, 64, 8, 2), 256: (64, 64, 8, 2)},
    "bf16": {64: (128, 64, 8, 3), 128: (128, 64, 8, 2), 256: (64, 64, 8, 2)},
}


def _compiled(dtype: str, widest: int) -> dict[str, int]:
    tiles = _HOPPER[dtype]
    chosen = tiles[min(dim for dim in tiles if dim >= widest)]
    return dict(zip(("block_query", "block_kv", "warps", "stages"), chosen, strict=True))


def _hides_future(mask: Spec) -> bool:
    """Whether keys after a row's own index are hidden, as far as the mask's names tell."""
    if mask.name == "and":
        return any(_hides_future(part) for part in mask.parts)
    return mask.name in {"causal", "sliding_window"}
