"""Variances where equal weights share one rounding error: equation B23 of the manual."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["quadrature"]

# Numbers gathered at a time: 16 million float64 are 128 MiB.
_AT_A_TIME = 2**24


def quadrature(
    weight: torch.Tensor,
    log: torch.Tensor,
    values: torch.Tensor,
    center: torch.Tensor | None,
    width: float,
) -> torch.Tensor:
    """Σ over groups of (Σ in a group of weight_j · (v_j − center))², ``(heads, rows, value_dim)``.

    Or the same with every key a group of its own, whichever is more: errors of one group may be
    equal, and then cancel where the sum does, or independent.

    Args:
        weight: ``(heads, rows, kv)``, not negative; keys of weight 0 are in no group.
        log: Logarithm of P but for a constant a row, same shape: keys are of one group where it
            lies in one interval of ``width``.
        values: ``(heads, kv, value_dim)``.
        center: ``(heads, rows, value_dim)``; None for 0.
        width: Of an interval.
    """
    square = weight.square()
    total = square @ values.square()
    if center is not None:
        total = (
            total - 2 * center * (square @ values) + center.square() * square.sum(-1, keepdim=True)
        )
    rows = weight.shape[1]
    step = max(1, _AT_A_TIME // (weight.shape[0] * weight.shape[2] * values.shape[2]))
    for first in range(0, rows, step):
        part = slice(first, first + step)
        about = None if center is None else center[:, part]
        excess = _excess(weight[:, part], log[:, part], values, about, width)
        total[:, part] += excess.clamp_min(0)
    return total.clamp_min(0)


@dataclass(frozen=True, slots=True, eq=False)
class _Members:
    """Keys that share a group with another, in order of row and group; one number each."""

    head: torch.Tensor
    row: torch.Tensor
    key: torch.Tensor
    group: torch.Tensor


def _excess(
    weight: torch.Tensor,
    log: torch.Tensor,
    values: torch.Tensor,
    center: torch.Tensor | None,
    width: float,
) -> torch.Tensor:
    """What groups of several keys add to Σ (weight · (v − center))²."""
    heads, rows, _ = weight.shape
    dim = values.shape[-1]
    found = _members(weight, log, width)
    sums = values.new_zeros((heads * rows, dim))
    if not found.key.numel():
        return sums.view(heads, rows, dim)
    term = values[found.head, found.key]
    if center is not None:
        term -= center[found.head, found.row]
    term *= weight[found.head, found.row, found.key][:, None]
    groups = int(found.group[-1]) + 1
    together = values.new_zeros((groups, dim)).index_add_(0, found.group, term)
    place = found.head * rows + found.row
    of_group = place.new_zeros(groups).index_put_((found.group,), place)
    sums.index_add_(0, of_group, together.square())
    sums.index_add_(0, place, term.square_(), alpha=-1)
    return sums.view(heads, rows, dim)


def _members(weight: torch.Tensor, log: torch.Tensor, width: float) -> _Members:
    interval = torch.where(weight > 0, (log / width).floor(), -torch.inf)
    ordered, key = interval.sort(-1)
    same = (ordered[..., 1:] == ordered[..., :-1]) & torch.isfinite(ordered[..., 1:])
    none = torch.zeros_like(same[..., :1])
    with_previous = torch.cat([none, same], -1)
    several = with_previous | torch.cat([same, none], -1)
    head, row, place = several.nonzero(as_tuple=True)
    begins = ~with_previous[head, row, place]
    return _Members(head, row, key[head, row, place], begins.cumsum(0) - 1)
