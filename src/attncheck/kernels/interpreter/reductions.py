"""Reductions and scans of the interpreter, on values, and with the GPU's rule for NaN.

The inner functions replace methods of ``ReduceOps`` and ``ScanOps``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attncheck.kernels.interpreter.casts import NARROW, encode, values
from attncheck.kernels.interpreter.repair import Repair

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.kernels.interpreter.casts import Array
    from attncheck.kernels.interpreter.repair import Stock

__all__ = ["REDUCTIONS"]

# Sums of these are rounded after every addition on a GPU; numpy sums fp16 in fp32.
_ROUNDED = (*NARROW, "fp16")
_MAXIMA = (np.max, np.nanmax, np.argmax, np.nanargmax)


def _first_index(data: Array, extreme: Array, axis: int, *, keepdims: bool) -> Array:
    """The first index of ``extreme``; of a row of NaN the last index, as on an H200."""
    hit = data == extreme
    found = np.any(hit, axis=axis, keepdims=True)
    first = np.argmax(hit, axis=axis, keepdims=True)
    index: Array = np.where(found, first, data.shape[axis] - 1)
    return index if keepdims else np.squeeze(index, axis)


def _rounded_sum(data: Array, name: str, axis: int | None, *, keepdims: bool) -> Array:
    """A balanced tree with a rounding after every addition, in the order of the axis."""
    rank = data.ndim
    part = np.moveaxis(data.reshape(-1) if axis is None else data, 0 if axis is None else axis, 0)
    while len(part) > 1:
        even = len(part) // 2 * 2
        pairs = encode(values(part[0:even:2], name) + values(part[1:even:2], name), name)
        part = np.concatenate([pairs, part[even:]]) if even < len(part) else pairs
    total: Array = part[0]
    if not keepdims:
        return total
    return total.reshape((1,) * rank) if axis is None else np.expand_dims(total, axis)


def _rounded_scan(data: Array, name: str, axis: int, combine: np.ufunc) -> Array:
    part = np.moveaxis(data, axis, 0).copy()
    for i in range(1, len(part)):
        part[i] = encode(combine(values(part[i - 1], name), values(part[i], name)), name)
    return np.ascontiguousarray(np.moveaxis(part, 0, axis))


def _extremum_method(interp: Any, _stock: Stock) -> dict[str, Any]:
    """``tl.max``, ``tl.min``, ``tl.argmax``, ``tl.argmin``.

    NaN is dropped, which is what a GPU does too (PropagateNan.NONE), unless there is nothing else.
    """

    def min_max(self: Any, tensor: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        tensor = tensor[0] if isinstance(tensor, tuple) else tensor
        name, data = tensor.dtype.name, tensor.handle.data
        numbers = values(data, name) if name in NARROW else data
        ufunc = np.fmax if (val_reduce_op or idx_reduce_op) in _MAXIMA else np.fmin
        extreme = ufunc.reduce(numbers, axis=self.axis, keepdims=True)
        found = []
        if val_reduce_op:
            kept = extreme if self.keep_dims else np.squeeze(extreme, self.axis)
            kept = encode(kept, name) if name in NARROW else kept
            found.append(self.to_tensor(kept, tensor.dtype))
        if idx_reduce_op:
            index = _first_index(numbers, extreme, self.axis, keepdims=self.keep_dims)
            found.append(self.to_tensor(index, interp.tl.int32))
        return tuple(found) if len(found) > 1 else found[0]

    return {"ReduceOps.min_max": min_max}


def _sum_method(_interp: Any, stock: Stock) -> dict[str, Any]:
    stock_sum = stock("ReduceOps.sum")

    def sum_(self: Any, tensor: Any) -> Any:
        name = tensor.dtype.name
        if name not in _ROUNDED:
            return stock_sum(self, tensor)
        total = _rounded_sum(tensor.handle.data, name, self.axis, keepdims=self.keep_dims)
        return self.to_tensor(total, tensor.dtype)

    return {"ReduceOps.sum": sum_}


def _scan_methods(_interp: Any, stock: Stock) -> dict[str, Any]:
    def scan(stock_scan: Any, combine: np.ufunc) -> Callable[[Any, Any], Any]:
        def method(self: Any, tensor: Any) -> Any:
            name = tensor.dtype.name
            if name not in NARROW:
                return stock_scan(self, tensor)
            data = _rounded_scan(tensor.handle.data, name, self.axis, combine)
            return [self.to_tensor(data, dtype=tensor.dtype)]

        return method

    combining = {"ScanOps.cumsum": np.add, "ScanOps.cumprod": np.multiply}
    return {name: scan(stock(name), combine) for name, combine in combining.items()}


REDUCTIONS = Repair(
    description="reductions and scans",
    methods=(_extremum_method, _sum_method, _scan_methods),
    uses=("ReduceOps.to_tensor", "ScanOps.to_tensor", "tl.int32"),
)
