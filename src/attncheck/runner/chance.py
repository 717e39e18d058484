"""How improbable it is that chance alone made a kernel's errors so much larger.

Two kernels that round as often and as finely err by different numbers, and their mean squares over
a Case are two draws of one population: their ratio is one of F's, with as many degrees of freedom
as there are independent errors. ``docs/how-to/baseline.md`` derives what is computed here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Pair", "growth", "improbable", "ratio"]

_STEPS = 100  # of a ternary search: each leaves two thirds


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The errors of one tensor on one Case, before and after; none of them 0.

    Attributes:
        before, after: Root mean squares, in the units of the Case.
        freedom_before, freedom_after: Degrees of freedom of their squares.
        ensemble: Root mean squares of ideal kernels of several tilings, in an order of theirs that
            is the same in every Case.
    """

    before: float
    after: float
    freedom_before: float
    freedom_after: float
    ensemble: tuple[float, ...]

    @property
    def weight(self) -> float:
        """What it counts among others: the inverse of the variance of the logarithm of F."""
        return self.freedom_before * self.freedom_after / (self.freedom_before + self.freedom_after)

    def reversed(self) -> Pair:
        """What was before is after."""
        return Pair(
            before=self.after,
            after=self.before,
            freedom_before=self.freedom_after,
            freedom_after=self.freedom_before,
            ensemble=self.ensemble,
        )


def ratio(pairs: Sequence[Pair]) -> float:
    """After ÷ before: the weighted geometric mean of the pairs."""
    return math.exp(_mean(pairs, [math.log(p.after) - math.log(p.before) for p in pairs]))


def growth(pairs: Sequence[Pair]) -> float:
    """By which factor another tiling alone may change the errors.

    The square of the largest ÷ the smallest of the ensemble, each member's errors taken together
    over all pairs: the kernel before may lie as far outside of what the ensemble spans as half of
    that is wide, and the kernel after as far on the other side.
    """
    members = zip(*(pair.ensemble for pair in pairs), strict=True)
    sizes = [_mean(pairs, [math.log(size) for size in member]) for member in members]
    return math.exp(2 * (max(sizes) - min(sizes))) if sizes else 1.0


def improbable(pairs: Sequence[Pair]) -> float:
    """Natural logarithm of a bound of the probability of a ``ratio`` this large; 0 where not.

    Of kernels that are equally accurate but for ``growth``. Chernoff's bound: for every s > 0 the
    probability that T ≥ t is at most E[exp(s·T)]·exp(−s·t), and of T, a weighted mean of the
    logarithms of independent ratios F, that expectation is a product of gamma functions.
    """
    excess = 2 * math.log(ratio(pairs) / growth(pairs))
    if excess <= 0:
        return 0.0
    whole = math.fsum(pair.weight for pair in pairs)
    shares = [pair.weight / whole for pair in pairs]

    def exponent(s: float) -> float:
        moments = (_moment(pair, s * w) for pair, w in zip(pairs, shares, strict=True))
        return math.fsum(moments) - s * excess

    # Beyond it a moment is infinite. The exponent is convex in s, and 0 at 0.
    end = min(pair.freedom_before / (2 * w) for pair, w in zip(pairs, shares, strict=True))
    return min(0.0, exponent(_least(exponent, end)))


def _mean(pairs: Sequence[Pair], values: Sequence[float]) -> float:
    whole = math.fsum(pair.weight for pair in pairs)
    return math.fsum(p.weight / whole * v for p, v in zip(pairs, values, strict=True))


def _moment(pair: Pair, u: float) -> float:
    """Of F, with (after, before) degrees of freedom, ln E[F^u]; u < freedom before ÷ 2."""
    above, below = pair.freedom_after / 2, pair.freedom_before / 2
    gammas = math.lgamma(above + u) - math.lgamma(above)
    gammas += math.lgamma(below - u) - math.lgamma(below)
    return u * math.log(below / above) + gammas


def _least(function: Callable[[float], float], end: float) -> float:
    """Where a convex function is least between 0 and ``end``, which it does not reach."""
    low, high = 0.0, end * (1 - 2.0**-20)
    for _ in range(_STEPS):
        first, second = low + (high - low) / 3, high - (high - low) / 3
        if function(first) <= function(second):
            high = second
        else:
            low = first
    return (low + high) / 2
