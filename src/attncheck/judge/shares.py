"""How much of its allowance each element's error takes; a share above 1 is beyond it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from attncheck.judgement import Place

if TYPE_CHECKING:
    from collections.abc import Iterable

    from attncheck.conditions import Rows
    from attncheck.tensor_names import TensorName

__all__ = ["Share", "at", "largest", "of_rows", "place", "share", "shares"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The largest share over some elements of one tensor.

    Attributes:
        tensor: Which one.
        size: |got − exact| ÷ allowance; infinite where an element has no allowance or is NaN.
        place: Where it is largest.
        got, exact, allowance: Of that element.
        beyond: Elements with a share above 1.
        elements: How many were compared.
    """

    tensor: TensorName
    size: float
    place: Place
    got: float
    exact: float
    allowance: float
    beyond: int
    elements: int


def shares(error: torch.Tensor, allowance: torch.Tensor) -> torch.Tensor:
    """|error| ÷ allowance, elementwise, float64.

    No error is no share, even of no allowance. An error without an allowance is infinite, and so
    is everything that is NaN: a NaN would compare as "not above 1".
    """
    ratio = error.abs() / allowance
    ratio = torch.where((error == 0) & (allowance == 0), 0.0, ratio)
    return torch.where(ratio.isnan(), math.inf, ratio)


def share(
    tensor: TensorName,
    got: torch.Tensor,
    exact: torch.Tensor,
    allowance: torch.Tensor,
    counted: torch.Tensor,
) -> Share | None:
    """The largest share over the elements counted; None where none is.

    Args:
        tensor: Which one this is.
        got: What the kernel gave, in the axes of ``judgement.AXES``.
        exact: The exact result, float64, same shape.
        allowance: float64, same shape.
        counted: bool, same shape: what has a finite allowance.
    """
    elements = int(counted.sum())
    if not elements:
        return None
    error = torch.where(counted, got.to(torch.float64) - exact, 0.0)
    ratio = torch.where(counted, shares(error, allowance), -1.0)
    flat = int(ratio.reshape(-1).argmax())
    return Share(
        tensor=tensor,
        size=float(ratio.reshape(-1)[flat]),
        place=place(flat, got.shape),
        got=float(got.reshape(-1)[flat]),
        exact=float(exact.reshape(-1)[flat]),
        allowance=float(allowance.reshape(-1)[flat]),
        beyond=int((ratio > 1).sum()),
        elements=elements,
    )


def at(rows: Rows, tensor: torch.Tensor) -> torch.Tensor:
    """The ``(heads, rows, …)`` part of a ``(batch, heads, query, …)`` tensor."""
    heads = rows.heads
    some = tensor.flatten(0, 1)[heads.start : heads.stop : heads.step]
    return some.index_select(1, rows.query.to(some.device))


def largest(found: Iterable[Share | None]) -> Share | None:
    """The largest of the shares of several parts, counting the elements of all."""
    some = [one for one in found if one is not None]
    if not some:
        return None
    return replace(
        max(some, key=lambda one: one.size),
        beyond=sum(one.beyond for one in some),
        elements=sum(one.elements for one in some),
    )


def of_rows(found: Share, rows: Rows, heads: int) -> Share:
    """``found`` among ``(1, heads, rows, …)`` of some rows, with its place in the whole problem."""
    head = rows.heads[found.place.head]
    query = int(rows.query[found.place.query])
    where = Place(batch=head // heads, head=head % heads, query=query, dim=found.place.dim)
    return replace(found, place=where)


def place(flat: int, shape: torch.Size) -> Place:
    """The element numbered ``flat`` of a tensor of this shape."""
    return Place.of(tuple(int(i) for i in np.unravel_index(flat, shape)))
