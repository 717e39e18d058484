"""What takes the place of keys and values that do not matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from attncheck import inputs as inputs_room

if TYPE_CHECKING:
    from attncheck.inputs import Inputs

__all__ = ["Fill", "huge", "nan", "others", "replaced"]

Fill = Callable[["Inputs"], tuple[torch.Tensor, torch.Tensor]]
"""Inputs → other k and v, of the same shapes and dtype."""

_HUGE = 1e30
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def replaced(old: torch.Tensor, new: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """``new`` where it is asked for, else ``old``: bit for bit, in fp8 too, which has no where.

    Args:
        old: Any dtype.
        new: Same shape and dtype.
        where: bool, broadcasts to that shape.
    """
    bits = _SAME_SIZE[old.element_size()]
    return torch.where(where, new.view(bits), old.view(bits)).view(old.dtype)


def others(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Another draw, normal whatever the first: constant values would change nothing."""
    seed = (inputs.problem.seed + 1) % 2**63
    other = inputs_room.draw(
        inputs.problem.replace(distribution="normal", seed=seed), inputs.q.device
    )
    return other.k, other.v


def nan(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN throughout."""
    return torch.full_like(inputs.k, torch.nan), torch.full_like(inputs.v, torch.nan)


def huge(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """1e30, in every other key the largest finite number: q·k may overflow, to inf − inf even."""
    largest = inputs.problem.formats.storage.max

    def filled(like: torch.Tensor) -> torch.Tensor:
        full = torch.full_like(like, min(_HUGE, largest))
        full[:, :, ::2] = largest
        return full

    return filled(inputs.k), filled(inputs.v)
