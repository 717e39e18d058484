"""attncheck's FlashAttention-1, -2 and -3 in Triton and Gluon as subjects, with variants."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from attncheck.core.declared_arithmetic import FP32
from attncheck.core.errors import TraceError
from attncheck.core.mod_spec import FULL, NONE
from attncheck.core.outputs import Outputs
from attncheck.inputs.problem import PROMISES
from attncheck.mods.masks import band_of
from attncheck.subjects.capabilities.subject import Call, Subject, Tiling, with_full_tanh
from attncheck.subjects.conventions.call_tensors import paged_inputs
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
_FP8_CAPABILITY = (8, 9)  # Ada; Triton compiles e4m3 from this on


Tiles = dict[str, dict[int, tuple[int, int, int, int]]]
_16_BITS, _FP8 = ("fp16", "bf16"), ("e4m3", "e5m2")

# (block_query, block_kv, warps, stages) for head dims up to 64, 128 and 256 on Hopper: tiles whose
# registers hardly spill (at most 80 bytes a thread in benchmarks/spills.py on Triton 3.6). IEEE
# products in fp32 hold their operands in registers, so larger tiles would spill kilobytes.
HOPPER: Tiles = {
    "fp32": {64: (64, 32, 8, 2), 128: (32, 32, 8, 2), 256: (16, 32, 8, 1)},
    "tf32": {64: (64, 64, 4, 2), 128: (64, 32, 8, 2), 256: (32, 32, 8, 1)},
    **{key: {64: (128, 64, 8, 3), 128: (128, 64, 8, 2), 256: (64, 64, 8, 2)} for key in _16_BITS},
    **{key: {64: (128, 64, 8, 3), 128: (128, 32, 8, 2), 256: (64, 32, 8, 2)} for key in _FP8},
}

# Tiles of the backward, for dQ by rows, and for dK and dV by keys, whose programs hold two sums.
BY_ROWS: Tiles = {
    "fp32": {64: (64, 32, 8, 2), 128: (32, 32, 8, 2), 256: (16, 32, 8, 1)},
    "tf32": {64: (64, 64, 8, 2), 128: (64, 32, 8, 2), 256: (64, 32, 8, 1)},
    **{key: {64: (128, 64, 8, 3), 128: (128, 64, 8, 2), 256: (64, 64, 8, 2)} for key in _16_BITS},
}
BY_KEYS: Tiles = {
    "fp32": {64: (32, 32, 8, 2), 128: (16, 32, 8, 1), 256: (16, 32, 8, 1)},
    "tf32": {64: (32, 64, 8, 2), 128: (32, 32, 8, 2), 256: (16, 32, 8, 1)},
    **{key: {64: (64, 128, 8, 2), 128: (32, 128, 8, 2), 256: (16, 64, 8, 2)} for key in _16_BITS},
}


class Flash(Subject):
    """A FlashAttention forward for any mask and score mod; interpreted if there is no GPU."""

    triton = True
    kernel: str  # the forward's module, whose name is also its launcher's
    backward_kernel: str  # likewise of the backward, in kernels that have one
    hopper: Tiles = HOPPER
    promises = frozenset(PROMISES)
    promises_gradients = True
    sinks = True
    max_num_imprecise_acc: int | None = 0  # as in ``kernels.launch.Launch``

    def absent(self, device: str) -> str | None:
        """Return a reason if triton, which has wheels for Linux only, is not installed."""
        del device
        return None if find_spec("triton") else "triton is not installed"

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """Return why it exceeds CUDA's limit of the grid's second axis, or needs a newer GPU."""
        together = problem.batch * problem.heads
        if device == "cuda" and together > _MOST_TOGETHER:
            return f"batch · heads = {together}: at most {_MOST_TOGETHER} on a GPU"
        if device == "cuda" and problem.formats.scaled:
            capability = torch.cuda.get_device_capability()
            if capability < _FP8_CAPABILITY:
                return f"fp8 needs a GPU of capability 8.9 or more, and this one has {capability}"
        return None

    def tiling(self, problem: Problem, device: str) -> Tiling | None:
        """Return the tile sizes of its launch on ``device``."""
        launch = self.launch(problem, device)
        return Tiling(block_query=launch.block_query, block_kv=launch.block_kv)

    def arithmetic(self, problem: Problem, device: str) -> Arithmetic:
        """Return its arithmetic: tf32 operands are truncated by tensor cores and the interpreter.

        Sums in fp8 depend on ``max_num_imprecise_acc``; the interpreter sums in fp32. For tanh see
        ``triton_ulp``.
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
        """Return tile sizes and options of its launch."""
        launch = launch_flash(problem, device, self.hopper)
        return replace(launch, max_num_imprecise_acc=self.max_num_imprecise_acc)

    def forward(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """Return the kernel's launcher; Triton is only imported by this call."""
        return _import_launcher(self.kernel)

    def backward_launcher(self) -> Callable[..., Any]:
        """Return the launcher of the kernel's backward."""
        return _import_launcher(self.backward_kernel)

    def stored(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, KernelPages | None]:
        """Return k and v in the memory layout that the kernel reads, before the timed call.

        With paging they are caches ``(pages, kv_heads, size, dim)``, with their page table.
        """
        if inputs.problem.paging is None:
            return inputs.k, inputs.v, None
        from attncheck.kernels.launch import KernelPages

        cache = paged_inputs(inputs)
        return cache.k, cache.v, KernelPages(cache.table.table, cache.table.size)

    def visited(self, problem: Problem, device: torch.device) -> dict[str, Any]:
        """Return the launcher's further keywords: in most kernels, lists of the tiles to visit."""
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
        launch = self.launch(problem, device)
        visited = self.visited(problem, inputs.device)

        def call() -> Outputs:
            out, lse = forward(
                inputs.q,
                k,
                v,
                scale=problem.scale,
                mask=mask,
                score=score,
                launch=launch,
                descale=inputs.descale,
                out_dtype=problem.formats.output.torch_dtype,
                sink=inputs.sink,
                **visited,
                **paged,
            )
            return Outputs(out, lse)

        return call


def _import_launcher(module: str) -> Callable[..., Any]:
    launcher: Callable[..., Any] = getattr(import_module(module), module.rpartition(".")[2])
    return launcher


def launch_flash(problem: Problem, device: str, hopper: Tiles = HOPPER) -> Launch:
    """Return a launch with tiles that do not spill on Hopper, or large ones in the interpreter.

    The interpreter's cost is per program and step, almost independent of tile sizes, so tiles are
    large; but every length above 64 has several, so that the recurrence is exercised.
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
    sizes = tiles[min(dim for dim in tiles if dim >= widest)]
    return dict(zip(("block_query", "block_kv", "warps", "stages"), sizes, strict=True))


def _hides_future(mask: Spec) -> bool:
    """Return whether the mask's name implies that it hides keys after a row's own index."""
    if mask.name == "and":
        return any(_hides_future(part) for part in mask.parts)
    return mask.name in {"causal", "sliding_window"}


# FlashAttention-1 holds O and P·V at once, so that some of FlashAttention-2's tiles would spill.
_FLASH1_TILES: Tiles = {
    **HOPPER,
    **{key: {**HOPPER["bf16"], 256: (32, 64, 8, 1)} for key in _16_BITS},
    **{key: {**HOPPER["e4m3"], 128: (64, 64, 8, 1), 256: (32, 64, 8, 1)} for key in _FP8},
}


class Flash1(Flash):
    """FlashAttention-1 forward: key blocks in the outer loop, with O, l and m in memory."""

    kernel = "attncheck.kernels.flash1_forward"
    name = "triton-flash1"
    summary = "our FlashAttention-1 forward in Triton (key blocks outermost), any mask and score"
    hopper = _FLASH1_TILES

    def tiling(self, problem: Problem, device: str) -> Tiling:
        """Return its tile sizes, with FlashAttention-1's recurrence."""
        launch = self.launch(problem, device)
        return Tiling(block_query=launch.block_query, block_kv=launch.block_kv, recurrence="flash1")


_SMALLEST, _LARGEST = 16, 128  # rows or keys of a tile in ``launches``
_FP8_SMALLEST = 32  # keys of a tile: tensor cores contract 32 fp8 numbers at a time
# Tiles of 64 rows do not get 8 warps: two warps would share a row's keys, and Triton would choose
# another layout of scores in the careful launch, which has one more product. Its row sums then
# differ by an ulp (in tf32, on an H200).
_TILES: Tiles = {
    **HOPPER,
    "tf32": {**HOPPER["tf32"], 128: (64, 32, 4, 2)},
    **{key: {**HOPPER["bf16"], 256: (128, 32, 8, 2)} for key in _16_BITS},
}
_LARGE = {9, 10}  # major compute capabilities with 227 KiB of shared memory for a block


class Flash2(Flash):
    """FlashAttention-2; in fp8 with fp32 sums and V in the Problem's own layout.

    It visits the tiles that the mask's block mask lists. One call computes both passes of a
    Problem with a backward.

    Args:
        blocks: Rows and keys of a tile; None: its own choice.
        dense: Whether it visits and masks all tiles instead.

    Attributes:
        atomic: Whether dQ is summed by atomic additions, in no fixed order.
    """

    kernel = "attncheck.kernels.flash2_forward"
    backward_kernel = "attncheck.kernels.flash2_backward"
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
        """Return tile sizes and options of its launch."""
        launch = super().launch(problem, device)
        if device == "cuda":
            launch = replace(launch, **_on_hopper(problem))
        return self._in_blocks(launch)

    def gradient_launches(self, problem: Problem, device: str) -> tuple[Launch, Launch]:
        """Return the launches of dQ, and of dK and dV."""
        rows, keys = (launch_flash(problem, device, tiles) for tiles in (BY_ROWS, BY_KEYS))
        if problem.dcaptured:
            # Score, slope and place each read a tile of a table, in every stage: with more stages
            # these tiles would exceed shared memory.
            rows = replace(rows, stages=1)
        return self._in_blocks(rows), self._in_blocks(keys)

    def _in_blocks(self, launch: Launch) -> Launch:
        if self._blocks is None:
            return launch
        return replace(launch, block_query=self._blocks[0], block_kv=self._blocks[1])

    def visited(self, problem: Problem, device: torch.device) -> dict[str, Any]:
        """Return the block mask's tiles; empty if all tiles are visited."""
        if self._dense or problem.mask == FULL:
            return {}
        launch = self.launch(problem, device.type)
        return {"tiles": visited_tiles(problem, launch.block_query, launch.block_kv, str(device))}

    def launches(self, problem: Problem, device: str) -> Mapping[str, Subject]:
        """Return it with half as many rows or keys in a tile, larger tiles on a CPU, and dense."""
        launch = self.launch(problem, device)
        rows, keys = launch.block_query, launch.block_kv
        # Each axis is halved once, which shows what depends on tiles: every launch costs a run.
        sizes = [(rows // 2, keys), (rows, keys // 2)]
        if device == "cpu":  # larger tiles do not fit a GPU
            sizes.append((2 * rows, 2 * keys))
        least = _FP8_SMALLEST if problem.formats.scaled else _SMALLEST
        others: dict[str, Subject] = {
            f"{size[0]}×{size[1]}": type(self)(size)
            for size in sizes
            if _SMALLEST <= size[0] <= _LARGEST and least <= size[1] <= _LARGEST
        }
        if problem.mask != FULL:
            others["dense"] = type(self)(self._blocks, dense=True)
        return others

    def _gradients_visit(self, problem: Problem, device: torch.device) -> dict[str, Any]:
        """Return the tiles that the launches of dQ and of dK and dV visit."""
        if self._dense or problem.mask == FULL:
            return {}
        rows, keys = self.gradient_launches(problem, device.type)
        return {
            name: visited_tiles(
                problem, launch.block_query, launch.block_kv, str(device), by_keys=name == "by_keys"
            )
            for name, launch in (("tiles", rows), ("by_keys", keys))
        }

    def prepare(self, inputs: Inputs) -> Call:
        """Return a call of the forward and, if the Problem has gradients, of the backward."""
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
        """Return a function from the forward's outputs to gradients, in the order of Outputs."""
        device, problem = inputs.device.type, inputs.problem
        rows, keys = self.gradient_launches(problem, device)
        # fmt: off
        launcher = partial(
            self.backward_launcher(), scale=problem.scale,
            mask=triton_mask(problem, device), score=triton_score(problem, device),
            slope=triton_slope(problem, device),
            captured=captured_reads(problem, device) if problem.dcaptured else None,
            launch=rows, launch_by_keys=keys, sink=inputs.sink, atomic=self.atomic,
            **self._gradients_visit(problem, inputs.device),
        )
        # fmt: on
        tensors = inputs.q, inputs.k, inputs.v
        return lambda forward: launcher(
            *tensors, forward.out, forward.lse, inputs.dout, inputs.dlse
        )


class Flash2Atomic(Flash2):
    """``Flash2`` with dQ summed by atomic additions of the programs of dK and dV.

    FlashAttention's backward does the same unless it is to be deterministic. Bits may differ
    between runs, and a non-finite hidden key affects dQ, so it promises nothing.
    """

    name = "triton-flash2-atomic"
    summary = "triton-flash2 with dQ added up by atomic additions"
    promises = frozenset()
    atomic = True

    def concerns(self, problem: Problem) -> bool:
        """Return whether there are gradients, because the forward equals ``triton-flash2``'s."""
        return super().concerns(problem) and problem.backward


class Flash2TransposedValues(Flash2):
    """``Flash2`` with V stored transposed, as Hopper's fp8 tensor cores require.

    V ``(batch, kv_heads, value_dim, kv)`` is contiguous, and is written before the timed call.
    """

    name = "triton-flash2-vt"
    summary = "triton-flash2 in fp8, V stored transposed"

    def concerns(self, problem: Problem) -> bool:
        """Return whether inputs are fp8: 16-bit operands may be in either order."""
        return super().concerns(problem) and problem.formats.scaled

    def stored(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, KernelPages | None]:
        """Return k, and a view of the transposed copy of v."""
        return inputs.k, inputs.v.mT.contiguous().mT, None


class Flash2FastAccumulation(Flash2):
    """``Flash2`` with tensor cores' own accumulator of about 13 bits, Triton's default on Hopper.

    It must differ from ``triton-flash2`` on Hopper; elsewhere it is the same kernel.
    """

    name = "triton-flash2-fastacc"
    summary = "triton-flash2 in fp8, sums in the tensor core's own accumulator (13 bits on Hopper)"
    max_num_imprecise_acc = None

    def absent(self, device: str) -> str | None:
        """Return why it cannot run; the interpreter always sums in fp32."""
        if device == "cpu":
            return "the interpreter has no such accumulator: needs a CUDA GPU"
        return super().absent(device)

    def concerns(self, problem: Problem) -> bool:
        """Return whether inputs are fp8, because other products are summed in fp32."""
        return super().concerns(problem) and problem.formats.scaled


class Flash3(Flash2):
    """FlashAttention-3 for Hopper: in 16 bits any mask and score mod, in e4m3 any mask, forward.

    Its backward supports masks that depend on distance alone, without score mods, and head dims up
    to 128; other gradients are ``triton-flash2``'s.

    In e4m3 its sums are the tensor core's own, and each call copies V by columns. If a non-finite
    value is hidden, ``triton-flash2``'s kernels recompute the result; their bits differ, so
    ``nan`` is not promised.

    Args:
        shape: Its launch parameters; None: its own choice.
    """

    kernel = "attncheck.kernels.flash3_forward"
    backward_kernel = "attncheck.kernels.flash3_backward"
    name = "triton-flash3"
    summary = "our FlashAttention-3 for Hopper GPUs in Gluon, any mask and score mod"
    hopper = HOPPER
    promises = frozenset(PROMISES) - {"nan"}
    sinks = False
    max_num_imprecise_acc = None  # for both kernels

    def __init__(self, shape: Shape | None = None) -> None:
        super().__init__()
        self._shape = shape

    def absent(self, device: str) -> str | None:
        """Return why it cannot run; its instructions exist only on Hopper."""
        from attncheck.kernels.compilation import on_hopper

        missing = super().absent(device)
        if missing is None and not on_hopper(torch.device(device)):
            return "it needs a Hopper GPU (compute capability 9.0)"
        return missing

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """Return why its launcher would call ``triton-flash2``'s forward instead."""
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
        """Return its tiles, which it visits in order in a list, else from the last key on."""
        shape, band = self._chosen(problem, device), band_of(problem.mask, problem.dimensions)
        return Tiling(block_query=shape.rows, block_kv=shape.keys, reverse=band is not None)

    def _chosen(self, problem: Problem, device: str) -> Shape:
        from attncheck.kernels.flash3_forward import shape_for
        from attncheck.mods.to_triton import weight_of

        if self._shape:
            return self._shape
        score = mask = None
        # If a mod cannot be traced, ``prepare`` raises the error.
        with suppress(TraceError):
            if problem.score != NONE:
                score = weight_of(score_expression(problem, device))
            if band_of(problem.mask, problem.dimensions) is None:
                mask = weight_of(mask_expression(problem, device))
        return shape_for(problem.head_dim, problem.formats.storage.torch_dtype, score, mask)

    def launches(self, problem: Problem, device: str) -> Mapping[str, Subject]:
        """Return it with half the keys in a tile, and with other orders of waits and turns."""
        shape = self._chosen(problem, device)
        return {
            f"{shape.keys // 2} keys": type(self)(replace(shape, keys=shape.keys // 2)),
            "other waits": type(self)(
                replace(shape, overlap=not shape.overlap, pingpong=not shape.pingpong)
            ),
        }

    def visited(self, problem: Problem, device: torch.device) -> dict[str, Any]:
        """Return the mask's band, or else the block mask's tiles; and the shape of the launch."""
        shape = self._chosen(problem, device.type)
        band = band_of(problem.mask, problem.dimensions)
        tiles = None
        if band is None:
            own = shape.rows // shape.groups
            tiles = visited_tiles(problem, own, shape.keys, str(device), groups=shape.groups)
        return {"band": band, "tiles": tiles, "shape": shape}

    def _gradients_visit(self, problem: Problem, device: torch.device) -> dict[str, Any]:
        """Return the mask's band, or tiles if ``triton-flash2``'s kernel does the backward."""
        if self._refusal(problem, backward=True):
            return super()._gradients_visit(problem, device)
        return {"band": band_of(problem.mask, problem.dimensions)}


def _on_hopper(problem: Problem) -> dict[str, Any]:
    """Return options of a 16-bit forward without a score mod on Hopper, from timings on an H200.

    Head dims above 64 get a third stage, in at most 131,072 bytes of shared memory: 4.6 ms instead
    of 5.6 without a mask. Smaller ones get a limit of registers, so that two programs share a
    multiprocessor with masks too: of the masks tried only a neighborhood then spills, 8 bytes a
    thread (Triton 3.6).
    """
    widest = max(problem.head_dim, problem.value_dim)
    if problem.dtype not in {"fp16", "bf16"} or problem.score != NONE or widest > 128:
        return {}
    # Without a GPU, kernels are only compiled, for Hopper. Other GPUs may lack shared memory.
    if torch.version.hip or (
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in _LARGE
    ):
        return {}
    return {"stages": 3} if widest > 64 else {"registers": 128}
