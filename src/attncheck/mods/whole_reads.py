"""What a table's element may be where an index may be another one after rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attncheck.mods.radii import Around

__all__ = ["read"]


def read(table: Tensor, value: Tensor, places: Sequence[Around]) -> tuple[Tensor, Tensor]:
    """Radius of ``table[places]``, and where another element may be read.

    One index may be off by one, up or down: the farther neighbour counts. Beyond that nothing is
    said.

    Args:
        table: Any tensor.
        value: What is read of it at the indices as they are.
        places: One index a dimension.
    """
    moved = [place.radius for place in places]
    total = sum(moved[1:], start=moved[0])
    radius = torch.where(total > 1, torch.inf, 0.0).double()
    for axis, place in enumerate(places):
        if not bool(place.moves.any()):
            continue
        for step in (-1, 1):
            other = [p.value for p in places]
            size = table.shape[axis]
            other[axis] = (place.value + step).clamp(-size, size - 1)
            gap = (table[tuple(other)].double() - value.double()).abs()
            gap = torch.where(table[tuple(other)] == value, 0.0, gap).nan_to_num(nan=torch.inf)
            radius = torch.where(place.moves, torch.maximum(radius, gap), radius)
    return radius, total > 0
