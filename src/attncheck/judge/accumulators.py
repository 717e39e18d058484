"""How sums of products are added up, and what that costs at most: equations B1–B3 of the manual."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from attncheck.formats import FORMATS, Format

if TYPE_CHECKING:
    import torch

    Count = TypeVar("Count", float, torch.Tensor)

__all__ = ["AMPERE", "FP32", "FP64", "HOPPER_FP8", "VOLTA", "Accumulator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulator:
    """How a sum of products is added up.

    Attributes:
        name: What reports call it.
        block: Products added in one step, aligned to the largest; None where every addition is
            rounded to nearest on its own, in any order. A step takes consecutive products, from a
            multiple of ``block`` on.
        alignment: Fraction bits that an aligned product keeps.
        result: Significant bits after a step: truncated where ``block`` is given, else rounded.
        format: Of the sum.

    Raises:
        ValueError: A number is no integer of at least 1.
    """

    name: str
    block: int | None = None
    alignment: int = 24
    result: int = 24
    format: Format = FORMATS["fp32"]

    def __post_init__(self) -> None:
        for name in ("block", "alignment", "result"):
            number = getattr(self, name)
            if number is not None and not (isinstance(number, int) and number >= 1):
                raise ValueError(f"{name}={number!r} must be an integer of at least 1.")

    @property
    def unit(self) -> float:
        """Unit roundoff of the sum's format."""
        return self.format.unit_roundoff

    @property
    def coarse(self) -> bool:
        """Whether its steps keep too few bits to pass for fp32, so that a finer bound pays."""
        return self.block is not None and 2.0**-self.alignment > 2 * self.format.unit_roundoff

    def step_loss(self) -> tuple[float, float]:
        """What a step loses at most: of its largest term, and of the running sum (B2)."""
        assert self.block is not None
        return (self.block + 1) * 2.0**-self.alignment, 2.0 ** (1 - self.result)

    def rounded(self, n: Count) -> Count:
        """Largest error of ``n`` roundings to nearest, relative to the sum of magnitudes (B1).

        Infinite of so many that B1 says nothing.
        """
        roundings = n * self.unit
        if isinstance(roundings, (int, float)):
            return roundings / (1 - roundings) if roundings < 1 else math.inf
        error: Count = (roundings / (1 - roundings)).masked_fill(roundings >= 1, math.inf)
        return error

    def det(self, n: Count, taken: Count | None = None) -> Count:
        """Largest error of a sum of ``n`` products, relative to the sum of magnitudes (B1, B2).

        What is cut off toward zero is less than everything. Of ``taken`` see ``bias``.
        """
        if self.block is None:
            return self.rounded(n)
        return self.rounded(n) + _at_most_one(self.bias(n, taken))

    def sd(self, n: Count) -> Count:
        """Standard deviation of rounding to nearest, relative to the sum of magnitudes (B3)."""
        deviation: Count = n**0.5 * (self.unit / math.sqrt(3))
        return deviation

    def bias(self, n: Count, taken: Count | None = None) -> Count:
        """Largest systematic error, relative to the largest running sum; 0 of rounding (B3).

        Args:
            n: Products.
            taken: Steps in which one of them is not 0, where they do not follow on each other.
        """
        if self.block is None:
            return n * 0.0
        aligned, truncated = self.step_loss()
        return (self._steps(n) if taken is None else taken) * (aligned + truncated)

    def _steps(self, n: Count) -> Count:
        assert self.block is not None
        if isinstance(n, (int, float)):
            return float(math.ceil(n / self.block))
        steps: Count = (n / self.block).ceil()
        return steps


def _at_most_one(share: Count) -> Count:
    if isinstance(share, float):
        return min(share, 1.0)
    capped: Count = share.clamp(max=1)
    return capped


FP32 = Accumulator(name="fp32")
FP64 = Accumulator(name="fp64", result=53, format=FORMATS["fp64"])

# Tensor cores, as MMA-Sim found them bit for bit (Xie et al. 2025): products are aligned to the
# largest exponent of a step, cut off, added exactly, and the sum is truncated. Hopper's for bf16
# and fp16 (16 products, 25 bits) loses less than FP32's any-order bound.
VOLTA = Accumulator(name="Volta tensor core", block=4, alignment=23, result=24)
AMPERE = Accumulator(name="Ampere tensor core", block=8, alignment=24, result=24)
HOPPER_FP8 = Accumulator(name="13-bit, 32 products a step", block=32, alignment=13, result=14)
