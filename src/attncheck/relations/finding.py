"""What is wrong with an output, and the comparisons that find it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from attncheck.tensor_names import TensorName

__all__ = ["Finding", "apart", "moved", "same", "wrong"]

_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Elements that are not what they must be.

    Attributes:
        tensor: Which one.
        place: The worst element, or of bits the first, in the axes of ``judgement.AXES``.
        value: What it is.
        expected: What it should be.
        allowed: How far the two may be apart; 0 where bits are compared.
        count: Wrong elements.
        compared: Elements compared.
    """

    tensor: TensorName
    place: tuple[int, ...]
    value: float
    expected: float
    allowed: float = 0.0
    count: int
    compared: int

    @property
    def message(self) -> str:
        """One line."""
        place = ", ".join(map(str, self.place))
        # Nine digits tell any two fp32 numbers apart.
        value, expected = f"{self.value:.9g}", f"{self.expected:.9g}"
        how = f" ± {self.allowed:.2g}" if self.allowed else " bit for bit"
        verb = "differs" if self.count == 1 else "differ"
        return (
            f"{self.tensor}[{place}] = {value}, but should be {expected}{how} "
            f"({self.count} of {self.compared} elements {verb})"
        )

    def __str__(self) -> str:
        return self.message


def moved(tensor: TensorName, value: torch.Tensor, expected: torch.Tensor) -> Finding | None:
    """Elements of which any bit differs, NaNs and the signs of zeros included.

    Args:
        tensor: Its name.
        value: What a kernel gave.
        expected: What it must be, same shape and dtype.
    """
    bits = _SAME_SIZE[value.element_size()]
    different = value.contiguous().view(bits) != expected.contiguous().view(bits)
    return _first(tensor, value, expected, different)


def wrong(tensor: TensorName, value: torch.Tensor, expected: torch.Tensor) -> Finding | None:
    """Elements that are another number, or NaN; the sign of a zero is left open.

    0 + (−0) is +0: a sum that starts at 0 cannot return the −0 that it was given.
    """
    return _first(tensor, value, expected, value != expected)


def apart(
    tensor: TensorName, value: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor
) -> Finding | None:
    """Elements that are further apart than ``allowed``; the worst of them.

    Args:
        tensor: Its name.
        value: What a kernel gave.
        expected: What it must be, same shape; compared in float64. Equal infinities agree.
        allowed: How far the two may be apart, same shape; NaN allows nothing.
    """
    value, expected = value.double(), expected.double()
    distance = torch.where(value == expected, 0.0, (value - expected).abs())
    distance = distance.nan_to_num(nan=torch.inf, posinf=torch.inf)
    allowed = allowed.double().nan_to_num(nan=0.0, posinf=torch.inf)
    different = (distance > allowed) | (distance.isinf() & ~allowed.isinf())
    if not bool(different.any()):
        return None
    # 0 ÷ 0 is no share: where nothing is allowed, any distance is worse than where something is.
    share = torch.where(different, distance / allowed, -1.0).nan_to_num(nan=torch.inf)
    # torch's own of it imports sympy.
    worst = np.unravel_index(int(share.argmax()), share.shape)
    place = tuple(int(index) for index in worst)
    return Finding(
        tensor=tensor,
        place=place,
        value=float(value[place]),
        expected=float(expected[place]),
        allowed=float(allowed[place]),
        count=int(different.sum()),
        compared=different.numel(),
    )


def same(
    tensor: TensorName, value: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor | None
) -> Finding | None:
    """``moved``, or ``apart`` where an error is allowed."""
    if allowed is None:
        return moved(tensor, value, expected)
    return apart(tensor, value, expected, allowed)


def _first(
    tensor: TensorName, value: torch.Tensor, expected: torch.Tensor, different: torch.Tensor
) -> Finding | None:
    places = different.nonzero()
    if not len(places):
        return None
    place = tuple(places[0].tolist())
    return Finding(
        tensor=tensor,
        place=place,
        value=float(value[place]),
        expected=float(expected[place]),
        count=len(places),
        compared=different.numel(),
    )
