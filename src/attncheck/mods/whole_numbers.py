"""A mod's truth values and whole numbers, exactly or as sets of possible values.

``mpmath_algebra`` and ``ball_algebra`` share them. All values are numpy arrays that broadcast.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from attncheck.core.errors import ProblemError
from attncheck.mods.expression import Captured

Values: TypeAlias = "np.ndarray[Any, Any]"  # bool, int64, or objects that are real numbers

# --- exact whole numbers ----------------------------------------------------------------------


def captured_array(captured: Captured) -> Values:
    """Return a captured value as bool, int64 or float64, which holds every real one exactly."""
    if not isinstance(captured, torch.Tensor):
        return np.asarray(captured)
    tensor = captured.detach().cpu()
    if tensor.dtype is torch.bool:
        return tensor.numpy()
    return (tensor.double() if tensor.is_floating_point() else tensor.long()).numpy()


def cast_whole(values: Values, dtype: str) -> Values:
    """Return truth values or whole numbers cast to bool or a whole dtype, which may wrap around."""
    if dtype == "bool":
        return np.not_equal(values, 0)
    return values.astype(np.dtype(dtype)).astype(np.int64)


def _nonzero(divisor: Values) -> Values:
    if (divisor == 0).any():
        raise ProblemError("a mod divides a whole number by 0: torch refuses that.")
    return divisor


def _counted(function: Callable[..., Values]) -> Callable[..., Values]:
    """Return ``function`` on whole numbers, with truth values as 0 and 1."""

    def apply(*operands: Values) -> Values:
        return function(*(o.astype(np.int64) if o.dtype == bool else o for o in operands))

    return apply


def _bitwise(function: Callable[..., Values]) -> Callable[..., Values]:
    """Return ``function`` on truth values or on whole numbers."""
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


# --- possible truth values and whole numbers --------------------------------------------------

_MOST_NUMBERS = 64  # Most possible values of a whole number before the evaluation gives up.
_MONOTONE = frozenset({"add", "sub", "mul", "neg", "minimum", "maximum"})


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """Possible truth values: bool arrays, nowhere both False."""

    yes: Values  # where it may be true
    no: Values  # where it may be false

    @classmethod
    def of(cls, values: Values) -> Truth:
        """Return known truth values."""
        return cls(values.astype(bool), ~values.astype(bool))


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """Whole numbers between ``low`` and ``high``, int64; or a table of any dtype, to be indexed."""

    low: Values
    high: Values

    @property
    def known(self) -> bool:
        """True if every element has only one possible value."""
        return self.low is self.high or np.array_equal(self.low, self.high)


def possible_numbers(operands: list[Whole]) -> Iterator[tuple[Values, ...]]:
    """Yield all combinations of the operands' possible values; raise ProblemError for too many."""
    widths = [0 if o.known else int((o.high - o.low).max()) for o in operands]
    if any(not 0 <= width < _MOST_NUMBERS for width in widths):
        raise ProblemError(
            f"a whole number of the mod may be any of {_MOST_NUMBERS} after rounding: "
            "it cannot be bounded."
        )
    for steps in itertools.product(*(range(width + 1) for width in widths)):
        yield tuple(np.minimum(o.low + n, o.high) for o, n in zip(operands, steps, strict=True))


def apply_to_whole(op: str, operands: list[Whole]) -> Whole:
    """Return the possible whole numbers of an operation; raise as ``possible_numbers``."""
    if op in _MONOTONE and not all(operand.known for operand in operands):
        # Monotone operations have extremes at the operands' extremes; others try all numbers.
        ends = [(operand.low, operand.high) for operand in operands]
        results = [WHOLE_OPERATIONS[op](*corner) for corner in itertools.product(*ends)]
    else:
        results = [WHOLE_OPERATIONS[op](*numbers) for numbers in possible_numbers(operands)]
    low, high = results[0], results[0]
    for other in results[1:]:
        low, high = np.minimum(low, other), np.maximum(high, other)
    return Whole(low, high)


def compare_whole(op: str, a: Whole, b: Whole) -> Truth:
    """Return the possible truth values of a comparison."""
    if op in {"gt", "ge"}:
        return compare_whole("lt" if op == "gt" else "le", b, a)
    if op == "lt":
        return Truth(a.low < b.high, a.high >= b.low)
    if op == "le":
        return Truth(a.low <= b.high, a.high > b.low)
    same, apart = (a.low <= b.high) & (b.low <= a.high), ~((a.low == b.high) & (b.low == a.high))
    return Truth(same, apart) if op == "eq" else Truth(apart, same)


def choose_whole(condition: Truth, a: Whole, b: Whole) -> Whole:
    """Return ``a`` where the condition holds, else ``b``; the range of both where it is unknown."""
    both = condition.yes & condition.no
    low = np.where(condition.yes, a.low, b.low)
    high = np.where(condition.yes, a.high, b.high)
    if a.known and b.known and not both.any():
        return Whole(low, low)
    return Whole(
        np.where(both, np.minimum(a.low, b.low), low),
        np.where(both, np.maximum(a.high, b.high), high),
    )


LOGIC: dict[str, Callable[..., Truth]] = {
    "and": lambda a, b: Truth(a.yes & b.yes, a.no | b.no),
    "or": lambda a, b: Truth(a.yes | b.yes, a.no & b.no),
    "xor": lambda a, b: Truth((a.yes & b.no) | (a.no & b.yes), (a.yes & b.yes) | (a.no & b.no)),
    "not": lambda a: Truth(a.no, a.yes),
}
"""Possible truth values of logical operations, from those of their operands."""
