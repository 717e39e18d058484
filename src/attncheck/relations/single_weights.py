"""Values of which one, weighted by exactly 1, is exactly the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.formats import FORMATS, round_to

if TYPE_CHECKING:
    from attncheck.problem import Problem

__all__ = ["as_read"]

_PAIR = 2 * FORMATS["tf32"].significand  # bits
_DROPPED = FORMATS["fp32"].significand - _PAIR


def as_read(v: torch.Tensor, problem: Problem) -> torch.Tensor:
    """V ``(batch, kv_heads, kv, value_dim)`` as P·V reads it, in its storage dtype.

    Rounded to the products' format (tf32). In fp32 to 22 bits, toward zero: kernels multiply fp32
    numbers as sums of two tf32 numbers, which hold no more (CUTLASS's 3×TF32, and with it torch's
    memory-efficient attention), and that is accurate enough to be right.
    """
    if problem.formats.products.name == "fp32":
        return (v.contiguous().view(torch.int32) & -(1 << _DROPPED)).view(torch.float32)
    return round_to(v.double(), problem.formats.products).to(v.dtype)
