"""NaN and infinity in V: they reach the rows that attend to their key, and no other row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from typing import Self

    from torch import Tensor

__all__ = ["Nonfinite"]


@dataclass(frozen=True, slots=True, eq=False)
class Nonfinite:
    """Values whose non-finite part is set apart, since 0·NaN and 0·∞ are NaN.

    Attributes:
        finite: The values, 0 where they are NaN or infinite; ``(…, kv, value_dim)``.
        marks: 1.0 where they are NaN, +∞ or −∞, side by side; ``(…, kv, 3·value_dim)``.
    """

    finite: Tensor
    marks: Tensor

    @classmethod
    def among(cls, values: Tensor) -> Self | None:
        """The parts of float64 ``values``, or None when all are finite.

        Numbers of fp32's range cannot overflow a float64 sum: it is finite exactly when all are.
        Larger ones may, and then cost a product of zeros, no more.
        """
        if math.isfinite(values.sum().item()):
            return None
        finite = values.isfinite()
        kinds = (values.isnan(), values == math.inf, values == -math.inf)
        return cls(values.masked_fill(~finite, 0.0), torch.cat(kinds, dim=-1).to(values.dtype))

    def seen_by(self, attended: Tensor) -> Tensor:
        """What to add to ``weights @ finite``; bool ``attended`` is ``(…, query, kv)``."""
        return poison(attended.to(self.marks.dtype) @ self.marks)


def poison(counts: Tensor) -> Tensor:
    """NaN, ±∞ or 0 for how many attended keys hold NaN, +∞ and −∞, side by side.

    A weight that underflows to 0 stands for a positive number: an attended infinity stays one.
    """
    nan, plus, minus = (part > 0 for part in counts.chunk(3, dim=-1))
    sign = torch.where(plus, math.inf, torch.where(minus, -math.inf, 0.0))
    return torch.where(nan | (plus & minus), math.nan, sign).to(counts.dtype)
