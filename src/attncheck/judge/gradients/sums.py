"""Sums of a backward over keys or rows, and how far they may be off: equation B36 of the manual."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attncheck.judge.spacing import half_ulp

if TYPE_CHECKING:
    from attncheck.formats import Format
    from attncheck.judge.accumulators import Accumulator
    from attncheck.judge.arithmetic import Arithmetic

__all__ = ["OUTPUT", "PARTS", "Sums", "in_parts", "rounded", "settled"]

_MOST_GROWTH = 512.0  # e to it is a float64

OUTPUT = "output rounding"
PARTS = "rounding of parts"
_ACCUMULATION, _SAVED = "accumulation", "saved out"

# The scale as it is multiplied by at the end (B5's two roundings), q·√scale and k·√scale, and one
# of the products.
_AROUND = 7


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Sums:
    """Sums Σ x_t y_t and their errors, float64; nonnegative but for ``shift`` and ``exact``.

    Attributes:
        moved: Σ of the largest errors of x times |y|, ``(heads, count, dim)``.
        size: Σ |x y|, x without its error.
        shift: What the saved out makes of the sum, exactly; None where that touches nothing.
        exact: The exact sum; None where it is not needed.
        parts: What ``moved`` is made of, in proportion, each ``(heads, count)``.
        taken: Terms that are summed, ``(heads, count)``.
        lost: What is taken for 0 below the normal range, ``(heads, count)``.
        unknown: bool ``(heads, count)``: nothing is known of some term.
    """

    moved: torch.Tensor
    size: torch.Tensor
    shift: torch.Tensor | None
    exact: torch.Tensor | None
    parts: dict[str, torch.Tensor]
    taken: torch.Tensor
    lost: torch.Tensor
    unknown: torch.Tensor

    def spread(self, to: torch.Tensor, count: int) -> Sums:
        """Those of ``count`` heads: each one's added to number ``to``."""

        def of(x: torch.Tensor) -> torch.Tensor:
            whole = torch.zeros((count, *x.shape[1:]), dtype=torch.float64, device=x.device)
            return whole.index_add_(0, to, x.to(torch.float64))

        return Sums(
            moved=of(self.moved),
            size=of(self.size),
            shift=None if self.shift is None else of(self.shift),
            exact=None if self.exact is None else of(self.exact),
            parts={name: of(part) for name, part in self.parts.items()},
            taken=of(self.taken),
            lost=of(self.lost),
            unknown=of(self.unknown) > 0,
        )

    def plus(self, other: Sums) -> Sums:
        """Both together; a name of parts may be in one alone."""
        nothing = torch.zeros_like(self.lost)
        names = sorted(self.parts.keys() | other.parts.keys())
        return Sums(
            moved=self.moved + other.moved,
            size=self.size + other.size,
            shift=_sum(self.shift, other.shift),
            exact=_sum(self.exact, other.exact),
            parts={n: self.parts.get(n, nothing) + other.parts.get(n, nothing) for n in names},
            taken=self.taken + other.taken,
            lost=self.lost + other.lost,
            unknown=self.unknown | other.unknown,
        )

    def terms(
        self,
        arithmetic: Arithmetic,
        accumulator: Accumulator,
        *,
        scale: float = 1.0,
        operand: float = 0.0,
        steps: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """B36: what the bound is made of before the sum is rounded, ``(heads, count, dim)``.

        Args:
            arithmetic: What the kernel declares.
            accumulator: What adds it up.
            scale: Factor of the sum.
            operand: Relative error of y.
            steps: Of a truncating accumulator, where they do not follow on each other.
        """
        whole = sum(self.parts.values(), torch.zeros_like(self.lost))
        share = {n: torch.where(whole > 0, part / whole, 0.0) for n, part in self.parts.items()}
        terms = {n: scale * part[..., None] * self.moved for n, part in share.items()}
        total = self.moved + self.size
        if self.shift is not None:
            terms[_SAVED] = scale * self.shift.abs()
        added = accumulator.det(self.taken + _AROUND, steps)[..., None]
        terms[_ACCUMULATION] = scale * (added * (1 + operand)) * total
        if operand:
            terms["rounding of operands"] = scale * operand * total
        terms["underflow"] = self.lost[..., None].expand_as(total) * max(1.0, scale)
        beyond = 2 * max(1.0, scale) * total > arithmetic.computes.max
        terms[_ACCUMULATION] = torch.where(beyond, torch.inf, terms[_ACCUMULATION])
        # The sums of this bound are float64 themselves, and some dozen operations each term.
        inflation = 1 + 8 * (self.taken[..., None] + total.shape[-1] + 8) * 2.0**-53
        return {name: term * inflation for name, term in terms.items()}


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return None if one is None or other is None else one + other


def rounded(exact: torch.Tensor, terms: dict[str, torch.Tensor], fmt: Format) -> torch.Tensor:
    """B4 of a sum that is off by ``terms``."""
    return half_ulp(exact.abs() + sum(terms.values()), fmt)


def in_parts(
    size: torch.Tensor, terms: dict[str, torch.Tensor], parts: int, fmt: Format
) -> torch.Tensor:
    """B39 of a sum that is added up in ``parts``, in ``fmt``, in any order; infinite beyond it.

    Args:
        size: Σ of the magnitudes of what is summed, which no partial sum passes.
        terms: What the sum is off by before.
        parts: How many.
        fmt: What each partial sum is rounded to.
    """
    rate = parts * math.log1p(fmt.unit_roundoff)
    growth = math.expm1(rate) if rate < _MOST_GROWTH else math.inf
    whole = size + sum(terms.values())
    # A tiny part grows like the sum: η ÷ 2 each, and as often as it is rounded again.
    found = growth * whole + (1 + growth) * parts * fmt.subnormal_spacing / 2
    return torch.where((1 + growth) * whole > fmt.max, math.inf, found)


def settled(
    terms: dict[str, torch.Tensor], zero: torch.Tensor, unknown: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The bound and its terms: 0 where nothing is summed, infinite where nothing is known."""
    terms = {
        name: torch.where(zero, 0.0, torch.where(unknown | torch.isnan(term), torch.inf, term))
        for name, term in terms.items()
    }
    return torch.stack(list(terms.values())).sum(0), terms
