"""The error that no kernel can avoid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.formats import Format, round_to
from attncheck.judge.metrics import errors

if TYPE_CHECKING:
    import torch

__all__ = ["rounding_floor"]


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
