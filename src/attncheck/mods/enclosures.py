"""Enclosures of a mod's values: which truth values, whole numbers or real numbers each may be.

A pair is (low, high), two raw mpmath numbers (``mpmath.libmp``), far more precise than any format
here. ``UNKNOWN`` is a pair of which nothing can be said, NaN included: 1/x where x may be 0, ∞ − ∞.

All are numpy arrays that broadcast; ``Interval`` holds an ``intervals.Pair`` for each element.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from mpmath import libmp
from mpmath.libmp import libmpi

from attncheck.core.errors import ProblemError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attncheck.core.formats import Format
    from attncheck.mods.expression import Captured

__all__ = [
    "INTERVAL_COMPARISONS",
    "INTERVAL_OPERATIONS",
    "LOGIC",
    "UNKNOWN",
    "WHOLE_OPERATIONS",
    "Enclosure",
    "Interval",
    "Pair",
    "Rounding",
    "Truth",
    "Values",
    "Whole",
    "apply_to_whole",
    "captured_array",
    "cast_whole",
    "choose",
    "compare_whole",
    "elementwise",
    "elementwise_pair",
    "exact_pair",
    "pair_hull",
    "pair_toward_zero",
    "possible_numbers",
    "union",
]


Values: TypeAlias = "np.ndarray[Any, Any]"
"""bool, int64, or objects that are real numbers."""


def captured_array(captured: Captured) -> Values:
    """A captured number or tensor: bool, int64, or float64, which holds every real one exactly."""
    if not isinstance(captured, torch.Tensor):
        return np.asarray(captured)
    tensor = captured.detach().cpu()
    if tensor.dtype is torch.bool:
        return tensor.numpy()
    return (tensor.double() if tensor.is_floating_point() else tensor.long()).numpy()


def cast_whole(values: Values, dtype: str) -> Values:
    """Truth values or whole numbers cast to bool or to a whole dtype, which may wrap around."""
    if dtype == "bool":
        return np.not_equal(values, 0)
    return values.astype(np.dtype(dtype)).astype(np.int64)


def _nonzero(divisor: Values) -> Values:
    if (divisor == 0).any():
        raise ProblemError("a mod divides a whole number by 0: torch refuses that.")
    return divisor


def _counted(values: Values) -> Values:
    """Truth values count as 0 and 1 in arithmetic."""
    return values.astype(np.int64) if values.dtype == bool else values


def _arithmetic(function: Callable[..., Values]) -> Callable[..., Values]:
    return lambda *operands: function(*map(_counted, operands))


def _bitwise(function: Callable[..., Values]) -> Callable[..., Values]:
    def apply(*operands: Values) -> Values:
        if all(operand.dtype == bool for operand in operands):
            return function(*operands)
        return function(*map(_counted, operands))

    return apply


WHOLE_OPERATIONS: dict[str, Callable[..., Values]] = {
    "ge": _arithmetic(np.greater_equal),
    "gt": _arithmetic(np.greater),
    "le": _arithmetic(np.less_equal),
    "lt": _arithmetic(np.less),
    "eq": _arithmetic(np.equal),
    "ne": _arithmetic(np.not_equal),
    "and": _bitwise(np.bitwise_and),
    "or": _bitwise(np.bitwise_or),
    "xor": _bitwise(np.bitwise_xor),
    "not": _bitwise(np.invert),
    "add": _arithmetic(np.add),
    "sub": _arithmetic(np.subtract),
    "mul": _arithmetic(np.multiply),
    "neg": _arithmetic(np.negative),
    "abs": _arithmetic(np.absolute),
    "sign": _arithmetic(np.sign),
    "floor": _arithmetic(np.positive),
    "ceil": _arithmetic(np.positive),
    "minimum": _arithmetic(np.minimum),
    "maximum": _arithmetic(np.maximum),
    "floor_divide": _arithmetic(lambda a, b: np.floor_divide(a, _nonzero(b))),
    "remainder": _arithmetic(lambda a, b: np.remainder(a, _nonzero(b))),
    "left_shift": _arithmetic(np.left_shift),
    "right_shift": _arithmetic(np.right_shift),
    "where": np.where,
}
"""Each operation with torch's semantics: // and % floor, int64 wraps around."""


Raw: TypeAlias = Any  # an untyped tuple of mpmath's own
Pair: TypeAlias = tuple[Raw, Raw]

UNKNOWN: Pair = (libmp.fnan, libmp.fnan)

# Every product of two float64 numbers is exact, and so is almost every sum.
_BITS = 160
_DOWN, _UP = "f", "c"
_INT64 = (-(2**63), 2**63 - 1)


def exact_pair(value: float) -> Pair:
    """One whole number or float."""
    raw = libmp.from_int(value) if isinstance(value, int) else libmp.from_float(value)
    return UNKNOWN if raw == libmp.fnan else (raw, raw)


def pair_hull(a: Pair, b: Pair) -> Pair:
    """The smallest interval with both in it."""
    if libmp.fnan in (a[0], b[0]):
        return UNKNOWN
    return _smaller(a[0], b[0]), _larger(a[1], b[1])


def pair_toward_zero(x: Pair) -> tuple[int, int]:
    """The whole numbers that the numbers of ``x`` are cut to, in the range of int64."""
    bounds = []
    for end, unbounded in zip(x, _INT64, strict=True):
        if end in (libmp.finf, libmp.fninf, libmp.fnan):
            bounds.append(unbounded if end == libmp.fnan else _INT64[end == libmp.finf])
        else:
            bounds.append(min(max(libmp.to_int(end), _INT64[0]), _INT64[1]))
    return bounds[0], bounds[1]


@dataclass(frozen=True)
class Rounding:
    """Rounding of a result to a format: at most ``ulps`` units in the last place off.

    An ulp of x is at most 2u·|x|, u the unit roundoff. What is below the smallest normal number may
    be flushed to 0; what is above the largest may become infinite. No rounding changes a sign. A
    number that the format holds stays as it is if ``ulps`` is at most 1/2.

    Attributes:
        format: Of the result.
        ulps: 0.5 for a correctly rounded operation.
    """

    format: Format
    ulps: float

    def __call__(self, x: Pair) -> Pair:
        """Where the rounded result of an exact one in ``x`` lies."""
        low, high = x
        if low == libmp.fnan:
            return UNKNOWN
        if self.ulps <= 0.5 and low == high and self._holds(low):
            return x
        return libmp.mpf_neg(self._upper(libmp.mpf_neg(low))), self._upper(high)

    def _holds(self, raw: Raw) -> bool:
        _, man, exp, bits = raw
        if not man:
            return True  # 0 and ±∞
        top = exp + bits - 1
        normal = self.format.min_exponent <= top
        return bits <= self.format.significand and normal and not self._above_max(raw)

    def _above_max(self, raw: Raw) -> bool:
        return bool(libmp.mpf_gt(libmp.mpf_abs(raw), self._max))

    def _upper(self, raw: Raw) -> Raw:
        """The largest number that one up to ``raw`` is rounded to."""
        _, man, _, _ = raw
        if not man:
            return raw
        if libmp.mpf_sign(raw) < 0:
            shrunk = libmp.mpf_mul(raw, self._shrink, _BITS, _UP)
            if libmp.mpf_gt(shrunk, self._minus_smallest):
                return libmp.fzero
            return _larger(shrunk, self._minus_max)
        grown = libmp.mpf_mul(_larger(raw, self._smallest), self._grow, _BITS, _UP)
        return libmp.finf if libmp.mpf_gt(grown, self._max) else grown

    @cached_property
    def _relative(self) -> Raw:
        return libmp.from_float(2 * self.ulps * self.format.unit_roundoff)

    @cached_property
    def _grow(self) -> Raw:
        return libmp.mpf_add(libmp.fone, self._relative)

    @cached_property
    def _shrink(self) -> Raw:
        return libmp.mpf_sub(libmp.fone, self._relative)

    @cached_property
    def _max(self) -> Raw:
        return libmp.from_float(self.format.max)

    @cached_property
    def _minus_max(self) -> Raw:
        return libmp.mpf_neg(self._max)

    @cached_property
    def _smallest(self) -> Raw:
        return libmp.from_float(2.0**self.format.min_exponent)

    @cached_property
    def _minus_smallest(self) -> Raw:
        return libmp.mpf_neg(self._smallest)


def _smaller(a: Raw, b: Raw) -> Raw:
    return a if libmp.mpf_lt(a, b) else b


def _larger(a: Raw, b: Raw) -> Raw:
    return b if libmp.mpf_lt(a, b) else a


def _known(function: Callable[..., Pair]) -> Callable[..., Pair]:
    """``function`` of pairs that are not UNKNOWN; what it cannot say of ∞ is UNKNOWN."""

    def apply(*operands: Pair) -> Pair:
        if any(low == libmp.fnan for low, _ in operands):
            return UNKNOWN
        found = function(*operands)
        return UNKNOWN if libmp.fnan in found else found

    return apply


def _rising(function: Callable[..., Raw]) -> Callable[[Pair], Pair]:
    """A function of one number that never falls, from one that mpmath rounds either way."""
    return lambda x: (function(x[0], _BITS, _DOWN), function(x[1], _BITS, _UP))


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


def _floors(a: Pair, b: Pair) -> Pair:
    if not _finite(a, b):
        return UNKNOWN
    low, high = _div(a, b)
    return libmp.mpf_floor(low), libmp.mpf_floor(high)


def _remainder(a: Pair, b: Pair) -> Pair:
    low, high = _floors(a, b)
    if libmp.fnan in (low, high):
        return UNKNOWN
    positive = libmp.mpf_sign(b[0]) > 0
    whole = (libmp.fzero, b[1]) if positive else (b[0], libmp.fzero)
    if low != high:
        return whole
    left = _add(a, _neg(libmpi.mpi_mul((low, low), b, _BITS)))
    return _larger(left[0], whole[0]), _smaller(left[1], whole[1])


def _sigmoid(x: Raw, bits: int, rounding: str) -> Raw:
    other = _UP if rounding == _DOWN else _DOWN
    e = libmp.mpf_exp(libmp.mpf_neg(x), bits, other)
    return libmp.mpf_div(libmp.fone, libmp.mpf_add(libmp.fone, e, bits, other), bits, rounding)


def _exp2(x: Pair) -> Pair:
    return libmpi.mpi_exp(libmpi.mpi_mul(x, _LN2, _BITS), _BITS)  # type: ignore[no-any-return]  # mpmath ships no types


def _log(x: Pair) -> Pair:
    if libmp.mpf_sign(x[0]) < 0:
        return UNKNOWN
    return _rising(libmp.mpf_log)(x)


def _sqrt(x: Pair) -> Pair:
    return UNKNOWN if libmp.mpf_sign(x[0]) < 0 else _rising(libmp.mpf_sqrt)(x)


def _of_angle(function: Callable[..., Pair]) -> Callable[[Pair], Pair]:
    return lambda x: function(x, _BITS) if _finite(x) else UNKNOWN


def _sign(x: Pair) -> Pair:
    return libmp.from_int(libmp.mpf_sign(x[0])), libmp.from_int(libmp.mpf_sign(x[1]))


_ONE: Pair = (libmp.fone, libmp.fone)
_LN2: Pair = (libmp.mpf_ln2(_BITS, _DOWN), libmp.mpf_ln2(_BITS, _UP))

_PLAIN: dict[str, Callable[..., Pair]] = {
    "add": _add,
    "sub": lambda a, b: _add(a, _neg(b)),
    "mul": _mul,
    "div": _div,
    "floor_divide": _floors,
    "remainder": _remainder,
    "neg": _neg,
    "abs": lambda x: libmpi.mpi_abs(x, 0),
    "minimum": lambda a, b: (_smaller(a[0], b[0]), _smaller(a[1], b[1])),
    "maximum": lambda a, b: (_larger(a[0], b[0]), _larger(a[1], b[1])),
    "floor": lambda x: (libmp.mpf_floor(x[0]), libmp.mpf_floor(x[1])),
    "ceil": lambda x: (libmp.mpf_ceil(x[0]), libmp.mpf_ceil(x[1])),
    "sign": _sign,
    "tanh": _rising(libmp.mpf_tanh),
    "sigmoid": _rising(_sigmoid),
    "exp": _rising(libmp.mpf_exp),
    "exp2": _exp2,
    "log": _log,
    "log2": lambda x: _known(_div)(_log(x), _LN2),
    "sqrt": _sqrt,
    "rsqrt": lambda x: _known(_div)(_ONE, _sqrt(x)),
    "sin": _of_angle(libmpi.mpi_sin),
    "cos": _of_angle(libmpi.mpi_cos),
}

INTERVAL_OPERATIONS: dict[str, Callable[..., Pair]] = {op: _known(f) for op, f in _PLAIN.items()}
"""Where the exact result of an operation lies, for operands anywhere in their intervals."""


def _compared(
    may: Callable[[Raw, Raw, Raw, Raw], bool], may_not: Callable[[Raw, Raw, Raw, Raw], bool]
) -> Callable[[Pair, Pair], tuple[bool, bool]]:
    def compare(a: Pair, b: Pair) -> tuple[bool, bool]:
        if libmp.fnan in (a[0], b[0]):
            return True, True
        return bool(may(*a, *b)), bool(may_not(*a, *b))

    return compare


_le, _lt = libmp.mpf_le, libmp.mpf_lt

INTERVAL_COMPARISONS: dict[str, Callable[[Pair, Pair], tuple[bool, bool]]] = {
    "lt": _compared(lambda a, _a, _b, b: _lt(a, b), lambda _a, a, b, _b: not _lt(a, b)),
    "le": _compared(lambda a, _a, _b, b: _le(a, b), lambda _a, a, b, _b: not _le(a, b)),
    "gt": _compared(lambda _a, a, b, _b: _lt(b, a), lambda a, _a, _b, b: not _lt(b, a)),
    "ge": _compared(lambda _a, a, b, _b: _le(b, a), lambda a, _a, _b, b: not _le(b, a)),
    "eq": _compared(
        lambda a, aa, b, bb: _le(a, bb) and _le(b, aa),
        lambda a, aa, b, bb: not a == aa == b == bb,
    ),
    "ne": _compared(
        lambda a, aa, b, bb: not a == aa == b == bb,
        lambda a, aa, b, bb: _le(a, bb) and _le(b, aa),
    ),
}
"""Whether a comparison may be true, and whether it may be false."""


_MOST_NUMBERS = 64  # whole numbers that a value may be before it is given up


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """Truth values as far as they are known: bool arrays, nowhere both False.

    Attributes:
        yes: Where it may be true.
        no: Where it may be false.
    """

    yes: Values
    no: Values

    def truth(self) -> Truth:
        """Itself."""
        return self

    def whole(self) -> Whole:
        """0 for false, 1 for true."""
        return Whole((~self.no).astype(np.int64), self.yes.astype(np.int64))

    def real(self) -> Interval:
        """0 for false, 1 for true."""
        return self.whole().real()


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """Whole numbers from ``low`` to ``high``, int64; or one table of anything, to be indexed."""

    low: Values
    high: Values

    @property
    def known(self) -> bool:
        """Whether each is one number."""
        return self.low is self.high or np.array_equal(self.low, self.high)

    def truth(self) -> Truth:
        """Whether it is not 0."""
        zero = np.asarray(0)
        return compare_whole("ne", self, Whole(zero, zero))

    def whole(self) -> Whole:
        """Itself."""
        return self

    def real(self) -> Interval:
        """The same as real numbers."""
        if self.known:
            return Interval.of(self.low)
        low, high = Interval.of(self.low), Interval.of(self.high)
        return Interval(elementwise(pair_hull, object, low.pairs, high.pairs))


@dataclass(frozen=True, slots=True, eq=False)
class Interval:
    """Intervals of real numbers: an array of ``intervals.Pair``."""

    pairs: Values

    @classmethod
    def of(cls, values: Values) -> Interval:
        """Numbers that are known: whole ones or float64."""
        return cls(elementwise(exact_pair, object, values))

    def contains(self, values: Values) -> Values:
        """Where the float64 ``values`` lie inside; nowhere where nothing is known."""
        low, high = self.bounds()
        return np.asarray((low <= values) & (values <= high))

    def unknown(self) -> Values:
        """Where nothing can be said: the exact value may be NaN."""
        return elementwise(lambda x: x[0] == libmp.fnan, bool, self.pairs)

    def bounds(self) -> tuple[Values, Values]:
        """The smallest and the largest float64 number inside; NaN where nothing is known."""
        low = elementwise(lambda x: _to_float(x[0], "c"), float, self.pairs)
        return low, elementwise(lambda x: _to_float(x[1], "f"), float, self.pairs)

    def through(self, function: Callable[[Pair], Pair]) -> Interval:
        """Each interval mapped to another."""
        return Interval(elementwise(function, object, self.pairs))

    def truth(self) -> Truth:
        """Whether it is not 0."""
        zero = Interval.of(np.asarray(0))
        return Truth(*elementwise_pair(INTERVAL_COMPARISONS["ne"], bool, self.pairs, zero.pairs))

    def whole(self) -> Whole:
        """Never asked: torch casts before it takes a real number for a whole one."""
        raise NotImplementedError

    def real(self) -> Interval:
        """Itself."""
        return self


def _to_float(raw: Any, rounding: str) -> float:
    # mpmath makes a NaN by ∞ − ∞, of which numpy warns.
    return math.nan if raw == libmp.fnan else float(libmp.to_float(raw, rnd=rounding))


Enclosure: TypeAlias = "Truth | Whole | Interval"


def elementwise(function: Callable[..., Any], dtype: Any, *arrays: Values) -> Values:
    """``function`` of the elements of arrays that broadcast."""
    found = np.frompyfunc(function, len(arrays), 1)(*arrays)
    if isinstance(found, np.ndarray):
        return found if dtype is object else found.astype(dtype)
    alone = np.empty((), dtype)
    alone[()] = found  # a tuple would be taken for an array elsewhere
    return alone


def elementwise_pair(
    function: Callable[..., Any], dtype: Any, *arrays: Values
) -> tuple[Values, Values]:
    """A ``function`` of elements that gives two values, each in an array of its own."""
    first, second = np.frompyfunc(function, len(arrays), 2)(*arrays)
    return np.asarray(first, dtype), np.asarray(second, dtype)


def possible_numbers(operands: list[Whole]) -> Iterator[tuple[Values, ...]]:
    """All the numbers that operands may be, together; raises ProblemError for too many."""
    widths = [0 if o.known else int((o.high - o.low).max()) for o in operands]
    if any(not 0 <= width < _MOST_NUMBERS for width in widths):
        raise ProblemError(
            f"a whole number of the mod may be any of {_MOST_NUMBERS} after rounding: "
            "it cannot be bounded."
        )
    for steps in itertools.product(*(range(width + 1) for width in widths)):
        yield tuple(np.minimum(o.low + n, o.high) for o, n in zip(operands, steps, strict=True))


def apply_to_whole(op: str, operands: list[Whole]) -> Whole:
    """An operation on whole numbers."""
    if op in _MONOTONE and not all(operand.known for operand in operands):
        ends = [(operand.low, operand.high) for operand in operands]
        found = [WHOLE_OPERATIONS[op](*corner) for corner in itertools.product(*ends)]
    else:
        found = [WHOLE_OPERATIONS[op](*numbers) for numbers in possible_numbers(operands)]
    low, high = found[0], found[0]
    for other in found[1:]:
        low, high = np.minimum(low, other), np.maximum(high, other)
    return Whole(low, high)


_MONOTONE = frozenset({"add", "sub", "mul", "neg", "minimum", "maximum"})


def compare_whole(op: str, a: Whole, b: Whole) -> Truth:
    """A comparison of whole numbers."""
    same, apart = (a.low <= b.high) & (b.low <= a.high), ~((a.low == b.high) & (b.low == a.high))
    found = {
        "lt": lambda: Truth(a.low < b.high, a.high >= b.low),
        "le": lambda: Truth(a.low <= b.high, a.high > b.low),
        "gt": lambda: Truth(a.high > b.low, a.low <= b.high),
        "ge": lambda: Truth(a.high >= b.low, a.low < b.high),
        "eq": lambda: Truth(same, apart),
        "ne": lambda: Truth(apart, same),
    }
    return found[op]()


def choose(condition: Truth, first: Enclosure, second: Enclosure) -> Enclosure:
    """``first`` where the condition holds, else ``second``; both where it may be either."""
    if isinstance(first, Interval) and isinstance(second, Interval):
        yes, no = condition.yes, condition.no
        return Interval(elementwise(_one_or_both, object, yes, no, first.pairs, second.pairs))
    if isinstance(first, Truth) and isinstance(second, Truth):
        return Truth(
            (condition.yes & first.yes) | (condition.no & second.yes),
            (condition.yes & first.no) | (condition.no & second.no),
        )
    a, b = first.whole(), second.whole()
    both = condition.yes & condition.no
    low = np.where(condition.yes, a.low, b.low)
    high = np.where(condition.yes, a.high, b.high)
    if a.known and b.known and not both.any():
        return Whole(low, low)
    return Whole(
        np.where(both, np.minimum(a.low, b.low), low),
        np.where(both, np.maximum(a.high, b.high), high),
    )


def _one_or_both(
    yes: bool,  # noqa: FBT001  (an element of an array)
    no: bool,  # noqa: FBT001  (an element of an array)
    first: Pair,
    second: Pair,
) -> Pair:
    if yes and no:
        return pair_hull(first, second)
    return first if yes else second


def union(found: list[Enclosure]) -> Enclosure:
    """What may be any of several, all of one kind."""
    both = np.asarray(True)  # noqa: FBT003  (numpy's own signature)
    everything = found[0]
    for other in found[1:]:
        everything = choose(Truth(both, both), everything, other)
    return everything


def _and(a: Truth, b: Truth) -> Truth:
    return Truth(a.yes & b.yes, a.no | b.no)


def _or(a: Truth, b: Truth) -> Truth:
    return Truth(a.yes | b.yes, a.no & b.no)


def _xor(a: Truth, b: Truth) -> Truth:
    return Truth((a.yes & b.no) | (a.no & b.yes), (a.yes & b.yes) | (a.no & b.no))


LOGIC: dict[str, Callable[..., Truth]] = {
    "and": _and,
    "or": _or,
    "xor": _xor,
    "not": lambda a: Truth(a.no, a.yes),
}
"""Each on Truth."""
