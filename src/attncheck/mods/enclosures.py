"""Enclosures of a mod's values: which truth values, whole numbers or real numbers each may be.

Truth values and whole numbers are the same for every number system. ``Enclosures`` is the algebra
on all three; Arb's balls and intervals with rounding each say what real numbers are
(``ball_algebra``, ``interval_algebra``). All values are numpy arrays that broadcast.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch

from attncheck.core.errors import ProblemError
from attncheck.mods.expression import Algebra, Captured, Node

Values: TypeAlias = "np.ndarray[Any, Any]"  # bool, int64, or objects that are real numbers

Real = TypeVar("Real")


def elementwise(function: Callable[..., Any], dtype: Any, *arrays: Values) -> Values:
    """Return ``function`` of the elements of arrays that broadcast."""
    results = np.frompyfunc(function, len(arrays), 1)(*arrays)
    if isinstance(results, np.ndarray):
        return results if dtype is object else results.astype(dtype)
    alone = np.empty((), dtype)
    alone[()] = results  # a tuple would be taken for an array elsewhere
    return alone


def elementwise_pair(
    function: Callable[..., Any], dtype: Any, *arrays: Values
) -> tuple[Values, Values]:
    """Return both results of a ``function`` of elements, each in an array of its own."""
    first, second = np.frompyfunc(function, len(arrays), 2)(*arrays)
    return np.asarray(first, dtype), np.asarray(second, dtype)


# --- whole numbers that are known exactly -----------------------------------------------------


def captured_array(captured: Captured) -> Values:
    """Return a captured value as bool, int64 or float64, which holds every real one exactly."""
    if not isinstance(captured, torch.Tensor):
        return np.asarray(captured)
    tensor = captured.detach().cpu()
    if tensor.dtype is torch.bool:
        return tensor.numpy()
    return (tensor.double() if tensor.is_floating_point() else tensor.long()).numpy()


def cast_whole(values: Values, dtype: str) -> Values:
    """Return truth values or whole numbers as bool or as a whole dtype, which may wrap around."""
    if dtype == "bool":
        return np.not_equal(values, 0)
    return values.astype(np.dtype(dtype)).astype(np.int64)


def _nonzero(divisor: Values) -> Values:
    if (divisor == 0).any():
        raise ProblemError("a mod divides a whole number by 0: torch refuses that.")
    return divisor


def _counted(function: Callable[..., Values]) -> Callable[..., Values]:
    """``function`` of whole numbers; truth values count as 0 and 1."""

    def apply(*operands: Values) -> Values:
        return function(*(o.astype(np.int64) if o.dtype == bool else o for o in operands))

    return apply


def _bitwise(function: Callable[..., Values]) -> Callable[..., Values]:
    """``function`` of truth values, or of whole numbers."""
    of_numbers = _counted(function)

    def apply(*operands: Values) -> Values:
        truth = all(operand.dtype == bool for operand in operands)
        return function(*operands) if truth else of_numbers(*operands)

    return apply


WHOLE_OPERATIONS: dict[str, Callable[..., Values]] = {
    "ge": _counted(np.greater_equal),
    "gt": _counted(np.greater),
    "le": _counted(np.less_equal),
    "lt": _counted(np.less),
    "eq": _counted(np.equal),
    "ne": _counted(np.not_equal),
    "and": _bitwise(np.bitwise_and),
    "or": _bitwise(np.bitwise_or),
    "xor": _bitwise(np.bitwise_xor),
    "not": _bitwise(np.invert),
    "add": _counted(np.add),
    "sub": _counted(np.subtract),
    "mul": _counted(np.multiply),
    "neg": _counted(np.negative),
    "abs": _counted(np.absolute),
    "sign": _counted(np.sign),
    "floor": _counted(np.positive),
    "ceil": _counted(np.positive),
    "minimum": _counted(np.minimum),
    "maximum": _counted(np.maximum),
    "floor_divide": _counted(lambda a, b: np.floor_divide(a, _nonzero(b))),
    "remainder": _counted(lambda a, b: np.remainder(a, _nonzero(b))),
    "left_shift": _counted(np.left_shift),
    "right_shift": _counted(np.right_shift),
}
"""Operations on truth values and whole numbers with torch's semantics: // and % floor, int64 wraps
around."""


# --- truth values and whole numbers as far as they are known ----------------------------------

_MOST_NUMBERS = 64  # whole numbers that a value may be before the evaluation gives up
_MONOTONE = frozenset({"add", "sub", "mul", "neg", "minimum", "maximum"})


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """Truth values as far as they are known: bool arrays, nowhere both False."""

    yes: Values  # where it may be true
    no: Values  # where it may be false

    @classmethod
    def of(cls, values: Values) -> Truth:
        """Return truth values that are known."""
        return cls(values.astype(bool), ~values.astype(bool))


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """Whole numbers from ``low`` to ``high``, int64; or one table of anything, to be indexed."""

    low: Values
    high: Values

    @property
    def known(self) -> bool:
        """True where each is one number."""
        return self.low is self.high or np.array_equal(self.low, self.high)


def _possible_numbers(operands: list[Whole]) -> Iterator[tuple[Values, ...]]:
    """Yield all the numbers that operands may be, together; raise ProblemError for too many."""
    widths = [0 if o.known else int((o.high - o.low).max()) for o in operands]
    if any(not 0 <= width < _MOST_NUMBERS for width in widths):
        raise ProblemError(
            f"a whole number of the mod may be any of {_MOST_NUMBERS} after rounding: "
            "it cannot be bounded."
        )
    for steps in itertools.product(*(range(width + 1) for width in widths)):
        yield tuple(np.minimum(o.low + n, o.high) for o, n in zip(operands, steps, strict=True))


def _apply_to_whole(op: str, operands: list[Whole]) -> Whole:
    if op in _MONOTONE and not all(operand.known for operand in operands):
        # Their extremes are where the operands have theirs; others are tried number by number.
        ends = [(operand.low, operand.high) for operand in operands]
        results = [WHOLE_OPERATIONS[op](*corner) for corner in itertools.product(*ends)]
    else:
        results = [WHOLE_OPERATIONS[op](*numbers) for numbers in _possible_numbers(operands)]
    low, high = results[0], results[0]
    for other in results[1:]:
        low, high = np.minimum(low, other), np.maximum(high, other)
    return Whole(low, high)


def _compare_whole(op: str, a: Whole, b: Whole) -> Truth:
    if op in {"gt", "ge"}:
        return _compare_whole("lt" if op == "gt" else "le", b, a)
    if op == "lt":
        return Truth(a.low < b.high, a.high >= b.low)
    if op == "le":
        return Truth(a.low <= b.high, a.high > b.low)
    same, apart = (a.low <= b.high) & (b.low <= a.high), ~((a.low == b.high) & (b.low == a.high))
    return Truth(same, apart) if op == "eq" else Truth(apart, same)


def _choose_whole(condition: Truth, a: Whole, b: Whole) -> Whole:
    both = condition.yes & condition.no
    low = np.where(condition.yes, a.low, b.low)
    high = np.where(condition.yes, a.high, b.high)
    if a.known and b.known and not both.any():
        return Whole(low, low)
    return Whole(
        np.where(both, np.minimum(a.low, b.low), low),
        np.where(both, np.maximum(a.high, b.high), high),
    )


_LOGIC: dict[str, Callable[..., Truth]] = {
    "and": lambda a, b: Truth(a.yes & b.yes, a.no | b.no),
    "or": lambda a, b: Truth(a.yes | b.yes, a.no & b.no),
    "xor": lambda a, b: Truth((a.yes & b.no) | (a.no & b.yes), (a.yes & b.yes) | (a.no & b.no)),
    "not": lambda a: Truth(a.no, a.yes),
}


# --- the algebra on all three -----------------------------------------------------------------


class Enclosures(ABC, Generic[Real]):
    """An algebra of enclosures, of one number system's real numbers.

    A comparison that could go either way gives both truth values, ``where`` the union of its
    branches, and what is cut to a whole number every one it may be cut to.
    """

    @abstractmethod
    def exact(self, node: Node | None, values: Values) -> Real:
        """Return real numbers that are known, whole ones or float64, as ``node`` holds them."""

    @abstractmethod
    def hull(self, a: Real, b: Real) -> Real:
        """Return what holds both."""

    @abstractmethod
    def choose(self, condition: Truth, first: Real, second: Real) -> Real:
        """Return the first where the condition holds, else the second; both where it is open."""

    @abstractmethod
    def compute(self, node: Node, operands: list[Real]) -> Real:
        """Return the result of an operation on real numbers."""

    @abstractmethod
    def compare(self, op: str, a: Real, b: Real) -> Truth:
        """Return a comparison of real numbers."""

    @abstractmethod
    def toward_zero(self, value: Real) -> Whole:
        """Return the whole numbers that a real number may be cut to, in the range of int64."""

    def convert(self, node: Node, values: list[Real]) -> list[Real]:  # noqa: ARG002
        """Return operands as ``node`` takes them: as they are, unless rounding them matters."""
        return values

    def algebra(self) -> Algebra[Any]:
        """Return the algebra on Truth, Whole and Real."""
        special = {
            "index": self._index,
            "where": self._where,
            "cast": self._cast,
            **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne"), self._compare),
        }
        return Algebra.of(self._leaf, self._apply, special)

    def _leaf(self, node: Node, value: Any) -> Any:
        array = np.asarray(value) if node.op == "input" else captured_array(value)
        # A table may hold anything; what an index reads of it is known.
        return Whole(array, array) if node.op == "tensor" else self._known(node, array)

    def _known(self, node: Node, array: Values) -> Any:
        if node.kind == "bool":
            return Truth.of(array)
        return Whole(array, array) if node.kind == "int" else self.exact(node, array)

    def _truth(self, value: Any) -> Truth:
        """Return ``value`` ≠ 0."""
        if isinstance(value, Truth):
            return value
        zero = np.asarray(0)
        if isinstance(value, Whole):
            return _compare_whole("ne", value, Whole(zero, zero))
        return self.compare("ne", value, self.exact(None, zero))

    def _whole(self, value: Any) -> Whole:
        """0 for false, 1 for true; torch casts before it takes a real number for a whole one."""
        if isinstance(value, Truth):
            return Whole((~value.no).astype(np.int64), value.yes.astype(np.int64))
        assert isinstance(value, Whole)
        return value

    def _real(self, value: Any) -> Real:
        if not isinstance(value, Truth | Whole):
            return value  # type: ignore[no-any-return]  # it is one
        whole = self._whole(value)
        if whole.known:
            return self.exact(None, whole.low)
        return self.hull(self.exact(None, whole.low), self.exact(None, whole.high))

    def _apply(self, node: Node, *operands: Any) -> Any:
        if node.kind == "float":
            return self.compute(node, self.convert(node, [self._real(o) for o in operands]))
        if node.kind == "bool" and node.op in _LOGIC:
            return _LOGIC[node.op](*map(self._truth, operands))
        result = _apply_to_whole(node.op, [self._whole(operand) for operand in operands])
        return result if node.kind == "int" else self._truth(result)

    def _compare(self, node: Node, *operands: Any) -> Truth:
        if all(isinstance(operand, Truth | Whole) for operand in operands):
            a, b = map(self._whole, operands)
            return _compare_whole(node.op, a, b)
        return self.compare(node.op, *self.convert(node, [self._real(o) for o in operands]))

    def _where(self, node: Node, condition: Any, *branches: Any) -> Any:
        truth = self._truth(condition)
        if node.kind == "float":
            first, second = self.convert(node, [self._real(branch) for branch in branches])
            return self.choose(truth, first, second)
        return self._choose_known(truth, *branches)

    def _choose_known(self, condition: Truth, first: Any, second: Any) -> Any:
        if isinstance(first, Truth) and isinstance(second, Truth):
            return Truth(
                (condition.yes & first.yes) | (condition.no & second.yes),
                (condition.yes & first.no) | (condition.no & second.no),
            )
        return _choose_whole(condition, self._whole(first), self._whole(second))

    def _cast(self, node: Node, operand: Any) -> Any:
        if node.kind == "float":
            (value,) = self.convert(node, [self._real(operand)])
            return value
        if node.kind == "bool":
            return self._truth(operand)
        real = not isinstance(operand, Truth | Whole)
        whole = self.toward_zero(operand) if real else self._whole(operand)
        if not whole.known:
            return whole
        # What may be several numbers is not wrapped around: its ends would change places.
        wrapped = cast_whole(whole.low, node.name)
        return Whole(wrapped, wrapped)

    def _index(self, node: Node, *operands: Any) -> Any:
        """A table at every place that its indices may mean; there must be one where known."""
        table, *places = map(self._whole, operands)
        known, sizes = all(place.known for place in places), table.low.shape
        result: Any = None
        anything = Truth(np.asarray(True), np.asarray(True))  # noqa: FBT003  (numpy's signature)
        for indices in _possible_numbers(places):
            inside = indices
            if not known:
                pairs = zip(indices, sizes, strict=True)
                inside = tuple(np.clip(index, -size, size - 1) for index, size in pairs)
            value = self._known(node, np.asarray(table.low[tuple(inside)]))
            if result is None:
                result = value
            elif node.kind == "float":
                result = self.choose(anything, result, value)
            else:
                result = self._choose_known(anything, result, value)
        return result
