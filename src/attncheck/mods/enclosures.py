"""What is known of a value: which truth values, whole numbers or real numbers it may be.

All are numpy arrays that broadcast; ``Interval`` holds an ``intervals.Pair`` for each element.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from mpmath import libmp  # type: ignore[import-untyped]  # mpmath ships no types

from attncheck.errors import ProblemError
from attncheck.mods import intervals
from attncheck.mods.whole_numbers import WHOLE, Values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "LOGIC",
    "Enclosure",
    "Interval",
    "Truth",
    "Whole",
    "chosen",
    "compared",
    "each",
    "every",
    "on_whole",
    "two",
    "union",
]

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
        return compared("ne", self, Whole(zero, zero))

    def whole(self) -> Whole:
        """Itself."""
        return self

    def real(self) -> Interval:
        """The same as real numbers."""
        if self.known:
            return Interval.of(self.low)
        low, high = Interval.of(self.low), Interval.of(self.high)
        return Interval(each(intervals.hull, object, low.pairs, high.pairs))


@dataclass(frozen=True, slots=True, eq=False)
class Interval:
    """Intervals of real numbers: an array of ``intervals.Pair``."""

    pairs: Values

    @classmethod
    def of(cls, values: Values) -> Interval:
        """Numbers that are known: whole ones or float64."""
        return cls(each(intervals.exact, object, values))

    def contains(self, values: Values) -> Values:
        """Where the float64 ``values`` lie inside; nowhere where nothing is known."""
        low, high = self.bounds()
        return np.asarray((low <= values) & (values <= high))

    def unknown(self) -> Values:
        """Where nothing can be said: the exact value may be NaN."""
        return each(lambda x: x[0] == libmp.fnan, bool, self.pairs)

    def bounds(self) -> tuple[Values, Values]:
        """The smallest and the largest float64 number inside; NaN where nothing is known."""
        low = each(lambda x: _to_float(x[0], "c"), float, self.pairs)
        return low, each(lambda x: _to_float(x[1], "f"), float, self.pairs)

    def through(self, function: Callable[[intervals.Pair], intervals.Pair]) -> Interval:
        """Each interval mapped to another."""
        return Interval(each(function, object, self.pairs))

    def truth(self) -> Truth:
        """Whether it is not 0."""
        zero = Interval.of(np.asarray(0))
        return Truth(*two(intervals.COMPARE["ne"], bool, self.pairs, zero.pairs))

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


def each(function: Callable[..., Any], dtype: Any, *arrays: Values) -> Values:
    """``function`` of the elements of arrays that broadcast."""
    found = np.frompyfunc(function, len(arrays), 1)(*arrays)
    if isinstance(found, np.ndarray):
        return found if dtype is object else found.astype(dtype)
    alone = np.empty((), dtype)
    alone[()] = found  # a tuple would be taken for an array elsewhere
    return alone


def two(function: Callable[..., Any], dtype: Any, *arrays: Values) -> tuple[Values, Values]:
    """A ``function`` of elements that gives two values, each in an array of its own."""
    first, second = np.frompyfunc(function, len(arrays), 2)(*arrays)
    return np.asarray(first, dtype), np.asarray(second, dtype)


def every(operands: list[Whole]) -> Iterator[tuple[Values, ...]]:
    """All the numbers that operands may be, together; raises ProblemError for too many."""
    widths = [0 if o.known else int((o.high - o.low).max()) for o in operands]
    if any(not 0 <= width < _MOST_NUMBERS for width in widths):
        raise ProblemError(
            f"a whole number of the mod may be any of {_MOST_NUMBERS} after rounding: "
            "it cannot be bounded."
        )
    for steps in itertools.product(*(range(width + 1) for width in widths)):
        yield tuple(np.minimum(o.low + n, o.high) for o, n in zip(operands, steps, strict=True))


def on_whole(op: str, operands: list[Whole]) -> Whole:
    """An operation on whole numbers."""
    if op in _MONOTONE and not all(operand.known for operand in operands):
        ends = [(operand.low, operand.high) for operand in operands]
        found = [WHOLE[op](*corner) for corner in itertools.product(*ends)]
    else:
        found = [WHOLE[op](*numbers) for numbers in every(operands)]
    low, high = found[0], found[0]
    for other in found[1:]:
        low, high = np.minimum(low, other), np.maximum(high, other)
    return Whole(low, high)


_MONOTONE = frozenset({"add", "sub", "mul", "neg", "minimum", "maximum"})


def compared(op: str, a: Whole, b: Whole) -> Truth:
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


def chosen(condition: Truth, first: Enclosure, second: Enclosure) -> Enclosure:
    """``first`` where the condition holds, else ``second``; both where it may be either."""
    if isinstance(first, Interval) and isinstance(second, Interval):
        yes, no = condition.yes, condition.no
        return Interval(each(_one_or_both, object, yes, no, first.pairs, second.pairs))
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
    first: intervals.Pair,
    second: intervals.Pair,
) -> intervals.Pair:
    if yes and no:
        return intervals.hull(first, second)
    return first if yes else second


def union(found: list[Enclosure]) -> Enclosure:
    """What may be any of several, all of one kind."""
    both = np.asarray(True)  # noqa: FBT003  (numpy's own signature)
    everything = found[0]
    for other in found[1:]:
        everything = chosen(Truth(both, both), everything, other)
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
