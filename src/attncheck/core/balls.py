"""Arb's real balls, through python-flint, an optional extra.

A ball is an interval given by a midpoint and a radius; the result of every operation contains the
exact results for all numbers in its operands (Johansson, "Arb: efficient arbitrary-precision
midpoint-radius interval arithmetic", 2017). NaN and balls of infinite radius are unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from attncheck.core.errors import UsageError

try:
    import flint
except ModuleNotFoundError as error:
    if error.name != "flint":
        raise
    raise UsageError(
        "balls need python-flint, which is not installed: pip install 'attncheck[exact]'."
    ) from error


Ball: TypeAlias = Any  # flint.arb
BallArray: TypeAlias = NDArray[np.object_]  # array of balls

# Every operation with NaN gives NaN, so that unknown numbers propagate.
NOTHING_KNOWN: Ball = flint.arb.nan()

_INFINITY = flint.arb.pos_inf()


def flint_version() -> str:
    """Return the version of python-flint."""
    return str(flint.__version__)


def working_precision(bits: int) -> AbstractContextManager[None]:
    """Return a context in which flint rounds midpoints to ``bits`` bits."""
    manager: AbstractContextManager[None] = flint.ctx.workprec(bits)
    return manager


def each_ball(function: Callable[..., Any], arguments: int) -> Callable[..., BallArray]:
    """Return an elementwise function of arrays, which broadcast, for a function of balls."""
    on_arrays = np.frompyfunc(function, arguments, 1)

    def elementwise(*arrays: Any) -> BallArray:
        return np.asarray(on_arrays(*arrays), dtype=object)  # a scalar if there are no axes

    return elementwise


balls_of = each_ball(flint.arb, 1)  # integers, float64 or balls → balls, exactly


def is_known(ball: Ball) -> bool:
    """Return whether a ball bounds its number: its radius is finite, or it is exactly ±∞."""
    return bool(ball.is_finite()) or _is_infinity(ball)


def _is_infinity(ball: Ball) -> bool:
    """Return whether a ball is ±∞; a finite radius does not matter then."""
    return not ball.is_nan() and abs(ball.mid()) == _INFINITY and bool(ball.rad().is_finite())


def hull(a: Ball, b: Ball) -> Ball:
    """Return a ball that contains both."""
    same_infinity = _is_infinity(a) and _is_infinity(b) and a.mid() == b.mid()
    return a if same_infinity else a.union(b)


def error_bound(given: float, exact: Ball) -> float:
    """Return an upper bound of |given − exact|: 0 for equal infinities, ∞ if unknown."""
    number = flint.arb(given)
    if not (number.is_finite() and exact.is_finite()):
        are_equal = _is_infinity(exact) and number == exact.mid()
        return 0.0 if are_equal else math.inf
    bound = (number - exact).abs_upper()
    # float() rounds to nearest, but an upper bound has to be rounded up.
    nearest = float(bound)
    return math.nextafter(nearest, math.inf) if flint.arb(nearest) < bound else nearest
