"""Intervals of real numbers with outward rounding, and what a floating-point rounding does to them.

A pair is (low, high), two raw mpmath numbers (``mpmath.libmp``), far more precise than any format
here. ``UNKNOWN`` is a pair of which nothing can be said, NaN included: 1/x where x may be 0, ∞ − ∞.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from mpmath import libmp  # type: ignore[import-untyped]  # mpmath ships no types
from mpmath.libmp import libmpi  # type: ignore[import-untyped]  # mpmath ships no types

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.formats import Format

__all__ = ["COMPARE", "REAL", "UNKNOWN", "Pair", "Rounding", "exact", "hull", "toward_zero"]

Raw: TypeAlias = Any  # an untyped tuple of mpmath's own
Pair: TypeAlias = tuple[Raw, Raw]

UNKNOWN: Pair = (libmp.fnan, libmp.fnan)

# Every product of two float64 numbers is exact, and so is almost every sum.
_BITS = 160
_DOWN, _UP = "f", "c"
_INT64 = (-(2**63), 2**63 - 1)


def exact(value: float) -> Pair:
    """One whole number or float."""
    raw = libmp.from_int(value) if isinstance(value, int) else libmp.from_float(value)
    return UNKNOWN if raw == libmp.fnan else (raw, raw)


def hull(a: Pair, b: Pair) -> Pair:
    """The smallest interval with both in it."""
    if libmp.fnan in (a[0], b[0]):
        return UNKNOWN
    return _smaller(a[0], b[0]), _larger(a[1], b[1])


def toward_zero(x: Pair) -> tuple[int, int]:
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

REAL: dict[str, Callable[..., Pair]] = {op: _known(f) for op, f in _PLAIN.items()}
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

COMPARE: dict[str, Callable[[Pair, Pair], tuple[bool, bool]]] = {
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
