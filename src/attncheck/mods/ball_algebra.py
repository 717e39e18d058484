"""Expressions evaluated on Arb's balls: where the exact score lies, whatever was rounded here.

Real arithmetic, as in ``mpmath_algebra``: a cast to any real dtype is the identity. What cannot be
bounded at all comes to a ball that says nothing. Needs python-flint.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import flint
import numpy as np

from attncheck.core.balls import (
    NOTHING_KNOWN,
    Ball,
    BallArray,
    balls_of,
    each_ball,
    hull,
    is_known,
    working_precision,
)
from attncheck.core.errors import ProblemError
from attncheck.mods.captured_reads import NumberSystem
from attncheck.mods.enclosures import Enclosures, Truth, Values, Whole, elementwise_pair
from attncheck.mods.expression import Expression, Node, evaluate

_INT64 = (-(2**63), 2**63 - 1)


def to_ball(expression: Expression, bits: int) -> Callable[..., BallArray]:
    """Return a score mod as a function of arrays: ``f(scores, b, h, q_idx, kv_idx)``.

    Args:
        bits: Of the midpoints of what it computes.

    Returns:
        A function of scores (objects that are ``flint.arb``) and indices (int64), which broadcast,
        that encloses the exact score for every number in a score's ball.

    Raises (the function):
        IndexError: for an index outside its tensor.
    """
    algebra = _Balls().algebra()

    def evaluate_balls(*inputs: Values) -> BallArray:
        with working_precision(bits):
            try:
                result: BallArray = evaluate(expression, algebra, *inputs)
            except ProblemError:  # a whole number that is known too badly to go on with
                shape = np.broadcast_shapes(*(np.shape(array) for array in inputs))
                return np.full(shape, NOTHING_KNOWN, dtype=object)
        return result

    return evaluate_balls


BALLS = NumberSystem(to_ball)  # score mods on Arb's balls; its context is how many bits


class _Balls(Enclosures["BallArray"]):
    """Real numbers as arrays of balls."""

    def exact(self, node: Node | None, values: Values) -> BallArray:  # noqa: ARG002
        return balls_of(values)

    def hull(self, a: BallArray, b: BallArray) -> BallArray:
        return _HULL(a, b)

    def choose(self, condition: Truth, first: BallArray, second: BallArray) -> BallArray:
        # Where the condition may be either, the exact result is one of two: both are enclosed.
        both = condition.yes & condition.no
        chosen = np.where(condition.yes, first, second)
        return np.where(both, _HULL(first, second), chosen) if both.any() else chosen

    def compute(self, node: Node, operands: list[BallArray]) -> BallArray:
        return _REAL[node.op](*operands)

    def compare(self, op: str, a: BallArray, b: BallArray) -> Truth:
        surely, surely_not = _COMPARISONS[op]

        def may_be(a: Ball, b: Ball) -> tuple[bool, bool]:
            if not (is_known(a) and is_known(b)):
                return True, True
            return not surely_not(a, b), not surely(a, b)

        return Truth(*elementwise_pair(may_be, bool, a, b))

    def toward_zero(self, value: BallArray) -> Whole:
        return Whole(*elementwise_pair(_toward_zero, np.int64, value))


# Of two balls Arb's comparisons are true where they hold for all numbers in them.
_COMPARISONS: dict[str, tuple[Callable[[Ball, Ball], bool], Callable[[Ball, Ball], bool]]] = {
    "lt": (operator.lt, operator.ge),
    "le": (operator.le, operator.gt),
    "gt": (operator.gt, operator.le),
    "ge": (operator.ge, operator.lt),
    "eq": (operator.eq, operator.ne),
    "ne": (operator.ne, operator.eq),
}
"""Each with its opposite."""


def _toward_zero(ball: Ball) -> tuple[int, int]:
    """Return the whole numbers that the numbers of a ball are cut to, in the range of int64."""
    if not ball.is_finite():
        return _INT64  # any number: a read or a division by it is given up
    ends = (ball.lower(), ball.upper())
    cut = [int((end.floor() if end >= 0 else end.ceil()).unique_fmpz()) for end in ends]
    low, high = (min(max(whole, _INT64[0]), _INT64[1]) for whole in cut)
    return low, high


def _divide(a: Ball, b: Ball) -> Ball:
    """A division by an exact 0 gives ±∞ where the sign of ``a`` is known, as on mpmath numbers."""
    if not b.is_zero():
        return a / b
    if a > 0 or a < 0:
        return flint.arb.pos_inf() if a > 0 else flint.arb.neg_inf()
    return NOTHING_KNOWN


def _floor_divide(a: Ball, b: Ball) -> Ball:
    if b.is_zero():
        return _divide(a, b)
    return (a / b).floor() if a.is_finite() and b.is_finite() else NOTHING_KNOWN


def _remainder(a: Ball, b: Ball) -> Ball:
    if b.is_zero() or not (a.is_finite() and b.is_finite()):
        return NOTHING_KNOWN
    return a - b * (a / b).floor()


def _of_angle(function: Callable[[Ball], Ball]) -> Callable[[Ball], Ball]:
    return lambda ball: function(ball) if ball.is_finite() else NOTHING_KNOWN


def _infinite_or(function: Callable[[Ball], Ball]) -> Callable[[Ball], Ball]:
    """A function that maps ±∞ to themselves, as Arb does not say."""
    return lambda ball: ball if not ball.is_finite() and is_known(ball) else function(ball)


# A ball that reaches below 0 may hold no real root: nothing is said of it.
def _sqrt(ball: Ball) -> Ball:
    return ball.sqrt() if ball >= 0 else NOTHING_KNOWN


def _log(ball: Ball) -> Ball:
    return flint.arb.neg_inf() if ball.is_zero() else ball.log()


_OF_ONE: dict[str, Callable[[Ball], Ball]] = {
    "neg": operator.neg,
    "abs": operator.abs,
    "sign": flint.arb.sgn,
    "floor": _infinite_or(flint.arb.floor),
    "ceil": _infinite_or(flint.arb.ceil),
    "tanh": flint.arb.tanh,
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "exp": flint.arb.exp,
    # Arb has no powers of two of its own: through ln 2, enclosed in a ball as well.
    "exp2": lambda x: (x * flint.arb.const_log2()).exp(),
    "log": _log,
    "log2": lambda x: _log(x) / flint.arb.const_log2(),
    "sqrt": _sqrt,
    "rsqrt": lambda x: _divide(flint.arb(1), _sqrt(x)),
    "sin": _of_angle(flint.arb.sin),
    "cos": _of_angle(flint.arb.cos),
}

_OF_TWO: dict[str, Callable[[Ball, Ball], Ball]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": _divide,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "minimum": flint.arb.min,
    "maximum": flint.arb.max,
}

_REAL: dict[str, Callable[..., BallArray]] = {
    **{op: each_ball(function, 1) for op, function in _OF_ONE.items()},
    **{op: each_ball(function, 2) for op, function in _OF_TWO.items()},
}
"""Balls that hold the exact result of an operation, for operands anywhere in their balls."""

_HULL = each_ball(hull, 2)
