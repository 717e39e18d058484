"""Accumulators of few bits: how few the allowances of some rows would expose.

The fault is played, not estimated: products are added up exactly in steps of 16, as a tensor core
takes them, and after every step the sum is cut to t significant bits, toward zero. Once this is
done to P·V, with exact weights and keys in their order, and once to q·k, with the exact softmax of
what comes out. A cut sum is always too small, so that what is lost adds up over the steps: this is
what tells a truncating accumulator from a rounding one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.judge.exposure import softmax

if TYPE_CHECKING:
    from attncheck.judge.exposure import Exposure

__all__ = ["accumulator_bits", "cut"]

STEP = 16
"""Products that are added in one step: of 16-bit operands on Hopper."""

MOST = 24
"""Significant bits of fp32: an accumulator of no fewer is no fault."""


def accumulator_bits(rows: Exposure, known: int = 0) -> int:
    """Largest number of bits below fp32's at which a cut sum is beyond an allowance of ``rows``.

    Args:
        rows: Where to look.
        known: A number of bits that is exposed already; nothing smaller is looked for.

    0 where none is. Found by halving: fewer bits lose more.
    """
    if rows.known.given_scores:
        return known  # nothing is multiplied
    seen, unseen = known, MOST
    bits = known + 1  # most often a later block shows nothing new
    while seen < bits < unseen:
        if _exposed(rows, bits):
            seen = bits
        else:
            unseen = bits
        bits = (seen + unseen) // 2
    return seen


def cut(values: torch.Tensor, bits: int) -> torch.Tensor:
    """float64 ``values`` with the first ``bits`` significant bits alone: rounded toward zero.

    Normal numbers; the sign is apart from the significand, so that clearing bits lessens the size.
    """
    return (values.contiguous().view(torch.int64) & -(1 << (53 - bits))).view(torch.float64)


def _exposed(rows: Exposure, bits: int) -> bool:
    return _values_exposed(rows, bits) or (rows.slope is not None and _scores_exposed(rows, bits))


def _values_exposed(rows: Exposure, bits: int) -> bool:
    """Whether P·V added up in ``bits`` bits is beyond what out is allowed."""
    weights, values = rows.weights, rows.known.v
    total = torch.zeros_like(rows.known.out)
    for start in range(0, weights.shape[-1], STEP):
        keys = slice(start, start + STEP)
        total = cut(total + weights[..., keys] @ values[:, keys], bits)
    return rows.exposed(total, rows.known.lse)


def _scores_exposed(rows: Exposure, bits: int) -> bool:
    """Whether q·k added up in ``bits`` bits makes out or LSE beyond what they are allowed.

    Through a score mod to first order, with its slope at the exact products.
    """
    known = rows.known
    assert rows.slope is not None
    total = torch.zeros_like(known.products)
    for start in range(0, known.q.shape[-1], STEP):
        dims = slice(start, start + STEP)
        total = cut(total + known.q[..., dims] @ known.k[..., dims].mT, bits)
    scores = known.scores + rows.slope * (known.scale * total - known.products)
    weights = softmax(scores, known.seen)
    hidden = torch.where(known.seen, scores, -torch.inf)
    return rows.exposed(rows.through_values(weights), torch.logsumexp(hidden, -1))
