"""Speed-ups of Triton's CPU interpreter, and what each saves.

The interpreter's own way to ``a + b`` leads through a dozen functions that ask each time what the
types of ``a`` and ``b`` have answered once: what to cast, what to spread, what the result is. A
plan is that answer, and numpy spreads. It is None where the types leave a question, and then the
interpreter's own way is gone: bf16 and fp8, booleans in arithmetic, ranks that differ.

Every operation names the type of its result, of its operands once they are spread, and for each the
shape again as a tuple of constants. A kernel has a few dozen types and tens of thousands of
operations, and the next launch has the same ones: pointers of one dtype are of one type.

Its rules are kept; its search for them is not repeated. Two thirds of a kernel's operations have
operands of one type and shape, or a tensor and a Python number.

The stock interpreter looks through the whole language again at every call of a jit function inside
a kernel, and does not take back what it finds there. Here the changes are found once a process and
are set and unset around a launch, whatever happens in it.
"""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from attncheck.kernels.interpreter.gpu_arithmetic import Repair

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attncheck.kernels.interpreter.gpu_arithmetic import Stock

    OfTwo = Callable[[Any, Any], tuple[Any, Any, tuple[Any, Any, Any, Any]] | None]
    OfNumber = Callable[[Any, type], tuple[Any, Any, Any, Any] | None]

__all__ = [
    "BOOLEAN",
    "LAUNCHES",
    "REAL",
    "WHOLE",
    "Result",
    "Types",
    "forget",
    "forget_plans",
    "indexed",
    "is_usual",
    "loaded",
    "operand_methods",
    "operators",
    "plans",
    "selected",
    "shortcuts",
    "to_dtype",
    "type_methods",
]


WHOLE = frozenset({"int32", "int64"})
REAL = frozenset({"fp16", "fp32", "fp64"})
BOOLEAN = "int1"

Result = tuple[Any, Any, Any, Any]
"""Of a tensor, beside its data: type, dtype, shape and numel."""

_INT32 = 2**31
_SMALLEST, _LARGEST = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
_PLANS: list[dict[Any, Any]] = []


def plans() -> dict[Any, Any]:
    """An empty table of plans by the identity of types; an entry must hold these types."""
    table: dict[Any, Any] = {}
    _PLANS.append(table)
    return table


def forget_plans() -> None:
    """Of all tables."""
    for table in _PLANS:
        table.clear()


def is_usual(number: Any) -> bool:
    """Whether a number is int32, 0, infinite or a normal fp32 one.

    Versions of triton differ about others; for 3.6 also −0.0 is 0.
    """
    if number.__class__ is float:
        if number == 0.0:
            return math.copysign(1.0, number) > 0
        return _SMALLEST <= abs(number) <= _LARGEST or math.isinf(number)
    return number.__class__ is int and -_INT32 < number < _INT32


class Types:
    """The interpreter's types and what comes of them."""

    def __init__(self, interp: Any) -> None:
        self._interp = interp
        core = interp.tl.core
        self.tensor, self._block = core.tensor, core.block_type
        self.boolean = interp.tl.int1
        self._alone = core.tuple([]), core.constexpr(1)

    def maker(self) -> Callable[..., Any]:
        """(data, *Result) → a tensor: without asking whether the data fit, which the plan knows."""
        tensor, of_handle, new = self.tensor, self._interp.TensorHandle, object.__new__

        def made(data: Any, kind: Any, dtype: Any, shape: Any, numel: Any) -> Any:
            handle = new(of_handle)
            handle.data, handle.dtype, handle.attr = data, dtype, {}
            result = new(tensor)
            result.handle, result.type, result.dtype = handle, kind, dtype
            result.shape, result.numel = shape, numel
            return result

        return made

    def result(self, shaped: Any, dtype: Any) -> Result | None:
        """Of the shape of ``shaped``, a type or None, with elements of ``dtype``."""
        if shaped is None:
            return None
        if not shaped.is_block():
            return dtype, dtype, *self._alone
        kind = shaped.with_element_ty(dtype)
        known = kind.__dict__.get("of_tensors")
        return None if known is None else (kind, dtype, *known)

    def spread(self, one: Any, other: Any) -> Any:
        """A type of the shape that both are spread to; None where they are not, or not by numpy."""
        if one is None or not one.is_block() or not other.is_block():
            return other if one is not None and other.is_block() else one
        left, right = list(one.shape), list(other.shape)
        if len(left) != len(right):
            return None
        if any(a != b and 1 not in (a, b) for a, b in zip(left, right, strict=True)):
            return None
        return self.block(
            one.scalar, [b if a == 1 else a for a, b in zip(left, right, strict=True)]
        )

    def block(self, scalar: Any, shape: list[int]) -> Any:
        """The type of a block."""
        return self._block(scalar, shape)

    def numbers(self, dtype: Any) -> Any:
        """How numpy calls ``dtype``."""
        return self._interp._get_np_dtype(dtype)

    def cast(self, source: Any, target: Any) -> Any:
        """How numpy calls ``target``; None where nothing is cast."""
        return None if source.name == target.name else self.numbers(target)

    def common(self, left: Any, right: Any) -> Any:
        """The dtype in which two others are computed with."""
        semantic = self._interp.interpreter_semantic
        return semantic.computation_type_impl(left, False, right, False, False)


# A block type holds its element type: as long as it is here, no other object has that id.
_BLOCKS: dict[tuple[int, ...], Any] = {}
_MOST = 4096


def forget() -> bool:
    """Whether there were so many types that all were forgotten: a kernel made pointer types."""
    many = len(_BLOCKS) > _MOST
    if many:
        _BLOCKS.clear()
    return many


def type_methods(interp: Any, stock: Stock) -> dict[str, Any]:
    """``block_type`` and ``tensor`` of ``triton.language.core``, and what IR calls a type."""
    core = interp.tl.core
    block_type, constexpr = core.block_type, core.constexpr
    stock_block, stock_ir = stock("tl.core.block_type.__init__"), stock("tl.core.block_type.to_ir")
    ranked = (list, core.tuple)
    of_scalars = core.tuple([]), constexpr(1)

    def _block(cls: Any, *given: Any, **named: Any) -> Any:
        if cls is not block_type or named or len(given) != 2 or type(given[1]) not in ranked:
            return object.__new__(cls)
        element, shape = given
        lengths = [length.value if type(length) is constexpr else length for length in shape]
        if {*map(type, lengths)} != {int}:  # 2.0 would find what 2 has made, and is refused
            return object.__new__(cls)
        key = (id(element), *lengths)
        found = _BLOCKS.get(key)
        if found is None:
            found = _BLOCKS[key] = _made(element, shape)
        return found

    def _made(element: Any, shape: Any) -> Any:
        made = object.__new__(block_type)
        stock_block(made, element, shape)
        lengths = core.tuple([constexpr(length) for length in made.shape])
        made.of_tensors = lengths, constexpr(made.numel)
        return made

    def _init_block(self: Any, *given: Any, **named: Any) -> None:
        if "of_tensors" not in self.__dict__:
            stock_block(self, *given, **named)

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        siblings = self.__dict__.setdefault("siblings", {})
        if id(scalar_ty) not in siblings:
            siblings[id(scalar_ty)] = block_type(scalar_ty, self.shape)
        return siblings[id(scalar_ty)]

    def to_ir(self: Any, builder: Any) -> Any:
        known = self.__dict__.get("in_ir")
        if known is None or builder is not interp.interpreter_builder:
            known = stock_ir(self, builder)
            if builder is interp.interpreter_builder:
                self.in_ir = known
        return known

    stock_tensor = stock("tl.core.tensor.__init__")

    def _init_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002  (its own signature)
        known = type.__dict__.get("of_tensors") if type.is_block() else of_scalars
        if known is None:
            stock_tensor(self, handle, type)
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known

    stock_argument = stock("_implicit_cvt")
    of_pointers: dict[tuple[type, Any], Any] = {}

    def _implicit_cvt(arg: Any) -> Any:
        if type(arg) is int and -_INT32 <= arg < _INT32:
            handle = interp.TensorHandle(np.array([arg], np.int32), core.int32)
            return core.tensor(handle, core.int32)
        if not hasattr(arg, "data_ptr"):
            return stock_argument(arg)
        key = type(arg), arg.dtype
        if key not in of_pointers:
            of_pointers[key] = stock_argument(arg).type
        kind = of_pointers[key]
        handle = interp.TensorHandle(np.array([arg.data_ptr()], np.uint64), kind)
        return core.tensor(handle, kind)

    return {
        "_implicit_cvt": _implicit_cvt,
        "tl.core.block_type.__new__": staticmethod(_block),
        "tl.core.block_type.__init__": _init_block,
        "tl.core.block_type.with_element_ty": with_element_ty,
        "tl.core.block_type.to_ir": to_ir,
        "tl.core.tensor.__init__": _init_tensor,
    }


_EVERY = slice(None)


def indexed(types: Types, stock: Any) -> Any:
    """In place of ``tensor.__getitem__``."""
    made, known = types.maker(), plans()

    def planned(kind: Any, new: tuple[bool, ...]) -> Any:
        if not kind.is_block() or new.count(False) != len(kind.shape):
            return None
        lengths = iter(kind.shape)
        shape = [1 if added else next(lengths) for added in new]
        return types.result(types.block(kind.scalar, shape), kind.scalar)

    def getitem(one: Any, slices: Any) -> Any:
        if slices.__class__ is not tuple or any(s is not None and s != _EVERY for s in slices):
            return stock(one, slices)
        key = id(one.type), tuple([s is None for s in slices])
        plan = known.get(key)
        if plan is None:
            plan = known[key] = planned(one.type, key[1]), one.type
        if plan[0] is None:
            return stock(one, slices)
        return made(one.handle.data[slices], *plan[0])

    return getitem


def to_dtype(types: Types, stock: Any) -> Any:
    """In place of ``tensor.to``."""
    made, known = types.maker(), plans()

    def planned(kind: Any, dtype: Any) -> Any:
        source, target = kind.scalar.name, dtype.scalar.name
        exact = source in {BOOLEAN, *WHOLE} and target in WHOLE | REAL
        rounds = source in REAL and target in REAL  # to nearest, as numpy does
        result = types.result(kind, dtype.scalar) if exact or rounds else None
        return None if result is None else (types.cast(kind.scalar, dtype.scalar), result)

    def to(one: Any, dtype: Any, *more: Any, **named: Any) -> Any:
        key = id(one.type), id(dtype)
        plan = known.get(key)
        if plan is None:
            scalar = hasattr(dtype, "scalar")
            plan = known[key] = planned(one.type, dtype) if scalar else None, one.type, dtype
        if plan[0] is None or more or named:
            return stock(one, dtype, *more, **named)
        cast, result = plan[0]
        return one if cast is None else made(one.handle.data.astype(cast), *result)

    return to


def selected(types: Types, stock: Any) -> Any:
    """In place of ``tl.where``."""
    tensor, made, known = types.tensor, types.maker(), plans()

    def planned(condition: Any, x: Any, y: Any) -> Any:
        tensors = [kind for kind in (x, y) if not isinstance(kind, type)]
        if condition.scalar.name != BOOLEAN or not tensors:
            return None
        scalar = tensors[0].scalar
        if scalar.name not in REAL or any(kind.scalar is not scalar for kind in tensors):
            return None
        if any(kind not in (float, int) for kind in (x, y) if isinstance(kind, type)):
            return None
        shape = condition
        for kind in tensors:
            shape = types.spread(shape, kind)
        result = types.result(shape, scalar)
        return None if result is None else (types.numbers(scalar).type, result)

    def where(condition: Any, x: Any, y: Any) -> Any:
        if condition.__class__ is not tensor:
            return stock(condition, x, y)
        of_x, of_y = (v.type if v.__class__ is tensor else v.__class__ for v in (x, y))
        key = id(condition.type), id(of_x), id(of_y)
        plan = known.get(key)
        if plan is None:
            plan = known[key] = planned(condition.type, of_x, of_y), condition.type, of_x, of_y
        if plan[0] is None or not all(v.__class__ is tensor or is_usual(v) for v in (x, y)):
            return stock(condition, x, y)
        number, result = plan[0]
        a, b = (v.handle.data if v.__class__ is tensor else number(v) for v in (x, y))
        return made(np.where(condition.handle.data, a, b), *result)

    return where


def loaded(types: Types, stock: Any, load_array: Any) -> Any:
    """In place of ``tl.load``, with a mask, and 0 or nothing where it hides."""
    tensor, made, known = types.tensor, types.maker(), plans()

    def planned(pointer: Any, mask: Any) -> Any:
        if not pointer.scalar.is_ptr() or mask.scalar.name != BOOLEAN:
            return None
        element = pointer.scalar.element_ty
        shape = types.spread(mask, pointer)
        if shape is None or element.name == BOOLEAN or pointer.is_block() != shape.is_block():
            return None
        lengths = tuple(pointer.shape) if pointer.is_block() else (1,)
        if pointer.is_block() and tuple(shape.shape) != lengths:
            return None
        result = types.result(pointer, element)
        return None if result is None else (types.numbers(element), lengths, result)

    def load(pointer: Any, mask: Any = None, other: Any = None, **named: Any) -> Any:
        if named or mask.__class__ is not tensor or not _is_nothing(other):
            return stock(pointer, mask, other, **named)
        key = id(pointer.type), id(mask.type)
        plan = known.get(key)
        if plan is None:
            plan = known[key] = planned(pointer.type, mask.type), pointer.type, mask.type
        if plan[0] is None:
            return stock(pointer, mask, other)
        dtype, lengths, result = plan[0]
        shown = mask.handle.data
        if shown.shape != lengths:
            shown = np.broadcast_to(shown, lengths)
        return made(
            load_array(pointer.handle.data, shown, np.zeros(lengths, dtype), dtype), *result
        )

    return load


def _is_nothing(other: Any) -> bool:
    """Whether all bits of it are 0: −0.0 is another number."""
    return other is None or (other.__class__ in (int, float) and repr(other) in {"0", "0.0"})


_WIDE = frozenset({"fp32", "fp64"})  # others are divided in fp32
_COMPARISONS = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}


def operators(types: Types) -> dict[str, Callable[[Any], Any]]:
    """Name of a tensor's method → (the interpreter's own) → what stands in its place."""
    of = _Operands(types)
    table: dict[str, tuple[Any, OfTwo, OfNumber]] = {
        "__add__": (np.add, of.sum, of.number),
        "__sub__": (np.subtract, of.two, of.number),
        "__mul__": (np.multiply, of.two, of.number),
        "__radd__": (_reflected(np.add), _unknown, of.number),
        "__rsub__": (_reflected(np.subtract), _unknown, of.number),
        "__rmul__": (_reflected(np.multiply), _unknown, of.number),
        "__truediv__": (np.divide, of.two_wide, of.wide_and_number),
        "__floordiv__": (_quotient, of.two_whole, of.whole_and_number),
        "__mod__": (np.fmod, of.two_whole, of.whole_and_number),
        "__and__": (np.bitwise_and, of.two_alike, _unknown),
        "__or__": (np.bitwise_or, of.two_alike, _unknown),
    }
    table |= {
        name: (ufunc, of.compared, of.number_compared) for name, ufunc in _COMPARISONS.items()
    }
    return {name: _with_plans(types, *how) for name, how in table.items()}


def _with_plans(
    types: Types, ufunc: Any, of_two: OfTwo, of_number: OfNumber
) -> Callable[[Any], Any]:
    tensor, made, known = types.tensor, types.maker(), plans()

    def with_tensor(one: Any, other: Any, stock: Any) -> Any:
        key = id(one.type), id(other.type)
        plan = known.get(key)
        if plan is None:
            plan = known[key] = of_two(one.type, other.type), one.type, other.type
        if plan[0] is None:
            return stock(one, other)
        left, right, result = plan[0]
        a, b = one.handle.data, other.handle.data
        return made(ufunc(a if left is None else a.astype(left), right(b) if right else b), *result)

    def with_number(one: Any, other: Any, stock: Any) -> Any:
        key = id(one.type), other.__class__
        plan = known.get(key)
        if plan is None:
            plan = known[key] = of_number(one.type, other.__class__), one.type
        # numpy makes a Python number one of the array's own dtype, as the interpreter does.
        return (
            stock(one, other) if plan[0] is None else made(ufunc(one.handle.data, other), *plan[0])
        )

    def instead(stock: Any) -> Any:
        def operator(one: Any, other: Any) -> Any:
            if other.__class__ is tensor:
                return with_tensor(one, other, stock)
            if is_usual(other):
                return with_number(one, other, stock)
            return stock(one, other)

        return operator

    return instead


class _Operands:
    """Plans of operands of two types: (cast of the first, change of the second, result) or None."""

    def __init__(self, types: Types) -> None:
        self._types = types

    def two(self, one: Any, other: Any, dtype: Any = None) -> Any:
        """Computed with in the dtype of both together."""
        left, right = one.scalar, other.scalar
        if not {left.name, right.name} <= WHOLE | REAL:
            return None
        both = self._types.common(left, right)
        result = self._types.result(self._types.spread(one, other), dtype or both)
        if result is None:
            return None
        return self._types.cast(left, both), _caster(self._types.cast(right, both)), result

    def sum(self, one: Any, other: Any) -> Any:
        """The same, and pointers with whole numbers behind them."""
        if not one.scalar.is_ptr() or other.scalar.name not in WHOLE:
            return self.two(one, other)
        result = self._types.result(self._types.spread(one, other), one.scalar)
        # A truth value has one bit, and a byte in memory.
        size = max(1, one.scalar.element_ty.primitive_bitwidth // 8)
        return None if result is None else (None, lambda n: n.astype(np.uint64) * size, result)

    def compared(self, one: Any, other: Any) -> Any:
        """As ``two``; gives truth values."""
        return self.two(one, other, self._types.boolean)

    def two_whole(self, one: Any, other: Any) -> Any:
        """Whole numbers alone."""
        return self.two(one, other) if {one.scalar.name, other.scalar.name} <= WHOLE else None

    def two_wide(self, one: Any, other: Any) -> Any:
        """Of one wide float format alone."""
        same = one.scalar.name == other.scalar.name
        return self.two(one, other) if same and one.scalar.name in _WIDE else None

    def two_alike(self, one: Any, other: Any) -> Any:
        """Truth values, or whole numbers of one dtype."""
        if one.scalar.name != other.scalar.name or one.scalar.name not in {BOOLEAN, *WHOLE}:
            return None
        result = self._types.result(self._types.spread(one, other), one.scalar)
        return None if result is None else (None, None, result)

    def number(self, one: Any, kind: type, dtype: Any = None) -> Any:
        """A tensor and a Python number that is one of its own."""
        of_its_own = one.scalar.name in (REAL | WHOLE if kind is int else REAL)
        return self._types.result(one, dtype or one.scalar) if of_its_own else None

    def number_compared(self, one: Any, kind: type) -> Any:
        """As ``number``; gives truth values."""
        return self.number(one, kind, self._types.boolean)

    def whole_and_number(self, one: Any, kind: type) -> Any:
        """Whole numbers alone."""
        return self.number(one, kind) if one.scalar.name in WHOLE else None

    def wide_and_number(self, one: Any, kind: type) -> Any:
        """Of a wide float format alone."""
        return self.number(one, kind) if one.scalar.name in _WIDE else None


def _unknown(*_types: Any) -> None:
    """Always the interpreter's own way."""


def _reflected(ufunc: Any) -> Any:
    return lambda one, other: ufunc(other, one)


def _quotient(one: Any, other: Any) -> Any:
    """Toward zero, as the interpreter has it."""
    return (one - np.fmod(one, other)) // other


def _caster(dtype: Any) -> Any:
    return None if dtype is None else lambda data: data.astype(dtype)


def shortcuts(interp: Any) -> Callable[[Any, str, Any], Any]:
    """(owner, name, the interpreter's own builtin) → what is to stand in its place."""
    types = Types(interp)
    of_tensors = operators(types)
    of_tensors["__getitem__"] = lambda stock: indexed(types, stock)
    of_tensors["to"] = lambda stock: to_dtype(types, stock)

    def load_array(*of: Any) -> Any:
        return interp._interpreter.load(*of)  # looked up each time: who watches accesses is in it

    of_language: dict[str, Callable[[Any], Any]] = {
        "where": lambda stock: selected(types, stock),
        "load": lambda stock: loaded(types, stock, load_array),
    }
    modules = (interp.tl, interp.tl.core)

    def shorter(owner: Any, name: str, stock: Any) -> Any:
        table = of_tensors if owner is types.tensor else {}
        if owner in modules:
            table = of_language
        return table[name](stock) if name in table else stock

    return shorter


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


class _Language:
    """``triton.language`` with the interpreter's builtins, while a launch runs."""

    def __init__(self, interp: Any, record: Callable[[Any], Any]) -> None:
        self._interp = interp
        self._record = record
        self._changes: list[tuple[Any, str, Any, Any]] | None = None
        self.active = False

    def _find_changes(self) -> list[tuple[Any, str, Any, Any]]:
        tl = self._interp.tl
        scope = self._record(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        changes = [(o, name, old, getattr(o, name)) for o, name, old in scope._changes]
        scope.restore()
        # 3.6 asks int() of an array of one element for a loop bound; numpy 2.4 refuses that.
        changes = [(o, n, old, _index if n == "__index__" else new) for o, n, old, new in changes]
        short = shortcuts(self._interp)
        return [(o, n, old, short(o, n, new)) for o, n, old, new in changes]

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        if self._changes is None:
            self._changes = self._find_changes()
        self.active = True
        try:
            for owner, name, _, new in self._changes:
                setattr(owner, name, new)
            # inf - inf and the like are what kernels do; they make NaN here as on a GPU.
            with np.errstate(all="ignore"):
                yield
        finally:
            self.active = False
            if forget():
                forget_plans()
            for owner, name, old, _ in reversed(self._changes):
                if old is self._interp._MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, old)


def _index(tensor: Any) -> int:
    return int(tensor.handle.data.item())


def _dtype_function(_interp: Any, stock: Stock) -> dict[str, Any]:
    stock_np_dtype, np_dtypes = stock("_get_np_dtype"), dict[str, Any]()

    def _get_np_dtype(dtype: Any) -> Any:
        # The stock one makes its table anew at every call.
        name = dtype.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = stock_np_dtype(dtype)
        return np_dtypes[name]

    return {"_get_np_dtype": _get_np_dtype}


def _patch_functions(interp: Any, _stock: Stock) -> dict[str, Any]:
    builtin_code = interp.tl.core.builtin(_index).__code__

    def _patch_attr(owner: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
        # The wrapper of a builtin only asks whether _semantic is given, and here it is.
        known = getattr(member, "__code__", None) is builtin_code
        target = member.__wrapped__ if known else member
        semantic = interp.interpreter_semantic

        def builtin(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return target(*args, **kwargs)

        scope.set_attr(owner, name, builtin)

    def _patch_lang(_fn: Any) -> Any:
        # The launch has done it already, for everything that a kernel can reach.
        return SimpleNamespace(restore=lambda: None)

    return {"_patch_attr": _patch_attr, "_patch_lang": _patch_lang}


def _launch_methods(interp: Any, stock: Stock) -> dict[str, Any]:
    language = _Language(interp, stock("_patch_lang"))
    stock_launch = stock("GridExecutor.__call__")

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if language.active:  # a pre-run hook launched a kernel
            return stock_launch(self, *args, **kwargs)
        with language.patched():
            return stock_launch(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not language.active:  # a host called it outside a launch
            with language.patched():
                return call(self, *args, **kwargs)
        try:
            return self.rewrite()(*args, **kwargs)
        except interp.InterpreterError:
            raise
        except Exception as error:
            raise interp.InterpreterError(repr(error)) from error

    return {"GridExecutor.__call__": launch, "InterpretedFunction.__call__": call}


LAUNCHES = Repair(
    description="faster launches without overflow checks",
    methods=(
        _dtype_function,
        _patch_functions,
        _launch_methods,
        type_methods,
        operand_methods,
    ),
    uses=(
        "InterpreterError",
        "InterpretedFunction.rewrite",
        "_LangPatchScope.set_attr",
        "_MISSING",
        "interpreter_semantic",
        "tl.core.builtin",
        "interpreter_builder.options.sanitize_overflow",
        "interpreter_semantic.cast",
        "interpreter_semantic.computation_type_impl",
        "interpreter_semantic.scalar_constant",
        "tl.core.constexpr",
    ),
)
