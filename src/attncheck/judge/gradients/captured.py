"""Gradients of the numbers that a score mod reads from tensors: equation B40 of the manual."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attncheck.judge.gradients.saved import kept
from attncheck.judge.gradients.score_gradients import score_gradients
from attncheck.judge.gradients.sums import Sums

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.conditions import GradientConditions, ReadConditions
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.judge.gradients.recomputed import Recomputed
    from attncheck.judge.gradients.saved import Saved
    from attncheck.judge.gradients.score_gradients import ScoreGradients

__all__ = ["captured_sums"]


def captured_sums(
    known: GradientConditions,
    arithmetic: Arithmetic,
    weights: Recomputed,
    saved: Saved,
    reads: Sequence[ReadConditions],
    numbers: int,
) -> Sums:
    """B40: these rows' part of the gradient of each number, ``(numbers, 1, 1)``.

    Args:
        known: Of the rows.
        arithmetic: What the kernel declares.
        weights: P as its backward has it.
        saved: How far its own out and LSE are off.
        reads: At least one.
        numbers: How many there are to read.
    """
    parts = (
        _of_read(known, arithmetic, weights, saved, read).spread(read.place.flatten(), numbers)
        for read in reads
    )
    return functools.reduce(Sums.plus, parts)


def _of_read(
    known: GradientConditions,
    arithmetic: Arithmetic,
    weights: Recomputed,
    saved: Saved,
    read: ReadConditions,
) -> Sums:
    """Each score's gradient times the slope of what it reads, a sum of one term."""
    # A sink, the last key, reads nothing: its slope is 0.
    sink = (0, known.dx.shape[-1] - read.place.shape[-1])
    slope = torch.nn.functional.pad(read.slope, sink)
    of_slope = ("radius", "own", "jump")
    padded = {n: torch.nn.functional.pad(getattr(read.error, n), sink) for n in of_slope}
    error = replace(read.error, **padded)
    weights = weights.without(~(torch.isfinite(error.radius) & torch.isfinite(slope)))
    known, saved = kept(replace(known, slope=slope), saved, weights.live.any(-1))
    found = score_gradients(known, arithmetic, weights, saved, error)
    return _terms(arithmetic, weights, found, read.place.shape[-1])


def _terms(arithmetic: Arithmetic, weights: Recomputed, found: ScoreGradients, keys: int) -> Sums:
    """Every score apart, ``(scores, 1, 1)``; as of a sink, dS is not rounded by what is fused."""

    def each(x: torch.Tensor) -> torch.Tensor:
        return x[..., :keys].reshape(-1, 1)

    parts = {
        name: each(part)
        for name, part in found.parts.items()
        if not (arithmetic.fused and part is found.rounded)
    }
    size, live = each(found.size), each(weights.live).to(torch.float64)
    moved = sum(parts.values(), torch.zeros_like(size))
    return Sums(
        moved=moved[..., None],
        size=size[..., None],
        shift=each(found.shift)[..., None],
        exact=None,
        parts=parts,
        taken=live,
        lost=2.0**arithmetic.computes.min_exponent * (2 * live + moved + size),
        unknown=each(weights.exposed & weights.unbounded[..., None]),
    )
