"""The error that no kernel can avoid, and what is usual among ideal kernels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attncheck.formats import Format, round_to
from attncheck.judge.metrics import errors

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["rounding_floor", "spread"]


def rounding_floor(truth: torch.Tensor, counted: torch.Tensor, output: Format) -> float:
    """RMSE of the exact result correctly rounded to the output format.

    Args:
        truth: float64, any shape.
        counted: bool, broadcastable to that shape.
        output: Format of out.

    No kernel with this output format has a smaller RMSE on these inputs: the nearest
    representable number minimises every element's error.
    """
    return errors(round_to(truth, output), truth, counted).rmse


def spread(
    rmse: torch.Tensor, ideal: Iterable[torch.Tensor], lost: torch.Tensor | None = None
) -> torch.Tensor:
    """RMSE of a kernel ÷ the largest of an ensemble of ideal kernels', head by head.

    Args:
        rmse: The kernel's, ``(batch, heads)``.
        ideal: The same of ideal kernels that differ in tile sizes, in the order of their tiles and
            in when they rescale: what their errors differ by is nobody's fault.
        lost: What a kernel's errors may be where it takes numbers below the normal range for 0,
            likewise; an ideal kernel may keep them.

    0 where every ideal kernel is exact, since their errors are no yardstick then; a NaN is
    infinite.
    """
    largest = torch.zeros_like(rmse)
    for one in ideal:
        largest = torch.maximum(largest, one)
    usual = largest if lost is None else torch.maximum(largest, lost)
    ratio = torch.where(largest > 0, rmse / usual, 0.0)
    return torch.where(ratio.isnan(), math.inf, ratio)
