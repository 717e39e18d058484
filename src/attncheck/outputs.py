"""What an oracle and a kernel both give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["Outputs"]


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """Results of one attention call.

    Attributes:
        out: ``(batch, heads, query, value_dim)``. Rows that see no key are 0.
        lse: Natural-log log-sum-exp of the visible scores, ``(batch, heads, query)``; −inf for
            rows that see no key. None where a kernel does not expose it.
    """

    out: torch.Tensor
    lse: torch.Tensor | None = None
