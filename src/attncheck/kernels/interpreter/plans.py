"""What the types of an operation's operands say of its result, found once for each pair of types.

The interpreter's own way to ``a + b`` leads through a dozen functions that ask each time what the
types of ``a`` and ``b`` have answered once: what to cast, what to spread, what the result is. A
plan is that answer, and numpy spreads. It is None where the types leave a question, and then the
interpreter's own way is gone: bf16 and fp8, booleans in arithmetic, ranks that differ.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BOOLEAN", "REAL", "WHOLE", "Result", "Types", "forget_plans", "is_usual", "plans"]

WHOLE = frozenset({"int32", "int64"})
REAL = frozenset({"fp16", "fp32", "fp64"})
BOOLEAN = "int1"

Result = tuple[Any, Any, Any, Any]
"""Of a tensor, beside its data: type, dtype, shape and numel."""

_INT32 = 2**31
_SMALLEST, _LARGEST = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
_PLANS: list[dict[Any, Any]] = []


def plans() -> dict[Any, Any]:
    """An empty table of plans by the identity of types; an entry must hold these types."""
    table: dict[Any, Any] = {}
    _PLANS.append(table)
    return table


def forget_plans() -> None:
    """Of all tables."""
    for table in _PLANS:
        table.clear()


def is_usual(number: Any) -> bool:
    """Whether a number is int32, 0, infinite or a normal fp32 one.

    Versions of triton differ about others; for 3.6 also −0.0 is 0.
    """
    if number.__class__ is float:
        if number == 0.0:
            return math.copysign(1.0, number) > 0
        return _SMALLEST <= abs(number) <= _LARGEST or math.isinf(number)
    return number.__class__ is int and -_INT32 < number < _INT32


class Types:
    """The interpreter's types and what comes of them."""

    def __init__(self, interp: Any) -> None:
        self._interp = interp
        core = interp.tl.core
        self.tensor, self._block = core.tensor, core.block_type
        self.boolean = interp.tl.int1
        self._alone = core.tuple([]), core.constexpr(1)

    def maker(self) -> Callable[..., Any]:
        """(data, *Result) → a tensor: without asking whether the data fit, which the plan knows."""
        tensor, of_handle, new = self.tensor, self._interp.TensorHandle, object.__new__

        def made(data: Any, kind: Any, dtype: Any, shape: Any, numel: Any) -> Any:
            handle = new(of_handle)
            handle.data, handle.dtype, handle.attr = data, dtype, {}
            result = new(tensor)
            result.handle, result.type, result.dtype = handle, kind, dtype
            result.shape, result.numel = shape, numel
            return result

        return made

    def result(self, shaped: Any, dtype: Any) -> Result | None:
        """Of the shape of ``shaped``, a type or None, with elements of ``dtype``."""
        if shaped is None:
            return None
        if not shaped.is_block():
            return dtype, dtype, *self._alone
        kind = shaped.with_element_ty(dtype)
        known = kind.__dict__.get("of_tensors")
        return None if known is None else (kind, dtype, *known)

    def spread(self, one: Any, other: Any) -> Any:
        """A type of the shape that both are spread to; None where they are not, or not by numpy."""
        if one is None or not one.is_block() or not other.is_block():
            return other if one is not None and other.is_block() else one
        left, right = list(one.shape), list(other.shape)
        if len(left) != len(right):
            return None
        if any(a != b and 1 not in (a, b) for a, b in zip(left, right, strict=True)):
            return None
        return self.block(
            one.scalar, [b if a == 1 else a for a, b in zip(left, right, strict=True)]
        )

    def block(self, scalar: Any, shape: list[int]) -> Any:
        """The type of a block."""
        return self._block(scalar, shape)

    def numbers(self, dtype: Any) -> Any:
        """How numpy calls ``dtype``."""
        return self._interp._get_np_dtype(dtype)

    def cast(self, source: Any, target: Any) -> Any:
        """How numpy calls ``target``; None where nothing is cast."""
        return None if source.name == target.name else self.numbers(target)

    def common(self, left: Any, right: Any) -> Any:
        """The dtype in which two others are computed with."""
        semantic = self._interp.interpreter_semantic
        return semantic.computation_type_impl(left, False, right, False, False)
