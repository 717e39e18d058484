"""Expressions evaluated on Arb's balls, which enclose the exact score in spite of rounding.

Arithmetic is real, as in ``mpmath_algebra``: a cast to any real dtype is the identity. A value that
cannot be bounded becomes the ball NOTHING_KNOWN. Needs python-flint.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

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
from attncheck.mods.expression import Algebra, Expression, Node, evaluate
from attncheck.mods.whole_numbers import (
    LOGIC,
    Truth,
    Values,
    Whole,
    apply_to_whole,
    captured_array,
    cast_whole,
    choose_whole,
    compare_whole,
    possible_numbers,
)

_INT64 = (-(2**63), 2**63 - 1)


def to_ball(expression: Expression, bits: int) -> Callable[..., BallArray]:
    """Return a score mod as a function of arrays: ``f(scores, b, h, q_idx, kv_idx)``.

    Args:
        bits: Precision of the midpoints of the computed balls.

    Returns:
        A function of scores (objects that are ``flint.arb``) and indices (int64), which broadcast,
        that encloses the exact score for every number in a score's ball.

    Raises (the function):
        IndexError: for an index outside its tensor.
    """

    def evaluate_balls(*inputs: Values) -> BallArray:
        with working_precision(bits):
            try:
                result: BallArray = evaluate(expression, _ALGEBRA, *inputs)
            except ProblemError:  # a whole number has too many possible values
                shape = np.broadcast_shapes(*(np.shape(array) for array in inputs))
                return np.full(shape, NOTHING_KNOWN, dtype=object)
        return result

    return evaluate_balls


BALLS = NumberSystem(to_ball)  # score mods on Arb's balls; the context is the number of bits


def _leaf(node: Node, value: Any) -> Any:
    array = np.asarray(value) if node.op == "input" else captured_array(value)
    # A table may hold values of any kind; its elements are converted when they are read.
    return Whole(array, array) if node.op == "tensor" else _known(node, array)


def _known(node: Node, array: Values) -> Any:
    if node.kind == "bool":
        return Truth.of(array)
    return Whole(array, array) if node.kind == "int" else balls_of(array)


def _truth(value: Any) -> Truth:
    """Return ``value`` ≠ 0."""
    if isinstance(value, Truth):
        return value
    zero = np.asarray(0)
    if isinstance(value, Whole):
        return compare_whole("ne", value, Whole(zero, zero))
    return _compare_balls("ne", value, balls_of(zero))


def _whole(value: Any) -> Whole:
    """Return truth values as 0 and 1, whole numbers as they are; torch casts reals before."""
    if isinstance(value, Truth):
        return Whole((~value.no).astype(np.int64), value.yes.astype(np.int64))
    assert isinstance(value, Whole)
    return value


def _real(value: Any) -> BallArray:
    if not isinstance(value, Truth | Whole):
        return value  # type: ignore[no-any-return]  # it is one
    whole = _whole(value)
    low = balls_of(whole.low)
    return low if whole.known else _HULL(low, balls_of(whole.high))


def _apply(node: Node, *operands: Any) -> Any:
    if node.kind == "float":
        return _REAL[node.op](*map(_real, operands))
    if node.kind == "bool" and node.op in LOGIC:
        return LOGIC[node.op](*map(_truth, operands))
    result = apply_to_whole(node.op, [_whole(operand) for operand in operands])
    return result if node.kind == "int" else _truth(result)


def _compare(node: Node, *operands: Any) -> Truth:
    if all(isinstance(operand, Truth | Whole) for operand in operands):
        a, b = map(_whole, operands)
        return compare_whole(node.op, a, b)
    return _compare_balls(node.op, *map(_real, operands))


def _where(node: Node, condition: Any, *branches: Any) -> Any:
    truth = _truth(condition)
    if node.kind == "float":
        return _choose_balls(truth, *map(_real, branches))
    return _choose_known(truth, *branches)


def _choose_known(condition: Truth, first: Any, second: Any) -> Any:
    if isinstance(first, Truth) and isinstance(second, Truth):
        return Truth(
            (condition.yes & first.yes) | (condition.no & second.yes),
            (condition.yes & first.no) | (condition.no & second.no),
        )
    return choose_whole(condition, _whole(first), _whole(second))


def _cast(node: Node, operand: Any) -> Any:
    if node.kind == "float":
        return _real(operand)
    if node.kind == "bool":
        return _truth(operand)
    real = not isinstance(operand, Truth | Whole)
    whole = _truncate_balls(operand) if real else _whole(operand)
    if not whole.known:
        return whole
    # Intervals of several numbers are not wrapped around: their ends might change order.
    wrapped = cast_whole(whole.low, node.name)
    return Whole(wrapped, wrapped)


def _index(node: Node, *operands: Any) -> Any:
    """Return the hull of a table's elements at all possible indices; known ones must be inside."""
    table, *places = map(_whole, operands)
    known, sizes = all(place.known for place in places), table.low.shape
    result: Any = None
    anything = Truth(np.asarray(True), np.asarray(True))  # noqa: FBT003  (numpy's signature)
    for indices in possible_numbers(places):
        inside = indices
        if not known:
            pairs = zip(indices, sizes, strict=True)
            inside = tuple(np.clip(index, -size, size - 1) for index, size in pairs)
        value = _known(node, np.asarray(table.low[tuple(inside)]))
        if result is None:
            result = value
        elif node.kind == "float":
            result = _choose_balls(anything, result, value)
        else:
            result = _choose_known(anything, result, value)
    return result


def _choose_balls(condition: Truth, first: BallArray, second: BallArray) -> BallArray:
    # Where the condition may be either, the result encloses both branches.
    both = condition.yes & condition.no
    chosen = np.where(condition.yes, first, second)
    return np.where(both, _HULL(first, second), chosen) if both.any() else chosen


def _compare_balls(op: str, a: BallArray, b: BallArray) -> Truth:
    surely, surely_not = _COMPARISONS[op]

    def may_be(a: Ball, b: Ball) -> tuple[bool, bool]:
        if not (is_known(a) and is_known(b)):
            return True, True
        return not surely_not(a, b), not surely(a, b)

    yes_and_no: Any = np.frompyfunc(may_be, 2, 2)(a, b)
    return Truth(*(np.asarray(each, bool) for each in yes_and_no))


def _truncate_balls(value: BallArray) -> Whole:
    ends: Any = np.frompyfunc(_toward_zero, 1, 2)(value)
    return Whole(*(np.asarray(end, np.int64) for end in ends))


# Comparisons and their opposites. Arb's are true where they hold for all numbers in two balls.
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
    """Return the smallest and largest whole number of a truncated ball, clamped to int64."""
    if not ball.is_finite():
        return _INT64  # any number; evaluation stops if it is an index or divisor
    ends = (ball.lower(), ball.upper())
    cut = [int((end.floor() if end >= 0 else end.ceil()).unique_fmpz()) for end in ends]
    low, high = (min(max(whole, _INT64[0]), _INT64[1]) for whole in cut)
    return low, high


def _divide(a: Ball, b: Ball) -> Ball:
    """Divide; an exact 0 gives ±∞ where the sign of ``a`` is known, as on mpmath numbers."""
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


def _finite_only(function: Callable[[Ball], Ball]) -> Callable[[Ball], Ball]:
    return lambda ball: function(ball) if ball.is_finite() else NOTHING_KNOWN


def _keep_infinities(function: Callable[[Ball], Ball]) -> Callable[[Ball], Ball]:
    """Return a function that maps ±∞ to themselves, for which Arb gives no result."""
    return lambda ball: ball if not ball.is_finite() and is_known(ball) else function(ball)


# Negative numbers in a ball have no real root: nothing is known then.
def _sqrt(ball: Ball) -> Ball:
    return ball.sqrt() if ball >= 0 else NOTHING_KNOWN


def _log(ball: Ball) -> Ball:
    return flint.arb.neg_inf() if ball.is_zero() else ball.log()


_UNARY: dict[str, Callable[[Ball], Ball]] = {
    "neg": operator.neg,
    "abs": operator.abs,
    "sign": flint.arb.sgn,
    "floor": _keep_infinities(flint.arb.floor),
    "ceil": _keep_infinities(flint.arb.ceil),
    "tanh": flint.arb.tanh,
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "exp": flint.arb.exp,
    # Arb has no exp2: computed through ln 2, which is a ball too.
    "exp2": lambda x: (x * flint.arb.const_log2()).exp(),
    "log": _log,
    "log2": lambda x: _log(x) / flint.arb.const_log2(),
    "sqrt": _sqrt,
    "rsqrt": lambda x: _divide(flint.arb(1), _sqrt(x)),
    "sin": _finite_only(flint.arb.sin),
    "cos": _finite_only(flint.arb.cos),
}

_BINARY: dict[str, Callable[[Ball, Ball], Ball]] = {
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
    **{op: each_ball(function, 1) for op, function in _UNARY.items()},
    **{op: each_ball(function, 2) for op, function in _BINARY.items()},
}
"""Operations whose result balls hold the exact results for all numbers in the operands' balls."""

_HULL = each_ball(hull, 2)

_ALGEBRA: Algebra[Any] = Algebra.of(
    _leaf,
    _apply,
    {"index": _index, "where": _where, "cast": _cast, **dict.fromkeys(_COMPARISONS, _compare)},
)
"""The algebra on Truth, Whole and arrays of balls. A comparison that could go either way gives both
truth values, ``where`` then the hull of its branches, and truncation all possible whole numbers."""
