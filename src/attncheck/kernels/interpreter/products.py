"""``tl.dot`` of the interpreter, on values and in every precision that Triton knows for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attncheck.kernels.interpreter.arithmetic import number
from attncheck.kernels.interpreter.casts import FORMATS, encode, values
from attncheck.kernels.interpreter.repair import Repair

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.kernels.interpreter.casts import Array
    from attncheck.kernels.interpreter.repair import Stock

__all__ = ["PRODUCTS"]


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


def _product(a: Array, b: Array, precision: str) -> Array:
    if precision in _SPLITS:
        return _split_product(a, b, precision)
    if precision == "TF32":
        a, b = _truncated(a), _truncated(b)
    result: Array = np.matmul(a, b)
    return result


def _dot_method(interp: Any, stock: Stock) -> dict[str, Any]:
    """``tl.dot``: exact products of values, summed in fp32 (fp64 for fp64 operands).

    An fp16 accumulator is rounded once, at the end. Operands of tf32 products are truncated to 10
    explicit bits, as an H200 was measured to do. ``max_num_imprecise_acc`` and the order of the sum
    inside a tensor core are not modelled.
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
