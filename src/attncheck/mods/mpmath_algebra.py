"""Expressions evaluated on mpmath numbers, to any number of digits.

Arithmetic is real: a cast to any real dtype is the identity. The result is the number that a mod
means; rounding it is a kernel's error. (The callable itself, which the float64 oracle calls, may
round: an fp32 table times an index is fp32 in torch.)
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from attncheck.mods.captured_reads import NumberSystem
from attncheck.mods.expression import OPERATIONS, Algebra, Expression, Node, evaluate
from attncheck.mods.whole_numbers import WHOLE_OPERATIONS, Values, captured_array, cast_whole

_INT64_SMALLEST = -(2**63)


def to_mpmath(expression: Expression, context: Any) -> Callable[..., Values]:
    """Return the expression as a function of numpy arrays: ``f(scores, b, h, q_idx, kv_idx)``.

    Masks take no scores. Arguments broadcast; indices are whole numbers, scores anything that
    ``context.mpf`` takes without rounding (mpf of that context, floats). The result broadcasts to
    them: bool for a mask, objects that are ``context.mpf`` for a score mod.

    // and % floor; a real division by 0 gives ±∞ or NaN and comparisons with NaN are false, as in
    torch. There is no −0.

    Args:
        context: An ``mpmath.MPContext``; its precision is read at every call. ``mpmath.mp`` stays.

    Raises (the function):
        ProblemError: for a whole number divided by 0.
        IndexError: for an index outside its tensor.
    """
    algebra = mpmath_algebra(context)
    return lambda *inputs: evaluate(expression, algebra, *inputs)


MPMATH = NumberSystem(to_mpmath)
"""Score mods on mpmath numbers; the context is that of ``to_mpmath``."""


def mpmath_algebra(context: Any) -> Algebra[Values]:  # noqa: C901  (functions of one context)
    """Return the algebra of ``context``'s real numbers, exact truth values and whole numbers."""
    convert = np.frompyfunc(context.convert, 1, 1)  # rounds nothing
    truncate = np.frompyfunc(lambda x: _toward_zero(context, x), 1, 1)
    functions = {
        op: np.frompyfunc(function, OPERATIONS[op].arity, 1)
        for op, function in _real_functions(context).items()
    }

    def real(values: Values) -> Values:
        """Convert whole numbers and floats to numbers of the context."""
        if values.dtype == object:
            return values
        return _objects(convert(values.astype(np.int64) if values.dtype == bool else values))

    def leaf(node: Node, value: Any) -> Values:
        array = np.asarray(value) if node.op == "input" else captured_array(value)
        if node.kind != "float" or node.op == "tensor":
            return array
        return _objects(convert(array))

    def index(node: Node, table: Values, *indices: Values) -> Values:
        elements = np.asarray(table[tuple(indices)])
        return real(elements) if node.kind == "float" else elements

    def where(node: Node, condition: Values, *branches: Values) -> Values:
        first, second = map(real, branches) if node.kind == "float" else branches
        return np.where(condition, first, second)

    def cast(node: Node, value: Values) -> Values:
        if node.kind == "float":
            return real(value)
        if value.dtype != object:
            return cast_whole(value, node.name)
        if node.kind == "bool":
            return np.asarray(value != context.zero, dtype=bool)
        return cast_whole(np.asarray(truncate(value)).astype(np.int64), node.name)

    def apply(node: Node, *operands: Values) -> Values:
        # Whole numbers stay int64, which wraps around as torch's does.
        if node.kind != "float" and not any(operand.dtype == object for operand in operands):
            return WHOLE_OPERATIONS[node.op](*operands)
        result = _objects(functions[node.op](*map(real, operands)))
        return result.astype(bool) if node.kind == "bool" else result

    return Algebra.of(leaf, apply, {"index": index, "where": where, "cast": cast})


def _objects(values: Any) -> Values:
    """Return an array of objects, also where numpy unpacked a 0-d one."""
    return np.asarray(values, dtype=object)


def _real_functions(context: Any) -> dict[str, Callable[..., Any]]:  # noqa: C901  (likewise)
    """Return the operations that torch has on real numbers, on numbers of ``context``."""
    nan, zero, one = context.nan, context.zero, context.one

    def divide(a: Any, b: Any) -> Any:
        if b != 0:
            return a / b
        if a == 0 or context.isnan(a):
            return nan
        return context.inf if a > 0 else context.ninf

    def log(x: Any) -> Any:
        return nan if x < 0 else context.log(x)

    def sqrt(x: Any) -> Any:
        return nan if x < 0 else context.sqrt(x)

    def remainder(a: Any, b: Any) -> Any:
        if b == 0 or not context.isfinite(a) or context.isnan(b):
            return nan
        if context.isfinite(b):
            return a % b
        return a if a * b >= 0 or a == 0 else b  # torch adds ±∞ to a remainder of the other sign

    def floor_divide(a: Any, b: Any) -> Any:
        if b == 0:
            return divide(a, b)
        if not context.isfinite(a) or context.isnan(b):
            return nan
        if not context.isfinite(b):
            return zero if a == 0 or a * b > 0 else -one
        # a − a mod b is a multiple of b: the rounded quotient is close to a whole number.
        return context.nint((a - a % b) / b)

    def choose(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda a, b: nan if context.isnan(a) or context.isnan(b) else function(a, b)

    python = ("ge", "gt", "le", "lt", "eq", "ne", "add", "sub", "mul", "neg", "abs")
    return {
        **{op: getattr(operator, op) for op in python},
        **{op: getattr(context, op) for op in ("floor", "ceil", "tanh", "exp", "sin", "cos")},
        "div": divide,
        "floor_divide": floor_divide,
        "remainder": remainder,
        "minimum": choose(min),
        "maximum": choose(max),
        "sign": lambda x: context.convert((x > 0) - (x < 0)),
        "sigmoid": lambda x: one / (one + context.exp(-x)),
        "exp2": lambda x: context.exp(x * context.ln2),
        "log": log,
        "log2": lambda x: log(x) / context.ln2,
        "sqrt": sqrt,
        "rsqrt": lambda x: divide(one, sqrt(x)),
    }


def _toward_zero(context: Any, value: Any) -> int:
    if not context.isfinite(value):
        return _INT64_SMALLEST  # as in a conversion on x86
    return min(max(int(value), _INT64_SMALLEST), -1 - _INT64_SMALLEST)
