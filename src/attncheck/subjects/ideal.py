"""What a perfect kernel at these dtypes gives: FlashAttention in fp32, rounded where declared."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch

from attncheck.formats import FORMATS, Format
from attncheck.problem import OPERATIONS
from attncheck.question import PROMISES
from attncheck.subjects.contract import Call, Subject, Tiling, with_full_tanh
from attncheck.subjects.ideal_attention import Index, attention
from attncheck.subjects.ideal_gradients import slope, with_gradients
from attncheck.subjects.ideal_softmax import ideal_softmax
from attncheck.subjects.matmul_precision import fp32_products

if TYPE_CHECKING:
    from attncheck.inputs import Inputs
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.mods.leaves import CapturedSums
    from attncheck.mods.signatures import MaskMod, ScoreMod
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem

__all__ = ["Ideal", "Index"]


class Ideal(Subject):
    """A tiled FlashAttention-2 forward (Dao 2023, algorithm 1) with every rounding on purpose.

    * q·k in fp32 from operands in the products' format (tf32: rounded to nearest, or truncated
      as tensor cores do); scores in fp32.
    * Without a score mod exp2(s·c − m·c) with c = fp32(scale · log2 e), m·c rounded and the
      multiply-add rounded once. With one s' is the mod of fp32(s · scale), in natural units, and
      exp2((s' − m)·log2 e), where the difference, log2 e and the product are rounded: no finite
      score overflows. Without one m·c does where a score passes 2.36e38, fp32's largest number
      divided by log2 e; such a row is not right. exp2 and log are rounded once, to fp32.
    * P in fp32; the row sum takes P unrounded; P is rounded to the weights' format before P·V.
    * O is rescaled in fp32, and at the end multiplied by the fp32 reciprocal of the row sum, as
      flash-attn does; then rounded to the output format.
    * LSE = fp32(m · scale) + log(row sum), or m + log(row sum) with a score mod.
    * fp8: q·k is of the stored numbers; scale and c are multiplied by fp32(q's · k's descale), one
      number a batch and key head. P is multiplied by the dtype's weights_scale before it is rounded
      (saturating; 2^-τ of that where a lazy maximum lets P reach 2^τ), and O at the end by
      fp32(v's descale / weights_scale).
    * A sink is natural: with one, scores are too, as with a score mod. It is there before the first
      tile: the maximum starts as the sink and the row sum as 1.
    * Rows that see no key give 0 and −∞, or the sink. A key or value that the mask hides from a row
      cannot reach it, whatever it holds, NaN included. A score mod's −∞ hides nothing: the key has
      weight 0, and its value, if not finite, gives NaN. Nor does −∞ become another weight where
      descales are so small that c underflows to 0.

    A tiling of FlashAttention-1 (Dao et al. 2022, algorithm 1) differs in that a step's P is
    relative to the step's own maximum, so that its largest is 1 exactly, and O is divided by the
    row sum after each step.

    Backward (algorithm 2; ``ideal_gradients``), in fp32 but for what is said:

    * delta is the row's Σ dO·O, of O as it is stored, less dLSE.
    * P comes again from the forward pass's LSE: exp2(s·c − LSE·log2 e), where LSE·log2 e is rounded
      and the multiply-add rounded once; with a score mod or a sink exp2((s' − LSE)·log2 e).
    * dS = P·(dP − delta), times the score mod's derivative, which is torch's, of its callable in
      fp32. P and dS are rounded to the weights' format before Pᵀ·dO, dS·K and dSᵀ·q, and dO to the
      products' before all.
    * dQ is added key tile by key tile, in the tiling's order; dK and dV row tile by row tile and,
      within one, head by head of those that share a key head (the last row tile first in a reverse
      tiling). dQ and dK are multiplied by the scale at the end. All are then rounded to the storage
      format.
    * dsink is the sum of exp2((sink − LSE)·log2 e)·(0 − delta) over rows, by tiles, in fp32.
    * dcaptured is the sum of dS, neither rounded nor times the score mod's derivative, times its
      derivative with respect to the number that it reads, tile after tile, in fp32.
    * A row that sees no key has no gradient and adds to none. What is hidden cannot reach the
      gradients of what sees it not, NaN included.

    A softmax is ``ideal_softmax``'s.

    Every matrix product has the shape of a whole tile, as on a GPU: a row's bits do not depend
    on the lengths or on its neighbours.

    Args:
        tiling: How to walk over the keys (default: 128 × 64 from the first key on).
        tf32: Whether tf32 operands are rounded to ``nearest`` or by ``truncate``.
    """

    name = "ideal"
    summary = "tiled FlashAttention-2 in fp32 torch operations, rounded where a kernel must round"
    log2_e = math.log2(math.e)
    first_maximum = -math.inf
    hidden_score = -math.inf
    promises = frozenset(PROMISES)
    promises_gradients = True
    sinks = True
    backward = True
    captured = True

    def __init__(
        self, tiling: Tiling | None = None, *, tf32: Literal["nearest", "truncate"] = "nearest"
    ) -> None:
        self._tiling = tiling or Tiling(block_query=128, block_kv=64)
        self._tf32 = tf32

    def concerns(self, problem: Problem) -> bool:
        """Attention, with sinks, pages and gradients or without, and softmax."""
        return problem.operation in OPERATIONS

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """Takes every Problem."""
        del problem, device
        return None

    def tiling(self, problem: Problem, device: str) -> Tiling:
        """The tiling it was made with."""
        del problem, device
        return self._tiling

    def arithmetic(self, problem: Problem, device: str) -> Arithmetic:
        """Of IEEE fp32 sums, on a GPU too; tf32 operands are rounded as it was made to."""
        del device
        return replace(
            with_full_tanh(super().arithmetic(problem, "cpu"), problem),
            truncates=problem.dtype == "tf32" and self._tf32 == "truncate",
            weights_scale=self.weights_scale(problem),
            lazy_rescale=self._tiling.lazy_rescale,
        )

    def prepare(self, inputs: Inputs) -> Call:
        """Nothing is prepared: the call does everything."""

        def call() -> Outputs:
            with torch.no_grad(), fp32_products("ieee"):
                if inputs.problem.operation == "softmax":
                    return ideal_softmax(inputs)
                outputs = attention(self, inputs)
                if inputs.problem.backward:
                    return with_gradients(self, inputs, outputs)
                return outputs

        return call

    def visible(self, mask: MaskMod, at: Index) -> torch.Tensor:
        """Which keys of a tile a row sees; may keep dimensions of 1."""
        return mask(at.b, at.h, at.q_idx, at.kv_idx)

    def operand(self, values: torch.Tensor, fmt: Format) -> torch.Tensor:
        """fp32 ``values`` as a matrix product reads them in ``fmt``: q, k, v and P.

        What is beyond fp8's range becomes its largest number; an infinity stays one, if it can.
        """
        if fmt.name == "tf32":
            return _to_tf32(values, truncate=self._tf32 == "truncate")
        if fmt.saturates:
            values = torch.where(values.isinf(), values, values.clamp(-fmt.max, fmt.max))
        return values.to(fmt.torch_dtype).float()

    def inside(self, keys: torch.Tensor, kv: int) -> torch.Tensor:
        """Which keys of a tile there are: the last tile may reach beyond the last key."""
        return keys < kv

    def product(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """fp32 (tiles, rows, n) × (tiles, n, m): q·k, or P·V of one tile of keys.

        A single column gets one of zeros beside it: torch multiplies a matrix by a vector in
        another order when it is alone in its batch (torch 2.13 on a CPU).
        """
        if columns.shape[-1] == 1:
            return torch.bmm(rows, torch.nn.functional.pad(columns, (0, 1)))[..., :1]
        return torch.bmm(rows, columns)

    def scores(self, products: torch.Tensor) -> torch.Tensor:
        """q·k of a tile as it is kept, before scale, score mod and mask."""
        return products

    def exp2(self, exponent: torch.Tensor) -> torch.Tensor:
        """2 to the power of fp32 numbers, rounded once."""
        return torch.exp2(exponent.double()).float()

    def weights_scale(self, problem: Problem) -> float:
        """What P is multiplied by before it is rounded.

        P reaches 2^τ where the maximum may lag by τ: it has to stay within fp8's range.
        """
        formats = problem.formats
        lag = 2.0 ** math.ceil(self._tiling.lazy_rescale) if formats.weights.saturates else 1.0
        return formats.weights_scale / lag

    def row_sum(self, p: torch.Tensor, problem: Problem, scale: float) -> torch.Tensor:
        """Σ of a tile's P, which is neither rounded nor multiplied by ``scale`` yet."""
        del problem, scale
        return p.sum(-1)

    def rescaled(self, running: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
        """The running sum or output after the maximum moved: ``running · alpha``."""
        return running * alpha

    def added(self, running: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """The running sum ``(batch, heads, rows)`` or output, one axis more, with a tile's part."""
        return running + part

    def normalised(self, out: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """O at the end, by the fp32 reciprocal of the row sum."""
        return out * (1.0 / total)

    def visible_again(self, mask: MaskMod, at: Index) -> torch.Tensor:
        """Which keys of a tile a row sees, in the backward pass."""
        return self.visible(mask, at)

    def delta(
        self, dout: torch.Tensor, out: torch.Tensor, dlse: torch.Tensor | None
    ) -> torch.Tensor:
        """What is taken off dP, ``(batch, heads, query)``: Σ dO·O less dLSE."""
        delta = (dout * out).sum(-1)
        return delta if dlse is None else delta - dlse

    def dscores(self, p: torch.Tensor, dp: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """The gradient of a tile's scores, after the score mod: P·(dP − delta)."""
        return p * (dp - delta)

    def slope(self, score: ScoreMod, x: torch.Tensor, at: Index) -> torch.Tensor:
        """The score mod's derivative at a tile's scores, by torch's autograd."""
        return slope(score, x, at)

    def capture(
        self, sums: CapturedSums, x: torch.Tensor, at: Index, ds: torch.Tensor, seen: torch.Tensor
    ) -> None:
        """Adds what a tile brings to the gradients of the numbers that the score mod reads.

        Args:
            sums: Them, so far.
            x: The tile's scores before the mod.
            at: Where it lies.
            ds: The gradient after the mod, 0 where not seen.
            seen: Which keys its rows see.
        """
        sums.add(x, (at.b, at.h, at.q_idx, at.kv_idx), ds, seen)

    def gradient_added(self, running: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """A running gradient with a tile's part, of one head."""
        return running + part

    def scaled(self, total: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The sums that are dQ or dK, at the end."""
        return total * scale


def _to_tf32(values: torch.Tensor, *, truncate: bool) -> torch.Tensor:
    """fp32 ``values`` in tf32: the last 13 of the 23 stored bits go, ties to even or truncated."""
    dropped = FORMATS["fp32"].significand - FORMATS["tf32"].significand
    bits = values.contiguous().view(torch.int32)
    if not truncate:
        half_less_one = (1 << (dropped - 1)) - 1
        bits = bits + half_less_one + ((bits >> dropped) & 1)
    kept = (bits & -(1 << dropped)).view(torch.float32)
    return torch.where(torch.isfinite(values), kept, values)
