"""How far a kernel's outputs may be from the exact ones, over a whole Problem."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from attncheck.conditions import Rows

__all__ = ["Allowance", "Sample"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Sample:
    """Statistical bounds of some rows, float64.

    Attributes:
        rows: Which.
        probable_out: Bound of |error| with probability 1 − 1e-6 over the whole Problem,
            ``(heads, rows, value_dim)``.
        probable_lse: The same of LSE, ``(heads, rows)``.
        sd_out: Predicted root mean square of the error, as ``probable_out``.
        sd_lse: The same of LSE.
        lost_out: What of the bound of out is for numbers below the normal range, which hardware
            may take for 0, as ``probable_out``; None for nothing.
    """

    rows: Rows
    probable_out: torch.Tensor
    probable_lse: torch.Tensor
    sd_out: torch.Tensor
    sd_lse: torch.Tensor
    lost_out: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Allowance:
    """Largest errors that rounding can explain; infinite in rows that nothing is known of.

    Attributes:
        out: ``(batch, heads, query, value_dim)``, float64; exactly 0 in rows that see no key.
        lse: ``(batch, heads, query)``, float64; likewise.
        samples: The rows examined more closely.
        jumps: Seen (row, key) pairs whose score lies within its error of a jump of the score mod.
        oracle_share: Largest proven error of the float64 oracle ÷ allowance, over what is finite.
    """

    out: torch.Tensor
    lse: torch.Tensor
    samples: list[Sample] = field(default_factory=list)
    jumps: int = 0
    oracle_share: float = 0.0
