"""A GPU's arithmetic in Triton's CPU interpreter: bf16 and fp8, products, reductions, scans.

Inner functions replace the methods of the same name of ``InterpreterBuilder``, and methods of
``ReduceOps`` and ``ScanOps``; ``self`` is that object. A handle is a ``TensorHandle``: an array
``data`` and a Triton ``dtype``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from attncheck.core.errors import InterpreterUnavailable
from attncheck.kernels.interpreter.casts import FORMATS, NARROW, convert, encode, values

if TYPE_CHECKING:
    from attncheck.kernels.interpreter.casts import Array

Stock = Callable[[str], Any]  # dotted name → the interpreter's own function of that name

Methods = Callable[[Any, Stock], dict[str, Any]]
"""(interpreter module, stock) → dotted name → replacement."""

_ABSENT = object()


def lookup(interp: Any, name: str) -> Any:
    """Return the attribute of ``interp`` with the dotted ``name``; a sentinel if there is none."""
    value = interp
    for part in name.split("."):
        value = getattr(value, part, _ABSENT)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """Replacements of the interpreter's functions that repair one aspect of it."""

    description: str
    methods: tuple[Methods, ...]  # replacements, in groups that belong together
    uses: tuple[str, ...] = ()  # other names of the interpreter that it requires
    adds: tuple[str, ...] = ()  # replaced names that some versions of triton do not have at all

    def replacements(self, interp: Any) -> dict[str, Any]:
        """Return dotted name → replacement; raise InterpreterUnavailable if triton lacks a name."""
        stock = partial(self._require, interp)
        for name in self.uses:
            stock(name)
        replacements: dict[str, Any] = {}
        for group in self.methods:
            replacements |= group(interp, stock)
        for name in replacements.keys() - set(self.adds):
            stock(name)
        return replacements

    def _require(self, interp: Any, name: str) -> Any:
        value = lookup(interp, name)
        if value is _ABSENT:
            version = sys.modules["triton"].__version__
            raise InterpreterUnavailable(
                f"the interpreter of triton {version} has no '{name}', which the repair "
                f"'{self.description}' needs: use a triton from 3.6 to 3.9, or a GPU."
            )
        return value


def number(handle: Any) -> Array:
    """Return a handle's data as numbers: fp32, or their own dtype if wider."""
    return values(handle.data, handle.dtype.scalar.name)


def is_narrow(handle: Any) -> bool:
    """Return whether a handle's data are bit patterns."""
    name = handle.dtype.scalar.name
    return name in NARROW and handle.data.dtype == NARROW[name]


def _convert_function(interp: Any, stock: Stock) -> dict[str, Any]:
    stock_convert = stock("_convert_float")
    zero_rounding = interp._ir.ROUNDING_MODE.RTZ

    def _convert_float(data: Array, source: Any, target: Any, rounding_mode: Any) -> Array:
        # AMD and pre-Hopper fp8 formats are cast by the stock function.
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

    return _builder_methods(cast_impl, create_fp_to_fp, get_bf16)


def _elementwise_methods(interp: Any, stock: Stock) -> dict[str, Any]:
    """Return operators that round bf16 once: an H200 adds, subtracts and multiplies it so.

    fp32 arithmetic followed by a rounding gives the same (24 >= 2*8 + 2 bits: the first rounding is
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

    return _builder_methods(binary_op, unary_op)


def _extremum_methods(interp: Any, _stock: Stock) -> dict[str, Any]:
    none = interp._ir.PROPAGATE_NAN.NONE

    def create_clampf(self: Any, arg: Any, lo: Any, hi: Any, propagate_nans: Any) -> Any:
        low, high = (np.fmax, np.fmin) if propagate_nans == none else (np.maximum, np.minimum)
        return self.binary_op(self.binary_op(arg, lo, low), hi, high)

    def create_maxnumf(self: Any, lhs: Any, rhs: Any) -> Any:
        return self.binary_op(lhs, rhs, np.fmax)

    def create_minnumf(self: Any, lhs: Any, rhs: Any) -> Any:
        return self.binary_op(lhs, rhs, np.fmin)

    return _builder_methods(create_clampf, create_maxnumf, create_minnumf)


def _fma_method(interp: Any, stock: Stock) -> dict[str, Any]:
    stock_fma = stock("InterpreterBuilder.create_fma")

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        dtype = z.dtype.scalar
        if dtype.name not in FORMATS or dtype.name == "fp64":
            return stock_fma(self, x, y, z)
        total = _fused_sum(number(x), number(y), number(z))
        return interp.TensorHandle(encode(total, dtype.name), dtype)

    return _builder_methods(create_fma)


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

    return _builder_methods(create_atomic_rmw)


def _builder_methods(*methods: Callable[..., Any]) -> dict[str, Any]:
    return {f"InterpreterBuilder.{method.__name__}": method for method in methods}


def _fused_sum(x: Array, y: Array, z: Array) -> Array:
    """Return x·y + z of fp32 arrays in fp64, rounded to odd: rounded to fp32 it is the fused sum.

    The product of two 24-bit significands is exact in fp64; Knuth's two-sum gives the sum's error.
    """
    product, addend = x.astype(np.float64) * y, z.astype(np.float64)
    total = np.asarray(product + addend)
    addend_part = total - product
    error = (product - (total - addend_part)) + (addend - addend_part)
    even = (total.view(np.uint64) & np.uint64(1)) == 0
    odd = np.nextafter(total, np.copysign(np.inf, error))
    return np.where(even & (error != 0) & np.isfinite(total), odd, total)


def _atomic_add(interp: Any, ptr: Any, val: Any, mask: Any) -> Array:
    """Add at one address after another, as a block may repeat addresses; return old values."""
    name = val.dtype.scalar.name
    addresses, unmasked = np.broadcast_arrays(ptr.data, mask.data)
    addends, old = (
        np.broadcast_to(val.data, addresses.shape),
        np.zeros(addresses.shape, NARROW[name]),
    )
    one = np.ones(1, np.bool_)
    for index in zip(*np.nonzero(unmasked), strict=True):
        address, fill = addresses[index].reshape(1), np.zeros(1, NARROW[name])
        before = interp._interpreter.load(address, one, fill, NARROW[name])
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


def _truncate_to_tf32(numbers: Array) -> Array:
    """Return fp32 ``numbers`` as a tf32 tensor core reads them: it ignores the low 13 bits."""
    return (numbers.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _tf32x3_terms(numbers: Array) -> list[Array]:
    """Return ``cvt.rna.tf32`` (ties away from zero) and the rest, which a tensor core truncates."""
    finite = np.isfinite(numbers)
    bits = numbers.view(np.uint32)
    near = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    big = np.where(finite, near, numbers)
    return [big, _truncate_to_tf32(numbers - big)]


def _bf16_terms(numbers: Array) -> list[Array]:
    terms = []
    for _ in range(3):
        terms.append(values(encode(numbers, "bf16"), "bf16"))
        numbers = numbers - terms[-1]
    return terms


# Per precision: the split into terms, and the pairs of terms to multiply, small products first. The
# last pair is that of the leading terms. Before it is added, NaN of the smaller products (inf - inf
# in the split) becomes 0, as in Triton's pass F32DotTC.
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


def _product(a: Array, b: Array, precision: str) -> Array:
    if precision in _SPLITS:
        return _split_product(a, b, precision)
    if precision == "TF32":
        a, b = _truncate_to_tf32(a), _truncate_to_tf32(b)
    result: Array = np.matmul(a, b)
    return result


def _dot_method(interp: Any, stock: Stock) -> dict[str, Any]:
    """Return ``tl.dot``: exact products of values, summed in fp32 (fp64 for fp64 operands).

    An fp16 accumulator is rounded once, at the end. Operands of tf32 products are truncated to 10
    explicit bits, as measured on an H200. ``max_num_imprecise_acc`` and the order of the sum inside
    a tensor core are not modelled.
    """
    stock_dot = stock("InterpreterBuilder.create_dot")

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, *rest: Any) -> Any:
        if not {a.dtype.scalar.name, b.dtype.scalar.name} <= FORMATS.keys():
            return stock_dot(self, a, b, d, input_precision, *rest)
        precision = input_precision.name if a.dtype.scalar.name == "fp32" else "IEEE"
        total = _product(number(a), number(b), precision) + number(d)
        return interp.TensorHandle(encode(total, d.dtype.scalar.name), d.dtype.scalar)

    return {"InterpreterBuilder.create_dot": create_dot}


PRODUCTS = Repair(
    description="dot products in fp32 and tf32",
    methods=(_dot_method,),
    uses=("TensorHandle", "_ir.INPUT_PRECISION.TF32", "interpreter_builder.options"),
)


# Formats whose sums a GPU rounds after every addition; numpy sums fp16 in fp32.
_ROUNDED_FORMATS = (*NARROW, "fp16")
_MAXIMA = (np.max, np.nanmax, np.argmax, np.nanargmax)


def _first_index(data: Array, extreme: Array, axis: int, *, keepdims: bool) -> Array:
    """Return the first index of ``extreme``; in a row of NaN the last index, as on an H200."""
    is_extreme = data == extreme
    has_extreme = np.any(is_extreme, axis=axis, keepdims=True)
    first = np.argmax(is_extreme, axis=axis, keepdims=True)
    index: Array = np.where(has_extreme, first, data.shape[axis] - 1)
    return index if keepdims else np.squeeze(index, axis)


def _rounded_sum(data: Array, name: str, axis: int | None, *, keepdims: bool) -> Array:
    """Return the sum by a balanced tree in the axis's order, rounded after every addition."""
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
    """Return ``tl.max``, ``tl.min``, ``tl.argmax`` and ``tl.argmin``.

    NaN is dropped, as on a GPU (PropagateNan.NONE), unless there is nothing else.
    """

    def min_max(self: Any, tensor: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        tensor = tensor[0] if isinstance(tensor, tuple) else tensor
        name, data = tensor.dtype.name, tensor.handle.data
        numbers = values(data, name) if name in NARROW else data
        ufunc = np.fmax if (val_reduce_op or idx_reduce_op) in _MAXIMA else np.fmin
        extreme = ufunc.reduce(numbers, axis=self.axis, keepdims=True)
        results = []
        if val_reduce_op:
            reduced = extreme if self.keep_dims else np.squeeze(extreme, self.axis)
            reduced = encode(reduced, name) if name in NARROW else reduced
            results.append(self.to_tensor(reduced, tensor.dtype))
        if idx_reduce_op:
            index = _first_index(numbers, extreme, self.axis, keepdims=self.keep_dims)
            results.append(self.to_tensor(index, interp.tl.int32))
        return tuple(results) if len(results) > 1 else results[0]

    return {"ReduceOps.min_max": min_max}


def _sum_method(_interp: Any, stock: Stock) -> dict[str, Any]:
    stock_sum = stock("ReduceOps.sum")

    def sum_(self: Any, tensor: Any) -> Any:
        name = tensor.dtype.name
        if name not in _ROUNDED_FORMATS:
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
