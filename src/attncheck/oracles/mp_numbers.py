"""mpmath's arbitrary-precision numbers as a number system, on the CPU; for small problems."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import mpmath
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attncheck.core.errors import UsageError
from attncheck.mods.signatures import ScoreMod
from attncheck.oracles.mod_calls import Indices
from attncheck.oracles.number_system import Captures, Evaluate, ObjectNumbers

LEAST_DIGITS = 17  # 60 bits, which hold every float64 exactly.

ManyDigits: TypeAlias = NDArray[np.object_]
"""An object array of mpmath numbers of one context, with the axes of a tensor."""

_EXPONENT_OF_SMALLEST = -1074  # Float64's smallest positive number is 2 to this power.
_SMALLEST_NORMAL = 2.0**-1022


class Mp(ObjectNumbers[ManyDigits]):
    """Object arrays ``(batch, heads, rows, columns)``; see ``Numbers`` for each method.

    Exponents are unbounded: nothing overflows or underflows. Sums and products of matrices are
    rounded once for each element. The context is private; mpmath's global precision is not used.

    Args:
        digits: Decimal digits; raises UsageError below 17, which hold a float64.
        evaluate, slope, captures: See ``ObjectNumbers``.
    """

    def __init__(
        self,
        digits: int,
        evaluate: Evaluate | None = None,
        slope: Evaluate | None = None,
        captures: Captures | None = None,
    ) -> None:
        if isinstance(digits, bool) or not isinstance(digits, int) or digits < LEAST_DIGITS:
            raise UsageError(
                f"digits={digits!r} must be a whole number of at least {LEAST_DIGITS}: "
                "fewer do not hold a float64."
            )
        # The precision of mpmath.mp is global and may be changed by other code.
        self.context: Any = mpmath.MPContext()
        self.context.dps = digits
        context = self.context
        super().__init__(context, evaluate, slope, captures)
        self._convert = _elementwise(context.convert, 1)
        self._exp = _elementwise(context.exp, 1)
        self._log = _elementwise(context.log, 1)
        self._larger = _elementwise(_larger, 2)
        self._nearest = _elementwise(_nearest_float, 1)
        self._is_minus_infinity = _elementwise(lambda x: x == context.ninf, 1)

    def exact(self, values: Tensor) -> ManyDigits:
        """Return the same numbers; ``values`` must be on the CPU."""
        return self._convert(values.numpy())

    def rounded(self, array: ManyDigits) -> Tensor:
        """Return the nearest float64 numbers, also if they are subnormal."""
        return torch.from_numpy(self._nearest(array).astype(np.float64))

    def matmul(self, left: ManyDigits, right: ManyDigits) -> ManyDigits:
        """Return the batched product, each element rounded once."""
        # fdot rounds once for each element; a matrix product in mpmath rounds every addition.
        product = np.empty((*left.shape[:-1], right.shape[-1]), dtype=object)
        for head in np.ndindex(left.shape[:2]):
            columns = right[head].T.tolist()
            for row, numbers in enumerate(left[head].tolist()):
                product[head][row] = [self.context.fdot(numbers, column) for column in columns]
        return product

    def weigh(self, weights: ManyDigits, values: ManyDigits, attended: Tensor) -> ManyDigits:
        """Return sums over the attended keys only, each rounded once."""
        used = attended.expand(weights.shape).numpy()
        product = np.empty((*weights.shape[:-1], values.shape[-1]), dtype=object)
        for head in np.ndindex(weights.shape[:2]):
            columns = values[head].T.tolist()
            for row, numbers in enumerate(weights[head].tolist()):
                keys = used[head][row].nonzero()[0].tolist()
                seen = [numbers[key] for key in keys]
                product[head][row] = [
                    self.context.fdot(seen, [column[key] for key in keys]) for column in columns
                ]
        return product

    def exp(self, array: ManyDigits) -> ManyDigits:
        """Return the exponential, elementwise."""
        return self._exp(array)

    def log(self, array: ManyDigits) -> ManyDigits:
        """Return the logarithm, elementwise."""
        return self._log(array)

    def maximum(self, left: ManyDigits, right: ManyDigits) -> ManyDigits:
        """Return the larger of two, elementwise."""
        return self._larger(left, right)

    def rowmax(self, array: ManyDigits) -> ManyDigits:
        """Return the maximum over the last axis."""
        largest: ManyDigits = functools.reduce(self._larger, np.moveaxis(array, -1, 0))
        return largest[..., None]

    def is_minus_infinity(self, array: ManyDigits) -> Tensor:
        """Return whether numbers are −∞, elementwise."""
        return torch.from_numpy(self._is_minus_infinity(array).astype(bool))

    def captured(
        self,
        score_mod: ScoreMod,
        scores: ManyDigits,
        indices: Indices,
        factors: ManyDigits,
        attended: Tensor,
    ) -> ManyDigits:
        """Return the sums by ``captures``; raise UsageError without it."""
        sums = self._captured_sums(score_mod, scores, indices, factors, attended)
        return self._convert(sums).reshape(1, 1, 1, -1)

    def _objects(self, array: ManyDigits) -> ManyDigits:
        return array

    def _made(self, objects: ManyDigits) -> ManyDigits:
        return objects

    def _number(self, value: float) -> Any:
        return self.context.convert(value)

    def _converted(self, objects: ManyDigits) -> ManyDigits:
        return self._convert(objects)

    def _sums(self, array: ManyDigits) -> ManyDigits:
        sums = np.empty(array.shape[:-1], dtype=object)
        for row in np.ndindex(sums.shape):
            sums[row] = self.context.fsum(array[row].tolist())
        return sums


def _elementwise(function: Callable[..., Any], arguments: int) -> Callable[..., ManyDigits]:
    """Return a function of numbers as a function of arrays."""
    on_arrays = np.frompyfunc(function, arguments, 1)

    def elementwise(*arrays: Any) -> ManyDigits:
        with np.errstate(all="ignore"):  # NumPy would warn when NaN is compared
            result = on_arrays(*arrays)
        return np.asarray(result, dtype=object)  # without axes the result is a bare number

    return elementwise


def _larger(left: Any, right: Any) -> Any:
    """Return the larger of two numbers, NaN if either is."""
    if left != left:  # noqa: PLR0124  # NaN alone is unequal to itself
        return left
    return left if left > right else right


def _nearest_float(number: Any) -> float:
    """Return the nearest float64.

    mpmath's own conversion rounds subnormal numbers twice, to 53 bits and then to their spacing.
    """
    if not abs(number) < _SMALLEST_NORMAL:
        return float(number)
    context = number.context
    steps = context.nint(context.ldexp(number, -_EXPONENT_OF_SMALLEST))
    return math.ldexp(int(steps), _EXPONENT_OF_SMALLEST)
