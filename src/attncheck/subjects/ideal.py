"""What a perfect kernel at these dtypes gives: FlashAttention-2 in fp32, rounded where declared."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from attncheck.formats import FORMATS, Format, fp32
from attncheck.mods import library
from attncheck.outputs import Outputs
from attncheck.subjects.contract import Call, Subject, Tiling
from attncheck.subjects.matmul_precision import fp32_products

if TYPE_CHECKING:
    from attncheck.inputs import Inputs
    from attncheck.mods.signatures import MaskMod
    from attncheck.problem import Problem

__all__ = ["Ideal", "Index"]

_LOG2_E = fp32(math.log2(math.e))
_LN_2 = fp32(math.log(2.0))

# Scores held at a time: 4 million of them are 16 MiB in fp32, 32 MiB in float64.
_SCORES_AT_A_TIME = 2**22


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


class Ideal(Subject):
    """A tiled FlashAttention-2 forward (Dao 2023, algorithm 1) with every rounding on purpose.

    * q·k in fp32 from operands in the products' format (tf32: rounded to nearest, or truncated
      as tensor cores do); scores in fp32.
    * Without a score mod exp2(s·c − m·c) with c = fp32(scale · log2 e), m·c rounded and the
      multiply-add rounded once. With one: the mod on fp32(s · scale), times log2 e, c = 1.
      exp2 and log are rounded once, to fp32.
    * P in fp32; the row sum takes P unrounded; P is rounded to the weights' format before P·V.
    * O is rescaled in fp32, and at the end multiplied by the fp32 reciprocal of the row sum, as
      flash-attn does; then rounded to the output format.
    * LSE = fp32(m · scale) + log(row sum), or m · ln 2 + log(row sum) with a score mod.
    * Rows that see no key give 0 and −∞. A key or value that a row does not see cannot reach it,
      whatever it holds, NaN included.

    Every matrix product has the shape of a whole tile, as on a GPU: a row's bits do not depend
    on the lengths or on its neighbours.

    Args:
        tiling: How to walk over the keys (default: 128 × 64 from the first key on).
        tf32: Whether tf32 operands are rounded to ``nearest`` or by ``truncate``.
    """

    name = "ideal"
    summary = "tiled FlashAttention-2 in fp32 torch operations, rounded where a kernel must round"

    def __init__(
        self, tiling: Tiling | None = None, *, tf32: Literal["nearest", "truncate"] = "nearest"
    ) -> None:
        self._tiling = tiling or Tiling(block_query=128, block_kv=64)
        self._tf32 = tf32

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """Takes every Problem."""
        del problem, device
        return None

    def tiling(self, problem: Problem, device: str) -> Tiling:
        """The tiling it was made with."""
        del problem, device
        return self._tiling

    def prepare(self, inputs: Inputs) -> Call:
        """Nothing is prepared: the call does everything."""

        def call() -> Outputs:
            with torch.no_grad(), fp32_products("ieee"):
                return _Pass(self, inputs).outputs()

        return call

    def visible(self, mask: MaskMod, at: Index) -> torch.Tensor:
        """Which keys of a tile a row sees; may keep dimensions of 1."""
        return mask(at.b, at.h, at.q_idx, at.kv_idx)

    def operand(self, values: torch.Tensor, fmt: Format) -> torch.Tensor:
        """fp32 ``values`` as a matrix product reads them in ``fmt``: q, k, v and P."""
        if fmt.name == "tf32":
            return _to_tf32(values, truncate=self._tf32 == "truncate")
        return values.to(fmt.torch_dtype).float()

    def rescaled(self, running: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
        """The running sum or output after the maximum moved: ``running · alpha``."""
        return running * alpha


class _Pass:
    """One forward pass over prepared inputs."""

    def __init__(self, kernel: Ideal, inputs: Inputs) -> None:
        self.kernel = kernel
        self.problem = problem = inputs.problem
        self.tile = kernel.tiling(problem, inputs.q.device.type)
        self.device = str(inputs.q.device)
        fmt = problem.formats.products
        self.q = _padded(kernel.operand(inputs.q.float(), fmt), self.tile.block_query)
        self.k = _padded(kernel.operand(inputs.k.float(), fmt), self.tile.block_kv)
        self.v = _padded(kernel.operand(inputs.v.float(), fmt), self.tile.block_kv)
        self.v_is_finite = bool(torch.isfinite(self.v).all())
        self.mask = problem.mask_mod(self.device)
        self.score = None if problem.score == library.NONE else problem.score_mod(self.device)
        self.c = 1.0 if self.score else fp32(problem.scale * math.log2(math.e))

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
        shape = q.shape[:3]
        running = _Running(
            q.new_full(shape, -math.inf),
            q.new_zeros(shape),
            q.new_zeros((*shape, self.problem.value_dim)),
        )
        starts = list(range(0, self.k.shape[2], self.tile.block_kv))
        for start in reversed(starts) if self.tile.reverse else starts:
            seen, at = self._seen(first, q.shape[2], start)
            if bool(seen.any()):
                self._step(running, q, seen, at, slice(start, start + self.tile.block_kv))
        return self._finish(running)

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
        inside = (keys < problem.kv).view(1, 1, 1, -1)
        seen = self.kernel.visible(self.mask, at) & inside
        return seen.expand(problem.batch, problem.heads, rows, -1), at

    def _step(
        self, run: _Running, q: torch.Tensor, seen: torch.Tensor, at: Index, keys: slice
    ) -> None:
        s = self._product(q, self._kv_heads_expanded(self.k[:, :, keys]).mT)
        if self.score:
            s = self.score(s * self.problem.scale, at.b, at.h, at.q_idx, at.kv_idx) * _LOG2_E
        s = torch.where(seen, s, -math.inf)
        maximum = self._moved(run.maximum, s.amax(-1))
        base = torch.where(torch.isneginf(maximum), 0.0, maximum)
        # A fused multiply-add: float64 holds s·c exactly, and the sum is rounded to fp32.
        exponent = s.double() * self.c - (base * self.c).double()[..., None]
        p = torch.exp2(exponent.float().double()).float()
        alpha = torch.exp2(((run.maximum - base) * self.c).double()).float()
        run.total = self.kernel.rescaled(run.total, alpha) + p.sum(-1)
        weights = self.kernel.operand(p, self.problem.formats.weights)
        out = self.kernel.rescaled(run.out, alpha[..., None])
        run.out = out + self._weighted(weights, seen, self._kv_heads_expanded(self.v[:, :, keys]))
        run.maximum = maximum

    def _moved(self, old: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
        """The running maximum after a tile; a lazy one stays while it grows by little."""
        new = torch.maximum(old, tile)
        if not self.tile.lazy_rescale:
            return new
        stays = ((new - old) * self.c <= self.tile.lazy_rescale) & ~torch.isneginf(old)
        return torch.where(stays, old, new)

    def _weighted(self, p: torch.Tensor, seen: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """P·V; a value that is not finite goes to the rows that see its key, and to no other."""
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
        inverse = 1.0 / torch.where(dead, 1.0, run.total)
        out = torch.where(dead[..., None], 0.0, run.out * inverse[..., None])
        log = torch.log(torch.where(dead, 1.0, run.total).double()).float()
        unit = _LN_2 if self.score else self.problem.scale
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
        return torch.bmm(tiles, repeated).view(batch, heads, length, -1)


def _padded(x: torch.Tensor, block: int) -> torch.Tensor:
    """``x`` (batch, heads, length, dim) with zeros up to a whole number of blocks."""
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % block))


def _to_tf32(values: torch.Tensor, *, truncate: bool) -> torch.Tensor:
    """fp32 ``values`` in tf32: the last 13 of the 23 stored bits go, ties to even or truncated."""
    dropped = FORMATS["fp32"].significand - FORMATS["tf32"].significand
    bits = values.contiguous().view(torch.int32)
    if not truncate:
        half_less_one = (1 << (dropped - 1)) - 1
        bits = bits + half_less_one + ((bits >> dropped) & 1)
    kept = (bits & -(1 << dropped)).view(torch.float32)
    return torch.where(torch.isfinite(values), kept, values)
