"""Expressions evaluated on mpmath numbers, to any number of digits.

Real arithmetic: a cast to any real dtype is the identity. A kernel that casts means the same number
and pays for its own rounding; the number meant is what this gives. (The callable itself, which the
float64 oracle calls, may round: an fp32 table times an index is fp32 in torch.)
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from attncheck.mods.captured_reads import EvaluatedReads
from attncheck.mods.enclosures import WHOLE_OPERATIONS, Values, captured_array, cast_whole
from attncheck.mods.trace import trace_derivative, trace_score

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.mods.expression import Expression, Node
    from attncheck.mods.spec import ScoreMod

__all__ = ["captures", "evaluator", "slope_evaluator", "to_mpmath"]


def to_mpmath(expression: Expression, context: Any) -> Callable[..., Values]:
    """The expression as a function of numpy arrays: ``f(scores, b, h, q_idx, kv_idx)``.

    A mask's has no scores. Arguments broadcast; indices are whole numbers, scores whatever
    ``context.mpf`` takes without rounding (mpf of that context, floats). The result broadcasts to
    them: bool for a mask, objects that are ``context.mpf`` for a score mod.

    // and % floor; a real division by 0 gives ±∞ or NaN and comparisons with NaN are false, as in
    torch. There is no −0.

    Args:
        expression: A traced mask or score mod.
        context: An ``mpmath.MPContext`` with the precision wanted, read at every call. Nothing is
            done to ``mpmath.mp``.

    Raises (the function):
        ProblemError: for a whole number divided by 0.
        IndexError: for an index outside its tensor.
    """
    real = Reals(context)
    nodes = expression.structure.nodes

    def evaluate(*inputs: Values) -> Values:
        named = dict(zip(expression.structure.inputs, map(np.asarray, inputs), strict=True))
        values: list[Values] = []
        for node in nodes:
            if node.op == "input":
                value = named[node.name]
                values.append(real.exact(value) if node.kind == "float" else value)
            elif node.op in {"true", "false"}:
                values.append(np.asarray(node.op == "true"))
            elif node.op == "number":
                value = captured_array(expression.captured[node.slot])
                values.append(real.exact(value) if node.kind == "float" else value)
            elif node.op == "tensor":
                values.append(captured_array(expression.captured[node.slot]))
            else:
                values.append(real.apply(node, [values[i] for i in node.operands]))
        return values[-1]

    return evaluate


def evaluator(score_mod: ScoreMod, context: Any, device: str = "cpu") -> Callable[..., Values]:
    """``to_mpmath`` of a score mod, traced: what an oracle on mpmath numbers is given to call.

    Args:
        score_mod: A FlexAttention callable.
        context: As for ``to_mpmath``.
        device: Where the tensors are that it captures.

    Raises:
        TraceError: for a score mod that cannot be traced.
    """
    return to_mpmath(trace_score(score_mod, device), context)


def slope_evaluator(
    score_mod: ScoreMod, context: Any, device: str = "cpu"
) -> Callable[..., Values]:
    """The same of the score mod's derivative."""
    return to_mpmath(trace_derivative(score_mod, device), context)


def captures(score_mod: ScoreMod, context: Any, device: str = "cpu") -> EvaluatedReads:
    """The same of what the score mod reads of the float tensors that it captures."""
    return EvaluatedReads(score_mod, lambda slope: to_mpmath(slope, context), device)


class Reals:
    """The vocabulary on real numbers of one mpmath context."""

    def __init__(self, context: Any) -> None:
        self._zero = context.zero
        self._convert = np.frompyfunc(context.convert, 1, 1)  # rounds nothing
        self._truncate = np.frompyfunc(lambda x: _toward_zero(context, x), 1, 1)
        arities = ((1, _of_one(context)), (2, _of_two(context) | _PYTHON))
        self._functions = {
            op: np.frompyfunc(function, arity, 1)
            for arity, functions in arities
            for op, function in functions.items()
        }

    def exact(self, values: Values) -> Values:
        """Whole numbers, floats or numbers of the context as numbers of the context."""
        return _objects(self._convert(values.astype(np.int64) if values.dtype == bool else values))

    def apply(self, node: Node, operands: list[Values]) -> Values:
        """The value of a node that is no leaf."""
        if node.op == "index":
            table, *indices = operands
            found = np.asarray(table[tuple(indices)])
            return self.exact(found) if node.kind == "float" else found
        if node.op == "where":
            condition, *branches = operands
            if node.kind == "float":
                branches = [self._real(branch) for branch in branches]
            return np.where(condition, *branches)
        if node.op == "cast":
            return self._cast(node, operands[0])
        if node.kind != "float" and not any(operand.dtype == object for operand in operands):
            return WHOLE_OPERATIONS[node.op](*operands)
        found = _objects(self._functions[node.op](*map(self._real, operands)))
        return found.astype(bool) if node.kind == "bool" else found

    def _cast(self, node: Node, value: Values) -> Values:
        if node.kind == "float":
            return self._real(value)
        if value.dtype != object:
            return cast_whole(value, node.name)
        if node.kind == "bool":
            return np.asarray(value != self._zero, dtype=bool)
        return cast_whole(np.asarray(self._truncate(value)).astype(np.int64), node.name)

    def _real(self, values: Values) -> Values:
        return values if values.dtype == object else self.exact(values)


def _objects(values: Any) -> Values:
    """An array of objects also where numpy unpacked a 0-d one."""
    return np.asarray(values, dtype=object)


_PYTHON: dict[str, Callable[[Any, Any], Any]] = {
    op: getattr(operator, op) for op in ("ge", "gt", "le", "lt", "eq", "ne", "add", "sub", "mul")
}


def _of_one(context: Any) -> dict[str, Callable[[Any], Any]]:
    def log(x: Any) -> Any:
        return context.nan if x < 0 else context.log(x)

    def sqrt(x: Any) -> Any:
        return context.nan if x < 0 else context.sqrt(x)

    return {
        "neg": operator.neg,
        "abs": operator.abs,
        "sign": lambda x: context.convert((x > 0) - (x < 0)),
        "floor": context.floor,
        "ceil": context.ceil,
        "tanh": context.tanh,
        "sigmoid": lambda x: context.one / (context.one + context.exp(-x)),
        "exp": context.exp,
        "exp2": lambda x: context.exp(x * context.ln2),
        "log": log,
        "log2": lambda x: log(x) / context.ln2,
        "sqrt": sqrt,
        "rsqrt": lambda x: _divided(context, context.one, sqrt(x)),
        "sin": context.sin,
        "cos": context.cos,
    }


def _of_two(context: Any) -> dict[str, Callable[[Any, Any], Any]]:
    def remainder(a: Any, b: Any) -> Any:
        if b == 0 or not context.isfinite(a) or context.isnan(b):
            return context.nan
        if context.isfinite(b):
            return a % b
        return a if a * b >= 0 or a == 0 else b  # torch adds ±∞ to what has the other sign

    def floor_divide(a: Any, b: Any) -> Any:
        if b == 0:
            return _divided(context, a, b)
        if not context.isfinite(a) or context.isnan(b):
            return context.nan
        if not context.isfinite(b):
            return context.zero if a == 0 or a * b > 0 else -context.one
        # a − a mod b is a multiple of b: the quotient is next to a whole number.
        return context.nint((a - a % b) / b)

    def of_numbers(choose: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def chosen(a: Any, b: Any) -> Any:
            return context.nan if context.isnan(a) or context.isnan(b) else choose(a, b)

        return chosen

    return {
        "div": lambda a, b: _divided(context, a, b),
        "remainder": remainder,
        "floor_divide": floor_divide,
        "minimum": of_numbers(min),
        "maximum": of_numbers(max),
    }


def _divided(context: Any, a: Any, b: Any) -> Any:
    if b != 0:
        return a / b
    if a == 0 or context.isnan(a):
        return context.nan
    return context.inf if a > 0 else context.ninf


def _toward_zero(context: Any, value: Any) -> int:
    if not context.isfinite(value):
        return _INT64_SMALLEST  # what a conversion on x86 gives
    return min(max(int(value), _INT64_SMALLEST), -1 - _INT64_SMALLEST)


_INT64_SMALLEST = -(2**63)
