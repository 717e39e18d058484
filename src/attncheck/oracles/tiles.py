"""How the streaming oracle cuts a problem: blocks, ranges of heads, and which tiles see anything.

Every number that only speed depends on is in ``Blocks``; ``benchmarks/oracle.py --sweep`` chooses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.oracles.indices import Indices, visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attncheck.mods.signatures import MaskMod
    from attncheck.problem import Problem

__all__ = [
    "Blocks",
    "Heads",
    "Run",
    "Visibility",
    "backward_blocks_for",
    "blocks_for",
    "head_ranges",
    "query_blocks",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Sizes of the tiles.

    Attributes:
        rows: Query rows of one batched product, all its heads together: enough to fill the device.
        query: Query rows of one head in a tile, at least (a causal diagonal wastes half of it).
        query_most: The same, at most, where few heads leave ``rows`` unfilled.
        kv: Keys of a tile; ``rows`` · ``kv`` · 8 bytes is the score buffer.
        cell: Keys that a mask is classified by; tiles begin and end at multiples of it.
    """

    rows: int
    query: int
    query_most: int
    kv: int
    cell: int


_CPU = Blocks(rows=1024, query=256, query_most=512, kv=512, cell=64)
_GPU = Blocks(rows=32768, query=512, query_most=2048, kv=2048, cell=128)


def blocks_for(device: torch.device) -> Blocks:
    """Sizes for a CPU (score buffer 4 MB, inside its last cache) or a GPU (512 MB)."""
    return _CPU if device.type == "cpu" else _GPU


# Two buffers of a tile, and five products: less of each fits beside them in a CPU's caches.
_CPU_BACKWARD = Blocks(rows=512, query=256, query_most=512, kv=512, cell=64)
_GPU_BACKWARD = Blocks(rows=16384, query=512, query_most=2048, kv=2048, cell=128)


def backward_blocks_for(device: torch.device) -> Blocks:
    """The same for the backward, with two score buffers: 2 MB each, or 256 MB."""
    return _CPU_BACKWARD if device.type == "cpu" else _GPU_BACKWARD


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of one tile: all kv heads of several sequences, or some of one.

    Attributes:
        batch: Sequences.
        kv: Key heads.
        group: Query heads a key head.
    """

    batch: range
    kv: range
    group: int

    @property
    def query(self) -> range:
        """Query heads."""
        return range(self.kv.start * self.group, self.kv.stop * self.group)

    def of(self, tensor: Tensor) -> Tensor:
        """The part of a tensor ``(batch, kv_heads, …)``."""
        return tensor[self.batch.start : self.batch.stop, self.kv.start : self.kv.stop]


@dataclass(frozen=True, slots=True)
class Run:
    """Keys of a tile.

    Attributes:
        keys: Which.
        partial: Whether some row of the tile does not see some of them.
    """

    keys: range
    partial: bool


def query_blocks(problem: Problem, blocks: Blocks) -> list[range]:
    """Ranges of query rows."""
    filled = blocks.rows // (problem.batch * problem.heads)
    size = min(max(filled, blocks.query), blocks.query_most, max(1, blocks.rows // problem.group))
    return _cut(range(problem.query), size)


def head_ranges(problem: Problem, blocks: Blocks, rows: int) -> Iterator[Heads]:
    """Ranges of heads whose tiles of ``rows`` query rows go into one batched product."""
    together = max(1, blocks.rows // (problem.group * rows))
    sequences = max(1, together // problem.kv_heads)
    for batch in _cut(range(problem.batch), sequences):
        for kv in _cut(range(problem.kv_heads), min(together, problem.kv_heads)):
            yield Heads(batch, kv, problem.group)


class Visibility:
    """Which tiles of a mask see nothing, something or everything.

    The mask is evaluated strip by strip, in memory of the order of a tile, and classified on its
    device; only the classes travel to the host, once for a range of heads (once in all when the
    mask does not depend on the head).
    """

    def __init__(self, problem: Problem, blocks: Blocks, device: torch.device) -> None:
        self._mask_mod: MaskMod = problem.mask_mod(str(device))
        self._problem, self._blocks, self._device = problem, blocks, device
        self._queries = query_blocks(problem, blocks)
        everybody = Heads(range(problem.batch), range(problem.kv_heads), problem.group)
        shape = self._visible(everybody, range(1), range(1)).shape
        self._shared = shape[:2] == (1, 1)
        self._runs: dict[Heads | None, list[list[Run]]] = {}
        self._tiles: dict[tuple[range, range], Tensor] = {}

    def runs(self, heads: Heads, block: int) -> list[Run]:
        """Tiles of query block number ``block`` that see something, in order."""
        key = None if self._shared else heads
        if key not in self._runs:
            self._runs[key] = self._classify(heads)
        return self._runs[key][block]

    def tile(self, heads: Heads, rows: range, keys: range) -> Tensor:
        """What a partial tile sees; bool, as ``indices.visible`` gives it.

        A mask that is the same for all heads is evaluated once for a query block.
        """
        if not self._shared:
            return self._visible(heads, rows, keys)
        if self._tiles and next(iter(self._tiles))[0] != rows:
            self._tiles.clear()
        if (rows, keys) not in self._tiles:
            self._tiles[rows, keys] = self._visible(heads, rows, keys)
        return self._tiles[rows, keys]

    def _visible(self, heads: Heads, rows: range, keys: range) -> Tensor:
        indices = Indices.of(heads.batch, heads.query, rows, keys, self._device)
        return visible(self._mask_mod, indices)

    def _classify(self, heads: Heads) -> list[list[Run]]:
        blocks, length = self._blocks, self._problem.kv
        if len(self._queries) == 1 and length <= blocks.kv:
            return [[Run(range(length), partial=True)]]  # one tile: classifying costs as much
        width = blocks.kv // blocks.cell * blocks.cell or blocks.cell
        if self._shared:  # the strip of a mask without heads may be as wide as a tile has rows
            width = max(width, blocks.rows * blocks.kv // len(self._queries[0]) // width * width)
        strips = [
            [self._cells(heads, rows, keys) for keys in _cut(range(length), width)]
            for rows in self._queries
        ]
        classes = torch.stack([torch.cat(row, dim=-1) for row in strips]).tolist()
        return [self._merge(some, every) for some, every in classes]

    def _cells(self, heads: Heads, rows: range, keys: range) -> Tensor:
        """Whether each cell of a strip sees something, and everything: bool, ``(2, cells)``."""
        seen = self._visible(heads, rows, keys)
        classes = []
        for reduce, padding in ((torch.any, False), (torch.all, True)):
            by_key = reduce(seen.flatten(0, 2), dim=0).expand(len(keys))
            extra = -len(keys) % self._blocks.cell
            if extra:
                by_key = torch.nn.functional.pad(by_key, (0, extra), value=padding)
            classes.append(reduce(by_key.view(-1, self._blocks.cell), dim=-1))
        return torch.stack(classes)

    def _merge(self, some: list[bool], every: list[bool]) -> list[Run]:
        """Neighbouring cells of one class as tiles of at most ``kv`` keys."""
        cell, most, length = self._blocks.cell, self._blocks.kv, self._problem.kv
        runs: list[Run] = []
        for number, (seen, whole) in enumerate(zip(some, every, strict=True)):
            if not seen:
                continue
            keys = range(number * cell, min((number + 1) * cell, length))
            last = runs[-1] if runs else None
            joins = last and last.keys.stop == keys.start and last.partial != whole
            if last and joins and keys.stop - last.keys.start <= most:
                runs[-1] = Run(range(last.keys.start, keys.stop), last.partial)
            else:
                runs.append(Run(keys, partial=not whole))
        return runs


def _cut(whole: range, size: int) -> list[range]:
    starts = range(whole.start, whole.stop, size)
    return [range(start, min(start + size, whole.stop)) for start in starts]
