"""Allowed errors of a kernel's outputs over a Problem, and the shares that its errors take."""

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
    # Bound of |error| with probability 1 − 1e-6 over the whole Problem, ``(heads, rows,
    # value_dim)``.
    probable_out: Tensor
    probable_lse: Tensor  # the same of LSE, ``(heads, rows)``
    sd_out: Tensor  # predicted root mean square of the error, as ``probable_out``
    sd_lse: Tensor  # the same of LSE
    # The part of out's bound that is for numbers below the normal range, which hardware may take
    # for 0, as ``probable_out``; None for nothing.
    lost_out: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Allowance:
    """Largest errors that rounding can explain; infinite in rows that nothing is known of."""

    out: Tensor  # ``(batch, heads, query, value_dim)``, float64; exactly 0 in rows that see no key
    lse: Tensor  # ``(batch, heads, query)``, float64; likewise
    samples: list[Sample] = field(default_factory=list)  # the rows examined more closely
    # Seen (row, key) pairs whose score lies within its error of a jump of the score mod.
    jumps: int = 0
    # Largest proven error of the float64 oracle ÷ allowance, over what is finite.
    oracle_share: float = 0.0
    # Rows whose ``out`` and ``lse`` are this, ``(batch, heads, query)`` bool; those of others are
    # floors of it, or NaN. None where all rows are.
    exact: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The largest |error| ÷ allowance over some elements of one tensor; above 1 is beyond it."""

    tensor: TensorName
    # |got − exact| ÷ allowance; infinite where an element has no allowance or is NaN.
    size: float
    place: Place  # where it is largest
    # got, exact, allowance: of that element.
    got: float
    exact: float
    allowance: float
    beyond: int  # elements with a share above 1
    elements: int  # how many were compared


def shares(error: Tensor, allowance: Tensor) -> Tensor:
    """|error| ÷ allowance, elementwise, float64.

    No error is no share, even of no allowance. An error without an allowance is infinite, and so
    is everything that is NaN: a NaN would compare as "not above 1".
    """
    # Division first, then its odd cases: 0 ÷ 0 and NaN would both pass as "not above 1".
    ratio = error.abs() / allowance
    ratio = torch.where((error == 0) & (allowance == 0), 0.0, ratio)
    return torch.where(ratio.isnan(), math.inf, ratio)


def share_of(
    tensor: TensorName, got: Tensor, exact: Tensor, allowance: Tensor, counted: Tensor
) -> Share | None:
    """The largest share over the elements counted; None where none is.

    Args:
        got: What the kernel gave, in the axes of ``core.outputs.AXES``.
        exact: The exact result, float64, same shape.
        allowance: float64, same shape.
        counted: bool, same shape: what has a finite allowance.
    """
    elements = int(counted.sum())
    if not elements:
        return None
    error = torch.where(counted, got.to(torch.float64) - exact, 0.0)
    # −1 where nothing is compared: below every share, so that argmax never lands there.
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
    """The largest of the shares of several parts, counting the elements of all."""
    some = [share for share in parts if share is not None]
    if not some:
        return None
    return replace(
        max(some, key=lambda share: share.size),
        beyond=sum(share.beyond for share in some),
        elements=sum(share.elements for share in some),
    )


def share_in_problem(share: Share, rows: Rows, heads: int) -> Share:
    """Return ``share`` of ``(1, heads, rows, …)``, some rows, with its place in the problem."""
    head = rows.heads[share.place.head]
    query = int(rows.query[share.place.query])
    where = Place(batch=head // heads, head=head % heads, query=query, dim=share.place.dim)
    return replace(share, place=where)


def at_rows(rows: Rows, tensor: Tensor) -> Tensor:
    """The ``(heads, rows, …)`` part of a ``(batch, heads, query, …)`` tensor."""
    heads = rows.heads
    # (batch, heads) pairs are numbered in this order wherever rows are cut into pieces.
    some = tensor.flatten(0, 1)[heads.start : heads.stop : heads.step]
    return some.index_select(1, rows.query.to(some.device))


def place_of(flat: int, shape: torch.Size) -> Place:
    """The element numbered ``flat``, row-major, of a tensor of this shape."""
    return Place.of(tuple(int(i) for i in np.unravel_index(flat, shape)))
