"""The spread of right kernels on a problem, and the effect of a fault in units of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from attncheck.core.outputs import Outputs

__all__ = ["Spread", "difference"]


class Spread:
    """The largest differences between right kernels on one problem."""

    def __init__(self, right: list[Outputs]) -> None:
        """Compare all pairs of outputs: the worst head, and the worst row."""
        pairs = [(a, b) for i, a in enumerate(right) for b in right[:i]]
        sizes = [difference(a, b) for a, b in pairs]
        self.most = [max(values) for values in zip(*sizes, strict=True)]

    def effect(self, outputs: Outputs, twin: Outputs) -> float:
        """Return the difference of two kernels in units of the spread; 0 for equal bits."""
        ratios = [
            0.0 if size == 0 else size / most if most else math.inf
            for size, most in zip(difference(outputs, twin), self.most, strict=True)
        ]
        return max(ratios)


def difference(a: Outputs, b: Outputs) -> list[float]:
    """Return the RMS differences of the worst head and of the worst row, in out and in LSE."""
    sizes = [*_of_rows(a.out, b.out)]
    if a.lse is None or b.lse is None:  # no difference of LSE is known
        sizes += [0.0, 0.0]
    else:
        sizes += _of_rows(a.lse[..., None], b.lse[..., None])
    return sizes


def _of_rows(a: torch.Tensor, b: torch.Tensor) -> list[float]:
    rows = _squares(a, b).mean(-1)
    return [float(size) ** 0.5 for size in (rows.mean(-1).max(), rows.max())]


def _squares(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a.double() - b.double()).nan_to_num(nan=math.inf)).square()
