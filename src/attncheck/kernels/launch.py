"""Launches of our attention kernels: compile-time choices, lists of tiles, pages, scales."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch
import triton

from attncheck.core.errors import UsageError
from attncheck.inputs.input_tensors import Descale

LOG2E = 1.4426950408889634
# Whether one of these is 1, or a multiple of 16, changes no load of a forward, and each would be
# compiled anew for it, which takes far longer than a small problem. Backwards load LSE and delta by
# these lengths: without what is known of them they took 1.04 to 1.3 times as long on an H200.
COUNTS = ("heads", "kv_heads", "group", "query", "kv", "total_query", "rows_of_all", "splits")
ALIGNED = 16  # bytes: what TMA and the widest loads take addresses and strides by


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Compile-time choices of one launch."""

    # block_query, block_kv: tile sizes, powers of two from 16 to 128; of keys at least 32 in fp8,
    # which tensor cores contract 32 at a time.
    block_query: int
    block_kv: int
    # warps, stages: warps per program and depth of the load pipeline.
    warps: int = 4
    stages: int = 2
    # At most so many a thread, so that several programs share a multiprocessor; None leaves it to
    # the assembler. Of the forward alone, and of no effect in the interpreter.
    registers: int | None = None
    precision: str = "ieee"  # ``input_precision`` of fp32 products: ``ieee`` or ``tf32``
    # Keys after a row's own index are never visible: FlashAttention-1 skips their tiles. Others
    # have a ``VisitList``.
    causal: bool = False
    free: bool = False  # the mask hides nothing: tiles that lie wholly inside need no mask
    # How many products of fp8 operands may be added up in the accumulator of Hopper's fp8
    # instructions (QGMMA), which keeps about 13 bits, before the sum goes to an fp32 register. 0:
    # none. Triton 3.6 to 3.9 then widens fp8 to fp16, which holds every number of it, for
    # instructions that add up in fp32 (HMMA; read from the SASS that benchmarks/spills.py
    # counts). None: Triton's default, on Hopper all of them. Of no effect on other operands, on
    # other GPUs and in the interpreter.
    max_num_imprecise_acc: int | None = 0
    # What P is multiplied by before it is rounded to v's format: a power of two.
    weights_scale: float = 1.0
    splits: int = 1  # into how many parts the keys are cut: of decoding alone
    together: int = 1  # how many neighbours of them are added up before they are merged by LSE


@dataclass(frozen=True, slots=True, eq=False)
class VisitList:
    """Which tiles each block of query rows has to visit, in order; what is not listed is hidden.

    They are listed by runs, consecutive tiles of one kind: where the next tile is follows from the
    last, so that its loads may be on their way before anything of a list is read.

    Batch and heads may be 1, for all of them. Blocks are those of the launch.
    """

    # int32 ``(batch, heads, query_blocks, most, 2)``: 2 · the first tile's key block, plus 1
    # where each tile lies wholly inside and every row of it sees every key; and how many tiles.
    # Ascending, then zeros.
    runs: torch.Tensor
    counts: torch.Tensor  # int32 ``(batch, heads, query_blocks)``: how many runs are there
    # The key block behind the last one that is listed for any block.
    beyond: int = field(init=False)
    # int32 ``(batch, heads, query_blocks)``: how many tiles its runs hold.
    totals: torch.Tensor = field(init=False)
    order: torch.Tensor = field(init=False)  # likewise: blocks, those of most tiles last

    def __post_init__(self) -> None:
        """Look once, since a GPU that is asked is waited for."""
        ends = (self.runs[..., 0] >> 1) + self.runs[..., 1]
        object.__setattr__(self, "beyond", int(ends.max()))
        totals = self.runs[..., 1].sum(-1, dtype=torch.int32)
        object.__setattr__(self, "totals", totals.contiguous())
        order = totals.argsort(dim=-1, stable=True).to(torch.int32)
        object.__setattr__(self, "order", order.contiguous())

    def check(self, name: str, own: tuple[int, int], across: tuple[int, int]) -> None:
        """Refuse a list that is not of these lengths in these blocks: its own axis, and the other.

        A kernel would read beyond a list of fewer blocks, and walk over tiles that are elsewhere.

        Raises:
            UsageError: for one that has other blocks, or a tile that is not there.
        """
        blocks, tiles = (triton.cdiv(length, block) for length, block in (own, across))
        if self.counts.shape[2] != blocks:
            raise UsageError(
                f"{name} lists the tiles of {self.counts.shape[2]} blocks: {own[0]} in blocks of "
                f"{own[1]} are {blocks}."
            )
        if self.beyond > tiles:
            raise UsageError(
                f"{name} lists tile {self.beyond - 1}, counted from 0: {across[0]} in tiles of "
                f"{across[1]} are {tiles}."
            )

    def visited(self) -> int:
        """Return how many tiles are listed, each once for all batches and heads that share it."""
        return int(self.totals.sum())

    def arguments(self) -> tuple[torch.Tensor | int, ...]:
        """Both tensors and their strides along batch, heads and blocks, 0 where one is for all."""
        counts = self.counts.contiguous()
        runs = self.runs.contiguous()
        return (runs, counts, *_strides(runs), *_strides(counts))


@dataclass(frozen=True, slots=True, eq=False)
class KernelPages:
    """Where the pages of a paged cache are."""

    # int32 ``(batch, most_pages)``: the numbers of each sequence's pages in order. Key j of
    # sequence b is in slot j % size of page ``table[b, j // size]``; what comes after a
    # sequence's last page may be read, and masked: it must be the number of some page.
    table: torch.Tensor
    size: int  # keys in a page

    def arguments(self) -> tuple[torch.Tensor | int, ...]:
        """The table and its stride along the batch."""
        table = self.table.contiguous()
        return (table, table.stride(0))


def _strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Along the first three axes; 0 along batch and heads of size 1."""
    batch, heads, blocks = (tensor.stride(axis) for axis in range(3))
    return (
        batch if tensor.shape[0] > 1 else 0,
        heads if tensor.shape[1] > 1 else 0,
        blocks,
    )


def needs_careful_launch(again: torch.Tensor) -> bool:
    """Return whether to launch the careful kernel: a block of rows was not finite without care.

    The GPU is waited for: the kernel is then mostly not compiled either, which takes far longer.
    While a CUDA graph is recorded nothing can be waited for. Then it is launched, and its programs
    look for themselves; it must have been compiled before, by a call with the same shapes, strides
    and dtypes and a v of NaN throughout.
    """
    if again.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    return bool(again.any())


def block_dim(dim: int, dtype: torch.dtype) -> int:
    """The power of two that covers ``dim`` columns: tl.dot contracts over 16 or, in fp8, 32."""
    return max(16 if dtype.itemsize > 1 else 32, int(triton.next_power_of_2(dim)))


def scales(descale: Descale | None) -> tuple[torch.Tensor, ...]:
    """Return a kernel's arguments of ``descale``: q's, k's, v's, ``(batch, kv_heads)`` each."""
    if descale is None:
        return ()
    return tuple(tensor.contiguous() for tensor in (descale.q, descale.k, descale.v))


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` ``(batch, heads, rows, columns)``, or a copy if a row begins off ``ALIGNED``.

    Or if its columns are apart, or its rows overlap.
    """
    if not _is_aligned(x.shape, x.stride(), x.element_size()):
        x = x.contiguous()
    return x.clone(memory_format=torch.contiguous_format) if x.data_ptr() % ALIGNED else x


@lru_cache(maxsize=256)
def _is_aligned(shape: torch.Size, strides: tuple[int, ...], size: int) -> bool:
    ahead = ALIGNED // size
    steps = [step for step, length in zip(strides, shape, strict=True) if length > 1]
    return strides[3] == 1 and all(step > 0 and step % ahead == 0 for step in steps if step != 1)
