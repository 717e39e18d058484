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


def spread(rmse: torch.Tensor, ideal: Iterable[torch.Tensor]) -> torch.Tensor:
    """RMSE of a kernel ÷ the largest of an ensemble of ideal kernels', head by head.

    Args:
        rmse: The kernel's, ``(batch, heads)``.
        ideal: The same of ideal kernels that differ in tile sizes, in the order of their tiles and
            in when they rescale: what their errors differ by is nobody's fault.

    0 where every ideal kernel is exact, since their errors are no yardstick then; a NaN is
    infinite.
    """
    largest = torch.zeros_like(rmse)
    for one in ideal:
        largest = torch.maximum(largest, one)
    ratio = torch.where(largest > 0, rmse / largest, 0.0)
    return torch.where(ratio.isnan(), math.inf, ratio)
