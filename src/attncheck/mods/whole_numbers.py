"""The vocabulary on truth values and whole numbers: exact, on numpy arrays that broadcast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from attncheck.errors import ProblemError

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.mods.expression import Captured

__all__ = ["WHOLE", "Values", "as_array", "cast"]

Values: TypeAlias = "np.ndarray[Any, Any]"
"""bool, int64, or objects that are real numbers."""


def as_array(captured: Captured) -> Values:
    """A captured number or tensor: bool, int64, or float64, which holds every real one exactly."""
    if not isinstance(captured, torch.Tensor):
        return np.asarray(captured)
    tensor = captured.detach().cpu()
    if tensor.dtype is torch.bool:
        return tensor.numpy()
    return (tensor.double() if tensor.is_floating_point() else tensor.long()).numpy()


def cast(values: Values, dtype: str) -> Values:
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


WHOLE: dict[str, Callable[..., Values]] = {
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
