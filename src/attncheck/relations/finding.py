"""What is wrong with an output, and the comparisons that find it: exact, without tolerances."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Finding", "moved", "wrong"]

_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Elements that are not what they must be.

    Attributes:
        tensor: ``out`` or ``lse``.
        place: First wrong element: (b, h, q, d), or (b, h, q) in the LSE.
        value: What it is.
        expected: What it should be.
        count: Wrong elements.
        compared: Elements compared.
    """

    tensor: str
    place: tuple[int, ...]
    value: float
    expected: float
    count: int
    compared: int

    @property
    def message(self) -> str:
        """One line."""
        place = ", ".join(map(str, self.place))
        # Nine digits tell any two fp32 numbers apart.
        value, expected = f"{self.value:.9g}", f"{self.expected:.9g}"
        verb = "differs" if self.count == 1 else "differ"
        return (
            f"{self.tensor}[{place}] = {value}, but should be {expected} bit for bit "
            f"({self.count} of {self.compared} elements {verb})"
        )

    def __str__(self) -> str:
        return self.message


def moved(tensor: str, value: torch.Tensor, expected: torch.Tensor) -> Finding | None:
    """Elements of which any bit differs, NaNs and the signs of zeros included.

    Args:
        tensor: Its name.
        value: What a kernel gave.
        expected: What it must be, same shape and dtype.
    """
    bits = _SAME_SIZE[value.element_size()]
    different = value.contiguous().view(bits) != expected.contiguous().view(bits)
    return _first(tensor, value, expected, different)


def wrong(tensor: str, value: torch.Tensor, expected: torch.Tensor) -> Finding | None:
    """Elements that are another number, or NaN; the sign of a zero is left open.

    0 + (−0) is +0: a sum that starts at 0 cannot return the −0 that it was given.
    """
    return _first(tensor, value, expected, value != expected)


def _first(
    tensor: str, value: torch.Tensor, expected: torch.Tensor, different: torch.Tensor
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
