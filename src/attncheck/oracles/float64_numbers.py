"""torch.float64 as a number system, and NaN and infinity in V."""

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
    """Values whose non-finite part is set apart, since 0·NaN and 0·∞ are NaN."""

    finite: Tensor  # the values, 0 where they are NaN or infinite; ``(…, kv, value_dim)``
    marks: Tensor  # 1.0 where they are NaN, +∞ or −∞, side by side; ``(…, kv, 3·value_dim)``

    @classmethod
    def among(cls, values: Tensor) -> Self | None:
        """The parts of float64 ``values``, or None when all are finite.

        Numbers of fp32's range cannot overflow a float64 sum: it is finite exactly when all are.
        Larger ones may, and then cost a product of zeros, no more.
        """
        # One sum in place of a test of each element: the usual case costs one pass.
        if math.isfinite(values.sum().item()):
            return None
        # Side by side in one tensor: a single product counts all three kinds.
        finite = values.isfinite()
        kinds = (values.isnan(), values == math.inf, values == -math.inf)
        return cls(values.masked_fill(~finite, 0.0), torch.cat(kinds, dim=-1).to(values.dtype))

    def seen_by(self, attended: Tensor) -> Tensor:
        """Amount to add to ``weights @ finite``; bool ``attended`` is ``(…, query, kv)``."""
        return nonfinite_sums(attended.to(self.marks.dtype) @ self.marks)


def nonfinite_sums(counts: Tensor) -> Tensor:
    """NaN, ±∞ or 0 for how many attended keys hold NaN, +∞ and −∞, side by side.

    A weight that underflows to 0 stands for a positive number: an attended infinity stays one.
    """
    nan, plus, minus = (part > 0 for part in counts.chunk(3, dim=-1))
    sign = torch.where(plus, math.inf, torch.where(minus, -math.inf, 0.0))
    return torch.where(nan | (plus & minus), math.nan, sign).to(counts.dtype)


class Float64:
    """Float64 tensors ``(batch, heads, rows, columns)``; see ``protocol.Numbers`` for each word.

    Args:
        device: Where new arrays are made; it must be that of the inputs.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def exact(self, values: Tensor) -> Tensor:
        """The values themselves."""
        return values

    def rounded(self, array: Tensor) -> Tensor:
        """The array itself."""
        return array

    def full(self, shape: Sequence[int], value: float) -> Tensor:
        """A new tensor."""
        return torch.full(tuple(shape), value, dtype=torch.float64, device=self.device)

    def rows(self, array: Tensor, start: int, stop: int) -> Tensor:
        """A view."""
        return array[:, :, start:stop]

    def columns(self, array: Tensor, start: int, stop: int) -> Tensor:
        """A view."""
        return array[..., start:stop]

    def join_rows(self, blocks: Sequence[Tensor]) -> Tensor:
        """Concatenation along the third axis."""
        return torch.cat(list(blocks), dim=2)

    def repeat_heads(self, array: Tensor, times: int) -> Tensor:
        """Each head ``times`` times in a row."""
        return array.repeat_interleave(times, dim=1)

    def sum_heads(self, array: Tensor, times: int) -> Tensor:
        """Over neighbours."""
        batch, heads, *sizes = array.shape
        return array.reshape(batch, heads // times, times, *sizes).sum(dim=2)

    def sum_batch(self, array: Tensor) -> Tensor:
        """Over the first axis."""
        return array.sum(dim=0, keepdim=True)

    def transpose(self, array: Tensor) -> Tensor:
        """A view."""
        return array.mT

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        """Batched product."""
        return left @ right

    def weigh(self, weights: Tensor, values: Tensor, attended: Tensor) -> Tensor:
        """Product of the finite values, then NaN and ±∞ in the rows that attend to one."""
        nonfinite = Nonfinite.among(values)
        if nonfinite is None:
            return weights @ values
        # Two products of finite numbers: a matrix product would make NaN of every 0·∞.
        return weights @ nonfinite.finite + nonfinite.seen_by(attended)

    def exp(self, array: Tensor) -> Tensor:
        """Elementwise."""
        return array.exp()

    def log(self, array: Tensor) -> Tensor:
        """Elementwise."""
        return array.log()

    def maximum(self, left: Tensor, right: Tensor) -> Tensor:
        """Elementwise."""
        return torch.maximum(left, right)

    def rowmax(self, array: Tensor) -> Tensor:
        """Over the last axis."""
        return array.amax(dim=-1, keepdim=True)

    def rowsum(self, array: Tensor) -> Tensor:
        """Over the last axis."""
        return array.sum(dim=-1, keepdim=True)

    def select(self, condition: Tensor, array: Tensor, otherwise: float) -> Tensor:
        """Elementwise; what is not selected does not matter, NaN included."""
        return torch.where(condition, array, otherwise)

    def is_minus_infinity(self, array: Tensor) -> Tensor:
        """Elementwise."""
        return array == -math.inf

    def score(self, score_mod: ScoreMod, scores: Tensor, indices: Indices) -> Tensor:
        """By the callable itself."""
        return call_score_mod(score_mod, scores, indices)

    def score_slope(self, score_mod: ScoreMod, scores: Tensor, indices: Indices) -> Tensor:
        """Torch's autograd of the callable itself."""
        return score_mod_slope(score_mod, scores, indices)

    def captured(
        self,
        score_mod: ScoreMod,
        scores: Tensor,
        indices: Indices,
        factors: Tensor,
        attended: Tensor,
    ) -> Tensor:
        """Torch's autograd of the callable, with what it reads in float64."""
        # Made for each tile: the callable's captured tensors are found by calling it.
        sums = CapturedSums(score_mod, self.device)
        sums.add(scores, indices.axes, factors, attended)
        return sums.sums.view(1, 1, 1, -1)
