"""What the interpreter does to two operands before it computes: one type, one shape.

Its rules are kept; its search for them is not repeated. Two thirds of a kernel's operations have
operands of one type and shape, or a tensor and a Python number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attncheck.kernels.interpreter.repair import Stock

__all__ = ["operand_methods"]

_INT32 = 2**31
_TAKE_NUMBERS = frozenset({"fp16", "bf16", "fp32", "fp64"})
_TAKE_WHOLE = _TAKE_NUMBERS | {"int32", "int64"}


def operand_methods(interp: Any, stock: Stock) -> dict[str, Any]:
    """Two methods of the interpreter's semantic; what they do not know goes the stock way."""
    stock_checked = stock("interpreter_semantic.binary_op_type_checking_impl")
    stock_spread = stock("interpreter_semantic.broadcast_impl_value")
    semantic, builder = interp.interpreter_semantic, interp.interpreter_builder
    tensor, block_type = interp.tl.core.tensor, interp.tl.core.block_type
    common: dict[tuple[str, str, bool], Any] = {}

    def _splat(scalar: Any, block: Any) -> Any:
        made = block.with_element_ty(scalar.dtype)
        return tensor(builder.create_splat(made, scalar.handle), made)

    def _spread(value: Any, shape: list[int]) -> Any:
        if value.type.shape.values == shape:
            return value
        made = block_type(value.type.element_ty, shape)
        return tensor(builder.create_broadcast(value.handle, shape), made)

    def _of_one_shape(lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type.shape.values, rhs.type.shape.values
        if left == right:
            return lhs, rhs
        shape = [b if a == 1 else a for a, b in zip(left, right, strict=False)]
        fits = all(b in (1, length) for b, length in zip(right, shape, strict=False))
        if len(left) != len(right) or not fits:
            return stock_spread(lhs, rhs)
        return _spread(lhs, shape), _spread(rhs, shape)

    def broadcast_impl_value(lhs: Any, rhs: Any) -> Any:
        if lhs.type is rhs.type:
            return lhs, rhs
        blocks = lhs.type.is_block(), rhs.type.is_block()
        if blocks == (True, True):
            return _of_one_shape(lhs, rhs)
        if blocks == (True, False):
            return lhs, _splat(rhs, lhs.type)
        return (_splat(lhs, rhs.type), rhs) if blocks == (False, True) else (lhs, rhs)

    def _cast(value: Any, dtype: Any) -> Any:
        return value if value.dtype is dtype else semantic.cast(value, dtype)

    def _of_one_type(lhs: Any, rhs: Any, *, divides: bool) -> Any:
        left, right = lhs.dtype, rhs.dtype
        key = (left.name, right.name, divides)
        if key not in common:
            common[key] = semantic.computation_type_impl(left, False, right, False, divides)
        return broadcast_impl_value(_cast(lhs, common[key]), _cast(rhs, common[key]))

    def _two_tensors(lhs: Any, rhs: Any, *, arithmetic: bool, divides: bool) -> Any:
        if arithmetic:
            return _of_one_type(lhs, rhs, divides=divides)
        return broadcast_impl_value(lhs, rhs)

    def binary_op_type_checking_impl(
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: Any = False,  # noqa: FBT002  (its own signature)
        allow_rhs_ptr: Any = False,  # noqa: FBT002  (its own signature)
        arithmetic_check: Any = True,  # noqa: FBT002  (its own signature)
        div_or_mod: Any = False,  # noqa: FBT002  (its own signature)
    ) -> Any:
        if type(lhs) is tensor and type(rhs) is tensor:
            if lhs.dtype.is_ptr() and allow_lhs_ptr and rhs.dtype.is_int():
                return broadcast_impl_value(lhs, rhs)
            if not lhs.dtype.is_ptr() and not rhs.dtype.is_ptr():
                return _two_tensors(lhs, rhs, arithmetic=arithmetic_check, divides=div_or_mod)
        elif arithmetic_check and not div_or_mod:
            if type(lhs) is tensor and _taken(rhs, lhs.dtype):
                return broadcast_impl_value(lhs, semantic.scalar_constant(rhs, dtype=lhs.dtype))
            if type(rhs) is tensor and _taken(lhs, rhs.dtype):
                return broadcast_impl_value(semantic.scalar_constant(lhs, dtype=rhs.dtype), rhs)
        return stock_checked(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return {
        "interpreter_semantic.broadcast_impl_value": broadcast_impl_value,
        "interpreter_semantic.binary_op_type_checking_impl": binary_op_type_checking_impl,
    }


def _taken(number: Any, dtype: Any) -> bool:
    """Whether a tensor of ``dtype`` makes ``number`` one of its own, as torch has it."""
    if type(number) is float:
        return dtype.name in _TAKE_NUMBERS
    return type(number) is int and abs(number) < _INT32 and dtype.name in _TAKE_WHOLE
