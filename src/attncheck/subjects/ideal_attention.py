"""The ideal kernel's forward pass over attention inputs; ``Ideal`` says what is rounded where."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.formats import fp32
from attncheck.mods import library
from attncheck.outputs import Outputs

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.inputs import Inputs
    from attncheck.problem import Problem
    from attncheck.subjects.ideal import Ideal

__all__ = ["Index", "attention"]

# Scores held at a time: 4 million of them are 16 MiB in fp32, 32 MiB in float64.
_SCORES_AT_A_TIME = 2**22


def attention(kernel: Ideal, inputs: Inputs) -> Outputs:
    """Out and LSE of ``kernel`` on ``inputs``."""
    return _Pass(kernel, inputs).outputs()


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
        log2_e = fp32(kernel.log2_e)
        in_nats = _in_nats(problem)
        self.exponent = torch.full_like(products, log2_e) if in_nats else log2_scale * products
        self.weights = kernel.weights_scale(problem)
        self.out = values / self.weights


class _Pass:
    """One forward pass over prepared inputs."""

    def __init__(self, kernel: Ideal, inputs: Inputs) -> None:
        self.kernel = kernel
        self.problem = problem = inputs.problem
        self.tile = kernel.tiling(problem, inputs.device.type)
        self.device = str(inputs.device)
        fmt = problem.formats.products
        self.q = _padded(kernel.operand(inputs.q.float(), fmt), self.tile.block_query)
        self.k = _padded(kernel.operand(inputs.k.float(), fmt), self.tile.block_kv)
        self.v = _padded(kernel.operand(inputs.v.float(), fmt), self.tile.block_kv)
        self.v_is_finite = bool(torch.isfinite(self.v).all())
        self.mask = problem.mask_mod(self.device)
        self.score = None if problem.score == library.NONE else problem.score_mod(self.device)
        self.factors = _Factors(kernel, inputs)
        self.in_nats = _in_nats(problem)
        self.sink = inputs.sink

    def outputs(self) -> Outputs:
        problem = self.problem
        per_block = problem.batch * problem.heads * self.tile.block_query * self.tile.block_kv
        step = max(1, _SCORES_AT_A_TIME // per_block) * self.tile.block_query
        parts = [self._rows(i, i + step) for i in range(0, self.q.shape[2], step)]
        out = torch.cat([part.out for part in parts], dim=2)[:, :, : problem.query]
        lse = torch.cat([part.lse for part in parts if part.lse is not None], dim=2)
        return Outputs(out, lse[:, :, : problem.query])

    def _rows(self, first: int, last: int) -> Outputs:
        q = self.q[:, :, first:last]
        running = self._start(q)
        starts = list(range(0, self.k.shape[2], self.tile.block_kv))
        for start in reversed(starts) if self.tile.reverse else starts:
            seen, at = self._seen(first, q.shape[2], start)
            if bool(seen.any()):
                keys = slice(start, start + self.tile.block_kv)
                s = self._scores(q, seen, at, keys)
                step = self._flash1 if self.tile.recurrence == "flash1" else self._flash2
                step(running, s, seen, self._kv_heads_expanded(self.v[:, :, keys]))
        return self._finish(running)

    def _start(self, q: torch.Tensor) -> _Running:
        """Before the first tile: nothing, or the sink, as a tile of one such key leaves it."""
        shape = q.shape[:3]
        maximum, total = q.new_full(shape, self.kernel.first_maximum), q.new_zeros(shape)
        if self.sink is not None:
            maximum = self.sink[:, None].expand(shape)
            total = (~torch.isneginf(maximum)).to(total.dtype)
        return _Running(maximum, total, q.new_zeros((*shape, self.problem.value_dim)))

    def _seen(self, first: int, rows: int, start: int) -> tuple[torch.Tensor, Index]:
        """Which keys the rows see; padding is asked about as the last row and key, then hidden."""
        problem, keys = self.problem, torch.arange(self.tile.block_kv, device=self.device) + start
        row = torch.arange(first, first + rows, device=self.device)
        at = Index(
            b=torch.arange(problem.batch, device=self.device).view(-1, 1, 1, 1),
            h=torch.arange(problem.heads, device=self.device).view(1, -1, 1, 1),
            q_idx=row.clamp(max=problem.query - 1).view(1, 1, -1, 1),
            kv_idx=keys.clamp(max=problem.kv - 1).view(1, 1, 1, -1),
        )
        inside = self.kernel.inside(keys, problem.kv).view(1, 1, 1, -1)
        seen = self.kernel.visible(self.mask, at) & inside
        return seen.expand(problem.batch, problem.heads, rows, -1), at

    def _scores(self, q: torch.Tensor, seen: torch.Tensor, at: Index, keys: slice) -> torch.Tensor:
        """Scores of a tile, −∞ where not seen: q·k, or natural ones, the score mod's."""
        s = self.kernel.scores(self._product(q, self._kv_heads_expanded(self.k[:, :, keys]).mT))
        if self.in_nats:
            s = s * self.factors.scale[..., None]
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
        base, c = _finite(maximum)[..., None], self.factors.exponent[..., None]
        if self.in_nats:
            # The difference first: c times a finite score may be beyond fp32.
            return _power_of_two(self.kernel.exp2, (s - base) * c, s)
        # A fused multiply-add: float64 holds s·c exactly, and the sum is rounded to fp32.
        exponent = (s.double() * c - (base * c).double()).float()
        return _power_of_two(self.kernel.exp2, exponent, s)

    def _power(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """What a weight relative to ``old`` is to be multiplied by to be relative to ``new``."""
        exponent = (old - _finite(new)) * self.factors.exponent
        return _power_of_two(self.kernel.exp2, exponent, old)

    def _row_sum(self, p: torch.Tensor) -> torch.Tensor:
        return self.kernel.row_sum(p, self.problem, self.factors.weights)

    def _weighted(self, p: torch.Tensor, seen: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """P·V; a value that is not finite goes to the rows that see its key, and to no other."""
        p = self.kernel.operand(p * self.factors.weights, self.problem.formats.weights)
        if self.v_is_finite:
            return self._product(p, v)
        odd = ~torch.isfinite(v)
        out = self._product(p, torch.where(odd, 0.0, v))
        for j in odd.any(-1).flatten(0, -2).any(0).nonzero().flatten().tolist():
            to_rows = (seen[..., j, None] & odd[:, :, None, j]).expand_as(out)
            out = torch.where(to_rows, out + p[..., j, None] * v[:, :, None, j], out)
        return out

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

    def _kv_heads_expanded(self, kv: torch.Tensor) -> torch.Tensor:
        return kv.repeat_interleave(self.problem.group, dim=1)

    def _product(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """(batch, heads, rows, n) × (batch, heads, n, m), one whole tile of rows at a time."""
        batch, heads, length, inner = rows.shape
        blocks = length // self.tile.block_query
        tiles = rows.reshape(batch * heads * blocks, self.tile.block_query, inner)
        repeated = columns.flatten(0, 1).repeat_interleave(blocks, dim=0)
        return self.kernel.product(tiles, repeated).view(batch, heads, length, -1)


def _in_nats(problem: Problem) -> bool:
    """Whether scores are multiplied by the scale before the softmax: mods and sinks are natural."""
    return problem.score != library.NONE or problem.sink


def _finite(maximum: torch.Tensor) -> torch.Tensor:
    """0 stands in for the maximum of a row that has seen nothing."""
    return torch.where(torch.isneginf(maximum), 0.0, maximum)


def _power_of_two(
    exp2: Callable[[torch.Tensor], torch.Tensor], exponent: torch.Tensor, score: torch.Tensor
) -> torch.Tensor:
    """``exp2``; 0 where ``score`` is −∞, also where −∞ · c is NaN: c may underflow."""
    return torch.where(torch.isneginf(score), 0.0, exp2(exponent))


def _padded(x: torch.Tensor, block: int) -> torch.Tensor:
    """``x`` (batch, heads, length, dim) with zeros up to a whole number of blocks."""
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % block))
