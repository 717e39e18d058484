"""Steps that the ideal kernel's passes have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["finite", "padded", "power_of_two", "weighted"]


def weighted(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    weights: torch.Tensor,
    seen: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """``product`` of (…, rows, n) and (…, n, columns), of which ``rows`` see what ``seen`` says.

    What is not finite among the values goes to the rows that see it, and to no other.
    """
    odd = ~torch.isfinite(values)
    out = product(weights, torch.where(odd, 0.0, values))
    for j in odd.any(-1).flatten(0, -2).any(0).nonzero().flatten().tolist():
        to_rows = (seen[..., j, None] & odd[..., None, j, :]).expand_as(out)
        added = out + weights[..., j, None] * values[..., None, j, :]
        out = torch.where(to_rows, added, out)
    return out


def finite(maximum: torch.Tensor) -> torch.Tensor:
    """0 stands in for the maximum of a row that has seen nothing."""
    return torch.where(torch.isneginf(maximum), 0.0, maximum)


def power_of_two(
    exp2: Callable[[torch.Tensor], torch.Tensor], exponent: torch.Tensor, score: torch.Tensor
) -> torch.Tensor:
    """``exp2``; 0 where ``score`` is −∞, also where −∞ · c is NaN: c may underflow."""
    return torch.where(torch.isneginf(score), 0.0, exp2(exponent))


def padded(x: torch.Tensor, block: int) -> torch.Tensor:
    """``x`` (batch, heads, length, dim) with zeros up to a whole number of blocks."""
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % block))
