"""Largest errors of rounding to a format."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attncheck.formats import spacing

if TYPE_CHECKING:
    from attncheck.formats import Format

__all__ = ["half_ulp"]


def half_ulp(size: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Largest error of rounding anything of at most ``size`` to nearest in ``fmt`` (B4).

    Args:
        size: float64, not negative, any shape.
        fmt: The format; below its normal range the spacing of subnormals counts.

    At a power of two the spacing above counts, that of the number itself. Infinite beyond the
    format's largest number, where rounding overflows, and where ``size`` is infinite or NaN.
    """
    # frexp calls the exponent of 0 zero.
    known = torch.where(size <= fmt.max, size, 1.0).clamp_min(2.0**fmt.min_exponent)
    # The smallest subnormal is a number too, half of it is not one of fp64.
    return torch.where(size <= fmt.max, spacing(known, fmt) / 2, math.inf)
