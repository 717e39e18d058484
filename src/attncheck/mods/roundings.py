"""What fp32 adds to the radius of a value: roundings of results, of operands, of what is stored."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attncheck.formats import FORMATS, Format, spacing
from attncheck.mods.promotion import dtypes
from attncheck.mods.radii import WHOLE_QUOTIENT, Around

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.mods.expression import Expression
    from attncheck.mods.to_interval import Arithmetic

__all__ = ["SLACK", "Roundings"]

SLACK = 1 + 2.0**-16
"""Roundings of fp32, and radii that come in, are taken larger by this: 2^12 units of 2^-53 at
least, of the value that is rounded.

It covers float64's own errors, of the oracle's values and of the radii: a few such units wherever
fp32 rounds too, which grow on their way to the result as the radius does.
"""


class Roundings:
    """The roundings of one expression in one arithmetic.

    What the oracle itself computes in a narrower format than float64, because the mod asks for it,
    a kernel rounds as well, and not always to the same number: such errors count twice. In the
    oracle's own arithmetic they do not count: they belong to what the mod says.

    Args:
        expression: A score mod.
        arithmetic: Of ``to_interval``: the errors of each operation.
        tanh_error: Largest relative error of tanh, where it is larger than the table's.
    """

    def __init__(self, expression: Expression, arithmetic: Arithmetic, tanh_error: float) -> None:
        self._kinds = [node.kind for node in expression.structure.nodes]
        self._arithmetic, self._tanh_error = arithmetic, tanh_error
        self._widest = arithmetic.format
        exact = arithmetic.format.name == "fp64"
        given = FORMATS["fp64" if exact else "fp32"]
        self.formats = [self._format(dtype) for dtype in dtypes(expression, given.torch_dtype)]
        narrow = [dtype in _NARROW for dtype in dtypes(expression, torch.float64)]
        # In float64 the radii themselves are as rough as what they bound: so four times.
        often, once = (0, 4) if exact else (2, 1)
        self._times = [often if computed else once for computed in narrow]

    def _format(self, dtype: torch.dtype | None) -> Format | None:
        """What values of ``dtype`` are computed in; None for whole and for Python numbers."""
        if dtype is None or not dtype.is_floating_point:
            return None
        own = next(f for f in FORMATS.values() if f.torch_dtype == dtype)
        return own if own.significand < self._widest.significand else self._widest

    def belongs_to_the_mod(self, i: int) -> bool:
        """Whether the rounding of node ``i`` is no error: the oracle's own, in its arithmetic."""
        return not self._times[i]

    def result(self, i: int, op: str, real: Tensor, radius: Tensor) -> Tensor:
        """The radius of what operation ``op``, node ``i``, gives: its exact one and its rounding.

        Infinite where the result may be beyond the largest number.
        """
        ulps = self._arithmetic.ulps.get(op, 0.0)
        if not ulps or self.belongs_to_the_mod(i):
            return radius
        added = ulps * self._ulp(real, radius, self._widest)
        if op == "tanh":
            added = torch.maximum(added, self._tanh_error * (real.abs() + radius))
        if op == "floor_divide":
            added = torch.where(real.abs() + radius < WHOLE_QUOTIENT, 0.0, added)
        added = added * (self._times[i] * SLACK)
        smallest = 2.0**self._widest.min_exponent
        added = torch.where(real.abs() - radius < smallest, added + smallest, added)  # flushed
        exact = (radius == 0) & ((real == 0) | (self._held(real, self._widest) & (ulps <= 0.5)))
        found = torch.where(exact | real.isinf(), radius, radius + added)
        # To nearest what is up to half a unit beyond the largest number is rounded to it.
        reach = radius if ulps <= 0.5 else found
        beyond = (real.abs() + reach > _largest(self._widest)) & ~real.isinf()
        return torch.where(beyond, torch.inf, found)

    def argument(self, op: str, operand: Around) -> Around:
        """An operand that is rounded before the operation, as that of exp is."""
        ulps = self._arithmetic.argument_ulps.get(op, 0.0)
        if not ulps:
            return operand
        added = ulps * SLACK * self._ulp(operand.real, operand.radius, self._widest)
        return replace(operand, radius=operand.radius + added)

    def operands(self, i: int, positions: tuple[int, ...], operands: list[Around]) -> list[Around]:
        """Operands of node ``i`` in the format that it is computed in."""
        fmt, times = self.formats[i] or self._widest, self._times[i]
        pairs = zip(positions, operands, strict=True)
        return [self._operand(fmt, position, x, times) for position, x in pairs]

    def compared(self, positions: tuple[int, ...], operands: list[Around]) -> list[Around]:
        """Whole numbers as they are; others in the wider format, as ``to_interval`` has them."""
        if all(self._kinds[o] != "float" for o in positions):
            return operands
        found = [f for o in positions if (f := self.formats[o]) is not None]
        fmt = max(found, key=lambda f: f.significand, default=FORMATS["fp32"])
        pairs = zip(positions, operands, strict=True)
        return [self._operand(fmt, position, x, 2) for position, x in pairs]

    def _operand(self, fmt: Format, position: int, found: Around, times: int) -> Around:
        """An operand as ``fmt`` holds it: Python and whole numbers, and wider ones, are rounded."""
        own, kind = self.formats[position], self._kinds[position]
        if kind == "bool" or (own is not None and own.significand <= fmt.significand):
            return found
        if kind != "int":
            return self._rounded(fmt, found, times)
        exact = found.real.abs() + found.radius < 2.0**fmt.significand
        rounded = self._rounded(fmt, found, times)
        return replace(found, radius=torch.where(exact, found.radius, rounded.radius))

    def _rounded(self, fmt: Format, found: Around, times: int) -> Around:
        exact = (found.radius == 0) & self._held(found.real, fmt)
        half = times * 0.5 * SLACK * self._ulp(found.real, found.radius, fmt)
        return replace(found, radius=found.radius + torch.where(exact, 0.0, half))

    @staticmethod
    def _held(real: Tensor, fmt: Format) -> Tensor:
        """Where ``fmt`` holds a number exactly."""
        return real == real.to(fmt.torch_dtype).double()

    @staticmethod
    def _ulp(real: Tensor, radius: Tensor, fmt: Format) -> Tensor:
        """A unit in the last place of the largest number within reach."""
        return spacing((real.abs() + radius).nan_to_num(nan=0.0, posinf=fmt.max), fmt)


def _largest(fmt: Format) -> float:
    """Half a unit beyond the largest number; of fp64 that is infinite."""
    return fmt.max + math.ldexp(1.0, math.frexp(fmt.max)[1] - 1 - fmt.significand)


_NARROW = frozenset({torch.float32, torch.float16, torch.bfloat16})
