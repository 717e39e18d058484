"""Operations of the interpreter's builder, on values where it worked on bit patterns.

Every function here replaces the method of the same name of ``InterpreterBuilder``; ``self`` is that
builder, and a handle is its ``TensorHandle``: an array ``data`` and a Triton ``dtype``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attncheck.kernels.interpreter.casts import FORMATS, NARROW, convert, encode, values

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.kernels.interpreter.casts import Array

__all__ = ["cast_methods", "dot_methods", "value_methods"]


def _number(handle: Any) -> Array:
    return values(handle.data, handle.dtype.scalar.name)


def _is_narrow(handle: Any) -> bool:
    name = handle.dtype.scalar.name
    return name in NARROW and handle.data.dtype == NARROW[name]


def cast_methods(interp: Any, stock: Callable[[str], Any]) -> dict[str, Any]:
    """``_convert_float``, and the builder's methods that cast."""
    stock_convert, stock_cast = stock("_convert_float"), stock("InterpreterBuilder.cast_impl")
    zero_rounding = interp._ir.ROUNDING_MODE.RTZ

    def _convert_float(data: Array, source: Any, target: Any, rounding_mode: Any) -> Array:
        # Also the AMD and pre-Hopper fp8 formats come through here; they keep the stock cast.
        if source.name not in FORMATS or target.name not in FORMATS:
            return stock_convert(data, source, target, rounding_mode)  # type: ignore[no-any-return]  # triton has no types
        result = convert(data, source.name, target.name, toward_zero=rounding_mode == zero_rounding)
        return result.view(np.dtype(f"uint{8 * result.itemsize}"))

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar.name, dst_type.scalar.name
        if target in NARROW:
            return interp.TensorHandle(encode(_number(src), target), dst_type.scalar)
        if _is_narrow(src):
            numbers = values(src.data, source)
            return interp.TensorHandle(
                numbers.astype(interp._get_np_dtype(dst_type)), dst_type.scalar
            )
        return stock_cast(self, src, dst_type)

    def create_fp_to_fp(_self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        data = interp._convert_float(src.data, src.dtype.scalar, dst_type.scalar, rounding_mode)
        return interp.TensorHandle(data.view(interp._get_np_dtype(dst_type)), dst_type.scalar)

    def get_bf16(_self: Any, value: float) -> Any:
        return interp.TensorHandle(
            encode(np.array([value], np.float64), "bf16"), interp.tl.bfloat16
        )

    return {
        "_convert_float": _convert_float,
        "InterpreterBuilder.cast_impl": cast_impl,
        "InterpreterBuilder.create_fp_to_fp": create_fp_to_fp,
        "InterpreterBuilder.get_bf16": get_bf16,
    }


def value_methods(interp: Any, stock: Callable[[str], Any]) -> dict[str, Any]:
    """Arithmetic, comparison, fma, clamp and atomic addition of bf16 and fp8.

    An H200 adds, subtracts and multiplies bf16 with one rounding to bf16; so does fp32 arithmetic
    followed by a rounding (24 >= 2*8 + 2 bits: the first rounding is innocuous, Figueroa 1995).
    Triton 3.6 compiles no fp8 arithmetic for an H200; here it is rounded to its own format.
    """
    stock_binary = stock("InterpreterBuilder.binary_op")
    stock_unary = stock("InterpreterBuilder.unary_op")
    stock_fma = stock("InterpreterBuilder.create_fma")
    stock_atomic = stock("InterpreterBuilder.create_atomic_rmw")
    none = interp._ir.PROPAGATE_NAN.NONE
    handle = interp.TensorHandle

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable[..., Array]) -> Any:
        if not _is_narrow(lhs):
            return stock_binary(self, lhs, rhs, op)
        result = op(_number(lhs), _number(rhs))
        if result.dtype == np.bool_:
            return handle(result, interp.tl.int1)
        dtype = lhs.dtype.scalar
        return handle(encode(result, dtype.name), dtype)

    def unary_op(self: Any, arg: Any, op: Callable[..., Array]) -> Any:
        if not _is_narrow(arg):
            return stock_unary(self, arg, op)
        dtype = arg.dtype.scalar
        return handle(encode(op(_number(arg)), dtype.name), dtype)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        dtype = z.dtype.scalar
        if dtype.name not in FORMATS or dtype.name == "fp64":
            return stock_fma(self, x, y, z)
        total = _fused(_number(x), _number(y), _number(z))
        return handle(encode(total, dtype.name), dtype)

    def create_clampf(self: Any, arg: Any, lo: Any, hi: Any, propagate_nans: Any) -> Any:
        low, high = (np.fmax, np.fmin) if propagate_nans == none else (np.maximum, np.minimum)
        return self.binary_op(self.binary_op(arg, lo, low), hi, high)

    def create_maxnumf(self: Any, lhs: Any, rhs: Any) -> Any:
        return self.binary_op(lhs, rhs, np.fmax)

    def create_minnumf(self: Any, lhs: Any, rhs: Any) -> Any:
        return self.binary_op(lhs, rhs, np.fmin)

    def create_atomic_rmw(  # the builder's own signature
        self: Any,
        rmwOp: Any,
        ptr: Any,
        val: Any,
        mask: Any,
        sem: Any,
        scope: Any,
    ) -> Any:
        if not _is_narrow(val) or rmwOp != interp._ir.ATOMIC_OP.FADD:
            return stock_atomic(self, rmwOp, ptr, val, mask, sem, scope)
        return handle(_atomic_add(interp, ptr, val, mask), val.dtype.scalar)

    return {
        f"InterpreterBuilder.{method.__name__}": method
        for method in (
            binary_op,
            unary_op,
            create_fma,
            create_clampf,
            create_maxnumf,
            create_minnumf,
            create_atomic_rmw,
        )
    }


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


def _truncated(numbers: Array) -> Array:
    """fp32 ``numbers`` as a tf32 tensor core reads them: it ignores the low 13 bits."""
    return (numbers.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _tf32x3_terms(numbers: Array) -> list[Array]:
    """``cvt.rna.tf32`` (ties away from zero) and what is left, which the tensor core truncates."""
    finite = np.isfinite(numbers)
    bits = numbers.view(np.uint32)
    near = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    big = np.where(finite, near, numbers)
    return [big, _truncated(numbers - big)]


def _bf16_terms(numbers: Array) -> list[Array]:
    terms = []
    for _ in range(3):
        terms.append(values(encode(numbers, "bf16"), "bf16"))
        numbers = numbers - terms[-1]
    return terms


# Which terms are multiplied, small products first; the last is the product of the leading terms.
# NaN of the smaller products (inf - inf in the split) is dropped before it, as in Triton's pass
# F32DotTC.
_SPLITS: dict[str, tuple[Callable[[Array], list[Array]], tuple[tuple[int, int], ...]]] = {
    "TF32x3": (_tf32x3_terms, ((1, 0), (0, 1), (0, 0))),
    "BF16x3": (_bf16_terms, ((1, 0), (0, 1), (0, 0))),
    "BF16x6": (_bf16_terms, ((1, 1), (2, 0), (0, 2), (1, 0), (0, 1), (0, 0))),
}


def _split_product(a: Array, b: Array, precision: str) -> Array:
    split, pairs = _SPLITS[precision]
    left, right = split(a), split(b)
    small: Array = np.zeros((), np.float32)
    for i, j in pairs[:-1]:
        small = small + np.matmul(left[i], right[j])
    leading: Array = np.matmul(left[0], right[0])
    return leading + np.where(np.isnan(small), np.float32(0.0), small)


def dot_methods(interp: Any, stock: Callable[[str], Any]) -> dict[str, Any]:
    """``tl.dot``: exact products of values, summed in fp32 (fp64 for fp64 operands).

    An fp16 accumulator is rounded once, at the end. Operands of tf32 products are truncated to 10
    explicit bits, as an H200 was measured to do. ``max_num_imprecise_acc`` and the order of the sum
    inside a tensor core are not modelled.
    """
    stock_dot = stock("InterpreterBuilder.create_dot")

    def product(a: Array, b: Array, precision: str) -> Array:
        if precision in _SPLITS:
            return _split_product(a, b, precision)
        if precision == "TF32":
            a, b = _truncated(a), _truncated(b)
        result: Array = np.matmul(a, b)
        return result

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, *rest: Any) -> Any:
        if not {a.dtype.scalar.name, b.dtype.scalar.name} <= FORMATS.keys():
            return stock_dot(self, a, b, d, input_precision, *rest)
        precision = input_precision.name if a.dtype.scalar.name == "fp32" else "IEEE"
        total = product(_number(a), _number(b), precision) + _number(d)
        return interp.TensorHandle(encode(total, d.dtype.scalar.name), d.dtype.scalar)

    return {"InterpreterBuilder.create_dot": create_dot}
