"""attncheck's Triton kernels for packed documents, for keys in pages, and for few query rows."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from attncheck.core.mod_spec import FULL, NONE
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Descale
from attncheck.mods.masks import band_of
from attncheck.subjects.conventions.function_gradients import Leaf
from attncheck.subjects.conventions.layouts import pack, packed_layout
from attncheck.subjects.conventions.window_masks import band_window
from attncheck.subjects.kernel_mods import (
    triton_mask,
    triton_score,
    triton_slope,
)
from attncheck.subjects.triton_flash import (
    BY_KEYS,
    BY_ROWS,
    Flash,
    Flash2,
    launch_flash,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attncheck.core.declared_arithmetic import Arithmetic
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Problem
    from attncheck.kernels.launch import Launch
    from attncheck.kernels.varlen_forward import Causal
    from attncheck.subjects.capabilities.subject import Call, Subject, Tiling
    from attncheck.subjects.conventions.layouts import Layout, PackedProblem

    Tensors = tuple[torch.Tensor, ...]

_MOST_HEADS = 65_535
_CAUSAL = (-1, 0)  # the causal mask as a window


class Varlen(Flash):
    """FlashAttention-2 of packed documents, without padding.

    Sequences of a batch are documents, shorter ones with ``padding``, and ``document`` and
    ``documents`` are documents within each sequence. The rest of such a mask is expressed by the
    kernel's causal flag if possible, aligned bottom-right or top-left, else by a traced mask. One
    call computes both passes of a Problem with a backward.
    """

    kernel = "attncheck.kernels.varlen_forward"
    backward_kernel = "attncheck.kernels.varlen_backward"
    name = "triton-varlen"
    summary = "our FlashAttention-2 of packed documents in Triton"
    sinks = True
    backward = True

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """Return why it is refused: a mask of other kinds, or cut twice, or a limit of the grid."""
        packed = pack(problem)
        if packed is None:
            return f"the mask {problem.mask} names documents or padding more than once"
        if not packed.cut and band_of(packed.rest, problem.dimensions) is None:
            return f"the mask {problem.mask} is neither documents nor padding nor a band"
        if device == "cuda" and problem.heads > _MOST_HEADS:
            return f"heads = {problem.heads}: at most {_MOST_HEADS} on a GPU"
        # Documents are an axis of the grid in place of the batch, and the mask was checked above.
        return super().unsupported(problem.replace(batch=1, mask=FULL), device)

    def tiling(self, problem: Problem, device: str) -> Tiling | None:
        """Return its tiling; None if tiles begin elsewhere than in a whole sequence.

        A document's first tile of keys begins at its first key.
        """
        tiling = super().tiling(problem, device)
        packed = _packed(problem)
        places = zip(packed.places(), packed.lengths(), strict=True)
        # A document without rows or keys has no tile.
        starts = {key for (_, _, key), lengths in places if min(lengths) > 0}
        unaligned = tiling is not None and any(start % tiling.block_kv for start in starts)
        # Tiles of the ideal kernel begin at multiples of their size in every sequence.
        return None if unaligned else tiling

    def launch(self, problem: Problem, device: str) -> Launch:
        """Return a launch for the Problem's lengths, independent of lengths of documents."""
        return super().launch(_plain(problem), device)

    def gradient_launches(self, problem: Problem, device: str) -> tuple[Launch, Launch]:
        """Return the launches of dQ, and of dK and dV."""
        rows, keys = (launch_flash(_plain(problem), device, tiles) for tiles in (BY_ROWS, BY_KEYS))
        return rows, keys

    def prepare(self, inputs: Inputs) -> Call:
        """Pack the documents, trace the mods, and bind the launches."""
        problem, device = inputs.problem, inputs.device.type
        from attncheck.kernels.compilation import prepare_triton

        prepare_triton(device)
        # The following lines import kernels, so Triton must be ready.
        layout, launch = packed_layout(problem), self.launch(problem, device)
        tensors = layout.queries(inputs.q), layout.keys(inputs.k), layout.keys(inputs.v)
        common = {"scale": problem.scale, "sink": inputs.sink}
        common |= _documents(inputs) | _mods(problem, device)
        forward = partial(
            self.forward(),
            *tensors,
            launch=launch,
            programs=_programs(inputs, launch),
            descale=_descale(inputs),
            out_dtype=problem.formats.output.torch_dtype,
            **common,
        )
        backward = self._backward(inputs, layout, tensors, common)

        def call() -> Outputs:
            out, lse = forward()
            gradients = {} if backward is None else backward(out, lse)
            out = layout.out[tuple(out.shape)](out)
            return Outputs(out, layout.lse[tuple(lse.shape)](lse), **gradients)

        return call

    def _backward(
        self, inputs: Inputs, layout: Layout, tensors: Tensors, common: dict[str, Any]
    ) -> Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]] | None:
        """Return a function from packed out and LSE to gradients; None without gradients."""
        if inputs.dout is None:
            return None
        from attncheck.kernels.varlen_backward import key_program_list

        problem, device = inputs.problem, inputs.device.type
        rows, keys = self.gradient_launches(problem, device)
        key_counts = [count for _, count in _packed(problem).lengths()]
        backward = partial(
            self.backward_launcher(),
            launch=rows,
            launch_by_keys=keys,
            programs=_programs(inputs, rows),
            key_programs=key_program_list(key_counts, keys.block_kv).to(inputs.device),
            slope=triton_slope(problem, device),
            **common,
        )
        changes = {"q": layout.queries, "k": layout.keys, "v": layout.keys}
        leaves = [Leaf.of(f"d{name}", getattr(inputs, name), how) for name, how in changes.items()]
        dout = layout.queries(inputs.dout)
        dlse = None if inputs.dlse is None else inputs.dlse.transpose(0, 1).flatten(1)

        def call(out: torch.Tensor, lse: torch.Tensor) -> dict[str, torch.Tensor]:
            *gradients, dsink = backward(*tensors, out, lse, dout, dlse)
            by_name = {leaf.name: leaf.back(g) for leaf, g in zip(leaves, gradients, strict=True)}
            return by_name if dsink is None else by_name | {"dsink": dsink}

        return call


def _packed(problem: Problem) -> PackedProblem:
    packed = pack(problem)
    assert packed is not None, "unsupported has refused it"
    return packed


def _plain(problem: Problem) -> Problem:
    """Return a Problem of one sequence with the same lengths, without a mask or score mod."""
    return problem.replace(batch=1, mask=FULL, score=NONE, dcaptured=False)


def _documents(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return the starts of the documents, and their first indices for mods."""
    packed = _packed(inputs.problem)
    starts = {f"cu_seqlens_{name}": packed.starts(side) for side, name in enumerate("qk")}
    return {
        name: torch.tensor(numbers, dtype=torch.int32, device=inputs.device)
        for name, numbers in {**starts, "places": packed.places()}.items()
    }


def _programs(inputs: Inputs, launch: Launch) -> torch.Tensor:
    from attncheck.kernels.varlen_forward import program_list

    rows = [rows for rows, _ in _packed(inputs.problem).lengths()]
    return program_list(rows, launch.block_query).to(inputs.device)


def _descale(inputs: Inputs) -> Descale | None:
    """Return the descales of documents, which are those of their sequences."""
    if inputs.descale is None:
        return None
    b = [b for b, _, _ in _packed(inputs.problem).places()]
    return Descale(**{name: getattr(inputs.descale, name)[b] for name in "qkv"})


def _mods(problem: Problem, device: str) -> dict[str, Any]:
    """Return the causal flag or the mask within documents, and the score mod."""
    packed = _packed(problem)
    causal = _causal(problem, packed)
    mask = None
    # The flag is cheaper than a mask.
    if packed.rest != FULL and not causal:
        mask = triton_mask(problem.replace(mask=packed.rest), device)
    return {"causal": causal, "mask": mask, "score": triton_score(problem, device)}


def _causal(problem: Problem, packed: PackedProblem) -> Causal:
    """Return the causal flag's alignment if it equals the mask within documents, else ""."""
    band = band_of(packed.aligned or packed.rest, problem.dimensions)
    if band is None:
        return ""
    window = partial(
        band_window,
        band,
        packed.lengths(),
        leads=packed.leads(),
        aligned=packed.aligned is not None,
    )
    if window(bottom_right=True) == _CAUSAL:
        return "bottom_right"
    return "top_left" if window(bottom_right=False) == _CAUSAL else ""


class Paged(Flash2):
    """``triton-flash2`` with a page table: prefill and decoding, any mask and score mod.

    Its tiles of keys are logical: a tile may span several pages, and a page several tiles. It
    gets kv as an argument; the mask hides what lies behind a sequence's end.
    """

    name = "triton-paged"
    summary = "triton-flash2 on keys and values in pages, behind a page table"
    backward = False

    def concerns(self, problem: Problem) -> bool:
        """Return whether it is attention with pages."""
        return problem.paging is not None and super().concerns(problem.replace(paging=None))


MOST_ROWS = 128  # most query rows times heads of a group, which one program processes

_SMALLEST_BLOCK = 16  # least rows of a tensor core's product
# Blocks up to this many rows and head dims need only this many warps, except in fp32, whose
# products take many registers.
_SMALL_BLOCK, _SMALL_DIM, _SMALL_WARPS = 32, 128, 4
# For such a block in 16 bits, by (rows, head dim): keys, warps and stages that use an H200's memory
# bandwidth best, and the number of splits that are added up before they are merged by LSE.
_LONG_TILES = {
    (16, 64): (64, 2, 3, 1),
    (16, 128): (64, 4, 3, 1),
    (32, 64): (64, 2, 3, 4),
    (32, 128): (64, 4, 3, 4),
}
_SHORTEST_SPLIT = 128  # keys, on a GPU; n times as many keys are cut into √n splits
_MOST_SPLITS_INTERPRETED = 3
_OTHER_SPLITS = (1, 2, 3, 7)  # numbers of splits in ``launches``


class Decode(Flash):
    """Split-KV decoding; interpreted if there is no GPU.

    It does not promise ``group``: a tile has all rows that read one kv head, so its size and the
    order of sums depend on how many heads share the kv head.

    Args:
        splits: The number of parts into which it cuts the keys; None: its own choice.
    """

    kernel = "attncheck.kernels.decode_forward"
    name = "triton-decode"
    summary = "our decode kernel in Triton: up to 128 rows a kv head, keys in splits merged by LSE"
    promises = frozenset({"repeat", "batch", "layout", "hidden", "nan"})

    def __init__(self, splits: int | None = None) -> None:
        self._splits = splits

    def concerns(self, problem: Problem) -> bool:
        """Return whether it is attention, paged or not."""
        return super().concerns(problem.replace(paging=None))

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """Return why it is refused: over ``MOST_ROWS`` rows per kv head, or a forward's limits."""
        rows = problem.query * problem.group
        if rows > MOST_ROWS:
            return f"query · group = {rows}: it is for decoding, at most {MOST_ROWS}"
        # The grid has a program for each kv head.
        return super().unsupported(problem.replace(heads=problem.kv_heads), device)

    def launch(self, problem: Problem, device: str) -> Launch:
        """Return a launch with the smallest block that holds the rows, and ``splits_of`` splits."""
        launch = super().launch(problem, device)
        rows = min(problem.query * problem.group, MOST_ROWS)
        block = max(_SMALLEST_BLOCK, 1 << (rows - 1).bit_length())
        if device != "cpu":  # on a GPU larger blocks would spill
            block = min(block, launch.block_query)
        narrow = block <= _SMALL_BLOCK and problem.dtype != "fp32"
        widest = max(problem.head_dim, problem.value_dim)
        narrow = narrow and widest <= _SMALL_DIM
        keys, warps, stages, together = launch.block_kv, launch.warps, launch.stages, 1
        if narrow and device != "cpu" and problem.dtype in {"fp16", "bf16"}:
            keys, warps, stages, together = _LONG_TILES[block, 64 if widest <= 64 else 128]
        elif narrow:
            warps = min(warps, _SMALL_WARPS)
        if problem.paging is not None:
            # Page numbers are loaded before their keys; Triton gives each load half of the stages.
            stages = 2 * stages - 1
        splits = self._splits or splits_of(problem.kv, keys, together, device)
        return replace(
            launch,
            block_query=block,
            block_kv=keys,
            warps=warps,
            stages=stages,
            splits=splits,
            together=together,
        )

    def tiling(self, problem: Problem, device: str) -> Tiling | None:
        """Return its tile sizes; None if it merges parts, each with its own maximum.

        The ideal kernel, which follows tilings, has no such parts.
        """
        return super().tiling(problem, device) if self._parts(problem, device) == 1 else None

    def launches(self, problem: Problem, device: str) -> Mapping[str, Subject]:
        """Return it with 1, 2, 3 and 7 splits, and with one split more than blocks of keys."""
        launch = self.launch(problem, device)
        counts = dict.fromkeys((*_OTHER_SPLITS, _blocks(problem.kv, launch.block_kv) + 1))
        return {
            f"{count} split{'s' * (count > 1)}": type(self)(count)
            for count in counts
            if count != launch.splits
        }

    def arithmetic(self, problem: Problem, device: str) -> Arithmetic:
        """Return the other forwards' arithmetic with its splits; a sink counts as one more."""
        assumed = super().arithmetic(problem, device)
        return replace(assumed, splits=self._parts(problem, device))

    def _parts(self, problem: Problem, device: str) -> int:
        return self.launch(problem, device).splits + problem.sink

    def visited(self, problem: Problem, device: torch.device) -> dict[str, Any]:
        """Return how many keys every row sees, if known from a mask that is a band."""
        del device
        band = band_of(problem.mask, problem.dimensions)
        if band is None or band.least is not None:
            return {}
        return {"whole": problem.kv if band.most is None else max(0, band.most + 1)}


def splits_of(kv: int, block_kv: int, together: int, device: str) -> int:
    """Return the number of splits of ``kv`` keys, independent of the batch, as bits must be.

    On a GPU it is ``together`` times √(kv / (``together`` · 128)), the number of parts that are
    merged by LSE. Many parts take time to write and merge if there are many sequences, and few
    splits leave a single sequence to few multiprocessors. In the interpreter, where a split costs
    as much as a block, it is one split per block, at most 3, which is enough to test merging.
    """
    if device == "cpu":
        return min(_blocks(kv, block_kv), _MOST_SPLITS_INTERPRETED)
    return max(1, together * math.isqrt(kv // (together * _SHORTEST_SPLIT)))


def _blocks(kv: int, block_kv: int) -> int:
    return -(-kv // block_kv)
