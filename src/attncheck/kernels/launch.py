"""Launches of our attention kernels: compile-time choices, lists of tiles, pages, scales."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch
import triton

from attncheck.core.errors import UsageError
from attncheck.inputs.input_tensors import Descale

LOG2E = 1.4426950408889634
# Arguments that forwards are not specialised on. Triton would compile a kernel anew where one is 1
# or a multiple of 16, which takes far longer than a small problem and improves no load. Backwards
# load LSE and delta by these lengths: unspecialised they took 1.04 to 1.3 times as long on an H200.
COUNTS = ("heads", "kv_heads", "group", "query", "kv", "total_query", "rows_of_all", "splits")
ALIGNMENT = 16  # Bytes that TMA and the widest loads need addresses and strides to be multiples of.


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
    # Most registers per thread, so that several programs share a multiprocessor; None leaves it to
    # the assembler. Only forwards use it, and the interpreter ignores it.
    registers: int | None = None
    precision: str = "ieee"  # ``input_precision`` of fp32 products: ``ieee`` or ``tf32``
    # Keys after a row's own index are never visible: FlashAttention-1 skips their tiles. The other
    # kernels use a ``VisitList``.
    causal: bool = False
    free: bool = False  # the mask hides nothing: tiles that lie wholly inside need no mask
    # How many products of fp8 operands may be added up in the accumulator of Hopper's fp8
    # instructions (QGMMA), which keeps about 13 bits, before the sum goes to an fp32 register. With
    # 0 Triton 3.6 to 3.9 widens fp8 to fp16, which represents it exactly, for instructions that
    # add up in fp32 (HMMA; seen in the SASS that benchmarks/spills.py counts). None: Triton's
    # default, on Hopper all products. No effect on other operands or GPUs, or if interpreted.
    max_num_imprecise_acc: int | None = 0
    # Factor of P before it is rounded to v's format: a power of two.
    weights_scale: float = 1.0
    splits: int = 1  # parts that the keys are cut into; only for decoding
    together: int = 1  # neighbouring splits that are added up before they are merged by LSE


@dataclass(frozen=True, slots=True, eq=False)
class VisitList:
    """The tiles that each block of query rows has to visit, in order; all others are hidden.

    They are listed in runs of consecutive tiles of the same kinds: the next tile follows from the
    last one, so that its loads can start before anything of the list is read.

    A block may be several groups of rows that visit its tiles together. A tile's kind for a group
    is 0 if the group sees nothing of it, 2 if the tile lies wholly inside and every row of the
    group sees every key, else 1.

    Batch and heads may be 1, and then hold for all. Blocks are those of the launch.
    """

    # int32 ``(batch, heads, query_blocks, most, 2)``: 4^groups · the first tile's key block plus,
    # for each group g, 4^g · the tiles' kind; and the number of tiles. Ascending, padded by zeros.
    runs: torch.Tensor
    counts: torch.Tensor  # int32 ``(batch, heads, query_blocks)``: number of runs
    groups: int = 1  # per block
    # The key block behind the last one that is listed for any block.
    beyond: int = field(init=False)
    # int32 ``(batch, heads, query_blocks)``: number of tiles in a block's runs.
    totals: torch.Tensor = field(init=False)
    order: torch.Tensor = field(init=False)  # same shape: blocks by ascending number of tiles
    # int32 ``(batch, heads, query_blocks, groups, 3)``: how many tiles of its block a group leaves
    # out at first, visits, and leaves out at last. It visits one even if it sees nothing.
    spans: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Compute the derived fields once, since reading them from a GPU synchronises with it."""
        heads, lengths = self.runs.unbind(-1)
        ends = (heads >> 2 * self.groups) + lengths
        object.__setattr__(self, "beyond", int(ends.max()))
        totals = lengths.sum(-1, dtype=torch.int32)
        shifts = 2 * torch.arange(self.groups, dtype=torch.int32, device=heads.device)
        seen = ((heads[..., None] >> shifts) & 3) != 0  # (batch, heads, query_blocks, most, groups)
        behind = lengths.cumsum(-1, dtype=torch.int32)[..., None]
        total = totals.clamp(min=1)[..., None]
        first = torch.where(seen, behind - lengths[..., None], total[..., None] - 1).amin(-2)
        end = torch.where(seen, behind, 0).amax(-2).maximum(first + 1)
        spans = torch.stack([first, end - first, total - end], -1)
        object.__setattr__(self, "spans", spans.contiguous())
        object.__setattr__(self, "totals", totals.contiguous())
        order = totals.argsort(dim=-1, stable=True).to(torch.int32)
        object.__setattr__(self, "order", order.contiguous())

    def check(
        self, name: str, own: tuple[int, int], across: tuple[int, int], *, groups: int = 1
    ) -> None:
        """Raise unless the list fits (length, block) of its ``own`` axis and of the one ``across``.

        Otherwise a kernel would read beyond the list, or visit the wrong tiles.

        Raises:
            UsageError: if the list has another number of blocks, of groups in a block, or a tile
                beyond the last.
        """
        if self.groups != groups:
            raise UsageError(
                f"{name} lists the tiles of {self.groups} group(s) of rows per block: this kernel "
                f"has {groups}."
            )
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
        """Return the number of listed tiles, each once for all batches and heads that share it."""
        return int(self.totals.sum())

    def arguments(self) -> tuple[torch.Tensor | int, ...]:
        """Return both tensors and their strides along batch, heads and blocks, 0 if shared."""
        counts = self.counts.contiguous()
        runs = self.runs.contiguous()
        return (runs, counts, *_strides(runs), *_strides(counts))


@dataclass(frozen=True, slots=True, eq=False)
class KernelPages:
    """The page table of a paged cache."""

    # int32 ``(batch, most_pages)``: the numbers of each sequence's pages in order. Key j of
    # sequence b is in slot j % size of page ``table[b, j // size]``. Entries after a sequence's
    # last page must be valid page numbers too: they may be read, and are then masked.
    table: torch.Tensor
    size: int  # keys in a page

    def arguments(self) -> tuple[torch.Tensor | int, ...]:
        """Return the table and its stride along the batch."""
        table = self.table.contiguous()
        return (table, table.stride(0))


def _strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return the strides of the first three axes; 0 along batch and heads of size 1."""
    batch, heads, blocks = (tensor.stride(axis) for axis in range(3))
    return (
        batch if tensor.shape[0] > 1 else 0,
        heads if tensor.shape[1] > 1 else 0,
        blocks,
    )


def needs_careful_launch(again: torch.Tensor) -> bool:
    """Return whether to launch the careful kernel: a block of rows was not finite without care.

    This waits for the GPU: usually the careful kernel need not be compiled then, which would take
    far longer. While a CUDA graph is recorded, waiting is impossible: the kernel is always launched
    then, and its programs check the flags. It must have been compiled before, by a call with the
    same shapes, strides and dtypes and a v of NaN throughout.
    """
    if again.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    return bool(again.any())


def block_dim(dim: int, dtype: torch.dtype) -> int:
    """Return the power of two that covers ``dim``: tl.dot contracts over 16 or, in fp8, 32."""
    return max(16 if dtype.itemsize > 1 else 32, int(triton.next_power_of_2(dim)))


def scales(descale: Descale | None) -> tuple[torch.Tensor, ...]:
    """Return a kernel's arguments for ``descale``: of q, k and v, ``(batch, kv_heads)`` each."""
    if descale is None:
        return ()
    return tuple(tensor.contiguous() for tensor in (descale.q, descale.k, descale.v))


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` ``(batch, heads, rows, columns)``, or a copy if a row begins off ``ALIGNMENT``.

    It is copied too if its columns are not contiguous, or its rows overlap.
    """
    if not _is_aligned(x.shape, x.stride(), x.element_size()):
        x = x.contiguous()
    return x.clone(memory_format=torch.contiguous_format) if x.data_ptr() % ALIGNMENT else x


@lru_cache(maxsize=256)
def _is_aligned(shape: torch.Size, strides: tuple[int, ...], size: int) -> bool:
    vector = ALIGNMENT // size
    steps = [step for step, length in zip(strides, shape, strict=True) if length > 1]
    return strides[3] == 1 and all(step > 0 and step % vector == 0 for step in steps if step != 1)
