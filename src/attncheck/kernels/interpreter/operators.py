"""Operators of tensors, straight from arrays to arrays where ``plans`` knows the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attncheck.kernels.interpreter.plans import BOOLEAN, REAL, WHOLE, is_usual, plans

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.kernels.interpreter.plans import Result, Types

    OfTwo = Callable[[Any, Any], tuple[Any, Any, Result] | None]
    OfNumber = Callable[[Any, type], Result | None]

__all__ = ["operators"]

_WIDE = frozenset({"fp32", "fp64"})  # others are divided in fp32
_COMPARISONS = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}


def operators(types: Types) -> dict[str, Callable[[Any], Any]]:
    """Name of a tensor's method → (the interpreter's own) → what stands in its place."""
    of = _Operands(types)
    table: dict[str, tuple[Any, OfTwo, OfNumber]] = {
        "__add__": (np.add, of.sum, of.number),
        "__sub__": (np.subtract, of.two, of.number),
        "__mul__": (np.multiply, of.two, of.number),
        "__radd__": (_reflected(np.add), _unknown, of.number),
        "__rsub__": (_reflected(np.subtract), _unknown, of.number),
        "__rmul__": (_reflected(np.multiply), _unknown, of.number),
        "__truediv__": (np.divide, of.two_wide, of.wide_and_number),
        "__floordiv__": (_quotient, of.two_whole, of.whole_and_number),
        "__mod__": (np.fmod, of.two_whole, of.whole_and_number),
        "__and__": (np.bitwise_and, of.two_alike, _unknown),
        "__or__": (np.bitwise_or, of.two_alike, _unknown),
    }
    table |= {
        name: (ufunc, of.compared, of.number_compared) for name, ufunc in _COMPARISONS.items()
    }
    return {name: _with_plans(types, *how) for name, how in table.items()}


def _with_plans(
    types: Types, ufunc: Any, of_two: OfTwo, of_number: OfNumber
) -> Callable[[Any], Any]:
    tensor, made, known = types.tensor, types.maker(), plans()

    def with_tensor(one: Any, other: Any, stock: Any) -> Any:
        key = id(one.type), id(other.type)
        plan = known.get(key)
        if plan is None:
            plan = known[key] = of_two(one.type, other.type), one.type, other.type
        if plan[0] is None:
            return stock(one, other)
        left, right, result = plan[0]
        a, b = one.handle.data, other.handle.data
        return made(ufunc(a if left is None else a.astype(left), right(b) if right else b), *result)

    def with_number(one: Any, other: Any, stock: Any) -> Any:
        key = id(one.type), other.__class__
        plan = known.get(key)
        if plan is None:
            plan = known[key] = of_number(one.type, other.__class__), one.type
        # numpy makes a Python number one of the array's own dtype, as the interpreter does.
        return (
            stock(one, other) if plan[0] is None else made(ufunc(one.handle.data, other), *plan[0])
        )

    def instead(stock: Any) -> Any:
        def operator(one: Any, other: Any) -> Any:
            if other.__class__ is tensor:
                return with_tensor(one, other, stock)
            if is_usual(other):
                return with_number(one, other, stock)
            return stock(one, other)

        return operator

    return instead


class _Operands:
    """Plans of operands of two types: (cast of the first, change of the second, result) or None."""

    def __init__(self, types: Types) -> None:
        self._types = types

    def two(self, one: Any, other: Any, dtype: Any = None) -> Any:
        """Computed with in the dtype of both together."""
        left, right = one.scalar, other.scalar
        if not {left.name, right.name} <= WHOLE | REAL:
            return None
        both = self._types.common(left, right)
        result = self._types.result(self._types.spread(one, other), dtype or both)
        if result is None:
            return None
        return self._types.cast(left, both), _caster(self._types.cast(right, both)), result

    def sum(self, one: Any, other: Any) -> Any:
        """The same, and pointers with whole numbers behind them."""
        if not one.scalar.is_ptr() or other.scalar.name not in WHOLE:
            return self.two(one, other)
        result = self._types.result(self._types.spread(one, other), one.scalar)
        # A truth value has one bit, and a byte in memory.
        size = max(1, one.scalar.element_ty.primitive_bitwidth // 8)
        return None if result is None else (None, lambda n: n.astype(np.uint64) * size, result)

    def compared(self, one: Any, other: Any) -> Any:
        """As ``two``; gives truth values."""
        return self.two(one, other, self._types.boolean)

    def two_whole(self, one: Any, other: Any) -> Any:
        """Whole numbers alone."""
        return self.two(one, other) if {one.scalar.name, other.scalar.name} <= WHOLE else None

    def two_wide(self, one: Any, other: Any) -> Any:
        """Of one wide float format alone."""
        same = one.scalar.name == other.scalar.name
        return self.two(one, other) if same and one.scalar.name in _WIDE else None

    def two_alike(self, one: Any, other: Any) -> Any:
        """Truth values, or whole numbers of one dtype."""
        if one.scalar.name != other.scalar.name or one.scalar.name not in {BOOLEAN, *WHOLE}:
            return None
        result = self._types.result(self._types.spread(one, other), one.scalar)
        return None if result is None else (None, None, result)

    def number(self, one: Any, kind: type, dtype: Any = None) -> Any:
        """A tensor and a Python number that is one of its own."""
        of_its_own = one.scalar.name in (REAL | WHOLE if kind is int else REAL)
        return self._types.result(one, dtype or one.scalar) if of_its_own else None

    def number_compared(self, one: Any, kind: type) -> Any:
        """As ``number``; gives truth values."""
        return self.number(one, kind, self._types.boolean)

    def whole_and_number(self, one: Any, kind: type) -> Any:
        """Whole numbers alone."""
        return self.number(one, kind) if one.scalar.name in WHOLE else None

    def wide_and_number(self, one: Any, kind: type) -> Any:
        """Of a wide float format alone."""
        return self.number(one, kind) if one.scalar.name in _WIDE else None


def _unknown(*_types: Any) -> None:
    """Always the interpreter's own way."""


def _reflected(ufunc: Any) -> Any:
    return lambda one, other: ufunc(other, one)


def _quotient(one: Any, other: Any) -> Any:
    """Toward zero, as the interpreter has it."""
    return (one - np.fmod(one, other)) // other


def _caster(dtype: Any) -> Any:
    return None if dtype is None else lambda data: data.astype(dtype)
