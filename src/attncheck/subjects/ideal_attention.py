"""The ideal kernel's forward pass over attention inputs; ``Ideal`` says what is rounded where."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.formats import fp32
from attncheck.mods import library
from attncheck.outputs import Outputs
from attncheck.subjects.ideal_steps import finite, padded, power_of_two, weighted

if TYPE_CHECKING:
    from attncheck.inputs import Inputs
    from attncheck.mods.signatures import MaskMod
    from attncheck.problem import Problem
    from attncheck.subjects.ideal import Ideal

__all__ = ["Index", "Pass", "attention"]

# Scores held at a time: 4 million of them are 16 MiB in fp32, 32 MiB in float64.
_SCORES_AT_A_TIME = 2**22


def attention(kernel: Ideal, inputs: Inputs) -> Outputs:
    """Out and LSE of ``kernel`` on ``inputs``."""
    return Pass(kernel, inputs).outputs()


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Where a tile of scores lies: integer tensors that broadcast to (batch, heads, rows, keys).

    Attributes:
        b: Sequence, (batch, 1, 1, 1).
        h: Query head, (1, heads, 1, 1).
        q_idx: Query row, (1, 1, rows, 1).
        kv_idx: Key, (1, 1, 1, keys).
    """

    b: torch.Tensor
    h: torch.Tensor
    q_idx: torch.Tensor
    kv_idx: torch.Tensor


@dataclass(slots=True)
class _Running:
    """What the online softmax carries from tile to tile; ``(batch, heads, rows[, value_dim])``."""

    maximum: torch.Tensor
    total: torch.Tensor
    out: torch.Tensor


class _Factors:
    """The fp32 numbers that scores and outputs are multiplied by.

    Tensors that broadcast to ``(batch, heads, rows)``.

    Attributes:
        scale: Of q·k.
        exponent: Of the difference of two scores, for exp2 (the docstring's c).
        log2_e: Of natural numbers, for exp2.
        weights: Of P before it is rounded.
        out: Of O at the end.
    """

    def __init__(self, kernel: Ideal, inputs: Inputs) -> None:
        problem, device = inputs.problem, inputs.device
        products = values = torch.ones((1, 1, 1), dtype=torch.float32, device=device)
        if inputs.descale is not None:
            given = (inputs.descale.q * inputs.descale.k, inputs.descale.v)
            products, values = (x.repeat_interleave(problem.group, 1)[..., None] for x in given)
        self.scale = problem.scale * products
        log2_scale = fp32(problem.scale * kernel.log2_e)
        self.log2_e = fp32(kernel.log2_e)
        of_nats = torch.full_like(products, self.log2_e)
        self.exponent = of_nats if _in_nats(problem) else log2_scale * products
        self.weights = kernel.weights_scale(problem)
        self.out = values / self.weights


class Pass:
    """One forward pass over prepared inputs.

    Attributes:
        kernel: Whose hooks are called.
        problem: Of the inputs.
        tile: The kernel's tiling.
        q, k, v: As a product reads them, in fp32, up to a whole number of tiles.
        factors: What scores and outputs are multiplied by.
        mask, score: The Problem's mods; ``score`` None where there is none.
        in_nats: Whether scores are multiplied by the scale before the softmax.
        sink: Each head's, if any.
    """

    def __init__(self, kernel: Ideal, inputs: Inputs) -> None:
        self.kernel = kernel
        self.problem = problem = inputs.problem
        self.tile = kernel.tiling(problem, inputs.device.type)
        self.device = str(inputs.device)
        fmt = problem.formats.products
        self.q = padded(kernel.operand(inputs.q.float(), fmt), self.tile.block_query)
        self.k = padded(kernel.operand(inputs.k.float(), fmt), self.tile.block_kv)
        self.v = padded(kernel.operand(inputs.v.float(), fmt), self.tile.block_kv)
        self.v_is_finite = bool(torch.isfinite(self.v).all())
        self.mask = problem.mask_mod(self.device)
        self.score = None if problem.score == library.NONE else problem.score_mod(self.device)
        self.factors = _Factors(kernel, inputs)
        self.in_nats = _in_nats(problem)
        self.sink = inputs.sink

    def outputs(self) -> Outputs:
        """Out and LSE."""
        problem = self.problem
        parts = [self._rows(rows) for rows in self.row_blocks()]
        out = torch.cat([part.out for part in parts], dim=2)[:, :, : problem.query]
        lse = torch.cat([part.lse for part in parts if part.lse is not None], dim=2)
        return Outputs(out, lse[:, :, : problem.query])

    def row_blocks(self) -> list[slice]:
        """Whole tiles of query rows: as many at a time as scores may be held."""
        per_block = self.problem.batch * self.problem.heads
        per_block *= self.tile.block_query * self.tile.block_kv
        step = max(1, _SCORES_AT_A_TIME // per_block) * self.tile.block_query
        last = self.q.shape[2]
        return [slice(i, min(i + step, last)) for i in range(0, last, step)]

    def key_tiles(self) -> list[slice]:
        """Tiles of keys in the order of the tiling."""
        size = self.tile.block_kv
        tiles = [slice(start, start + size) for start in range(0, self.k.shape[2], size)]
        return tiles[::-1] if self.tile.reverse else tiles

    def _rows(self, rows: slice) -> Outputs:
        q = self.q[:, :, rows]
        running = self._start(q)
        for keys in self.key_tiles():
            seen, at = self.seen(rows, keys)
            if bool(seen.any()):
                s = self.modified(self.logits(q, keys), seen, at)
                step = self._flash1 if self.tile.recurrence == "flash1" else self._flash2
                step(running, s, seen, self.expanded(self.v[:, :, keys]))
        return self._finish(running)

    def _start(self, q: torch.Tensor) -> _Running:
        """Before the first tile: nothing, or the sink, as a tile of one such key leaves it."""
        shape = q.shape[:3]
        maximum, total = q.new_full(shape, self.kernel.first_maximum), q.new_zeros(shape)
        if self.sink is not None:
            maximum = self.sink[:, None].expand(shape)
            total = (~torch.isneginf(maximum)).to(total.dtype)
        return _Running(maximum, total, q.new_zeros((*shape, self.problem.value_dim)))

    def seen(self, rows: slice, keys: slice) -> tuple[torch.Tensor, Index]:
        """Which keys the rows see; padding is asked about as the last row and key, then hidden."""
        problem = self.problem
        row = torch.arange(rows.start, rows.stop, device=self.device)
        key = torch.arange(keys.start, keys.stop, device=self.device)
        at = Index(
            b=torch.arange(problem.batch, device=self.device).view(-1, 1, 1, 1),
            h=torch.arange(problem.heads, device=self.device).view(1, -1, 1, 1),
            q_idx=row.clamp(max=problem.query - 1).view(1, 1, -1, 1),
            kv_idx=key.clamp(max=problem.kv - 1).view(1, 1, 1, -1),
        )
        inside = self.kernel.inside(key, problem.kv).view(1, 1, 1, -1)
        seen = self.visible(self.mask, at) & inside
        return seen.expand(problem.batch, problem.heads, len(row), -1), at

    def visible(self, mask: MaskMod, at: Index) -> torch.Tensor:
        """Which keys of a tile there are to see, as the kernel says."""
        return self.kernel.visible(mask, at)

    def logits(self, q: torch.Tensor, keys: slice) -> torch.Tensor:
        """Scores of a tile before score mod and mask: q·k, or natural ones."""
        s = self.kernel.scores(self.product(q, self.expanded(self.k[:, :, keys]).mT))
        return s * self.factors.scale[..., None] if self.in_nats else s

    def modified(self, s: torch.Tensor, seen: torch.Tensor, at: Index) -> torch.Tensor:
        """Scores of a tile after the score mod, −∞ where not seen."""
        if self.score:
            # A mod that computes in float64 gives an fp32 kernel an fp32 number all the same.
            s = self.score(s, at.b, at.h, at.q_idx, at.kv_idx).to(s.dtype)
        return torch.where(seen, s, self.kernel.hidden_score)

    def _flash2(self, run: _Running, s: torch.Tensor, seen: torch.Tensor, v: torch.Tensor) -> None:
        maximum = self._moved(run.maximum, s.amax(-1))
        p = self._weights(s, maximum)
        alpha = self._power(run.maximum, maximum)
        total = self.kernel.rescaled(run.total, alpha)
        run.total = self.kernel.added(total, self._row_sum(p))
        out = self.kernel.rescaled(run.out, alpha[..., None])
        run.out = self.kernel.added(out, self._weighted(p, seen, v))
        run.maximum = maximum

    def _flash1(self, run: _Running, s: torch.Tensor, seen: torch.Tensor, v: torch.Tensor) -> None:
        own = s.amax(-1)
        p = self._weights(s, own)
        maximum = torch.maximum(run.maximum, own)
        before = self.kernel.rescaled(run.total, self._power(run.maximum, maximum))
        beta = self._power(own, maximum)
        run.total = self.kernel.added(before, beta * self._row_sum(p))
        out = self.kernel.rescaled(run.out, before[..., None])
        out = self.kernel.added(out, beta[..., None] * self._weighted(p, seen, v))
        run.out = out / torch.where(run.total == 0, 1.0, run.total)[..., None]
        run.maximum = maximum

    def _moved(self, old: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
        """The running maximum after a tile; a lazy one stays while it grows by little."""
        new = torch.maximum(old, tile)
        if not self.tile.lazy_rescale:
            return new
        growth = (new - old) * self.factors.exponent
        stays = (growth <= self.tile.lazy_rescale) & ~torch.isneginf(old)
        return torch.where(stays, old, new)

    def _weights(self, s: torch.Tensor, maximum: torch.Tensor) -> torch.Tensor:
        """exp2 of the scores below ``maximum``, in fp32; 0 where a score is −∞."""
        base, c = finite(maximum)[..., None], self.factors.exponent[..., None]
        if self.in_nats:
            # The difference first: c times a finite score may be beyond fp32.
            return power_of_two(self.kernel.exp2, (s - base) * c, s)
        # A fused multiply-add: float64 holds s·c exactly, and the sum is rounded to fp32.
        exponent = (s.double() * c - (base * c).double()).float()
        return power_of_two(self.kernel.exp2, exponent, s)

    def _power(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """What a weight relative to ``old`` is to be multiplied by to be relative to ``new``."""
        exponent = (old - finite(new)) * self.factors.exponent
        return power_of_two(self.kernel.exp2, exponent, old)

    def _row_sum(self, p: torch.Tensor) -> torch.Tensor:
        return self.kernel.row_sum(p, self.problem, self.factors.weights)

    def _weighted(self, p: torch.Tensor, seen: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """P·V; a value that is not finite goes to the rows that see its key, and to no other."""
        p = self.kernel.operand(p * self.factors.weights, self.problem.formats.weights)
        return self.product(p, v) if self.v_is_finite else weighted(self.product, p, seen, v)

    def _finish(self, run: _Running) -> Outputs:
        dead = run.total == 0
        out = run.out
        if self.tile.recurrence == "flash2":
            out = self.kernel.normalised(out, torch.where(dead, 1.0, run.total)[..., None])
        out = torch.where(dead[..., None], 0.0, out * self.factors.out[..., None])
        log = torch.log(torch.where(dead, 1.0, run.total).double()).float()
        unit = 1.0 if self.in_nats else self.factors.scale
        lse = torch.where(dead, -math.inf, run.maximum * unit + log)
        return Outputs(out.to(self.problem.formats.output.torch_dtype), lse)

    def expanded(self, kv: torch.Tensor) -> torch.Tensor:
        """Each key head as often as there are query heads that share it."""
        return kv.repeat_interleave(self.problem.group, dim=1)

    def product(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """(batch, heads, rows, n) × (batch, heads, n, m), one whole tile of rows at a time."""
        batch, heads, length, inner = rows.shape
        blocks = length // self.tile.block_query
        tiles = rows.reshape(batch * heads * blocks, self.tile.block_query, inner)
        repeated = columns.flatten(0, 1).repeat_interleave(blocks, dim=0)
        return self.kernel.product(tiles, repeated).view(batch, heads, length, -1)


def _in_nats(problem: Problem) -> bool:
    """Whether scores are multiplied by the scale before the softmax: mods and sinks are natural."""
    return problem.score != library.NONE or problem.sink
