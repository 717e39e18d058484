"""Exact gradients in float64 with O(N) memory, by plain torch.

As in the streaming forward, passes over memory determine the speed. A tile costs five products and,
between them,

* if scores are known to be small (``_Bounded``), one exponential and one product in place:
  exp(score) needs no LSE subtracted, since exp(−LSE) is a factor of its row and goes into dO. On a
  GPU that does both within the products' kernel (``fused_tiles``) they cost no pass;
* otherwise P from the LSE, the slope of the score mod, and the removal of hidden keys
  (``_General``).

dO has an additional column of dLSE − delta and V one of ones, so that dO·Vᵀ gives dP − delta + dLSE
without a pass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Inputs
from attncheck.mods.captured_gradients import CapturedSums
from attncheck.oracles import fused_tiles
from attncheck.oracles.float64_numbers import Nonfinite, nonfinite_sums
from attncheck.oracles.mod_calls import Indices, call_score_mod_with_slope, is_identity
from attncheck.oracles.streaming_forward import (
    Blocks,
    Heads,
    Run,
    Visibility,
    all_moderate,
    backward_blocks_for,
    exponential,
    head_ranges,
    query_blocks,
    streaming,
    with_ones,
)

# |score| up to which exp(score) and exp(−LSE) may be separate factors. exp(−LSE)·dO·V, summed over
# up to 2^16 columns, is below 2^(256 + 128 + 128 + 16). LSE is at most the largest score plus
# ln 2^32, so exp(−LSE)·dO·V is at least 2^−(256 + 32 + 149 + 149), a normal number.
LARGEST_BOUNDED_SCORE = 256 * math.log(2)


def streaming_backward(inputs: Inputs, *, blocks: Blocks | None = None) -> Outputs:
    """Return the gradients of ``inputs`` on their device, in float64 and O(query + kv) memory.

    Args:
        inputs: With a loss; raises ProblemError without one.
        blocks: Tile sizes; the result depends on them only by rounding.

    Returns:
        Float64 out, lse and gradients: dq ``(batch, heads, query, head_dim)``, dk and dv with
        kv_heads, dsink ``(heads,)`` of a Problem with a sink, dcaptured ``(numbers,)`` of one with
        dcaptured.
    """
    sums = _Sums(inputs, streaming(inputs), blocks)
    blocked = list(enumerate(query_blocks(inputs.problem, sums.blocks)))
    # The last rows take longest under a causal mask: starting there, the host stays ahead of a GPU.
    for block, rows in reversed(blocked) if sums.fused else blocked:
        for heads in head_ranges(inputs.problem, sums.blocks, len(rows)):
            tiles = (_Bounded if sums.bounded else _General)(sums, heads, rows)
            for run in sums.visibility.runs(heads, block):
                tiles.add(run)
            tiles.finish()
    return sums.outputs()


class _Sums:
    """Data that all tiles of one call share: promoted tensors, mods, buffers, gradients.

    Axes are ``(batch, kv_heads, group, query, …)`` of tensors of rows and
    ``(batch, kv_heads, kv, …)`` of tensors of keys.

    Attributes:
        terms: dLSE − delta of each row.
        attends: Whether a row attends to any key; only set if ``careful``.
        careful: Whether 0 times some number may be NaN.
        marks: Positions of NaN, +∞ and −∞ in dO; None if it is finite.
        dk: Transposed, ``(batch, kv_heads, head_dim, kv)``, and without the scale; dv is transposed
            too. Xᵀ·tile is a third faster than tileᵀ·X on a CPU.
        captured: Gradients of the tensors that the score mod reads, if they have gradients.
        counts: For each key, how many rows that attend to it have NaN, +∞ and −∞ in dO, transposed.
    """

    def __init__(self, inputs: Inputs, forward: Outputs, blocks: Blocks | None) -> None:
        self.problem, self.sink, self.forward = inputs.problem, inputs.sink, forward
        device = inputs.q.device
        assert forward.lse is not None
        q, k, v = (tensor.contiguous() for tensor in inputs.promoted())
        dout, dlse = inputs.loss()
        of_rows = (q, dout, dlse[..., None], forward.lse[..., None], forward.out)
        q, dout, self.dlse, self.lse, out = (self._by_key_head(x) for x in of_rows)
        self.terms = self.dlse - (dout * out).sum(dim=-1, keepdim=True)
        self.attends = torch.zeros_like(self.lse, dtype=torch.bool)
        self.score_mod = self.problem.score_mod(str(device))
        self.plain = is_identity(self.score_mod, device)
        wanted = self.problem.dcaptured
        self.captured = CapturedSums(self.score_mod, device) if wanted else None
        nonfinite = [Nonfinite.among(x) for x in (q, k, v, dout)]
        finite_lse_loss = bool(torch.isfinite(self.dlse).all())
        self.careful = not self.plain or any(nonfinite) or not finite_lse_loss
        self.bounded = (
            not self.careful
            and _has_small_scores(inputs)
            and all_moderate(v, inputs.v)
            and all_moderate(dout)
        )
        self.q, self.k, self.v, self.dout = q, k, with_ones(v), dout
        # Without non-finite numbers, as factors in sums to which only some rows or keys contribute.
        self.q0, self.k0, self.dout0 = (
            whole if part is None else part.finite
            for whole, part in ((q, nonfinite[0]), (k, nonfinite[1]), (dout, nonfinite[3]))
        )
        self.marks = None if nonfinite[3] is None else nonfinite[3].marks
        self.dq, self.dk, self.dv = torch.empty_like(q), _transposed_zeros(k), _transposed_zeros(v)
        self.counts = None if self.marks is None else _transposed_zeros(v.repeat(1, 1, 1, 3))
        self.fused = self.bounded and fused_tiles.takes(self.problem, device, backward=True)
        self.blocks = blocks or backward_blocks_for(device, fused=self.fused)
        self.visibility = Visibility(self.problem, self.blocks, device)
        self._buffers = [q.new_empty(0), q.new_empty(0)]

    def _by_key_head(self, tensor: Tensor) -> Tensor:
        heads = (self.problem.batch, self.problem.kv_heads, self.problem.group)
        return tensor.contiguous().view(*heads, *tensor.shape[2:])

    def product(self, number: int, left: Tensor, right: Tensor, factor: float = 1.0) -> Tensor:
        """Return ``factor · left·rightᵀ``, ``(heads, rows, keys)``, in buffer ``number``."""
        tile = self.buffer(number, (left.shape[0], left.shape[1], right.shape[1]))
        return torch.baddbmm(tile, left, right.mT, beta=0, alpha=factor, out=tile)

    def buffer(self, number: int, shape: tuple[int, int, int]) -> Tensor:
        """Return buffer ``number`` as a tensor of ``shape``, not cleared."""
        if self._buffers[number].numel() < math.prod(shape):
            self._buffers[number] = self.q.new_empty(math.prod(shape))
        return self._buffers[number][: math.prod(shape)].view(shape)

    def outputs(self) -> Outputs:
        """Return all results, after every tile was added."""
        dq, dk = self.dq.flatten(1, 2), self.dk.mT * self.problem.scale
        dv = self.dv.mT.contiguous()
        if self.counts is not None:
            dv += nonfinite_sums(self.counts.mT)
        dsink = None if self.sink is None else self._dsink(self.sink)
        dcaptured = None if self.captured is None else self.captured.sums
        return Outputs(self.forward.out, self.forward.lse, dq, dk, dv, dsink, dcaptured)

    def _dsink(self, sink: Tensor) -> Tensor:
        """Return ``Σ P_sink (dLSE − delta)``, ``(heads,)``."""
        logits = sink.double().view(1, self.problem.kv_heads, self.problem.group, 1, 1)
        # A sink of −∞ has weight 0 even in a row whose LSE is −∞.
        weighs = logits != -math.inf
        weights = torch.where(weighs, (logits - self.lse).exp(), 0.0)
        # A row that attends to no key has out = 0, so delta is 0 even if dO holds NaN.
        terms = torch.where(self.attends, self.terms, self.dlse) if self.careful else self.terms
        return torch.where(weighs, weights * terms, 0.0).sum(dim=(0, 3, 4)).flatten()


class _Rows:
    """Rows of one query block and range of heads; axes ``(kv heads, group · rows, …)``."""

    def __init__(self, sums: _Sums, heads: Heads, rows: range) -> None:
        self.sums, self.heads, self.rows = sums, heads, rows
        # Query heads that share a key head are rows of one product, which sums over the group.
        self.q, self.lse = self.mine(sums.q), self.mine(sums.lse)
        self.lse = self.lse.masked_fill(self.lse == -math.inf, 0.0)
        # With this column of dO and V's column of ones, dO·Vᵀ adds dLSE − δ at no cost.
        self.loss = torch.cat([self.mine(sums.dout), self.mine(sums.terms)], dim=-1)
        columns = sums.v.shape[-1] - self.loss.shape[-1]
        self.loss = torch.nn.functional.pad(self.loss, (0, columns))
        self.dq = torch.zeros_like(self.q)  # of the tiles so far, without the scale

    def mine(self, tensor: Tensor) -> Tensor:
        """Return these rows of a tensor ``(batch, kv_heads, group, query, …)``."""
        part = self.heads.of(tensor)[:, :, :, self.rows.start : self.rows.stop]
        return part.flatten(0, 1).flatten(1, 2)

    def keys(self, tensor: Tensor, run: Run) -> Tensor:
        """Return a view of a tile's keys, ``(kv heads, keys, …)``."""
        part = self.heads.of(tensor)[:, :, run.keys.start : run.keys.stop]
        return part.view(-1, *part.shape[2:])

    def turned(self, tensor: Tensor, run: Run) -> Tensor:
        """Return a view of a tile's keys in a transposed tensor, ``(kv heads, …, keys)``."""
        part = self.heads.of(tensor)[..., run.keys.start : run.keys.stop]
        return part.view(-1, *part.shape[2:])

    def by_index(self, tile: Tensor) -> Tensor:
        """Return a view of a tile with the axes of a mask, ``(batch, heads, rows, keys)``."""
        return tile.view(len(self.heads.batch), len(self.heads.query), len(self.rows), -1)

    def visible(self, run: Run) -> Tensor:
        """Return the mask's visibility of a partial tile."""
        return self.sums.visibility.tile(self.heads, self.rows, run.keys)

    def seen(self, run: Run) -> Tensor | None:
        """Return the visibility of any tile, ``(batch, heads, rows, keys)``; None if all is."""
        sizes = len(self.heads.batch), len(self.heads.query), len(self.rows), len(run.keys)
        return self.visible(run).expand(sizes) if run.partial else None

    def add(self, run: Run) -> None:
        """Add the keys of one tile."""
        raise NotImplementedError

    def finish(self) -> None:
        """Store dq of the rows."""
        dq = self.heads.of(self.sums.dq)[:, :, :, self.rows.start : self.rows.stop]
        dq.copy_(self.dq.mul_(self.sums.problem.scale).view(dq.shape))


class _Bounded(_Rows):
    """Gradients for |score| ≤ LARGEST_BOUNDED_SCORE, finite and moderate numbers, no score mod."""

    def __init__(self, sums: _Sums, heads: Heads, rows: range) -> None:
        super().__init__(sums, heads, rows)
        self.loss *= self.lse.neg().exp_()
        self.dout = self.loss[..., : sums.problem.value_dim].contiguous()

    def add(self, run: Run) -> None:
        sums = self.sums
        k, v, scale = self.keys(sums.k, run), self.keys(sums.v, run), sums.problem.scale
        if sums.fused and len(run.keys) % 2 == 0:
            shape = (*self.q.shape[:2], len(run.keys))
            weights, dx = sums.buffer(0, shape), sums.buffer(1, shape)
            values, seen = v[:, :, : sums.problem.value_dim], self.seen(run)
            operands = self.q, k, self.loss, values
            fused_tiles.fill_tiles((weights, dx), *operands, scale=scale, seen=seen)
        else:
            weights = sums.product(0, self.q, k, scale).exp_()
            if run.partial:
                self.by_index(weights).mul_(self.visible(run))  # finite: 0·weight = 0
            dx = sums.product(1, self.loss, v).mul_(weights)
        self.turned(sums.dv, run).baddbmm_(self.dout.mT, weights)
        self.dq.baddbmm_(dx, k)
        self.turned(sums.dk, run).baddbmm_(self.q.mT, dx)


class _General(_Rows):
    """Gradients for any scores and score mods, and for numbers that are not finite."""

    def __init__(self, sums: _Sums, heads: Heads, rows: range) -> None:
        super().__init__(sums, heads, rows)
        self.q0, self.dout0 = self.mine(sums.q0), self.mine(sums.dout0)

    def add(self, run: Run) -> None:
        sums = self.sums
        tile = sums.product(0, self.q, self.keys(sums.k, run), sums.problem.scale)
        products = None if sums.captured is None else self.by_index(tile).clone()
        slopes = None if sums.plain else self._apply_score_mod(tile, run)
        if run.partial:
            self.by_index(tile).masked_fill_(~self.visible(run), -math.inf)
        hidden = (tile == -math.inf) if sums.careful else None
        weights = exponential(tile.sub_(self.lse))
        dx = sums.product(1, self.loss, self.keys(sums.v, run)).mul_(weights)
        if products is not None and hidden is not None:
            self._captured(products, dx, ~hidden, run)
        if slopes is not None:
            self.by_index(dx).mul_(slopes)
        if hidden is not None:
            self._hide(hidden, weights, dx, run)
        self.turned(sums.dv, run).baddbmm_(self.dout0.mT, weights)
        self.dq.baddbmm_(dx, self.keys(sums.k0, run))
        self.turned(sums.dk, run).baddbmm_(self.q0.mT, dx)

    def _apply_score_mod(self, tile: Tensor, run: Run) -> Tensor | None:
        """Replace the products by scores; return the score mod's slopes, None if all are 1."""
        by_index = self.by_index(tile)
        after, slopes = call_score_mod_with_slope(self.sums.score_mod, by_index, self._indices(run))
        # A score mod may return a view of its own table, which masking must not change.
        by_index.copy_(after)
        return slopes

    def _captured(self, products: Tensor, dz: Tensor, attended: Tensor, run: Run) -> None:
        assert self.sums.captured is not None, "called where there are such"
        at = self._indices(run).axes
        self.sums.captured.add(products, at, self.by_index(dz), self.by_index(attended))

    def _indices(self, run: Run) -> Indices:
        heads = self.heads
        return Indices.of(heads.batch, heads.query, self.rows, run.keys, self.q.device)

    def _hide(self, hidden: Tensor, weights: Tensor, dx: Tensor, run: Run) -> None:
        """Clear hidden scores, which may be NaN; note attending rows and count non-finite dO."""
        sums = self.sums
        weights.masked_fill_(hidden, 0.0)
        dx.masked_fill_(hidden, 0.0)
        attends = self.heads.of(sums.attends)[:, :, :, self.rows.start : self.rows.stop]
        attends |= (~hidden).any(dim=-1).view(attends.shape)
        if sums.marks is not None and sums.counts is not None:
            marks = self.mine(sums.marks)
            self.turned(sums.counts, run).baddbmm_(marks.mT, (~hidden).to(marks.dtype))


def _transposed_zeros(tensor: Tensor) -> Tensor:
    """Return zeros of the shape of ``tensor`` with its last two axes exchanged."""
    return tensor.new_zeros(tensor.mT.shape)


def _has_small_scores(inputs: Inputs) -> bool:
    """Return whether no |score| or |sink| exceeds LARGEST_BOUNDED_SCORE (by Cauchy–Schwarz)."""
    q, k, _ = inputs.promoted()
    norms = [torch.linalg.vector_norm(tensor, dim=-1).amax() for tensor in (q, k)]
    largest = abs(inputs.problem.scale) * float(norms[0] * norms[1])
    if inputs.sink is not None:
        largest = max(largest, float(inputs.sink.abs().amax()))
    return largest <= LARGEST_BOUNDED_SCORE
