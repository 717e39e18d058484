"""Which changes of a single key's weight the allowances of a row would expose.

With P the exact weights of a row, O = P·V, and A the allowance of O (element by element):

* Key j's weight times 1 + η makes (O + η P_j v_j) ÷ (1 + η P_j), so that O moves by
  η P_j (v_j − O) ÷ (1 + η P_j) and LSE by log(1 + η P_j).
* Let M_j = max over dim of |v_jd − O_d| ÷ A_d. The smallest |η| that moves some element by its
  allowance is 1 ÷ (P_j (M_j + 1)) for a weight that is too small; where that is 1 or more, a weight
  cannot be so small, and it is 1 ÷ (P_j (M_j − 1)) for one too large, if M_j > 1.
* LSE exposes 1 − e^−A ÷ P_j of a weight too small, (e^A − 1) ÷ P_j of one too large.
* Key j dropped is η = −1: O moves by P_j ÷ (1 − P_j) · (v_j − O), LSE by −log(1 − P_j).

For the key of the largest weight 1 − P_j and v_j − O may be lost in float64. With O′ of the row
without it, v_j − O = (1 − P_j)(v_j − O′), and dropping it moves O by P_j (v_j − O′); 1 − P_j is
added up from the other weights, each of which is at most ½. LSE′ is of the other scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.judge.exposure import softmax

if TYPE_CHECKING:
    from attncheck.judge.exposure import Exposure

__all__ = ["KeyWeights", "key_weights"]


_LEAST = torch.finfo(torch.float64).tiny  # in place of no allowance at all: 0 ÷ 0 is no share


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyWeights:
    """What would be exposed of single keys.

    Attributes:
        smallest: Smallest relative error of one key's weight; infinite where none.
        dropped: Visible (row, key) pairs of rows that see two keys or more of which one dropped
            would be seen.
        pairs: All such pairs.
    """

    smallest: float
    dropped: int
    pairs: int


def key_weights(rows: Exposure) -> KeyWeights:
    """What the allowances of ``rows`` expose of single keys, by the formulas above."""
    known, weights = rows.known, rows.weights
    top = weights.argmax(-1, keepdim=True)
    others = known.seen.scatter(-1, top, value=False)
    without = softmax(known.scores, others)
    alone = ~others.any(-1, keepdim=True)
    rest = torch.where(others, weights, 0.0).sum(-1, keepdim=True)  # 1 − P of the largest

    farthest = _farthest(rows).masked_fill(alone, 0.0)
    from_rest = _farthest_of_top(rows, top, without).masked_fill(alone, 0.0)
    farthest = farthest.scatter(-1, top, rest * from_rest)
    moved = weights / (1 - weights) * farthest
    moved = moved.scatter(-1, top, weights.gather(-1, top) * from_rest)
    lse_moved = -torch.log1p(-weights)
    hidden = torch.where(others, known.scores, -math.inf)
    of_top = known.lse[..., None] - torch.logsumexp(hidden, -1, keepdim=True)
    lse_moved = lse_moved.scatter(-1, top, of_top)

    paired = known.seen & ~alone
    dropped = paired & ((moved > 1) | (lse_moved > rows.lse_allowance[..., None]))
    smallest = _smallest_change(weights, farthest, rows.lse_allowance[..., None])
    visible = smallest[known.seen & (weights > 0)]
    return KeyWeights(
        smallest=float(visible.min()) if visible.numel() else math.inf,
        dropped=int(dropped.sum()),
        pairs=int(paired.sum()),
    )


def _farthest(rows: Exposure) -> torch.Tensor:
    """M, ``(heads, rows, kv)``; huge where an element without an allowance moves.

    One dim after the other, so that nothing of the size rows × kv × dim is ever held.
    """
    if rows.known.given_scores:
        return _farthest_of_softmax(rows)
    values = rows.known.v.mT.contiguous()
    out, blur, asked = (
        part.mT[..., None].contiguous()
        for part in (
            rows.known.out,
            rows.resolution * rows.size(rows.weights),
            1 / rows.out_allowance.clamp_min(_LEAST),
        )
    )
    found = torch.zeros_like(rows.weights)
    for d in range(values.shape[1]):
        apart = (values[:, d, None] - out[:, d]).abs_().sub_(blur[:, d]).mul_(asked[:, d])
        torch.maximum(found, apart, out=found)
    return found


def _farthest_of_top(rows: Exposure, top: torch.Tensor, without: torch.Tensor) -> torch.Tensor:
    """M ÷ (1 − P) of the key of the largest weight, ``(heads, rows, 1)``."""
    elsewhere = rows.through_values(without)
    blur = rows.resolution * rows.size(without)
    if rows.known.given_scores:
        own = torch.zeros_like(elsewhere).scatter(-1, top, 1.0)
    else:
        dim = rows.known.v.shape[-1]
        own = rows.known.v.gather(1, top.expand(-1, -1, dim))
    apart = (own - elsewhere).abs() - blur
    return _share(apart, rows.out_allowance).amax(-1, keepdim=True)


def _farthest_of_softmax(rows: Exposure) -> torch.Tensor:
    """The same with V the identity: |1 − P_j| of key j itself, P_d of every other."""
    weights, allowance = rows.weights, rows.out_allowance
    each = _share(weights, allowance)
    top = each.argmax(-1, keepdim=True)
    other = each.amax(-1, keepdim=True).expand_as(each)
    other = other.scatter(-1, top, each.scatter(-1, top, 0.0).amax(-1, keepdim=True))
    return torch.maximum(_share(1 - weights, allowance), other)


def _share(moved: torch.Tensor, allowance: torch.Tensor) -> torch.Tensor:
    """How many times its allowance each moves; 0 of what does not move or nobody asks about."""
    return moved.clamp_min(0.0) / allowance.clamp_min(_LEAST)


def _smallest_change(
    weights: torch.Tensor, farthest: torch.Tensor, allowance: torch.Tensor
) -> torch.Tensor:
    """|η| of every pair, ``(heads, rows, kv)``, through out or LSE, whichever needs less."""
    too_small = torch.minimum(1 / (weights * (farthest + 1)), -torch.expm1(-allowance) / weights)
    through_out = torch.where(farthest > 1, 1 / (weights * (farthest - 1)), math.inf)
    too_large = torch.minimum(through_out, torch.expm1(allowance) / weights)
    return torch.where(too_small < 1, too_small, too_large)
