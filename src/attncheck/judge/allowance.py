"""Allowed errors of a kernel's outputs over a Problem, and errors as shares of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from attncheck.core.conditions import Rows
from attncheck.core.judgement import Place
from attncheck.core.tensor_names import TensorName


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Sample:
    """Statistical bounds of some rows, float64."""

    rows: Rows
    # Bounds of |error| that hold with probability 1 − 1e-6 over the whole Problem.
    probable_out: Tensor  # ``(heads, rows, value_dim)``
    probable_lse: Tensor  # ``(heads, rows)``
    sd_out: Tensor  # predicted root mean square of out's error, shape of ``probable_out``
    sd_lse: Tensor  # predicted root mean square of LSE's error, shape of ``probable_lse``
    # The part of out's bound for numbers below the normal range, which hardware may flush to 0,
    # shape of ``probable_out``; None if there is none.
    lost_out: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Allowance:
    """Largest errors that rounding can explain; infinite in rows without a known bound."""

    out: Tensor  # ``(batch, heads, query, value_dim)``, float64; exactly 0 in rows that see no key
    lse: Tensor  # ``(batch, heads, query)``, float64; exactly 0 in rows that see no key
    samples: list[Sample] = field(default_factory=list)  # statistical bounds of sampled rows
    # Seen (row, key) pairs whose score lies within its error of a jump of the score mod.
    jumps: int = 0
    # Largest proven error of the float64 oracle ÷ allowance, over finite allowances.
    oracle_share: float = 0.0
    # Rows whose ``out`` and ``lse`` are the full bound, ``(batch, heads, query)`` bool; other rows
    # hold floors of it, or NaN. None if all rows hold the full bound.
    full_rows: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The largest |error| ÷ allowance over some elements of one tensor; wrong if above 1."""

    tensor: TensorName
    # |got − exact| ÷ allowance; infinite where an element has no allowance or is NaN.
    size: float
    place: Place  # the element with the largest share; the next three numbers belong to it
    got: float
    exact: float
    allowance: float
    beyond: int  # number of elements with a share above 1
    elements: int  # number of elements compared


def shares(error: Tensor, allowance: Tensor) -> Tensor:
    """Return |error| ÷ allowance, elementwise, float64.

    An error of 0 has a share of 0, even with an allowance of 0. The share of any other error with
    an allowance of 0 is infinite, and so is that of NaN, which would compare as "not above 1".
    """
    ratio = error.abs() / allowance
    ratio = torch.where((error == 0) & (allowance == 0), 0.0, ratio)
    return torch.where(ratio.isnan(), math.inf, ratio)


def share_of(
    tensor: TensorName, got: Tensor, exact: Tensor, allowance: Tensor, counted: Tensor
) -> Share | None:
    """Return the largest share over the counted elements; None if none is counted.

    Args:
        got: The kernel's result, in the axes of ``core.outputs.AXES``.
        exact: The exact result, float64, same shape.
        allowance: float64, same shape.
        counted: bool, same shape: the elements with a finite allowance.
    """
    elements = int(counted.sum())
    if not elements:
        return None
    error = torch.where(counted, got.to(torch.float64) - exact, 0.0)
    # Elements that are not compared get −1, below every share, so that argmax never finds them.
    ratio = torch.where(counted, shares(error, allowance), -1.0)
    flat = int(ratio.reshape(-1).argmax())
    return Share(
        tensor=tensor,
        size=float(ratio.reshape(-1)[flat]),
        place=place_of(flat, got.shape),
        got=float(got.reshape(-1)[flat]),
        exact=float(exact.reshape(-1)[flat]),
        allowance=float(allowance.reshape(-1)[flat]),
        beyond=int((ratio > 1).sum()),
        elements=elements,
    )


def largest_share(parts: Iterable[Share | None]) -> Share | None:
    """Return the largest share of several parts, with the elements of all parts counted."""
    some = [share for share in parts if share is not None]
    if not some:
        return None
    return replace(
        max(some, key=lambda share: share.size),
        beyond=sum(share.beyond for share in some),
        elements=sum(share.elements for share in some),
    )


def share_in_problem(share: Share, rows: Rows, heads: int) -> Share:
    """Return a ``share`` within a piece ``(1, heads, rows, …)`` with its place in the problem."""
    head = rows.heads[share.place.head]
    query = int(rows.query[share.place.query])
    where = Place(batch=head // heads, head=head % heads, query=query, dim=share.place.dim)
    return replace(share, place=where)


def at_rows(rows: Rows, tensor: Tensor) -> Tensor:
    """Return the ``(heads, rows, …)`` part of a ``(batch, heads, query, …)`` tensor."""
    heads = rows.heads
    # ``Rows.heads`` numbers (batch, head) pairs in row-major order.
    some = tensor.flatten(0, 1)[heads.start : heads.stop : heads.step]
    return some.index_select(1, rows.query.to(some.device))


def place_of(flat: int, shape: torch.Size) -> Place:
    """Return the place of the element with row-major index ``flat`` in a tensor of this shape."""
    return Place.of(tuple(int(i) for i in np.unravel_index(flat, shape)))
