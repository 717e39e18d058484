"""A table of numbers as a mod: what stands at four indices."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.mods.signatures import MaskMod

__all__ = ["reader"]


def reader(table: Tensor) -> MaskMod:
    """A mod that gives what ``table``, ``(batch or 1, heads or 1, query or 1, kv or 1)``, holds.

    Axes of size 1 are not looked at. A table of one number keeps its last axis: captured tensors
    are read by an index.
    """
    axes = [axis for axis, size in enumerate(table.shape) if size > 1] or [3]
    squeezed = table.reshape([table.shape[axis] for axis in axes])
    one = math.prod(table.shape) == 1

    def read(*indices: Tensor) -> Tensor:
        used = tuple(indices[axis] for axis in axes)
        return squeezed[(used[0] * 0,) if one else used]

    return read
