"""Expressions evaluated on Arb's balls, which enclose the exact score.

Real arithmetic, as in ``to_mpmath``: a cast to any real dtype is the identity. A comparison that a
ball leaves open gives both truth values, and ``where`` a ball around both of its branches; what
cannot be bounded at all comes to a ball that says nothing. Needs python-flint.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import flint
import numpy as np

from attncheck.core.balls import (
    NOTHING_KNOWN,
    balls_of,
    each_ball,
    hull,
    is_known,
    working_precision,
)
from attncheck.core.errors import ProblemError
from attncheck.mods import enclosures
from attncheck.mods.captured_reads import EvaluatedReads
from attncheck.mods.enclosures import (
    LOGIC,
    Truth,
    Whole,
    apply_to_whole,
    captured_array,
    cast_whole,
    compare_whole,
    elementwise_pair,
    possible_numbers,
)
from attncheck.mods.trace import trace_derivative, trace_score

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.core.balls import Ball, BallArray
    from attncheck.mods.enclosures import Values
    from attncheck.mods.expression import Expression, Node
    from attncheck.mods.spec import ScoreMod

__all__ = [
    "BALL_COMPARISONS",
    "BALL_OPERATIONS",
    "ball_toward_zero",
    "captures",
    "evaluator",
    "slope_evaluator",
    "to_ball",
]


_INT64 = (-(2**63), 2**63 - 1)


def ball_toward_zero(ball: Ball) -> tuple[int, int]:
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
BALL_COMPARISONS = {
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

BALL_OPERATIONS: dict[str, Callable[..., BallArray]] = {
    **{op: each_ball(function, 1) for op, function in _OF_ONE.items()},
    **{op: each_ball(function, 2) for op, function in _OF_TWO.items()},
}
"""Where the exact result of an operation lies, for operands anywhere in their balls."""


def to_ball(expression: Expression, bits: int) -> Callable[..., BallArray]:
    """A score mod as a function of arrays that broadcast: ``f(scores, b, h, q_idx, kv_idx)``.

    Args:
        expression: A traced score mod.
        bits: Of the midpoints of what it computes.

    Returns:
        A function of scores (objects that are ``flint.arb``) and indices (int64) that encloses the
        exact score for every number in a score's ball.

    Raises (the function):
        IndexError: for an index outside its tensor.
    """

    def evaluate(*inputs: Values) -> BallArray:
        named = dict(zip(expression.structure.inputs, map(np.asarray, inputs), strict=True))
        with working_precision(bits):
            try:
                return _evaluated(expression, named)
            except ProblemError:  # a whole number that is known too badly to go on with
                shape = np.broadcast_shapes(*(array.shape for array in named.values()))
                return np.full(shape, NOTHING_KNOWN, dtype=object)

    return evaluate


def evaluator(score_mod: ScoreMod, bits: int, device: str = "cpu") -> Callable[..., BallArray]:
    """``to_ball`` of a score mod, traced: what an oracle on balls is given to call.

    Args:
        score_mod: A FlexAttention callable.
        bits: As for ``to_ball``.
        device: Where the tensors are that it captures.

    Raises:
        TraceError: for a score mod that cannot be traced.
    """
    return to_ball(trace_score(score_mod, device), bits)


def slope_evaluator(
    score_mod: ScoreMod, bits: int, device: str = "cpu"
) -> Callable[..., BallArray]:
    """The same of the score mod's derivative."""
    return to_ball(trace_derivative(score_mod, device), bits)


def captures(score_mod: ScoreMod, bits: int, device: str = "cpu") -> EvaluatedReads:
    """The same of what the score mod reads of the float tensors that it captures."""
    return EvaluatedReads(score_mod, lambda slope: to_ball(slope, bits), device)


@dataclass(frozen=True, slots=True, eq=False)
class _Real:
    """Balls of real numbers."""

    balls: BallArray

    def truth(self) -> Truth:
        """Whether it is not 0."""
        return _compared("ne", self, _Real(balls_of(np.asarray(0))))


_Value = Truth | Whole | _Real

_HULL = each_ball(hull, 2)


def _evaluated(expression: Expression, inputs: dict[str, Values]) -> BallArray:
    values: list[_Value] = []
    for node in expression.structure.nodes:
        if node.operands:
            values.append(_applied(node, [values[i] for i in node.operands]))
        elif node.op == "input":
            values.append(_leaf(node, inputs[node.name]))
        elif node.op in {"true", "false"}:
            values.append(_leaf(node, np.asarray(node.op == "true")))
        else:
            values.append(_leaf(node, captured_array(expression.captured[node.slot])))
    return _real(values[-1]).balls


def _leaf(node: Node, values: Values) -> _Value:
    """Values that are known exactly; of a table, whatever it holds, to be indexed."""
    if node.op == "tensor" or node.kind == "int":
        return Whole(values, values)
    if node.kind == "bool":
        return Truth(values.astype(bool), ~values.astype(bool))
    return _Real(balls_of(values))


def _applied(node: Node, operands: list[_Value]) -> _Value:
    if node.op in _SPECIAL:
        return _SPECIAL[node.op](node, operands)
    if node.op in BALL_COMPARISONS:
        if any(isinstance(operand, _Real) for operand in operands):
            a, b = map(_real, operands)
            return _compared(node.op, a, b)
        left, right = map(_whole, operands)
        return compare_whole(node.op, left, right)
    if node.kind == "float":
        return _Real(BALL_OPERATIONS[node.op](*(_real(operand).balls for operand in operands)))
    if node.kind == "bool" and node.op in LOGIC:
        return LOGIC[node.op](*(operand.truth() for operand in operands))
    found = apply_to_whole(node.op, [_whole(operand) for operand in operands])
    return found if node.kind == "int" else found.truth()


def _whole(value: _Value) -> Whole:
    assert not isinstance(value, _Real), "torch casts before it takes a real number for a whole one"
    return value.whole()


def _compared(op: str, a: _Real, b: _Real) -> Truth:
    return Truth(*elementwise_pair(BALL_COMPARISONS[op], bool, a.balls, b.balls))


def _real(value: _Value) -> _Real:
    if isinstance(value, _Real):
        return value
    whole = value.whole()
    if whole.known:
        return _Real(balls_of(whole.low))
    return _Real(_HULL(balls_of(whole.low), balls_of(whole.high)))


def _where(node: Node, operands: list[_Value]) -> _Value:
    condition, first, second = operands
    if node.kind == "float":
        first, second = _real(first), _real(second)
    return _chosen(condition.truth(), first, second)


def _chosen(condition: Truth, first: _Value, second: _Value) -> _Value:
    """``first`` where the condition holds, else ``second``; both where it may be either."""
    if not (isinstance(first, _Real) and isinstance(second, _Real)):
        assert not isinstance(first, _Real)
        assert not isinstance(second, _Real)
        chosen = enclosures.choose(condition, first, second)
        assert isinstance(chosen, Truth | Whole)
        return chosen
    both = condition.yes & condition.no
    found = np.where(condition.yes, first.balls, second.balls)
    if not both.any():
        return _Real(found)
    return _Real(np.where(both, _HULL(first.balls, second.balls), found))


def _cast(node: Node, operands: list[_Value]) -> _Value:
    (operand,) = operands
    if node.kind == "float":
        return _real(operand)
    if node.kind == "bool":
        return operand.truth()
    if isinstance(operand, _Real):
        whole = Whole(*elementwise_pair(ball_toward_zero, np.int64, operand.balls))
    else:
        whole = operand.whole()
    if not whole.known:
        return whole
    wrapped = cast_whole(whole.low, node.name)
    return Whole(wrapped, wrapped)


def _read(node: Node, operands: list[_Value]) -> _Value:
    """A table at every place that its indices may mean; there must be one where they are known."""
    table, *places = (_whole(operand) for operand in operands)
    known, sizes = all(place.known for place in places), table.low.shape
    found = []
    for indices in possible_numbers(places):
        inside = indices if known else _inside(indices, sizes)
        found.append(_leaf(node, np.asarray(table.low[tuple(inside)])))
    return functools.reduce(_either, found)


def _inside(indices: tuple[Values, ...], sizes: tuple[int, ...]) -> list[Values]:
    pairs = zip(indices, sizes, strict=True)
    return [np.clip(index, -size, size - 1) for index, size in pairs]


def _either(first: _Value, second: _Value) -> _Value:
    anything = np.asarray(True)  # noqa: FBT003  (numpy's own signature)
    return _chosen(Truth(anything, anything), first, second)


_SPECIAL: dict[str, Callable[[Node, list[_Value]], _Value]] = {
    "where": _where,
    "cast": _cast,
    "index": _read,
}
