"""The vocabulary on Arb's balls: exact results and comparisons of everything that they hold."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import flint

from attncheck.arb import NOTHING_KNOWN, each_ball, is_known

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.arb import Ball, BallArray

__all__ = ["COMPARE", "REAL", "toward_zero"]

_INT64 = (-(2**63), 2**63 - 1)


def toward_zero(ball: Ball) -> tuple[int, int]:
    """The whole numbers that the numbers of a ball are cut to, in the range of int64."""
    if not ball.is_finite():
        return _INT64
    ends = (ball.lower(), ball.upper())
    cut = [int((end.floor() if end >= 0 else end.ceil()).unique_fmpz()) for end in ends]
    low, high = (min(max(whole, _INT64[0]), _INT64[1]) for whole in cut)
    return low, high


def _decided(
    surely: Callable[[Ball, Ball], bool], surely_not: Callable[[Ball, Ball], bool]
) -> Callable[[Ball, Ball], tuple[bool, bool]]:
    """Whether a comparison may be true, and whether it may be false."""

    def compare(a: Ball, b: Ball) -> tuple[bool, bool]:
        if not (is_known(a) and is_known(b)):
            return True, True
        return not surely_not(a, b), not surely(a, b)

    return compare


# Of two balls Arb's comparisons are true where they hold for all numbers in them.
COMPARE = {
    "lt": _decided(operator.lt, operator.ge),
    "le": _decided(operator.le, operator.gt),
    "gt": _decided(operator.gt, operator.le),
    "ge": _decided(operator.ge, operator.lt),
    "eq": _decided(operator.eq, operator.ne),
    "ne": _decided(operator.ne, operator.eq),
}
"""Whether a comparison may be true, and whether it may be false."""


def _divided(a: Ball, b: Ball) -> Ball:
    """A division by an exact 0 gives ±∞ where the sign of ``a`` is known, as in ``to_mpmath``."""
    if not b.is_zero():
        return a / b
    if a > 0 or a < 0:
        return flint.arb.pos_inf() if a > 0 else flint.arb.neg_inf()
    return NOTHING_KNOWN


def _floor_divided(a: Ball, b: Ball) -> Ball:
    if b.is_zero():
        return _divided(a, b)
    return (a / b).floor() if _finite(a, b) else NOTHING_KNOWN


def _remainder(a: Ball, b: Ball) -> Ball:
    if b.is_zero() or not _finite(a, b):
        return NOTHING_KNOWN
    return a - b * (a / b).floor()


def _finite(*balls: Ball) -> bool:
    return all(ball.is_finite() for ball in balls)


def _of_angle(function: Callable[[Ball], Ball]) -> Callable[[Ball], Ball]:
    return lambda ball: function(ball) if ball.is_finite() else NOTHING_KNOWN


def _root(ball: Ball) -> Ball:
    return ball.sqrt() if ball >= 0 else NOTHING_KNOWN


def _logarithm(ball: Ball) -> Ball:
    return flint.arb.neg_inf() if ball.is_zero() else ball.log()


def _infinite_or(function: Callable[[Ball], Ball]) -> Callable[[Ball], Ball]:
    """A function that maps ±∞ to themselves, as Arb does not say."""
    return lambda ball: ball if not ball.is_finite() and is_known(ball) else function(ball)


_OF_ONE: dict[str, Callable[[Ball], Ball]] = {
    "neg": operator.neg,
    "abs": operator.abs,
    "sign": flint.arb.sgn,
    "floor": _infinite_or(flint.arb.floor),
    "ceil": _infinite_or(flint.arb.ceil),
    "tanh": flint.arb.tanh,
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "exp": flint.arb.exp,
    "exp2": lambda x: (x * flint.arb.const_log2()).exp(),
    "log": _logarithm,
    "log2": lambda x: _logarithm(x) / flint.arb.const_log2(),
    "sqrt": _root,
    "rsqrt": lambda x: _divided(flint.arb(1), _root(x)),
    "sin": _of_angle(flint.arb.sin),
    "cos": _of_angle(flint.arb.cos),
}

_OF_TWO: dict[str, Callable[[Ball, Ball], Ball]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": _divided,
    "floor_divide": _floor_divided,
    "remainder": _remainder,
    "minimum": flint.arb.min,
    "maximum": flint.arb.max,
}

REAL: dict[str, Callable[..., BallArray]] = {
    **{op: each_ball(function, 1) for op, function in _OF_ONE.items()},
    **{op: each_ball(function, 2) for op, function in _OF_TWO.items()},
}
"""Where the exact result of an operation lies, for operands anywhere in their balls."""
