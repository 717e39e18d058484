"""Our Triton FlashAttention-1 and -2 as subjects.

And two ways to run its forward in fp8, and one to add up its dQ.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from attncheck.core.declared_arithmetic import FP32
from attncheck.core.errors import TraceError
from attncheck.core.mod_spec import FULL, NONE
from attncheck.core.outputs import Outputs
from attncheck.inputs.problem import PROMISES
from attncheck.mods.masks import Band, band_of
from attncheck.subjects.capabilities.subject import Call, Subject, Tiling, with_full_tanh
from attncheck.subjects.kernel_mods import (
    captured_reads,
    mask_expression,
    score_expression,
    triton_mask,
    triton_score,
    triton_slope,
    visited_tiles,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attncheck.core.declared_arithmetic import Arithmetic
    from attncheck.core.mod_spec import Spec
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Problem
    from attncheck.kernels.flash3_forward import Shape
    from attncheck.kernels.launch import KernelPages, Launch

    Gradients = tuple[
        torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None
    ]

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
    """A forward of ours for any mask and score mod; interpreted where there is no GPU."""

    triton = True
    hopper: Tiles = HOPPER
    promises = frozenset(PROMISES)
    promises_gradients = True
    sinks = True
    max_num_imprecise_acc: int | None = 0  # as in ``kernels.launch.Launch``

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
        assumed = replace(
            with_full_tanh(super().arithmetic(problem, device), problem),
            truncates=problem.dtype == "tf32",
            weights_scale=problem.formats.weights_scale,
        )
        if problem.formats.scaled and self.max_num_imprecise_acc == 0:
            return replace(assumed, scores=FP32, values=FP32)
        return assumed

    def launch(self, problem: Problem, device: str) -> Launch:
        """Tile sizes and options of its launch."""
        chosen = launch_flash(problem, device, self.hopper)
        return replace(chosen, max_num_imprecise_acc=self.max_num_imprecise_acc)

    @abstractmethod
    def forward(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """The kernel's launcher; Triton is imported when this is called, not before."""

    def values(self, v: torch.Tensor) -> torch.Tensor:
        """V as it lies in memory when the kernel reads it."""
        return v

    def stored(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, KernelPages | None]:
        """K and v as they lie in memory when the kernel reads them, and their pages if any."""
        return inputs.k, self.values(inputs.v), None

    def visited(self, problem: Problem, device: torch.device) -> dict[str, Any]:
        """What its launcher takes besides: lists of the tiles to visit, of most."""
        del problem, device
        return {}

    def prepare(self, inputs: Inputs) -> Call:
        """Trace the mods, print them as Triton functions, and bind the launches."""
        problem, device = inputs.problem, inputs.device.type
        from attncheck.kernels.compilation import prepare_triton

        prepare_triton(device)
        forward = self.forward()
        mask, score = triton_mask(problem, device), triton_score(problem, device)
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


def launch_flash(problem: Problem, device: str, hopper: Tiles = HOPPER) -> Launch:
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
        free=problem.mask == FULL,
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
    """Return whether keys after a row's own index are hidden, as far as the mask's names tell."""
    if mask.name == "and":
        return any(_hides_future(part) for part in mask.parts)
    return mask.name in {"causal", "sliding_window"}


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
        """Tile sizes and options of its launch."""
        chosen = super().launch(problem, device)
        if device == "cuda":
            chosen = replace(chosen, **_on_hopper(problem))
        return self._in_blocks(chosen)

    def gradient_launches(self, problem: Problem, device: str) -> tuple[Launch, Launch]:
        """Launches of dQ, and of dK and dV."""
        rows, keys = (launch_flash(problem, device, tiles) for tiles in (BY_ROWS, BY_KEYS))
        if problem.dcaptured:
            # A table is read by score, slope and place alike: one more tile of it for each and for
            # each stage is more than there is of shared memory.
            rows = replace(rows, stages=1)
        return self._in_blocks(rows), self._in_blocks(keys)

    def _in_blocks(self, chosen: Launch) -> Launch:
        if self._blocks is None:
            return chosen
        return replace(chosen, block_query=self._blocks[0], block_kv=self._blocks[1])

    def visited(self, problem: Problem, device: torch.device) -> dict[str, Any]:
        """The tiles of the block mask; all of them where nothing is hidden."""
        if self._dense or problem.mask == FULL:
            return {}
        chosen = self.launch(problem, device.type)
        return {"tiles": visited_tiles(problem, chosen.block_query, chosen.block_kv, str(device))}

    def launches(self, problem: Problem, device: str) -> Mapping[str, Subject]:
        """With tiles half as long or half as wide, in the interpreter twice as large, and dense."""
        own = self.launch(problem, device)
        rows, keys = own.block_query, own.block_kv
        # Either axis once: what depends on tiles shows, and each launch costs a run.
        sizes = [(rows // 2, keys), (rows, keys // 2)]
        if device == "cpu":  # on a GPU larger ones do not fit
            sizes.append((2 * rows, 2 * keys))
        least = _FP8_SMALLEST if problem.formats.scaled else _SMALLEST
        other: dict[str, Subject] = {
            f"{of[0]}×{of[1]}": type(self)(of)
            for of in sizes
            if _SMALLEST <= of[0] <= _LARGEST and least <= of[1] <= _LARGEST
        }
        if problem.mask != FULL:
            other["dense"] = type(self)(self._blocks, dense=True)
        return other

    def _gradients_visit(self, problem: Problem, device: torch.device) -> dict[str, Any]:
        """The tiles of dQ and of dK and dV, as ``visited``."""
        if self._dense or problem.mask == FULL:
            return {}
        rows, keys = self.gradient_launches(problem, device.type)
        return {
            name: visited_tiles(
                problem, of.block_query, of.block_kv, str(device), by_keys=name == "by_keys"
            )
            for name, of in (("tiles", rows), ("by_keys", keys))
        }

    def prepare(self, inputs: Inputs) -> Call:
        """The launches of the forward and, where it is asked for, of the backward."""
        forward = super().prepare(inputs)
        if inputs.dout is None:
            return forward
        backward = self._prepared_backward(inputs)

        def call() -> Outputs:
            outputs = forward()
            dq, dk, dv, dsink, dcaptured = backward(outputs)
            return replace(outputs, dq=dq, dk=dk, dv=dv, dsink=dsink, dcaptured=dcaptured)

        return call

    def _prepared_backward(self, inputs: Inputs) -> Callable[[Outputs], Gradients]:
        """Return the backward: the forward's results → gradients, in the order of Outputs."""
        device, problem = inputs.device.type, inputs.problem
        rows, keys = self.gradient_launches(problem, device)
        # fmt: off
        launched = partial(
            self.backward_launcher(), scale=problem.scale,
            mask=triton_mask(problem, device), score=triton_score(problem, device),
            slope=triton_slope(problem, device),
            captured=captured_reads(problem, device) if problem.dcaptured else None,
            launch=rows, launch_by_keys=keys, sink=inputs.sink, atomic=self.atomic,
            **self._gradients_visit(problem, inputs.device),
        )
        # fmt: on
        tensors = inputs.q, inputs.k, inputs.v

        def backward(forward: Outputs) -> Gradients:
            return launched(*tensors, forward.out, forward.lse, inputs.dout, inputs.dlse)

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
        """Return whether there are gradients: the forward is ``triton-flash2``'s."""
        return super().concerns(problem) and problem.backward


class Flash2TransposedValues(Flash2):
    """The same with V stored transposed, as an fp8 tensor core on Hopper wants its operands.

    V ``(batch, kv_heads, value_dim, kv)`` is contiguous, and written before the call that is timed.
    """

    name = "triton-flash2-vt"
    summary = "triton-flash2 in fp8, V stored transposed"

    def concerns(self, problem: Problem) -> bool:
        """Return whether there is fp8: 16-bit operands are multiplied in either order alike."""
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
        """Return whether there is fp8: other products are added up in fp32."""
        return super().concerns(problem) and problem.formats.scaled


class Flash3(Flash2):
    """FlashAttention-3 for Hopper: in 16 bits any mask and score mod, in e4m3 any mask, forward.

    Its backward takes masks that go by distance alone, no score mod, and head dims up to 128; other
    gradients are ``triton-flash2``'s.

    In e4m3 its sums are the tensor core's own, and each call copies V by columns. What hides a
    value that is not finite is done again by ``triton-flash2``'s kernels, whose bits are others:
    they are no promise there.

    Args:
        shape: How it is launched, where not as it chooses itself.
    """

    name = "triton-flash3"
    summary = "our FlashAttention-3 for Hopper GPUs in Gluon, any mask and score mod"
    hopper = HOPPER
    promises = frozenset(PROMISES) - {"nan"}
    sinks = False
    max_num_imprecise_acc = None  # of both kernels

    def __init__(self, shape: Shape | None = None) -> None:
        super().__init__()
        self._shape = shape

    def absent(self, device: str) -> str | None:
        """It is written for one generation of GPUs, in instructions that no other has."""
        from attncheck.kernels.compilation import on_hopper

        missing = super().absent(device)
        if missing is None and not on_hopper(torch.device(device)):
            return "it needs a Hopper GPU (compute capability 9.0)"
        return missing

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """Takes what its launcher does not hand on to ``triton-flash2``'s kernel, forward."""
        return super().unsupported(problem, device) or self._refusal(problem, backward=False)

    def _refusal(self, problem: Problem, *, backward: bool) -> str | None:
        from attncheck.kernels.flash3_forward import unsupported_by_kernel

        return unsupported_by_kernel(
            problem.formats.storage.torch_dtype,
            (problem.head_dim, problem.value_dim),
            band_of(problem.mask, problem.dimensions),
            others=False,
            score=problem.score != NONE,
            backward=backward,
        )

    def tiling(self, problem: Problem, device: str) -> Tiling | None:
        """Its own tiles, of a list in order, else from the last key to the first; of a window none.

        There the tiles at both ends come first, in an order that no Tiling has.
        """
        shape, band = self._chosen(problem, device), _band(problem)
        if band is not None and band.least is not None:
            return None
        return Tiling(block_query=shape.rows, block_kv=shape.keys, reverse=band is not None)

    def _chosen(self, problem: Problem, device: str) -> Shape:
        from attncheck.kernels.flash3_forward import shape_for
        from attncheck.mods.to_triton import is_long

        if self._shape:
            return self._shape
        modified = problem.score != NONE
        listed = band_of(problem.mask, problem.dimensions) is None
        long = False
        # A mod that cannot be traced is refused where it is called.
        with suppress(TraceError):
            long = listed and is_long(mask_expression(problem, device))
            long = long or (modified and is_long(score_expression(problem, device)))
        dtype = problem.formats.storage.torch_dtype
        return shape_for(problem.head_dim, dtype, modified=modified, long=long)

    def launches(self, problem: Problem, device: str) -> Mapping[str, Subject]:
        """With half the keys in a tile, and by the other order of waits and turns."""
        own = self._chosen(problem, device)
        return {
            f"{own.keys // 2} keys": type(self)(replace(own, keys=own.keys // 2)),
            "other waits": type(self)(
                replace(own, overlap=not own.overlap, pingpong=not own.pingpong)
            ),
        }

    def visited(self, problem: Problem, device: torch.device) -> dict[str, Any]:
        """The band of its mask, or else the tiles of the block mask; and its launch."""
        shape = self._chosen(problem, device.type)
        band = band_of(problem.mask, problem.dimensions)
        tiles = None
        if band is None:
            tiles = visited_tiles(problem, shape.rows, shape.keys, str(device))
        return {"band": band, "tiles": tiles, "shape": shape}

    def forward(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """``kernels.flash3_forward.flash3_forward``."""
        from attncheck.kernels import flash3_forward

        return flash3_forward.flash3_forward

    def _gradients_visit(self, problem: Problem, device: torch.device) -> dict[str, Any]:
        """The band of its mask; the tiles of the other kernel's where that does the backward."""
        if self._refusal(problem, backward=True):
            return super()._gradients_visit(problem, device)
        return {"band": band_of(problem.mask, problem.dimensions)}

    def backward_launcher(self) -> Callable[..., Gradients]:
        """``kernels.flash3_backward.flash3_backward``."""
        from attncheck.kernels import flash3_backward

        return flash3_backward.flash3_backward


def _band(problem: Problem) -> Band | None:
    """The band of a Problem's mask, as far as it hides anything there; None of another mask."""
    band = band_of(problem.mask, problem.dimensions)
    return None if band is None else band.within(problem.query, problem.kv)


def _on_hopper(problem: Problem) -> dict[str, Any]:
    """Options of a forward in 16 bits without a score mod on Hopper, as timed on an H200.

    At head dims above 64 it has a third stage, in at most 131,072 bytes of shared memory: 5.6 to
    4.6 ms without a mask. Up to 64 it has a limit of registers, by which two programs share a
    multiprocessor under masks too: of those tried a neighborhood alone spills by it, 8 bytes a
    thread (Triton 3.6).
    """
    import torch

    widest = max(problem.head_dim, problem.value_dim)
    if problem.dtype not in {"fp16", "bf16"} or problem.score != NONE or widest > 128:
        return {}
    # Without a GPU kernels are compiled alone, for Hopper; others may not have the memory.
    if torch.version.hip or (
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in _LARGE
    ):
        return {}
    return {"stages": 3} if widest > 64 else {"registers": 128}
