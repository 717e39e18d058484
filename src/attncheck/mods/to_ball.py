"""Expressions evaluated on Arb's balls: where the exact score lies, whatever was rounded here.

Real arithmetic, as in ``to_mpmath``: a cast to any real dtype is the identity. A comparison that a
ball leaves open gives both truth values, and ``where`` a ball around both of its branches; what
cannot be bounded at all comes to a ball that says nothing. Needs python-flint.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attncheck.arb import NOTHING_KNOWN, balls_of, each_ball, hull, working_precision
from attncheck.errors import ProblemError
from attncheck.mods import enclosures
from attncheck.mods.ball_operations import COMPARE, REAL, toward_zero
from attncheck.mods.captured import EvaluatedReads
from attncheck.mods.derivative import derivative
from attncheck.mods.enclosures import LOGIC, Truth, Whole, compared, every, on_whole, two
from attncheck.mods.trace import trace_score
from attncheck.mods.whole_numbers import as_array, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.arb import BallArray
    from attncheck.mods.expression import Expression, Node
    from attncheck.mods.signatures import ScoreMod
    from attncheck.mods.whole_numbers import Values

__all__ = ["captures", "evaluator", "slope_evaluator", "to_ball"]


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
    return to_ball(derivative(score_mod, device), bits)


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
            values.append(_leaf(node, as_array(expression.captured[node.slot])))
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
    if node.op in COMPARE:
        if any(isinstance(operand, _Real) for operand in operands):
            a, b = map(_real, operands)
            return _compared(node.op, a, b)
        left, right = map(_whole, operands)
        return compared(node.op, left, right)
    if node.kind == "float":
        return _Real(REAL[node.op](*(_real(operand).balls for operand in operands)))
    if node.kind == "bool" and node.op in LOGIC:
        return LOGIC[node.op](*(operand.truth() for operand in operands))
    found = on_whole(node.op, [_whole(operand) for operand in operands])
    return found if node.kind == "int" else found.truth()


def _whole(value: _Value) -> Whole:
    assert not isinstance(value, _Real), "torch casts before it takes a real number for a whole one"
    return value.whole()


def _compared(op: str, a: _Real, b: _Real) -> Truth:
    return Truth(*two(COMPARE[op], bool, a.balls, b.balls))


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
        chosen = enclosures.chosen(condition, first, second)
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
        whole = Whole(*two(toward_zero, np.int64, operand.balls))
    else:
        whole = operand.whole()
    if not whole.known:
        return whole
    wrapped = cast(whole.low, node.name)
    return Whole(wrapped, wrapped)


def _read(node: Node, operands: list[_Value]) -> _Value:
    """A table at every place that its indices may mean; there must be one where they are known."""
    table, *places = (_whole(operand) for operand in operands)
    known, sizes = all(place.known for place in places), table.low.shape
    found = []
    for indices in every(places):
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
