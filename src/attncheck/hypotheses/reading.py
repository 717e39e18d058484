"""What is read from memory by strides that are not the tensor's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["contiguous", "places", "read_as", "read_at", "wider"]


def contiguous(shape: torch.Size) -> tuple[int, ...]:
    """Strides of a tensor that is."""
    return torch.empty(shape, device="meta").stride()


def read_as(
    tensor: Tensor, stride: tuple[int, ...], shape: tuple[int, ...] | None = None
) -> Iterator[Tensor]:
    """What is read with other strides; beyond its memory the last number there, or else 0.

    Args:
        tensor: Whose memory.
        stride: As many numbers as it has axes.
        shape: Its own unless told.
    """
    steps = places(shape or tuple(tensor.shape), stride)
    found, inside = read_at(tensor, sum(steps, torch.zeros((), dtype=torch.int64)))
    yield found
    if not bool(inside.all()):
        yield torch.where(inside, found, torch.zeros((), dtype=found.dtype))


def places(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[Tensor]:
    """Along each axis, in elements: int64 that broadcast to ``shape`` together."""
    found = []
    for axis, (length, step) in enumerate(zip(shape, stride, strict=True)):
        along = [-1 if other == axis else 1 for other in range(len(shape))]
        found.append((torch.arange(length) * step).view(along))
    return found


def read_at(tensor: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """What its memory holds ``at`` elements behind the first, clamped to it; and where it does."""
    at = at + int(tensor.storage_offset())
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    found = tensor.as_strided((size,), (1,), 0)[at.clamp(0, size - 1)]
    return found, (at >= 0) & (at < size)


def wider(tensor: Tensor, axis: int, length: int) -> Iterator[Tensor]:
    """The same with another length of one axis: what lies behind its own in memory."""
    shape = list(tensor.shape)
    shape[axis] = length
    yield from read_as(tensor, tensor.stride(), tuple(shape))
