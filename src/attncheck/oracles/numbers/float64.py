"""Torch's float64 as a number system, on the CPU or a GPU."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attncheck.mods.leaves import CapturedSums
from attncheck.oracles.indices import scored, slope
from attncheck.oracles.nonfinite import Nonfinite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attncheck.mods.signatures import ScoreMod
    from attncheck.oracles.indices import Indices

__all__ = ["Float64"]


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
        """Calls the callable itself."""
        return scored(score_mod, scores, indices)

    def score_slope(self, score_mod: ScoreMod, scores: Tensor, indices: Indices) -> Tensor:
        """Torch's autograd of the callable itself."""
        return slope(score_mod, scores, indices)

    def captured(
        self,
        score_mod: ScoreMod,
        scores: Tensor,
        indices: Indices,
        factors: Tensor,
        attended: Tensor,
    ) -> Tensor:
        """Torch's autograd of the callable, with what it reads in float64."""
        sums = CapturedSums(score_mod, self.device)
        sums.add(scores, indices.axes, factors, attended)
        return sums.sums.view(1, 1, 1, -1)
