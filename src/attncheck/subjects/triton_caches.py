"""Our Triton kernels of packed documents, of keys in pages, and of few query rows."""

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
from attncheck.subjects.conventions.call_tensors import paged_inputs
from attncheck.subjects.conventions.function_gradients import Leaf
from attncheck.subjects.conventions.layouts import pack, packed_layout
from attncheck.subjects.conventions.window_masks import band_window
from attncheck.subjects.kernel_mods import (
    triton_mask,
    triton_score,
    triton_slope,
)
from attncheck.subjects.triton_flash import BY_KEYS, BY_ROWS, Flash, Flash2, launch_flash

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attncheck.core.declared_arithmetic import Arithmetic
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Problem
    from attncheck.kernels.launch import KernelPages, Launch
    from attncheck.kernels.varlen_forward import Causal
    from attncheck.subjects.capabilities.subject import Call, Subject, Tiling
    from attncheck.subjects.conventions.layouts import Layout, PackedProblem

    Tensors = tuple[torch.Tensor, ...]
    Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]

_MOST_HEADS = 65_535
_CAUSAL = (-1, 0)


class Varlen(Flash):
    """FlashAttention-2 of documents one behind the other, without padding.

    A batch is its sequences as documents, ``padding`` is keys of other lengths, ``document`` and
    ``documents`` are documents within each sequence. What else a mask with documents hides is left
    to the kernel's causal flag where that is it, aligned bottom-right or top-left, else to a traced
    mask. A Problem with a backward has both passes in one call.
    """

    name = "triton-varlen"
    summary = "our FlashAttention-2 of packed documents in Triton"
    sinks = True
    backward = True

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """Return why it is refused: masks other than documents, padding, or one band a sequence."""
        packed = pack(problem)
        if packed is None:
            return f"the mask {problem.mask} names documents or padding more than once"
        if not packed.cut and band_of(packed.rest, problem.dimensions) is None:
            return f"the mask {problem.mask} is neither documents nor padding nor a band"
        if device == "cuda" and problem.heads > _MOST_HEADS:
            return f"heads = {problem.heads}: at most {_MOST_HEADS} on a GPU"
        # Documents are one axis of the grid, and its mask is this class's own matter.
        return super().unsupported(problem.replace(batch=1, mask=FULL), device)

    def forward(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """``kernels.varlen_forward.varlen_forward``."""
        from attncheck.kernels import varlen_forward

        return varlen_forward.varlen_forward

    def tiling(self, problem: Problem, device: str) -> Tiling | None:
        """Its tiles where they are those of a whole sequence; None where documents move them.

        A document's tiles of keys begin with its first key, wherever that is.
        """
        tiling = super().tiling(problem, device)
        packed = _packed(problem)
        places = zip(packed.places(), packed.lengths(), strict=True)
        # A document without rows or keys has no tile, wherever it begins.
        starts = {key for (_, _, key), lengths in places if min(lengths) > 0}
        moved = tiling is not None and any(start % tiling.block_kv for start in starts)
        # A tile of the ideal kernel begins at a multiple of its size, in every sequence.
        return None if moved else tiling

    def launch(self, problem: Problem, device: str) -> Launch:
        """Tiles by the Problem's own lengths, so that no sequence's depend on its neighbours'."""
        return super().launch(_alone(problem), device)

    def gradient_launches(self, problem: Problem, device: str) -> tuple[Launch, Launch]:
        """Launches of dQ, and of dK and dV."""
        rows, keys = (launch_flash(_alone(problem), device, tiles) for tiles in (BY_ROWS, BY_KEYS))
        return rows, keys

    def backward_launcher(self) -> Callable[..., Gradients]:
        """``kernels.varlen_backward.varlen_backward``."""
        from attncheck.kernels import varlen_backward

        return varlen_backward.varlen_backward

    def prepare(self, inputs: Inputs) -> Call:
        """Pack the documents, trace the mods, and bind the launches."""
        problem, device = inputs.problem, inputs.device.type
        from attncheck.kernels.compilation import prepare_triton

        prepare_triton(device)
        # Triton is ready from here on: what follows imports kernels.
        layout, chosen = packed_layout(problem), self.launch(problem, device)
        tensors = layout.queries(inputs.q), layout.keys(inputs.k), layout.keys(inputs.v)
        of_both = {"scale": problem.scale, "sink": inputs.sink}
        of_both |= _documents(inputs) | _mods(problem, device)
        forward = partial(
            self.forward(),
            *tensors,
            launch=chosen,
            programs=_programs(inputs, chosen),
            descale=_descale(inputs),
            out_dtype=problem.formats.output.torch_dtype,
            **of_both,
        )
        backward = self._backward(inputs, layout, tensors, of_both)

        def call() -> Outputs:
            out, lse = forward()
            gradients = {} if backward is None else backward(out, lse)
            out = layout.out[tuple(out.shape)](out)
            return Outputs(out, layout.lse[tuple(lse.shape)](lse), **gradients)

        return call

    def _backward(
        self, inputs: Inputs, layout: Layout, tensors: Tensors, of_both: dict[str, Any]
    ) -> Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]] | None:
        """Return what gives the gradients, from the packed out and LSE; None for none."""
        if inputs.dout is None:
            return None
        problem, device = inputs.problem, inputs.device.type
        rows, keys = self.gradient_launches(problem, device)
        backward = partial(
            self.backward_launcher(),
            launch=rows,
            launch_by_keys=keys,
            programs=_programs(inputs, rows),
            key_programs=_key_programs(inputs, keys),
            slope=triton_slope(problem, device),
            **of_both,
        )
        changes = {"q": layout.queries, "k": layout.keys, "v": layout.keys}
        leaves = [Leaf.of(f"d{name}", getattr(inputs, name), how) for name, how in changes.items()]
        dout, dlse = layout.queries(inputs.dout), _packed_rows(inputs.dlse)

        def call(out: torch.Tensor, lse: torch.Tensor) -> dict[str, torch.Tensor]:
            *gradients, dsink = backward(*tensors, out, lse, dout, dlse)
            back = {leaf.name: leaf.back(g) for leaf, g in zip(leaves, gradients, strict=True)}
            return back if dsink is None else back | {"dsink": dsink}

        return call


def _packed(problem: Problem) -> PackedProblem:
    packed = pack(problem)
    assert packed is not None, "unsupported has refused it"
    return packed


def _alone(problem: Problem) -> Problem:
    """The Problem of one sequence as long, in which nothing is hidden."""
    return problem.replace(batch=1, mask=FULL, score=NONE, dcaptured=False)


def _documents(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Places of the documents, and by which numbers the mods know them."""
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


def _key_programs(inputs: Inputs, launch: Launch) -> torch.Tensor:
    from attncheck.kernels.varlen_backward import key_program_list

    keys = [keys for _, keys in _packed(inputs.problem).lengths()]
    return key_program_list(keys, launch.block_kv).to(inputs.device)


def _descale(inputs: Inputs) -> Descale | None:
    """Each document's: that of its sequence."""
    if inputs.descale is None:
        return None
    b = [b for b, _, _ in _packed(inputs.problem).places()]
    return Descale(**{name: getattr(inputs.descale, name)[b] for name in "qkv"})


def _packed_rows(dlse: torch.Tensor | None) -> torch.Tensor | None:
    """``(batch, heads, query)`` → ``(heads, total)``."""
    return None if dlse is None else dlse.transpose(0, 1).flatten(1)


def _mods(problem: Problem, device: str) -> dict[str, Any]:
    """The mask within documents, by flag or by mask, and the score mod."""
    packed = _packed(problem)
    causal = _causal(problem, packed)
    mask = None
    # A mask in a tile costs more than the flag.
    if packed.rest != FULL and not causal:
        mask = triton_mask(problem.replace(mask=packed.rest), device)
    return {"causal": causal, "mask": mask, "score": triton_score(problem, device)}


def _causal(problem: Problem, packed: PackedProblem) -> Causal:
    """Alignment of the kernel's flag, where it is what hides keys within documents."""
    band = band_of(packed.rest, problem.dimensions)
    lengths, leads = packed.lengths(), packed.leads()
    if band is None:
        return ""
    if band_window(band, lengths, bottom_right=True, leads=leads) == _CAUSAL:
        return "bottom_right"
    top_left = band_window(band, lengths, bottom_right=False, leads=leads) == _CAUSAL
    return "top_left" if top_left else ""


class Paged(Flash2):
    """``triton-flash2`` behind a page table: prefill and decoding, any mask and score mod.

    Its tiles of keys are logical: a tile may be of several pages, and a page of several tiles. It
    is given kv, and the mask says where a sequence ends.
    """

    name = "triton-paged"
    summary = "triton-flash2 on keys and values in pages, behind a page table"
    backward = False

    def concerns(self, problem: Problem) -> bool:
        """Attention with pages, and no other."""
        return problem.paging is not None and super().concerns(problem.replace(paging=None))

    def stored(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, KernelPages | None]:
        """Caches ``(pages, kv_heads, size, dim)``, and the table; packed before the call."""
        return _in_pages(inputs)


MOST_ROWS = 128  # query rows times heads of a group: what one program was meant for

_SMALLEST_BLOCK = 16  # rows of a tensor core's product
# Rows and columns for which fewer warps are enough; fp32's products take many registers.
_SMALL_BLOCK, _SMALL_DIM, _SMALL_WARPS = 32, 128, 4
# Keys, warps and stages of such a block in 16 bits, by its rows and head dim: what fills an H100's
# memory best. And how many splits are added up before they are merged by LSE.
_LONG_TILES = {
    (16, 64): (64, 2, 3, 1),
    (16, 128): (64, 4, 3, 1),
    (32, 64): (64, 4, 3, 4),
    (32, 128): (32, 4, 3, 4),
}
_SHORTEST_SPLIT = 128  # keys, on a GPU: of n times as many √n splits are made
_MOST_SPLITS_INTERPRETED = 3
_OTHER_SPLITS = (1, 2, 3, 7)


class Decode(Flash):
    """Split-KV decoding; interpreted where there is no GPU.

    It does not promise ``group``: the rows of a tile are all those that read one kv head, and its
    size, and with it the order of sums, depends on how many heads share that.

    Args:
        splits: Into how many parts it cuts the keys, where not as many as it chooses itself.
    """

    name = "triton-decode"
    summary = "our decode kernel in Triton: up to 128 rows a kv head, keys in splits merged by LSE"
    promises = frozenset({"repeat", "batch", "layout", "hidden", "nan"})

    def __init__(self, splits: int | None = None) -> None:
        self._splits = splits

    def concerns(self, problem: Problem) -> bool:
        """Return whether it is attention, paged or not."""
        return super().concerns(problem.replace(paging=None))

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """Return why it is refused: above ``MOST_ROWS`` rows a kv head, or as by other forwards."""
        rows = problem.query * problem.group
        if rows > MOST_ROWS:
            return f"query · group = {rows}: it is for decoding, at most {MOST_ROWS}"
        # A program is of a kv head.
        return super().unsupported(problem.replace(heads=problem.kv_heads), device)

    def launch(self, problem: Problem, device: str) -> Launch:
        """A block of rows as small as they are, and as many splits as ``splits_of`` says."""
        chosen = super().launch(problem, device)
        rows = min(problem.query * problem.group, MOST_ROWS)
        block = max(_SMALLEST_BLOCK, 1 << (rows - 1).bit_length())
        if device != "cpu":  # there a larger one would spill
            block = min(block, chosen.block_query)
        narrow = block <= _SMALL_BLOCK and problem.dtype != "fp32"
        widest = max(problem.head_dim, problem.value_dim)
        narrow = narrow and widest <= _SMALL_DIM
        keys, warps, stages, together = chosen.block_kv, chosen.warps, chosen.stages, 1
        if narrow and device != "cpu" and problem.dtype in {"fp16", "bf16"}:
            keys, warps, stages, together = _LONG_TILES[block, 64 if widest <= 64 else 128]
        elif narrow:
            warps = min(warps, _SMALL_WARPS)
        if problem.paging is not None:
            # A page's number is loaded before its keys: Triton gives each half of the stages.
            stages = 2 * stages - 1
        splits = self._splits or splits_of(problem.kv, keys, together, device)
        return replace(
            chosen,
            block_query=block,
            block_kv=keys,
            warps=warps,
            stages=stages,
            splits=splits,
            together=together,
        )

    def tiling(self, problem: Problem, device: str) -> Tiling | None:
        """Its tile sizes; none where parts are merged, each with weights relative to its maximum.

        The ideal kernel, which rounds as a tiling says, has no such parts.
        """
        return super().tiling(problem, device) if self._parts(problem, device) == 1 else None

    def launches(self, problem: Problem, device: str) -> Mapping[str, Subject]:
        """Return it with 1, 2, 3 and 7 splits, and with one more than there are blocks of keys."""
        own = self.launch(problem, device)
        counts = dict.fromkeys((*_OTHER_SPLITS, _blocks(problem.kv, own.block_kv) + 1))
        return {
            f"{count} split{'s' * (count > 1)}": type(self)(count)
            for count in counts
            if count != own.splits
        }

    def arithmetic(self, problem: Problem, device: str) -> Arithmetic:
        """The other forwards' arithmetic, and its splits; a sink is merged as one more."""
        assumed = super().arithmetic(problem, device)
        return replace(assumed, splits=self._parts(problem, device))

    def _parts(self, problem: Problem, device: str) -> int:
        return self.launch(problem, device).splits + problem.sink

    def visited(self, problem: Problem, device: torch.device) -> dict[str, Any]:
        """How many keys every row sees, if its mask goes by distance: of others none is known."""
        del device
        band = band_of(problem.mask, problem.dimensions)
        if band is None or band.least is not None:
            return {}
        return {"whole": problem.kv if band.most is None else max(0, band.most + 1)}

    def stored(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, KernelPages | None]:
        """K, v and their pages: those of a Problem with paging, as a cache holds them."""
        if inputs.problem.paging is None:
            return super().stored(inputs)
        return _in_pages(inputs)

    def forward(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """``kernels.decode_forward.decode_forward``."""
        from attncheck.kernels import decode_forward

        return decode_forward.decode_forward


def splits_of(kv: int, block_kv: int, together: int, device: str) -> int:
    """Into how many splits ``kv`` keys are cut: whatever the batch, so that no bit depends on it.

    On a GPU ``together`` for each part that is merged by LSE, of which there are as many as the
    root of what each could have of stretches of 128 keys a split. What is written and merged of
    many parts takes time from many sequences, and few splits leave one sequence to few
    multiprocessors. In the interpreter, where a split costs what a block does, one a block, at
    most 3: enough to be merged.
    """
    if device == "cpu":
        return min(_blocks(kv, block_kv), _MOST_SPLITS_INTERPRETED)
    return max(1, together * math.isqrt(kv // (together * _SHORTEST_SPLIT)))


def _blocks(kv: int, block_kv: int) -> int:
    return -(-kv // block_kv)


def _in_pages(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, KernelPages]:
    from attncheck.kernels.launch import KernelPages

    cache = paged_inputs(inputs)
    return cache.k, cache.v, KernelPages(cache.table.table, cache.table.size)
