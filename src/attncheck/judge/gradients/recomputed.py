"""Softmax weights as a backward has them: equation B31 of the manual."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch

from attncheck.judge.exponents import exponents
from attncheck.judge.row_sums import log_sum_base
from attncheck.judge.scores import factor_roundings

if TYPE_CHECKING:
    from attncheck.conditions import GradientConditions, ScoreModError
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.judge.exponents import Exponents
    from attncheck.judge.gradients.saved import Saved
    from attncheck.judge.scores import ScoreError

    Count = TypeVar("Count", float, torch.Tensor)

__all__ = ["Recomputed", "recomputed", "roundings"]

# p ÷ l where P is had from a row sum and not from LSE: as in B14.
_DIVISION = 6


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Recomputed:
    """P of a backward, float64 ``(heads, rows, kv)``; 0 where not seen, and in unbounded rows.

    Attributes:
        exact: P.
        moved: Largest |computed P − P| before it is rounded.
        rounded: Largest error of rounding it to its format.
        parts: What the error of its logarithm is made of, by name.
        live: bool: seen, of a row that something is known of.
        unbounded: bool ``(heads, rows)``: nothing is known of the row.
        exposed: bool: the keys that are then not known: seen, or perhaps seen after rounding.
    """

    exact: torch.Tensor
    moved: torch.Tensor
    rounded: torch.Tensor
    parts: dict[str, torch.Tensor]
    live: torch.Tensor
    unbounded: torch.Tensor
    exposed: torch.Tensor

    def without(self, keys: torch.Tensor) -> Recomputed:
        """The same with rows of which one of ``keys``, bool ``(heads, rows, kv)``, is unbounded."""
        unbounded = self.unbounded | (keys & self.exposed).any(-1)
        live = self.live & ~unbounded[..., None]
        exact, moved, rounded = (
            torch.where(live, x, 0.0) for x in (self.exact, self.moved, self.rounded)
        )
        return replace(
            self,
            exact=exact,
            moved=moved,
            rounded=rounded,
            parts={name: torch.where(live, part, 0.0) for name, part in self.parts.items()},
            live=live,
            unbounded=unbounded,
        )


def roundings(count: Count, arithmetic: Arithmetic) -> Count:
    """B1 in the arithmetic of everything that is no product of matrices."""
    error: Count = count * arithmetic.unit / (1 - count * arithmetic.unit)
    return error


def recomputed(
    known: GradientConditions,
    arithmetic: Arithmetic,
    scores: ScoreError,
    saved: Saved,
    mod: ScoreModError | None,
) -> Recomputed:
    """B31: P from the kernel's own LSE, or from its own maximum and row sum."""
    forward = known.known
    errors = exponents(forward, arithmetic, scores, mod)
    alive = forward.seen.any(-1)
    lse_error = torch.where(alive, saved.lse_error.abs(), 0.0)
    unbounded = errors.unbounded | (alive & _unknown(known, saved))
    live = forward.seen & ~unbounded[..., None]
    lse_error = torch.where(unbounded, 0.0, lse_error)[..., None]
    parts = {
        "scores": errors.product,
        "score mod": errors.own,
        "LSE": lse_error.expand_as(errors.product),
        "exponent": _exponent_error(known, arithmetic, errors, lse_error),
    }
    parts = {name: torch.where(live, part, 0.0) for name, part in parts.items()}
    exact, moved = _moved(known, arithmetic, live, sum(parts.values(), torch.zeros_like(known.dx)))
    radius = scores.radius if mod is None else mod.radius
    return Recomputed(
        exact=exact,
        moved=moved,
        rounded=_rounded(arithmetic, exact + moved),
        parts=parts,
        live=live,
        unbounded=unbounded,
        exposed=forward.seen | (~torch.isfinite(radius) if mod is not None else False),
    )


def _unknown(known: GradientConditions, saved: Saved) -> torch.Tensor:
    """Rows whose exact or saved results, or whose loss or slopes, are not finite."""
    rows = (known.known.out, known.dout, known.dx, saved.out_error)
    finite = torch.stack([torch.isfinite(x).all(-1) for x in rows]).all(0)
    each = (known.known.lse, known.dlse, saved.lse_error)
    return ~(finite & torch.stack([torch.isfinite(x) for x in each]).all(0))


def _exponent_error(
    known: GradientConditions, arithmetic: Arithmetic, errors: Exponents, lse_error: torch.Tensor
) -> torch.Tensor:
    """B31: of exp2(z·c − LSE·c), or B9's of exp2(z·c − m·c) ÷ l and what LSE was rounded to."""
    forward = known.known
    alive = forward.seen.any(-1, keepdim=True)
    lse = torch.where(alive, forward.lse[..., None], 0.0)
    each, differences = 2 * arithmetic.exp2_ulps + 1, factor_roundings(arithmetic) + 2
    size, distance = forward.scores.abs() + lse.abs(), (forward.scores - lse).abs()
    off = errors.product + errors.own + lse_error
    count = 2 * size + differences * (distance + off) + 4 * off + each
    from_lse = count * (arithmetic.unit / (1 - each * arithmetic.unit))
    stored = log_sum_base(forward, arithmetic, lse_error[..., 0])[..., None]
    from_sum = errors.exponent + stored + roundings(_DIVISION, arithmetic)
    return torch.maximum(from_lse, from_sum)


def _moved(
    known: GradientConditions, arithmetic: Arithmetic, live: torch.Tensor, rho: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """P, and P (e^ρ − 1) with what is taken for 0 below the normal range."""
    forward = known.known
    log = torch.where(live, forward.scores - forward.lse[..., None], -torch.inf)
    exact = torch.exp(log)
    growth = torch.where(exact > 0, exact * torch.expm1(rho), torch.exp(log + rho))
    return exact, torch.where(live, growth + 2.0**arithmetic.computes.min_exponent, 0.0)


def _rounded(arithmetic: Arithmetic, upper: torch.Tensor) -> torch.Tensor:
    """B13 of a P that is divided already."""
    if not arithmetic.weights_error:
        return torch.zeros_like(upper)
    fmt, scale = arithmetic.weights, arithmetic.weights_scale
    floor = fmt.subnormal_spacing / 2 / scale
    rounded = torch.maximum(arithmetic.weights_error * upper, upper.clamp_max(floor))
    return torch.where(scale * upper > fmt.max, torch.inf, rounded)
