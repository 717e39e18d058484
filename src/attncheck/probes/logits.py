"""Scores of a chosen size from numbers that every format holds: a few bits and a power of two."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from attncheck.problem import Problem

__all__ = ["blank", "product_of", "too_far"]

_SIGNIFICANDS = (1.0, 1.25, 1.5, 1.75)  # three bits, as e5m2 has


def product_of(problem: Problem, logit: float) -> tuple[float, float]:
    """(x, y) whose product is the least with scale · x · y ≥ ``logit`` that has three bits.

    x is a power of two and y has the three bits; each takes half of the exponent.
    """
    size = logit / problem.scale
    exponent = math.frexp(size)[1] - 1
    larger = (math.ldexp(s, exponent) for s in (*_SIGNIFICANDS, 2.0))
    product = next(x for x in larger if x >= size)
    significand, exponent = math.frexp(product)
    x = math.ldexp(1.0, exponent // 2)
    return x, math.ldexp(significand, exponent - exponent // 2)


def too_far(problem: Problem, logit: float, factor: float = 1.0) -> str | None:
    """Why the storage format cannot hold what makes ``logit``, times ``factor``; None if it can."""
    fmt = problem.formats.storage
    sizes = [x * factor for x in product_of(problem, logit)]
    # fp8 has descales; there the range is that of fp32.
    top, low = (2.0**60, 2.0**-60) if fmt.saturates else (fmt.max, 2.0**fmt.min_exponent)
    if all(2 * low < size <= top / 2 for size in sizes):
        return None
    return f"scale={problem.scale:g} asks for q and k beyond {fmt.name}"


def blank(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros: q ``(batch, heads, query, head_dim)`` and k ``(batch, kv_heads, kv, head_dim)``."""
    q = (problem.batch, problem.heads, problem.query, problem.head_dim)
    k = (problem.batch, problem.kv_heads, problem.kv, problem.head_dim)
    return torch.zeros(q, dtype=torch.float64), torch.zeros(k, dtype=torch.float64)
