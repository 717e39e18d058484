"""What a probe's exact rule finds wrong, and how it is told what a mask shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Finding", "Seen"]

Seen = Callable[[range], torch.Tensor]
"""Query rows → where they see a key: bool, broadcastable to ``(batch, heads, rows, kv)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Rows that cannot be what they must be.

    Attributes:
        tensor: ``out`` or ``lse``.
        place: The first wrong row and its key: (batch, head, query, key); key −1 where the answer
            does not tell one.
        dim: Column of out where the row is furthest off; −1 in LSE.
        value: What it is there.
        expected: What it should be.
        what: What is wrong with the row, in words: ``key 7 is missing``.
        count: Wrong rows.
        compared: Rows asked.
    """

    tensor: str
    place: tuple[int, int, int, int]
    dim: int
    value: float
    expected: float
    what: str
    count: int
    compared: int

    @property
    def message(self) -> str:
        """One line."""
        batch, head, query, _ = self.place
        where = f"{self.tensor}[{batch}, {head}, {query}"
        where += f", {self.dim}]" if self.tensor == "out" else "]"
        verb = "is" if self.count == 1 else "are"
        return (
            f"batch {batch}, head {head}, row {query}: {self.what} "
            f"({where} = {self.value:.9g}, but should be {self.expected:.9g}; "
            f"{self.count} of {self.compared} rows {verb} wrong)"
        )

    def __str__(self) -> str:
        return self.message
