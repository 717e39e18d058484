"""A mask's value at every index, a strip of rows at a time: the whole of it never exists."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attncheck.mods.signatures import MaskMod

__all__ = ["AT_ONCE", "Strips", "cut"]

AT_ONCE = 2**20
"""Places that one call of a mask is asked about at most: a few megabytes of 64-bit numbers."""

# What torch and Python raise when a callable was written for 0-d indices only.
_NOT_BROADCAST = (RuntimeError, IndexError, TypeError, ValueError)


@dataclass(slots=True)
class Strips:
    """A mask on all sequences, heads and keys, a strip of rows at a time.

    Attributes:
        mask_mod: The callable.
        batch: Sequences to ask about.
        heads: Heads to ask about.
        kv: Keys to ask about.
        device: Where.
        broadcasts: False once it turned out to be written for single indices.
    """

    mask_mod: MaskMod
    batch: int
    heads: int
    kv: int
    device: torch.device | str
    broadcasts: bool = True

    def of_rows(self, rows: range) -> tuple[Tensor, Tensor]:
        """Whether any of ``rows`` sees a key, and whether all do: uint8 ``(batch, heads, kv)``."""
        some = torch.zeros(self.batch, self.heads, self.kv, dtype=torch.uint8, device=self.device)
        every = torch.ones_like(some)
        for b, h, part, keys in self._parts(rows):
            seen = self._seen(b, h, part, keys)
            place = (_slice(b), _slice(h), _slice(keys))
            some[place] = torch.maximum(some[place], seen.amax(2))
            every[place] = torch.minimum(every[place], seen.amin(2))
        return some, every

    def _parts(self, rows: range) -> Iterator[tuple[range, ...]]:
        """All sequences, heads, ``rows`` and keys in parts of at most ``AT_ONCE`` places."""
        ranges = (range(self.batch), range(self.heads), rows, range(self.kv))
        room, cuts = AT_ONCE, []
        for whole in reversed(ranges):
            size = min(len(whole), room)
            room //= size
            cuts.append(cut(whole, size))
        return product(*reversed(cuts))

    def _seen(self, *ranges: range) -> Tensor:
        """Where a row sees a key: uint8, four axes, each of its range's length or of 1."""
        axes = [torch.arange(r.start, r.stop, device=self.device) for r in ranges]
        with torch.no_grad():  # a mask may capture a parameter
            seen = self._broadcast(axes) if self.broadcasts else None
            if seen is None:
                self.broadcasts = False
                seen = _mapped(self.mask_mod)(*axes)
        return seen.to(self.device, torch.bool).view(torch.uint8)

    def _broadcast(self, axes: list[Tensor]) -> Tensor | None:
        indices = [
            axis.view([-1 if i == dim else 1 for i in range(4)]) for dim, axis in enumerate(axes)
        ]
        try:
            seen = torch.as_tensor(self.mask_mod(*indices))
            seen.expand([axis.numel() for axis in axes])  # raises where it has another shape
        except _NOT_BROADCAST:
            return None
        return seen[(None,) * (4 - seen.dim())]


def _mapped(mask_mod: MaskMod) -> MaskMod:
    """A mask of single indices, mapped over four axes as FlexAttention does."""
    for axis in (3, 2, 1, 0):
        mask_mod = torch.vmap(mask_mod, in_dims=tuple(0 if i == axis else None for i in range(4)))
    return mask_mod


def cut(whole: range, size: int) -> list[range]:
    """``whole`` in parts of ``size``, the last one perhaps shorter."""
    return [whole[i : i + size] for i in range(0, len(whole), size)]


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)
