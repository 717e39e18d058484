"""Some rows of a call with what each of their outputs may be off by: what an error must exceed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from attncheck.conditions import Conditions

__all__ = ["Exposure"]

UNIT = 2.0**-52
"""Twice float64's unit roundoff: what a sum of n terms may be off by is n times half of it."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Exposure:
    """Rows, their exact softmax weights, and the allowances that were applied to them.

    Attributes:
        known: The exact quantities.
        weights: P, ``(heads, rows, kv)``; 0 where not seen.
        out_allowance: ``(heads, rows, value_dim)``; infinite where nothing is asked.
        lse_allowance: ``(heads, rows)``; infinite where nothing is asked, and where the kernel does
            not expose LSE.
        slope: Derivative of the score mod at the products, ``(heads, rows, kv)``; None where it is
            not known.
    """

    known: Conditions
    weights: torch.Tensor
    out_allowance: torch.Tensor
    lse_allowance: torch.Tensor
    slope: torch.Tensor | None

    @classmethod
    def of(
        cls,
        known: Conditions,
        out_allowance: torch.Tensor,
        lse_allowance: torch.Tensor | None,
        slope: torch.Tensor | None,
    ) -> Exposure:
        """The exposure of ``known`` with these allowances; without ``lse_allowance`` no LSE."""
        alive = known.seen.any(-1)
        if lse_allowance is None:
            lse_allowance = torch.full_like(known.lse, math.inf)
        if slope is None and not known.has_score_mod:
            slope = torch.ones_like(known.products)
        return cls(
            known=known,
            weights=softmax(known.scores, known.seen),
            out_allowance=_asked(out_allowance, alive[..., None]),
            lse_allowance=_asked(lse_allowance, alive),
            slope=slope,
        )

    def rows(self, chosen: torch.Tensor) -> Exposure:
        """Those of the rows with these int64 indices into the axis ``rows``."""
        known = self.known
        part = {
            name: getattr(known, name)[:, chosen]
            for name in ("q", "products", "scores", "seen", "maximum", "total", "out", "lse")
        }
        kept = {
            name: getattr(known, name)
            for name in (
                "rows",
                "k",
                "v",
                "scale",
                "given_scores",
                "has_score_mod",
                "has_sink",
            )
        }
        return Exposure(
            known=type(known)(**part, **kept),
            weights=self.weights[:, chosen],
            out_allowance=self.out_allowance[:, chosen],
            lse_allowance=self.lse_allowance[:, chosen],
            slope=None if self.slope is None else self.slope[:, chosen],
        )

    def through_values(self, weights: torch.Tensor) -> torch.Tensor:
        """``weights`` times V, ``(heads, rows, value_dim)``; of a softmax V is the identity."""
        return weights if self.known.given_scores else weights @ self.known.v

    def size(self, weights: torch.Tensor) -> torch.Tensor:
        """The same of |weights| and |V|: what a sum's own rounding is in proportion to."""
        sizes = weights.abs()
        return sizes if self.known.given_scores else sizes @ self.known.v.abs()

    @property
    def resolution(self) -> float:
        """Relative rounding error of a float64 sum over the keys, of two products and a factor."""
        return (self.weights.shape[-1] + 4) * UNIT

    def exposed(self, out: torch.Tensor, lse: torch.Tensor) -> bool:
        """Whether these results instead of the exact ones would be beyond an allowance."""
        known = self.known
        beyond = (out - known.out).abs() > self.out_allowance
        return bool(beyond.any() or ((lse - known.lse).abs() > self.lse_allowance).any())


def softmax(scores: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """exp(score − maximum) ÷ Σ over the seen keys, ``(…, kv)``; zeros where none is seen."""
    hidden = torch.where(seen, scores, -math.inf)
    largest = hidden.amax(-1, keepdim=True)
    powers = torch.exp(hidden - torch.where(largest.isfinite(), largest, 0.0))
    total = powers.sum(-1, keepdim=True)
    return powers / torch.where(total > 0, total, 1.0)


def _asked(allowance: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
    """Infinite in rows that see no key, which another rule asks about, and where it is NaN."""
    return torch.where(alive & ~allowance.isnan(), allowance, math.inf)
