"""torch.float64 as a number system, with NaN and infinity in V treated separately."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from attncheck.mods.captured_gradients import CapturedSums
from attncheck.mods.signatures import ScoreMod
from attncheck.oracles.mod_calls import Indices, call_score_mod, score_mod_slope


@dataclass(frozen=True, slots=True, eq=False)
class Nonfinite:
    """Values with their non-finite numbers separated, since 0·NaN and 0·∞ are NaN."""

    finite: Tensor  # the values, 0 where they are NaN or infinite; ``(…, kv, value_dim)``
    marks: Tensor  # 1.0 where they are NaN, +∞ or −∞, side by side; ``(…, kv, 3·value_dim)``

    @classmethod
    def among(cls, values: Tensor) -> Self | None:
        """Return the parts of float64 ``values``, or None if all are finite.

        The sum of numbers in fp32's range cannot overflow float64: it is finite if and only if all
        are. Larger numbers may overflow it, which only costs a needless product.
        """
        # In the usual case, a sum costs a single pass.
        if math.isfinite(values.sum().item()):
            return None
        # Side by side in one tensor, so that a single product counts all three kinds.
        finite = values.isfinite()
        kinds = (values.isnan(), values == math.inf, values == -math.inf)
        return cls(values.masked_fill(~finite, 0.0), torch.cat(kinds, dim=-1).to(values.dtype))

    def seen_by(self, attended: Tensor) -> Tensor:
        """Return what to add to ``weights @ finite``; bool ``attended`` is ``(…, query, kv)``."""
        return nonfinite_sums(attended.to(self.marks.dtype) @ self.marks)


def nonfinite_sums(counts: Tensor) -> Tensor:
    """Return NaN, ±∞ or 0, by the ``counts`` of attended keys with NaN, +∞ and −∞, side by side.

    Every attended key counts, even if its weight underflows to 0, since the exact one is positive.
    """
    nan, plus, minus = (part > 0 for part in counts.chunk(3, dim=-1))
    sign = torch.where(plus, math.inf, torch.where(minus, -math.inf, 0.0))
    return torch.where(nan | (plus & minus), math.nan, sign).to(counts.dtype)


class Float64:
    """Float64 tensors ``(batch, heads, rows, columns)``; see ``Numbers`` for each method.

    Args:
        device: Device of new arrays, which must be that of the inputs.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def exact(self, values: Tensor) -> Tensor:
        """Return the values themselves."""
        return values

    def rounded(self, array: Tensor) -> Tensor:
        """Return the array itself."""
        return array

    def full(self, shape: Sequence[int], value: float) -> Tensor:
        """Return a new tensor."""
        return torch.full(tuple(shape), value, dtype=torch.float64, device=self.device)

    def rows(self, array: Tensor, start: int, stop: int) -> Tensor:
        """Return a view."""
        return array[:, :, start:stop]

    def columns(self, array: Tensor, start: int, stop: int) -> Tensor:
        """Return a view."""
        return array[..., start:stop]

    def join_rows(self, blocks: Sequence[Tensor]) -> Tensor:
        """Return the concatenation along the third axis."""
        return torch.cat(list(blocks), dim=2)

    def repeat_heads(self, array: Tensor, times: int) -> Tensor:
        """Return each head ``times`` times in a row."""
        return array.repeat_interleave(times, dim=1)

    def sum_heads(self, array: Tensor, times: int) -> Tensor:
        """Return sums over ``times`` neighbouring heads."""
        batch, heads, *sizes = array.shape
        return array.reshape(batch, heads // times, times, *sizes).sum(dim=2)

    def sum_batch(self, array: Tensor) -> Tensor:
        """Return sums over the first axis."""
        return array.sum(dim=0, keepdim=True)

    def transpose(self, array: Tensor) -> Tensor:
        """Return a view."""
        return array.mT

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the batched product."""
        return left @ right

    def weigh(self, weights: Tensor, values: Tensor, attended: Tensor) -> Tensor:
        """Return the product of the finite values, with NaN and ±∞ in rows that attend to one."""
        nonfinite = Nonfinite.among(values)
        if nonfinite is None:
            return weights @ values
        # Two products of finite numbers, since a single one would turn 0·∞ into NaN.
        return weights @ nonfinite.finite + nonfinite.seen_by(attended)

    def exp(self, array: Tensor) -> Tensor:
        """Return the exponential, elementwise."""
        return array.exp()

    def log(self, array: Tensor) -> Tensor:
        """Return the logarithm, elementwise."""
        return array.log()

    def maximum(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the larger of two, elementwise."""
        return torch.maximum(left, right)

    def rowmax(self, array: Tensor) -> Tensor:
        """Return the maximum over the last axis."""
        return array.amax(dim=-1, keepdim=True)

    def rowsum(self, array: Tensor) -> Tensor:
        """Return the sum over the last axis."""
        return array.sum(dim=-1, keepdim=True)

    def select(self, condition: Tensor, array: Tensor, otherwise: float) -> Tensor:
        """Select elementwise; numbers that are not selected do not matter, not even NaN."""
        return torch.where(condition, array, otherwise)

    def is_minus_infinity(self, array: Tensor) -> Tensor:
        """Return whether numbers are −∞, elementwise."""
        return array == -math.inf

    def score(self, score_mod: ScoreMod, scores: Tensor, indices: Indices) -> Tensor:
        """Return the scores by the callable itself."""
        return call_score_mod(score_mod, scores, indices)

    def score_slope(self, score_mod: ScoreMod, scores: Tensor, indices: Indices) -> Tensor:
        """Return the slopes by torch's autograd of the callable itself."""
        return score_mod_slope(score_mod, scores, indices)

    def captured(
        self,
        score_mod: ScoreMod,
        scores: Tensor,
        indices: Indices,
        factors: Tensor,
        attended: Tensor,
    ) -> Tensor:
        """Return the sums by torch's autograd of the callable, with captured tensors in float64."""
        # Made for each tile, since a call of the callable finds its captured tensors.
        sums = CapturedSums(score_mod, self.device)
        sums.add(scores, indices.axes, factors, attended)
        return sums.sums.view(1, 1, 1, -1)
