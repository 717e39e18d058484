"""Columns of zeros after a tensor's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["COLUMNS", "with_zero_columns"]

# 1 makes an odd dim of an even one; from 8 on they are 16 bytes of a 16-bit dtype.
COLUMNS = (1, 8, 16, 32, 64, 128)


def with_zero_columns(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """``(…, dim)`` → ``(…, dim + columns)``."""
    dim = tensor.shape[-1]
    wider = tensor.new_zeros((*tensor.shape[:-1], dim + columns))
    wider[..., :dim] = tensor
    return wider
