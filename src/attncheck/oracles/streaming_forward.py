"""Exact attention of any size: float64, O(N) memory, CPU or GPU, by plain torch.

Passes over memory determine the speed. A tile costs two products and, between them,

* if scores are known to be small (``_Bounded``), one exponential in place, or nothing on a GPU that
  computes it and both products in one kernel (``fused_tiles``);
* otherwise the running maximum of the online softmax (``_Online``).

Values have an additional column of ones, so that P·V also gives the row sum without a pass. Masks
are evaluated once and applied only to partly visible tiles; tiles that see nothing are never
computed. All numbers that affect only speed are in ``Blocks``; ``benchmarks/oracle.py --sweep``
chooses them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.core.errors import ProblemError
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Problem
from attncheck.mods.signatures import MaskMod
from attncheck.oracles import fused_tiles
from attncheck.oracles.float64_numbers import Float64, Nonfinite, nonfinite_sums
from attncheck.oracles.mod_calls import (
    Indices,
    call_mask,
    call_score_mod,
    is_identity,
    seen_by_blocks,
)
from attncheck.oracles.recurrence_steps import safe

# |score| up to which Σ exp(score)·|v| needs no maximum subtracted: it is below 2^1022 for 2^32 keys
# and values up to fp32's 2^128; exp(−score)·2^−149 (fp32's smallest value) is ≥ 2^−1011, normal.
LARGEST_BOUNDED_SCORE = (1022 - 32 - 128) * math.log(2)
# Float64 values, and fp8 values times their descale, may lie outside and have to be checked.
_SMALLEST_BOUNDED_VALUE, _LARGEST_BOUNDED_VALUE = 2.0**-149, 2.0**128


def streaming(inputs: Inputs, *, blocks: Blocks | None = None) -> Outputs:
    """Return the attention of ``inputs`` on their device, in float64 and O(query + kv) memory.

    Args:
        inputs: q ``(batch, heads, query, head_dim)``; k and v with kv_heads.
        blocks: Tile sizes; the result depends on them only by rounding.

    Returns:
        Float64 out ``(batch, heads, query, value_dim)`` and natural-log LSE
        ``(batch, heads, query)``. Rows that attend to no key have out 0, and LSE −∞ or the head's
        sink.
    """
    problem, device = inputs.problem, inputs.q.device
    tiles = _Tiles(inputs)
    blocks = blocks or blocks_for(device, fused=tiles.fused)
    tiles.visibility = visibility = Visibility(problem, blocks, device)
    recurrence = _Bounded if tiles.bounded else _Online
    # The fused kernel skips unseen keys itself: its tiles are as wide as memory for masks allows.
    most = max(blocks.cell, blocks.kv // visibility.distinct)
    whole_runs = [Run(keys, partial=True) for keys in _cut(range(problem.kv), most)]
    shape = (problem.batch, problem.kv_heads, problem.group, problem.query)
    out = torch.empty(*shape, problem.value_dim, dtype=torch.float64, device=device)
    lse = torch.empty(*shape, 1, dtype=torch.float64, device=device)
    for block, rows in enumerate(query_blocks(problem, blocks)):
        for heads in head_ranges(problem, blocks, len(rows)):
            sums = recurrence(tiles, heads, rows)
            for run in whole_runs if tiles.fused else visibility.runs(heads, block):
                sums.add(run)
            for output, block_output in zip((out, lse), sums.finish(), strict=True):
                place = heads.of(output)[:, :, :, rows.start : rows.stop]
                place.copy_(block_output.view(place.shape))
    return Outputs(out.flatten(1, 2), lse.flatten(1, 2).squeeze(-1))


class _Tiles:
    """Data that all tiles of one call share: promoted tensors, mods and the score buffer."""

    visibility: Visibility  # made for the blocks, which depend on these tensors

    def __init__(self, inputs: Inputs) -> None:
        problem = self.problem = inputs.problem
        self.device = inputs.q.device
        # k and v are promoted at once: they take O(kv) memory, unlike scores.
        q, self.k, self.v = (tensor.contiguous() for tensor in inputs.promoted())
        self.q = q.view(problem.batch, problem.kv_heads, problem.group, *q.shape[2:])
        self.score_mod = problem.score_mod(str(self.device))
        self.plain = is_identity(self.score_mod, self.device)
        self.sink = None if inputs.sink is None else self._by_key_head(inputs.sink.double())
        self.nonfinite = Nonfinite.among(self.v)
        if self.nonfinite:
            self.v = self.nonfinite.finite
        # With NaN in q or k the bound is NaN and compares false: ``_Online`` handles hidden NaN.
        small = self._largest_score() <= LARGEST_BOUNDED_SCORE
        self.bounded = self.plain and self.nonfinite is None and small
        self.bounded = self.bounded and all_moderate(self.v, inputs.v)
        self.fused = self.bounded and fused_tiles.takes(problem, self.device)
        self.columns = _columns(problem.value_dim)
        self.v = self.v if self.fused else with_ones(self.v)
        self._buffer = q.new_empty(0)

    def _by_key_head(self, sink: Tensor) -> Tensor:
        """Return a view ``(batch, kv_heads, group)`` of ``sink``, ``(heads,)``."""
        problem = self.problem
        return sink.view(problem.kv_heads, problem.group).expand(problem.batch, -1, -1)

    def _largest_score(self) -> float:
        """Return a bound of |scale·q·k| over all rows and keys, by Cauchy–Schwarz, and of sinks."""
        norms = [torch.linalg.vector_norm(tensor, dim=-1).amax() for tensor in (self.q, self.k)]
        of_keys = abs(self.problem.scale) * float(norms[0] * norms[1])
        return of_keys if self.sink is None else max(of_keys, float(self.sink.abs().amax()))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return ``scale · q·kᵀ`` of one tile, ``(heads, rows, keys)``, in the buffer.

        The scale is baddbmm's ``alpha``: q·k of 16-bit inputs is exact and then rounded once.
        """
        shape = (q.shape[0], q.shape[1], k.shape[1])
        if self._buffer.numel() < math.prod(shape):
            self._buffer = q.new_empty(math.prod(shape))
        tile = self._buffer[: math.prod(shape)].view(shape)
        return torch.baddbmm(tile, q, k.mT, beta=0, alpha=self.problem.scale, out=tile)


class _Rows:
    """Sums over the keys for the rows of one query block and range of heads."""

    def __init__(self, tiles: _Tiles, heads: Heads, rows: range) -> None:
        self.tiles, self.heads, self.rows = tiles, heads, rows
        q = heads.of(tiles.q)[:, :, :, rows.start : rows.stop]
        # Query heads that share a key head are rows of one product, so K is not repeated.
        self.q = q.flatten(0, 1).flatten(1, 2)
        # Σ weight · v, then Σ weight: ``(kv heads, group · rows, columns)`` as of ``with_ones``.
        self.sums = q.new_zeros(*self.q.shape[:2], tiles.columns)
        self.sink = None if tiles.sink is None else self._row_sink(tiles.sink)

    def _row_sink(self, sink: Tensor) -> Tensor:
        """Return each row's sink, ``(kv heads, group · rows, 1)``."""
        own = self.heads.of(sink).flatten(0, 1)[..., None]
        return own.expand(-1, -1, len(self.rows)).reshape(*self.q.shape[:2], 1)

    def add(self, run: Run) -> None:
        """Add the keys of one tile."""
        raise NotImplementedError

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return out and LSE of the rows."""
        raise NotImplementedError

    def keys(self, tensor: Tensor, run: Run) -> Tensor:
        """Return a tile's keys of a ``(batch, kv_heads, kv, …)`` tensor: ``(heads, keys, …)``."""
        return self.heads.of(tensor)[:, :, run.keys.start : run.keys.stop].flatten(0, 1)

    def by_index(self, tile: Tensor) -> Tensor:
        """Return a view of a tile with the axes of a mask, ``(batch, heads, rows, keys)``."""
        return tile.view(len(self.heads.batch), len(self.heads.query), len(self.rows), -1)

    def visible(self, run: Run) -> Tensor:
        """Return the mask's visibility of a partial tile."""
        return self.tiles.visibility.tile(self.heads, self.rows, run.keys)

    def seen(self, run: Run) -> Tensor | None:
        """Return the visibility of any tile, ``(batch, heads, rows, keys)``; None if all is."""
        sizes = len(self.heads.batch), len(self.heads.query), len(self.rows), len(run.keys)
        return self.visible(run).expand(sizes) if run.partial else None

    @property
    def total(self) -> Tensor:
        """Return a view of Σ weight, ``(kv heads, group · rows, 1)``."""
        column = self.tiles.problem.value_dim
        return self.sums[:, :, column : column + 1]

    def _quotient(self) -> Tensor:
        """Return Σ weight · v ÷ Σ weight; rows that attend to no key are 0."""
        values = self.sums[:, :, : self.tiles.problem.value_dim]
        return values / self.total.masked_fill(self.total == 0, 1.0)


class _Bounded(_Rows):
    """Softmax without a maximum, for |score| ≤ LARGEST_BOUNDED_SCORE and finite values.

    Nothing overflows or underflows, and it saves the rounding of score − maximum.
    """

    def __init__(self, tiles: _Tiles, heads: Heads, rows: range) -> None:
        super().__init__(tiles, heads, rows)
        if self.sink is not None:
            self.total.copy_(self.sink.exp())

    def add(self, run: Run) -> None:
        k, v = (self.keys(tensor, run) for tensor in (self.tiles.k, self.tiles.v))
        if self.tiles.fused:
            scale, seen = self.tiles.problem.scale, self.seen(run)
            fused_tiles.add_tile(self.sums, self.q, k, v, scale=scale, seen=seen)
            return
        weights = self.tiles.scores(self.q, k).exp_()
        if run.partial:
            self.by_index(weights).mul_(self.visible(run))  # finite weights: 0·weight = 0
        self.sums.baddbmm_(weights, v)

    def finish(self) -> tuple[Tensor, Tensor]:
        return self._quotient(), self.total.log()


class _Online(_Rows):
    """Milakov and Gimelshein's online softmax (2018): weights relative to the running maximum."""

    def __init__(self, tiles: _Tiles, heads: Heads, rows: range) -> None:
        super().__init__(tiles, heads, rows)
        # Maximum so far, including the sink, ``(kv heads, group · rows, 1)``.
        self.largest = torch.full_like(self.total, -math.inf)
        if self.sink is not None:  # like a first key with value 0
            self.largest = self.sink
            self.total.copy_(self.sink != -math.inf)
        # Numbers of attended values that are NaN, +∞ and −∞, if V is not finite.
        self.counts: Tensor | float = 0.0

    def add(self, run: Run) -> None:
        tile = self._scores(run)
        if self.tiles.nonfinite:
            attended = (tile != -math.inf).to(tile.dtype)
            self.counts = self.counts + attended @ self.keys(self.tiles.nonfinite.marks, run)
        raised = torch.maximum(self.largest, tile.amax(dim=-1, keepdim=True))
        # A row that has not attended to a key has no maximum yet: −∞ − (−∞) would be NaN.
        reference = raised.masked_fill(raised == -math.inf, 0.0)
        rescale = (self.largest - reference).exp_()
        weights = exponential(tile.sub_(reference))
        self.sums.mul_(rescale).baddbmm_(weights, self.keys(self.tiles.v, run))
        self.largest = raised

    def finish(self) -> tuple[Tensor, Tensor]:
        # log 0 = −∞ for a row without keys, whose maximum of −∞ must not be added to that.
        lse = self.largest.masked_fill(self.largest == -math.inf, 0.0) + self.total.log()
        out = self._quotient()
        return (out if isinstance(self.counts, float) else out + nonfinite_sums(self.counts)), lse

    def _scores(self, run: Run) -> Tensor:
        """Return the scores of a tile after score mod and mask."""
        tile = self.tiles.scores(self.q, self.keys(self.tiles.k, run))
        by_index = self.by_index(tile)
        if not self.tiles.plain:
            heads = self.heads
            indices = Indices.of(heads.batch, heads.query, self.rows, run.keys, self.tiles.device)
            # A score mod may return a view of its own table, which masking must not change.
            by_index.copy_(call_score_mod(self.tiles.score_mod, by_index, indices))
        if run.partial:
            by_index.masked_fill_(~self.visible(run), -math.inf)
        return tile


def all_moderate(values: Tensor, stored: Tensor | None = None) -> bool:
    """Return whether all values are 0 or in the range that LARGEST_BOUNDED_SCORE assumes.

    Args:
        values: Finite values.
        stored: The tensor that they were promoted from; some dtypes cannot exceed the range.
    """
    if stored is not None and stored.dtype in (torch.bfloat16, torch.float16, torch.float32):
        return True
    sizes = values.abs()
    largest = float(sizes.amax())
    smallest = float(sizes.masked_fill_(sizes == 0, 1.0).amin())
    return smallest >= _SMALLEST_BOUNDED_VALUE and largest <= _LARGEST_BOUNDED_VALUE


def with_ones(v: Tensor) -> Tensor:
    """Return ``v`` with a column of ones appended, then zeros to a multiple of 8 (64-byte rows)."""
    columns = v.shape[-1]
    wide = v.new_zeros(*v.shape[:-1], _columns(columns))
    wide[..., :columns] = v
    wide[..., columns] = 1.0
    return wide


def _columns(value_dim: int) -> int:
    return (value_dim // 8 + 1) * 8


def exponential(shifted: Tensor) -> Tensor:
    """Replace numbers ≤ 0 by their exponentials, and return them.

    MKL's float64 exp is 7 times slower for −∞ and underflow, which are frequent here; exp2 is not.
    The factor's two roundings cost 2·|x|·2^-53·exp(x) ≤ 0.74 units of 2^-53.
    """
    if shifted.device.type == "cpu":
        return shifted.mul_(math.log2(math.e)).exp2_()
    return shifted.exp_()


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Sizes of the tiles."""

    # Query rows of one batched product over all its heads: enough to fill the device.
    rows: int
    query: int  # fewest query rows per head in a tile (a causal diagonal wastes half of it)
    query_most: int  # most query rows per head in a tile, if few heads leave ``rows`` unfilled
    kv: int  # keys of a tile; the score buffer has ``rows`` · ``kv`` · 8 bytes
    cell: int  # keys per cell; a mask is classified, and tiles begin and end, by cells


_CPU = Blocks(rows=1024, query=256, query_most=512, kv=512, cell=64)
_GPU = Blocks(rows=32768, query=512, query_most=2048, kv=2048, cell=128)
# Fused tiles need no score buffer: 16 heads of 16,384 rows at once keep a GPU busy.
_FUSED = Blocks(rows=262144, query=512, query_most=16384, kv=16384, cell=128)


def blocks_for(device: torch.device, *, fused: bool = False) -> Blocks:
    """Return sizes for a CPU (score buffer of 4 MB, within its last cache) or GPU (512 MB or 0)."""
    return _CPU if device.type == "cpu" else _FUSED if fused else _GPU


# A backward has two tile buffers and five products, so a CPU's caches hold smaller tiles.
_CPU_BACKWARD = Blocks(rows=512, query=256, query_most=512, kv=512, cell=64)
_GPU_BACKWARD = Blocks(rows=16384, query=512, query_most=2048, kv=2048, cell=128)
_FUSED_BACKWARD = Blocks(rows=16384, query=512, query_most=1024, kv=4096, cell=128)


def backward_blocks_for(device: torch.device, *, fused: bool = False) -> Blocks:
    """Return sizes for a backward, with two score buffers: 2 MB, 256 MB or (fused) 512 MB each."""
    return _CPU_BACKWARD if device.type == "cpu" else _FUSED_BACKWARD if fused else _GPU_BACKWARD


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of one tile: all kv heads of several sequences, or some of one."""

    batch: range  # sequences
    kv: range  # key heads
    group: int  # query heads a key head

    @property
    def query(self) -> range:
        """Query heads."""
        return range(self.kv.start * self.group, self.kv.stop * self.group)

    def of(self, tensor: Tensor) -> Tensor:
        """Return these heads of a tensor ``(batch, kv_heads, …)``."""
        return tensor[self.batch.start : self.batch.stop, self.kv.start : self.kv.stop]


@dataclass(frozen=True, slots=True)
class Run:
    """Keys of a tile."""

    keys: range
    partial: bool  # whether some row of the tile does not see some of them


def query_blocks(problem: Problem, blocks: Blocks) -> list[range]:
    """Return the ranges of query rows that tiles are made of."""
    filled = blocks.rows // (problem.batch * problem.heads)
    size = min(max(filled, blocks.query), blocks.query_most, max(1, blocks.rows // problem.group))
    return _cut(range(problem.query), size)


def head_ranges(problem: Problem, blocks: Blocks, rows: int) -> Iterator[Heads]:
    """Yield ranges of heads whose tiles of ``rows`` query rows go into one batched product."""
    together = max(1, blocks.rows // (problem.group * rows))
    sequences = max(1, together // problem.kv_heads)
    for batch in _cut(range(problem.batch), sequences):
        for kv in _cut(range(problem.kv_heads), min(together, problem.kv_heads)):
            yield Heads(batch, kv, problem.group)


class Visibility:
    """Classes of a mask's tiles: they see nothing, something or everything.

    The mask is evaluated in strips, with memory of about a tile, and classified on its device; only
    the classes are copied to the host, once for a range of heads, or only once if the mask does not
    depend on the head.
    """

    def __init__(self, problem: Problem, blocks: Blocks, device: torch.device) -> None:
        self._mask_mod: MaskMod = problem.mask_mod(str(device))
        self._problem, self._blocks, self._device = problem, blocks, device
        self._queries = query_blocks(problem, blocks)
        # A mask that ignores batch and heads is evaluated once for all of them.
        all_heads = Heads(range(problem.batch), range(problem.kv_heads), problem.group)
        shape = self._visible(all_heads, range(1), range(1)).shape
        self.distinct = shape[0] * shape[1]  # masks of sequences and heads
        self._shared = self.distinct == 1
        self._runs: dict[Heads | None, list[list[Run]]] = {}
        self._tiles: dict[tuple[range, range], Tensor] = {}

    def runs(self, heads: Heads, block: int) -> list[Run]:
        """Return the tiles of query block number ``block`` that see something, in order."""
        key = None if self._shared else heads
        if key not in self._runs:
            self._runs[key] = self._classify(heads)
        return self._runs[key][block]

    def tile(self, heads: Heads, rows: range, keys: range) -> Tensor:
        """Return the mask's visibility of a partial tile, as ``mod_calls.call_mask`` does.

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
        return call_mask(self._mask_mod, indices)

    def _classify(self, heads: Heads) -> list[list[Run]]:
        sizes, length = self._blocks, self._problem.kv
        if len(self._queries) == 1 and length <= sizes.kv:
            return [[Run(range(length), partial=True)]]  # classifying a single tile saves nothing
        width, rows, together = sizes.kv // sizes.cell * sizes.cell or sizes.cell, self._queries, 1
        if self._shared:  # a shared strip may be as large as all heads' tile of scores
            most = 8 * sizes.rows * sizes.kv // len(rows[0])  # a bool has 1 byte, a score 8
            width, together = max(width, most // width * width), max(1, most // length)
        # Large strips, for few calls: nothing else runs until all is classified.
        strips = [
            torch.cat([self._cells(heads, blocks, keys) for keys in _cut(range(length), width)], -1)
            for blocks in (rows[i : i + together] for i in range(0, len(rows), together))
        ]
        some, every = torch.cat(strips, dim=1).tolist()
        return [self._merge(*each) for each in zip(some, every, strict=True)]

    def _cells(self, heads: Heads, blocks: list[range], keys: range) -> Tensor:
        """Return whether cells of query blocks see something, and all; ``(2, blocks, cells)``."""
        rows, cell = range(blocks[0].start, blocks[-1].stop), self._blocks.cell
        some, every = seen_by_blocks(self._visible(heads, rows, keys), len(blocks[0]), cell)
        shape = len(blocks), -(-len(keys) // cell)
        classes = some.flatten(0, 1).any(0).expand(shape), every.flatten(0, 1).all(0).expand(shape)
        return torch.stack(classes)

    def _merge(self, some: list[bool], every: list[bool]) -> list[Run]:
        """Merge neighbouring cells of one class into tiles of at most ``kv`` keys."""
        cell, length = self._blocks.cell, self._problem.kv
        most = max(self._blocks.kv // cell, 1) * cell
        runs: list[Run] = []
        first = last = 0
        for (seen, whole), neighbours in itertools.groupby(zip(some, every, strict=True)):
            first, last = last, last + len(list(neighbours))
            if seen:
                keys = range(first * cell, min(last * cell, length))
                runs += [Run(part, partial=not whole) for part in _cut(keys, most)]
        return runs


def _cut(whole: range, size: int) -> list[range]:
    starts = range(whole.start, whole.stop, size)
    return [range(start, min(start + size, whole.stop)) for start in starts]


# Scores of one block of rows. The softmax holds about six such arrays: 6 MB on a CPU, about the
# size of its last cache, and 1.5 GB on a GPU.
_CPU_SCORES, _GPU_SCORES = 2**17, 2**25


def softmax_by_rows(inputs: Inputs, *, block_scores: int | None = None) -> Outputs:
    """Return the softmax of ``inputs.x`` on its device, computed some rows at a time.

    Args:
        inputs: Of a Problem whose operation is softmax; raises ProblemError for attention.
        block_scores: Number of scores to hold at a time; at least one row is held.

    Returns:
        Float64 out ``(batch, heads, query, kv)`` and natural-log LSE ``(batch, heads, query)``:
        0 and −∞ for a row that is −∞ throughout.
    """
    x = inputs.x
    if x is None:
        raise ProblemError(f"{inputs.problem.operation} has no scores as inputs.")
    numbers, rows = Float64(x.device), x.reshape(1, 1, -1, x.shape[-1])
    out = torch.empty(rows.shape, dtype=torch.float64, device=x.device)
    lse = torch.empty(*rows.shape[:-1], 1, dtype=torch.float64, device=x.device)
    # Rows are independent: the block size does not change a bit.
    at_once = block_scores or (_CPU_SCORES if x.device.type == "cpu" else _GPU_SCORES)
    step = max(1, at_once // x.shape[-1])
    for start in range(0, rows.shape[2], step):
        block = slice(start, start + step)
        scores = rows[:, :, block].double()
        attended = ~numbers.is_minus_infinity(scores)
        out[:, :, block], lse[:, :, block] = safe(numbers, scores, attended)
    return Outputs(out.view(x.shape), lse.view(x.shape[:-1]))
