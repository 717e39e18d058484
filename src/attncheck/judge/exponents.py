"""Errors of the exponents of softmax weights: equation B9 of the manual."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.judge.additions import steps
from attncheck.judge.scores import factor_roundings, maximum_of_keys

if TYPE_CHECKING:
    from attncheck.conditions import Conditions, ScoreModError
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.judge.scores import ScoreError

__all__ = ["Exponents", "exponents"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Exponents:
    """Errors of the exponents, float64 ``(heads, rows, kv)``, 0 where not seen; what makes them up.

    Attributes:
        product: Of scale · q·k, after the score mod.
        own: The score mod's own.
        exponent: Of everything between a score and its weight.
        arrival: ``exponent`` of the score that is the maximum, ``(heads, rows, 1)``.
        highest: How far the computed maximum is from the exact one at most, likewise.
        unbounded: bool ``(heads, rows)``: nothing is known of a score, or it may overflow.
    """

    product: torch.Tensor
    own: torch.Tensor
    exponent: torch.Tensor
    arrival: torch.Tensor
    highest: torch.Tensor
    unbounded: torch.Tensor

    @property
    def total(self) -> torch.Tensor:
        """Largest |error| of a weight's logarithm (B9)."""
        return self.product + self.own + self.exponent


def exponents(
    conditions: Conditions,
    arithmetic: Arithmetic,
    scores: ScoreError,
    mod: ScoreModError | None,
) -> Exponents:
    """B9: errors of every exponent of these rows."""
    seen = conditions.seen
    given = scores.radius if mod is None else mod.radius
    own = torch.zeros_like(given) if mod is None else mod.own.clamp_max(given)
    # A score mod may hide a key, or show it, after rounding: its radius is infinite there.
    unknown = ~torch.isfinite(given) & (seen if mod is None else True)
    unbounded = unknown.any(-1)
    counted = seen & ~unbounded[..., None]
    given, own = torch.where(counted, given, 0.0), torch.where(counted, own, 0.0)
    maximum = conditions.maximum[..., None]
    below = (maximum - conditions.scores).abs()
    moved = torch.where(counted, given - below, 0.0).amax(-1, keepdim=True)
    fallen = torch.where(counted, given + below, torch.inf).amin(-1, keepdim=True)
    highest = torch.maximum(moved, torch.where(torch.isfinite(fallen), fallen, 0.0))
    exponent = _exponent_error(conditions, arithmetic, given + highest, below)
    at_top = _exponent_error(
        conditions, arithmetic, 2 * highest, torch.zeros_like(highest), maximum
    )
    return Exponents(
        product=given - own,
        own=own,
        exponent=torch.where(counted, exponent, 0.0),
        arrival=at_top,
        highest=highest,
        unbounded=unbounded,
    )


def _exponent_error(
    conditions: Conditions,
    arithmetic: Arithmetic,
    shift: torch.Tensor,
    below: torch.Tensor,
    score: torch.Tensor | None = None,
) -> torch.Tensor:
    """B9's last part: of scores ``below`` the maximum, both known within ``shift``."""
    score = conditions.scores if score is None else score
    own = maximum_of_keys(conditions)
    maximum = torch.maximum(conditions.maximum.abs(), own.abs())[..., None]
    below = below + (conditions.maximum - own)[..., None]
    tiles = steps(conditions, arithmetic)
    each = 2 * arithmetic.exp2_ulps + 1
    differences = factor_roundings(arithmetic) + 2
    lag = 2 * math.log(2) * arithmetic.lazy_rescale
    count = score.abs() + maximum + 2 * shift + differences * (below + shift + lag) + each * tiles
    if arithmetic.splits > 1:
        logarithm = torch.log(conditions.seen.sum(-1, keepdim=True).clamp_min(1).double())
        count = count + 8 * (score.abs() + maximum + shift + logarithm) + 2 * each + 8
    unit = arithmetic.unit
    return count * (unit / (1 - each * unit))
