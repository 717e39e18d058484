"""Random and systematic errors of exponents: equation B22 of the manual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.judge.additions import steps
from attncheck.judge.scores import factor_roundings, likely_radius

if TYPE_CHECKING:
    from attncheck.conditions import Conditions, ScoreModError
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.judge.scores import ScoreError

__all__ = ["ScoreStatistics", "score_statistics"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScoreStatistics:
    """Errors of the exponents, float64 ``(heads, rows, kv)``, 0 where not seen.

    Attributes:
        deviation: Standard deviation of a weight's relative error, times what the exponential
            makes of λ of them.
        steady: Signed errors that are the same throughout a row but for a factor in [−1, 1]:
            of the constant scale · log2 e, and of truncation.
        slope: Of the score mod, with its sign: 1 where there is none.
        common: Relative standard deviation of the whole row's, ``(heads, rows)``: it cancels in
            out and not in LSE.
        sigmas: λ.
    """

    deviation: torch.Tensor
    steady: list[torch.Tensor]
    slope: torch.Tensor
    common: torch.Tensor
    sigmas: float


def score_statistics(
    conditions: Conditions,
    arithmetic: Arithmetic,
    scores: ScoreError,
    mod: ScoreModError | None,
    sigmas: float,
) -> ScoreStatistics:
    """Statistics of these rows; ``sigmas`` is the λ of the bound they are for."""
    seen, unit = conditions.seen, arithmetic.unit
    slope, own = _slope(scores, mod, sigmas)
    maximum = conditions.maximum[..., None]
    below = torch.where(seen, conditions.scores - maximum, 0.0)
    each = 2 * arithmetic.exp2_ulps + 1
    records = _records(steps(conditions, arithmetic))
    exponent = (
        conditions.scores.square()
        + maximum.square()
        + ((factor_roundings(arithmetic) + 1) * below).square()
        + each**2 * (1 + records)
    )
    variance = slope.square() * scores.variance + own.square() / 3 + unit**2 / 3 * exponent
    deviation = torch.expm1(sigmas * variance.sqrt()) / sigmas
    if mod is not None and mod.falls is not None:
        slope = torch.where(mod.falls, -slope, slope)
    slope = torch.where(seen, slope, 0.0)
    steady = [factor_roundings(arithmetic) * unit * below]
    if scores.bias is not None:
        steady.append(slope * scores.bias)
    return ScoreStatistics(
        deviation=torch.where(seen, deviation, 0.0),
        steady=steady,
        slope=slope,
        common=unit**2 / 3 * (maximum.square() + each**2 * records)[..., 0],
        sigmas=sigmas,
    )


def _slope(
    scores: ScoreError, mod: ScoreModError | None, sigmas: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the score mod makes of an error, and adds of its own."""
    if mod is None:
        return torch.ones_like(scores.radius), torch.zeros_like(scores.radius)
    if mod.likely is None:
        reach, radius = scores.radius, mod.radius
    else:
        reach, radius = likely_radius(scores, sigmas), mod.likely
    carried = (radius - mod.own).clamp_min(0)
    return torch.where(reach > 0, carried / reach, 0.0), mod.own


def _records(tiles: torch.Tensor) -> torch.Tensor:
    """How often the running maximum moves: of a random order 2 ln T at most, and some (B22)."""
    return torch.minimum(tiles - 1, 3 + 2 * torch.log(tiles))
