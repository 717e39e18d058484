"""Expressions evaluated on intervals that hold every right floating-point evaluation.

Every operation is exact interval arithmetic, and then wider by what an ``Arithmetic`` declares of
that operation: there is no tolerance in it. Fewer roundings (a fused multiplication and addition)
lie inside, and so do subnormal numbers flushed to 0.

A pair is (low, high), two raw mpmath numbers (``mpmath.libmp``), far more precise than any format
here. ``UNKNOWN`` is a pair of which nothing is known, NaN included: 1/x where x may be 0, ∞ − ∞.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from mpmath import libmp
from mpmath.libmp import libmpi

from attncheck.core.formats import FORMATS, Format
from attncheck.mods.enclosures import (
    Enclosures,
    Truth,
    Values,
    Whole,
    elementwise,
    elementwise_pair,
)
from attncheck.mods.expression import Expression, Node, evaluate, node_dtypes
from attncheck.mods.operation_errors import Arithmetic

Raw: TypeAlias = Any  # an untyped tuple of mpmath's own
Pair: TypeAlias = tuple[Raw, Raw]

UNKNOWN: Pair = (libmp.fnan, libmp.fnan)

# Every product of two float64 numbers is exact, and so is almost every sum.
_BITS = 160
_DOWN, _UP = "f", "c"
_INT64 = (-(2**63), 2**63 - 1)


def to_interval(expression: Expression, arithmetic: Arithmetic) -> Callable[..., Truth | Interval]:
    """Return the expression as a function of numpy arrays that gives Truth (masks) or Interval.

    The function takes ``(scores, b, h, q_idx, kv_idx)``, a mask's no scores: float64 numbers that
    ``arithmetic.format`` holds, and whole numbers, of shapes that broadcast.

    Raises (the function):
        ProblemError: for a whole number that is known too badly to go on with.
    """
    algebra = _Intervals(expression, arithmetic).algebra()
    return lambda *inputs: evaluate(expression, algebra, *inputs)


@dataclass(frozen=True, slots=True, eq=False)
class Interval:
    """Intervals of real numbers."""

    pairs: Values
    # What the numbers are held in; None of whole and of Python numbers.
    format: Format | None = None

    @classmethod
    def of(cls, values: Values) -> Interval:
        """Return numbers that are known: whole ones or float64."""
        return cls(elementwise(exact_pair, object, values))

    def contains(self, values: Values) -> Values:
        """Return where the float64 ``values`` lie inside; nowhere where nothing is known."""
        low, high = self.bounds()
        return np.asarray((low <= values) & (values <= high))

    def unknown(self) -> Values:
        """Return where nothing is known: the exact value may be NaN."""
        return elementwise(lambda x: x[0] == libmp.fnan, bool, self.pairs)

    def bounds(self) -> tuple[Values, Values]:
        """Return the smallest and the largest float64 number inside; NaN where nothing is known."""
        low = elementwise(lambda x: _to_float(x[0], "c"), float, self.pairs)
        return low, elementwise(lambda x: _to_float(x[1], "f"), float, self.pairs)

    def through(self, function: Callable[[Pair], Pair]) -> Interval:
        """Return each interval mapped to another."""
        return replace(self, pairs=elementwise(function, object, self.pairs))


def _to_float(raw: Raw, rounding: str) -> float:
    # mpmath makes a NaN by ∞ − ∞, of which numpy warns.
    return math.nan if raw == libmp.fnan else float(libmp.to_float(raw, rnd=rounding))


class _Intervals(Enclosures[Interval]):
    """Real numbers as intervals, rounded as an implementation may round them."""

    def __init__(self, expression: Expression, arithmetic: Arithmetic) -> None:
        self._arithmetic, self._widest = arithmetic, arithmetic.format
        dtypes = node_dtypes(expression, arithmetic.format.torch_dtype)
        # Equal nodes are the same value, of one dtype.
        self._formats = dict(
            zip(expression.structure.nodes, map(arithmetic.format_of, dtypes), strict=True)
        )

    def exact(self, node: Node | None, values: Values) -> Interval:
        """Return numbers as a kernel holds them: subnormal ones or 0."""
        known, fmt = Interval.of(values), None if node is None else self._formats[node]
        return known if fmt is None else self._held(known, fmt)

    def hull(self, a: Interval, b: Interval) -> Interval:
        return Interval(elementwise(_hull, object, a.pairs, b.pairs), a.format)

    def choose(self, condition: Truth, first: Interval, second: Interval) -> Interval:
        ends = (condition.yes, condition.no, first.pairs, second.pairs)
        return replace(first, pairs=elementwise(_one_or_both, object, *ends))

    def compute(self, node: Node, operands: list[Interval]) -> Interval:
        op, fmt = node.op, self._formats[node]
        pairs = [operand.pairs for operand in operands]
        if argument_ulps := self._arithmetic.argument_ulps.get(op):
            before = Rounding(self._widest, argument_ulps)
            pairs = [elementwise(before, object, array) for array in pairs]
        exactly, ulps = INTERVAL_OPERATIONS[op], self._arithmetic.ulps.get(op, 0.0)
        if not ulps:
            return Interval(elementwise(exactly, object, *pairs), fmt)
        rounding = Rounding(fmt or self._widest, ulps)
        return Interval(elementwise(lambda *x: rounding(exactly(*x)), object, *pairs), fmt)

    def compare(self, op: str, a: Interval, b: Interval) -> Truth:
        return Truth(*elementwise_pair(_COMPARISONS[op], bool, a.pairs, b.pairs))

    def toward_zero(self, value: Interval) -> Whole:
        return Whole(*elementwise_pair(_toward_zero, np.int64, value.pairs))

    def convert(self, node: Node, values: list[Interval]) -> list[Interval]:
        """Return operands as real numbers of the format in which an operation is computed."""
        fmt = self._formats[node] or self._widest
        if node.kind == "bool":
            # A whole number and a Python number are compared in torch's default dtype.
            formats = [value.format for value in values if value.format is not None]
            fmt = max(formats, key=lambda f: f.significand, default=FORMATS["fp32"])
        return [
            self._held(value, fmt)
            if value.format is None or value.format.significand > fmt.significand
            else replace(value, format=fmt)
            for value in values
        ]

    @staticmethod
    def _held(value: Interval, fmt: Format) -> Interval:
        return replace(value.through(Rounding(fmt, 0.5)), format=fmt)


# --- rounding ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rounding:
    """Rounding of a result to a format: at most ``ulps`` units in the last place off.

    An ulp of x is at most 2u·|x|, u the unit roundoff. What is below the smallest normal number may
    be flushed to 0; what is above the largest may become infinite. No rounding changes a sign. A
    number that the format holds stays as it is if ``ulps`` is at most 1/2.
    """

    format: Format
    ulps: float  # 0.5 for a correctly rounded operation

    def __call__(self, x: Pair) -> Pair:
        """Return where the rounded result of an exact one in ``x`` lies."""
        low, high = x
        if low == libmp.fnan:
            return UNKNOWN
        if self.ulps <= 0.5 and low == high and self._holds(low):
            return x
        # Rounding is symmetric: the lower end is the upper one of the numbers negated.
        return libmp.mpf_neg(self._upper(libmp.mpf_neg(low))), self._upper(high)

    def _holds(self, raw: Raw) -> bool:
        _, man, exp, bits = raw
        if not man:
            return True  # 0 and ±∞
        normal = self.format.min_exponent <= exp + bits - 1
        above = libmp.mpf_gt(libmp.mpf_abs(raw), self._max)
        return bits <= self.format.significand and normal and not above

    def _upper(self, raw: Raw) -> Raw:
        """The largest number that one up to ``raw`` is rounded to."""
        _, man, _, _ = raw
        if not man:
            return raw
        if libmp.mpf_sign(raw) < 0:
            shrunk = libmp.mpf_mul(raw, self._shrink, _BITS, _UP)
            if libmp.mpf_gt(shrunk, libmp.mpf_neg(self._smallest)):
                return libmp.fzero
            return _larger(shrunk, libmp.mpf_neg(self._max))
        grown = libmp.mpf_mul(_larger(raw, self._smallest), self._grow, _BITS, _UP)
        return libmp.finf if libmp.mpf_gt(grown, self._max) else grown

    @cached_property
    def _grow(self) -> Raw:
        return libmp.mpf_add(libmp.fone, self._relative)

    @cached_property
    def _shrink(self) -> Raw:
        return libmp.mpf_sub(libmp.fone, self._relative)

    @cached_property
    def _relative(self) -> Raw:
        return libmp.from_float(2 * self.ulps * self.format.unit_roundoff)

    @cached_property
    def _max(self) -> Raw:
        return libmp.from_float(self.format.max)

    @cached_property
    def _smallest(self) -> Raw:
        return libmp.from_float(2.0**self.format.min_exponent)


# --- pairs ------------------------------------------------------------------------------------


def exact_pair(value: float) -> Pair:
    """Return one whole number or float."""
    raw = libmp.from_int(value) if isinstance(value, int) else libmp.from_float(value)
    return UNKNOWN if raw == libmp.fnan else (raw, raw)


def _smaller(a: Raw, b: Raw) -> Raw:
    return a if libmp.mpf_lt(a, b) else b


def _larger(a: Raw, b: Raw) -> Raw:
    return b if libmp.mpf_lt(a, b) else a


def _hull(a: Pair, b: Pair) -> Pair:
    if libmp.fnan in (a[0], b[0]):
        return UNKNOWN
    return _smaller(a[0], b[0]), _larger(a[1], b[1])


def _one_or_both(
    yes: bool,  # noqa: FBT001  (an element of an array)
    no: bool,  # noqa: FBT001  (an element of an array)
    first: Pair,
    second: Pair,
) -> Pair:
    if yes and no:
        return _hull(first, second)
    return first if yes else second


def _toward_zero(x: Pair) -> tuple[int, int]:
    """Return the whole numbers that the numbers of ``x`` are cut to, in the range of int64."""
    bounds = []
    for end, unbounded in zip(x, _INT64, strict=True):
        if end in (libmp.finf, libmp.fninf, libmp.fnan):
            bounds.append(unbounded if end == libmp.fnan else _INT64[end == libmp.finf])
        else:
            bounds.append(min(max(libmp.to_int(end), _INT64[0]), _INT64[1]))
    return bounds[0], bounds[1]


def _known(function: Callable[..., Pair]) -> Callable[..., Pair]:
    """``function`` of pairs that are not UNKNOWN; what it cannot say of ∞ is UNKNOWN."""

    def apply(*operands: Pair) -> Pair:
        if any(low == libmp.fnan for low, _ in operands):
            return UNKNOWN
        result = function(*operands)
        return UNKNOWN if libmp.fnan in result else result

    return apply


def _rising(function: Callable[..., Raw]) -> Callable[[Pair], Pair]:
    """A function of one number that never falls, from one that mpmath rounds either way."""
    return lambda x: (function(x[0], _BITS, _DOWN), function(x[1], _BITS, _UP))


def _of_both(function: Callable[..., Raw]) -> Callable[..., Pair]:
    """An exact function that never falls in any operand."""
    return lambda *x: tuple(map(function, *x))


def _finite(*operands: Pair) -> bool:
    return not any(end in (libmp.finf, libmp.fninf) for x in operands for end in x)


def _has_zero(x: Pair) -> bool:
    return bool(libmp.mpf_sign(x[0]) <= 0 <= libmp.mpf_sign(x[1]))


def _neg(x: Pair) -> Pair:
    return libmp.mpf_neg(x[1]), libmp.mpf_neg(x[0])


def _add(a: Pair, b: Pair) -> Pair:
    return libmp.mpf_add(a[0], b[0], _BITS, _DOWN), libmp.mpf_add(a[1], b[1], _BITS, _UP)


def _mul(a: Pair, b: Pair) -> Pair:
    if (_has_zero(a) and not _finite(b)) or (_has_zero(b) and not _finite(a)):
        return UNKNOWN
    return libmpi.mpi_mul(a, b, _BITS)  # type: ignore[no-any-return]  # mpmath ships no types


def _div(a: Pair, b: Pair) -> Pair:
    if _has_zero(b) or not (_finite(a) or _finite(b)):
        return UNKNOWN
    return libmpi.mpi_div(a, b, _BITS)  # type: ignore[no-any-return]  # mpmath ships no types


def _floor_divide(a: Pair, b: Pair) -> Pair:
    return _of_both(libmp.mpf_floor)(_div(a, b)) if _finite(a, b) else UNKNOWN


def _remainder(a: Pair, b: Pair) -> Pair:
    low, high = _floor_divide(a, b)
    if libmp.fnan in (low, high):
        return UNKNOWN
    positive = libmp.mpf_sign(b[0]) > 0
    whole = (libmp.fzero, b[1]) if positive else (b[0], libmp.fzero)
    if low != high:
        return whole  # the quotient may pass a whole number: any remainder there is
    left = _add(a, _neg(libmpi.mpi_mul((low, low), b, _BITS)))
    return _larger(left[0], whole[0]), _smaller(left[1], whole[1])


def _sigmoid(x: Raw, bits: int, rounding: str) -> Raw:
    other = _UP if rounding == _DOWN else _DOWN
    e = libmp.mpf_exp(libmp.mpf_neg(x), bits, other)
    return libmp.mpf_div(libmp.fone, libmp.mpf_add(libmp.fone, e, bits, other), bits, rounding)


def _of_positive(function: Callable[..., Raw]) -> Callable[[Pair], Pair]:
    return lambda x: UNKNOWN if libmp.mpf_sign(x[0]) < 0 else _rising(function)(x)


def _of_angle(function: Callable[..., Pair]) -> Callable[[Pair], Pair]:
    return lambda x: function(x, _BITS) if _finite(x) else UNKNOWN


_ONE: Pair = (libmp.fone, libmp.fone)
_LN2: Pair = (libmp.mpf_ln2(_BITS, _DOWN), libmp.mpf_ln2(_BITS, _UP))
_log, _sqrt = _of_positive(libmp.mpf_log), _of_positive(libmp.mpf_sqrt)

_REAL: dict[str, Callable[..., Pair]] = {
    "add": _add,
    "sub": lambda a, b: _add(a, _neg(b)),
    "mul": _mul,
    "div": _div,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "neg": _neg,
    "abs": lambda x: libmpi.mpi_abs(x, 0),
    "minimum": _of_both(_smaller),
    "maximum": _of_both(_larger),
    "floor": _of_both(libmp.mpf_floor),
    "ceil": _of_both(libmp.mpf_ceil),
    "sign": _of_both(lambda end: libmp.from_int(libmp.mpf_sign(end))),
    "tanh": _rising(libmp.mpf_tanh),
    "sigmoid": _rising(_sigmoid),
    "exp": _rising(libmp.mpf_exp),
    "exp2": lambda x: libmpi.mpi_exp(libmpi.mpi_mul(x, _LN2, _BITS), _BITS),
    "log": _log,
    "log2": lambda x: _known(_div)(_log(x), _LN2),
    "sqrt": _sqrt,
    "rsqrt": lambda x: _known(_div)(_ONE, _sqrt(x)),
    "sin": _of_angle(libmpi.mpi_sin),
    "cos": _of_angle(libmpi.mpi_cos),
}

INTERVAL_OPERATIONS: dict[str, Callable[..., Pair]] = {op: _known(f) for op, f in _REAL.items()}
"""Intervals that hold the exact result of an operation, for operands anywhere in theirs."""


def _less(a: Pair, b: Pair) -> tuple[bool, bool]:
    return libmp.mpf_lt(a[0], b[1]), not libmp.mpf_lt(a[1], b[0])


def _less_or_equal(a: Pair, b: Pair) -> tuple[bool, bool]:
    return libmp.mpf_le(a[0], b[1]), not libmp.mpf_le(a[1], b[0])


def _equal(a: Pair, b: Pair) -> tuple[bool, bool]:
    same = libmp.mpf_le(a[0], b[1]) and libmp.mpf_le(b[0], a[1])
    return same, not a[0] == a[1] == b[0] == b[1]


def _open(
    compare: Callable[[Pair, Pair], tuple[bool, bool]],
) -> Callable[[Pair, Pair], tuple[bool, bool]]:
    """``compare`` of known pairs; both answers of others."""
    return lambda a, b: (True, True) if libmp.fnan in (a[0], b[0]) else compare(a, b)


_COMPARISONS: dict[str, Callable[[Pair, Pair], tuple[bool, bool]]] = {
    "lt": _open(_less),
    "le": _open(_less_or_equal),
    "gt": _open(lambda a, b: _less(b, a)),
    "ge": _open(lambda a, b: _less_or_equal(b, a)),
    "eq": _open(_equal),
    "ne": _open(lambda a, b: _equal(a, b)[::-1]),
}
"""(May a comparison be true, may it be false) of numbers anywhere in two intervals."""
