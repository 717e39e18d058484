"""What a distribution is asked for, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Drawn", "Floats", "Integers", "Sizes"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Drawn = tuple[Floats, Floats, Floats]
"""q, k and v."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of q ``(batch, heads, query, head_dim)``, k and v, as in a Problem."""

    batch: int
    heads: int
    kv_heads: int
    query: int
    kv: int
    head_dim: int
    value_dim: int

    @property
    def q(self) -> tuple[int, int, int, int]:
        """Shape of q, ``(batch, heads, query, head_dim)``."""
        return (self.batch, self.heads, self.query, self.head_dim)

    @property
    def k(self) -> tuple[int, int, int, int]:
        """Shape of k, ``(batch, kv_heads, kv, head_dim)``."""
        return (self.batch, self.kv_heads, self.kv, self.head_dim)

    @property
    def v(self) -> tuple[int, int, int, int]:
        """Shape of v, ``(batch, kv_heads, kv, value_dim)``."""
        return (self.batch, self.kv_heads, self.kv, self.value_dim)

    @property
    def x(self) -> tuple[int, int, int, int]:
        """Shape of a softmax's scores, ``(batch, heads, query, kv)``."""
        return (self.batch, self.heads, self.query, self.kv)
