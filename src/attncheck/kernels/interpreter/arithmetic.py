"""Operations of the interpreter's builder, on values where it worked on bit patterns.

The inner functions replace the methods of the same name of ``InterpreterBuilder``; ``self`` is that
builder, and a handle is its ``TensorHandle``: an array ``data`` and a Triton ``dtype``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attncheck.kernels.interpreter.casts import FORMATS, NARROW, convert, encode, values
from attncheck.kernels.interpreter.repair import Repair

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.kernels.interpreter.casts import Array
    from attncheck.kernels.interpreter.repair import Stock

__all__ = ["CASTS", "VALUES", "is_narrow", "number"]


def number(handle: Any) -> Array:
    """A handle's data as numbers: fp32, or their own dtype if wider."""
    return values(handle.data, handle.dtype.scalar.name)


def is_narrow(handle: Any) -> bool:
    """Whether a handle's data are bit patterns."""
    name = handle.dtype.scalar.name
    return name in NARROW and handle.data.dtype == NARROW[name]


def _convert_function(interp: Any, stock: Stock) -> dict[str, Any]:
    stock_convert = stock("_convert_float")
    zero_rounding = interp._ir.ROUNDING_MODE.RTZ

    def _convert_float(data: Array, source: Any, target: Any, rounding_mode: Any) -> Array:
        # Also the AMD and pre-Hopper fp8 formats come through here; they keep the stock cast.
        if source.name not in FORMATS or target.name not in FORMATS:
            return stock_convert(data, source, target, rounding_mode)  # type: ignore[no-any-return]  # triton has no types
        result = convert(data, source.name, target.name, toward_zero=rounding_mode == zero_rounding)
        return result.view(np.dtype(f"uint{8 * result.itemsize}"))

    return {"_convert_float": _convert_float}


def _cast_methods(interp: Any, stock: Stock) -> dict[str, Any]:
    stock_cast = stock("InterpreterBuilder.cast_impl")

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar.name, dst_type.scalar.name
        if target in NARROW:
            return interp.TensorHandle(encode(number(src), target), dst_type.scalar)
        if is_narrow(src):
            numbers = values(src.data, source)
            data = numbers.astype(interp._get_np_dtype(dst_type))
            return interp.TensorHandle(data, dst_type.scalar)
        return stock_cast(self, src, dst_type)

    def create_fp_to_fp(_self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        data = interp._convert_float(src.data, src.dtype.scalar, dst_type.scalar, rounding_mode)
        return interp.TensorHandle(data.view(interp._get_np_dtype(dst_type)), dst_type.scalar)

    def get_bf16(_self: Any, value: float) -> Any:
        data = encode(np.array([value], np.float64), "bf16")
        return interp.TensorHandle(data, interp.tl.bfloat16)

    return _of_the_builder(cast_impl, create_fp_to_fp, get_bf16)


def _elementwise_methods(interp: Any, stock: Stock) -> dict[str, Any]:
    """An H200 adds, subtracts and multiplies bf16 with one rounding to bf16.

    So does fp32 arithmetic followed by a rounding (24 >= 2*8 + 2 bits: the first rounding is
    innocuous, Figueroa 1995). Triton 3.6 compiles no fp8 arithmetic for an H200; here it is rounded
    to its own format.
    """
    stock_binary = stock("InterpreterBuilder.binary_op")
    stock_unary = stock("InterpreterBuilder.unary_op")
    handle = interp.TensorHandle

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable[..., Array]) -> Any:
        if not is_narrow(lhs):
            return stock_binary(self, lhs, rhs, op)
        result = op(number(lhs), number(rhs))
        if result.dtype == np.bool_:
            return handle(result, interp.tl.int1)
        dtype = lhs.dtype.scalar
        return handle(encode(result, dtype.name), dtype)

    def unary_op(self: Any, arg: Any, op: Callable[..., Array]) -> Any:
        if not is_narrow(arg):
            return stock_unary(self, arg, op)
        dtype = arg.dtype.scalar
        return handle(encode(op(number(arg)), dtype.name), dtype)

    return _of_the_builder(binary_op, unary_op)


def _extremum_methods(interp: Any, _stock: Stock) -> dict[str, Any]:
    none = interp._ir.PROPAGATE_NAN.NONE

    def create_clampf(self: Any, arg: Any, lo: Any, hi: Any, propagate_nans: Any) -> Any:
        low, high = (np.fmax, np.fmin) if propagate_nans == none else (np.maximum, np.minimum)
        return self.binary_op(self.binary_op(arg, lo, low), hi, high)

    def create_maxnumf(self: Any, lhs: Any, rhs: Any) -> Any:
        return self.binary_op(lhs, rhs, np.fmax)

    def create_minnumf(self: Any, lhs: Any, rhs: Any) -> Any:
        return self.binary_op(lhs, rhs, np.fmin)

    return _of_the_builder(create_clampf, create_maxnumf, create_minnumf)


def _fma_method(interp: Any, stock: Stock) -> dict[str, Any]:
    stock_fma = stock("InterpreterBuilder.create_fma")

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        dtype = z.dtype.scalar
        if dtype.name not in FORMATS or dtype.name == "fp64":
            return stock_fma(self, x, y, z)
        total = _fused(number(x), number(y), number(z))
        return interp.TensorHandle(encode(total, dtype.name), dtype)

    return _of_the_builder(create_fma)


def _atomic_method(interp: Any, stock: Stock) -> dict[str, Any]:
    stock_atomic = stock("InterpreterBuilder.create_atomic_rmw")

    def create_atomic_rmw(  # the builder's own signature
        self: Any,
        rmwOp: Any,
        ptr: Any,
        val: Any,
        mask: Any,
        sem: Any,
        scope: Any,
    ) -> Any:
        if not is_narrow(val) or rmwOp != interp._ir.ATOMIC_OP.FADD:
            return stock_atomic(self, rmwOp, ptr, val, mask, sem, scope)
        return interp.TensorHandle(_atomic_add(interp, ptr, val, mask), val.dtype.scalar)

    return _of_the_builder(create_atomic_rmw)


def _of_the_builder(*methods: Callable[..., Any]) -> dict[str, Any]:
    return {f"InterpreterBuilder.{method.__name__}": method for method in methods}


def _fused(x: Array, y: Array, z: Array) -> Array:
    """x·y + z of fp32 arrays in fp64, rounded to odd: a rounding to fp32 then gives the fused sum.

    The product of two 24-bit significands is exact in fp64; what the sum lost is Knuth's two-sum.
    """
    product, addend = x.astype(np.float64) * y, z.astype(np.float64)
    total = np.asarray(product + addend)
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    even = (total.view(np.uint64) & np.uint64(1)) == 0
    odd = np.nextafter(total, np.copysign(np.inf, lost))
    return np.where(even & (lost != 0) & np.isfinite(total), odd, total)


def _atomic_add(interp: Any, ptr: Any, val: Any, mask: Any) -> Array:
    """One address after the other, because a block may add to the same address twice."""
    name = val.dtype.scalar.name
    addresses, allowed = np.broadcast_arrays(ptr.data, mask.data)
    addends, old = (
        np.broadcast_to(val.data, addresses.shape),
        np.zeros(addresses.shape, NARROW[name]),
    )
    one = np.ones(1, np.bool_)
    for index in zip(*np.nonzero(allowed), strict=True):
        address, unused = addresses[index].reshape(1), np.zeros(1, NARROW[name])
        before = interp._interpreter.load(address, one, unused, NARROW[name])
        total = values(before, name) + values(addends[index].reshape(1), name)
        interp._interpreter.store(address, encode(total, name), one)
        old[index] = before[0]
    return old


CASTS = Repair(
    description="casts",
    methods=(_convert_function, _cast_methods),
    uses=("TensorHandle", "_get_np_dtype", "_ir.ROUNDING_MODE.RTZ", "tl.bfloat16"),
    adds=("InterpreterBuilder.get_bf16",),
)
VALUES = Repair(
    description="bf16/fp8 arithmetic",
    methods=(_elementwise_methods, _extremum_methods, _fma_method, _atomic_method),
    uses=(
        "TensorHandle",
        "tl.int1",
        "_ir.PROPAGATE_NAN.NONE",
        "_ir.ATOMIC_OP.FADD",
        "_interpreter.load",
        "_interpreter.store",
    ),
)
