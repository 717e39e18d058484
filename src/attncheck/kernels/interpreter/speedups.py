"""Speed-ups of Triton's CPU interpreter, and what each saves.

Processor time of a launch without the speed-up over that with it, of FlashAttention-2 forwards and
backwards, packed documents and decoding at lengths of 5 to 300:

* types that are made once, and the plans that need them: 4 to 6;
* plans of operators: 2.1 to 2.7; of ``x[:, None]``: 1.2 to 1.3; of ``where``: 1.2; of ``load`` and
  of ``to``: 1.1 each;
* numpy's dtypes looked up once: 1.1; the language searched once a process and not at every call of
  a jit function inside a kernel: 1 to 1.1.

What the interpreter does is kept, bit for bit; only its search for it is not repeated. A plan is
what the types of an operation's operands say of its result: what to cast, and the result's type. It
is None where the types leave a question (bf16 and fp8, booleans in arithmetic, ranks that differ),
and then the interpreter's own way is taken.
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

    Result = tuple[Any, Any, Any, Any]  # of a tensor, beside its data: type, dtype, shape, numel

_INT32 = 2**31

# ------------------------------------------------------------------ types, each made once

# A block type holds its element type: as long as it is here, no other object has that id.
_BLOCKS: dict[tuple[int, ...], Any] = {}
_MOST = 4096  # a kernel has a few dozen, but one that makes pointer types makes new ones each time


def _type_methods(interp: Any, stock: Stock) -> dict[str, Any]:
    """``block_type`` and ``tensor`` of ``triton.language.core``, and what IR calls a type.

    Every operation names the type of its result, of its operands once they are broadcast, and for
    each the shape again as a tuple of constants. A kernel has a few dozen types and tens of
    thousands of operations, and the next launch has the same ones: pointers of one dtype are of one
    type.
    """
    core = interp.tl.core
    block_type, constexpr = core.block_type, core.constexpr
    stock_block, stock_ir = stock("tl.core.block_type.__init__"), stock("tl.core.block_type.to_ir")
    ranked = (list, core.tuple)
    of_scalars = core.tuple([]), constexpr(1)

    def new_block(cls: Any, *args: Any, **named: Any) -> Any:
        if cls is not block_type or named or len(args) != 2 or type(args[1]) not in ranked:
            return object.__new__(cls)
        element, shape = args
        lengths = [length.value if type(length) is constexpr else length for length in shape]
        if {*map(type, lengths)} != {int}:  # 2.0 would find what 2 has made, and is refused
            return object.__new__(cls)
        key = (id(element), *lengths)
        block = _BLOCKS.get(key)
        if block is None:
            block = object.__new__(block_type)
            stock_block(block, element, shape)
            constants = core.tuple([constexpr(length) for length in block.shape])
            block.of_tensors = constants, constexpr(block.numel)
            _BLOCKS[key] = block
        return block

    def init_block(self: Any, *args: Any, **named: Any) -> None:
        if "of_tensors" not in self.__dict__:
            stock_block(self, *args, **named)

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

    def init_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002  (its own signature)
        known = type.__dict__.get("of_tensors") if type.is_block() else of_scalars
        if known is None:
            stock_tensor(self, handle, type)
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known

    stock_argument = stock("_implicit_cvt")
    of_pointers: dict[tuple[type, Any], Any] = {}

    def convert_argument(arg: Any) -> Any:
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
        "_implicit_cvt": convert_argument,
        "tl.core.block_type.__new__": staticmethod(new_block),
        "tl.core.block_type.__init__": init_block,
        "tl.core.block_type.with_element_ty": with_element_ty,
        "tl.core.block_type.to_ir": to_ir,
        "tl.core.tensor.__init__": init_tensor,
    }


def _dtype_method(_interp: Any, stock: Stock) -> dict[str, Any]:
    """The stock one makes its table anew at every call."""
    stock_np_dtype, np_dtypes = stock("_get_np_dtype"), dict[str, Any]()

    def get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = stock_np_dtype(dtype)
        return np_dtypes[name]

    return {"_get_np_dtype": get_np_dtype}


# ------------------------------------------------------------------ plans

_WHOLE = frozenset({"int32", "int64"})
_REAL = frozenset({"fp16", "fp32", "fp64"})
_WIDE = frozenset({"fp32", "fp64"})  # others are divided in fp32
_BOOLEAN = "int1"
_SMALLEST, _LARGEST = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
_PLANS: list[dict[Any, Any]] = []


def _plan_table() -> dict[Any, Any]:
    """An empty table of plans by the identity of types; an entry must hold these types."""
    table: dict[Any, Any] = {}
    _PLANS.append(table)
    return table


def forget_plans() -> None:
    """Empty all tables of plans: their types are no more."""
    for table in _PLANS:
        table.clear()


def _is_usual(number: Any) -> bool:
    """Return whether a number is int32, 0, infinite or a normal fp32 one.

    Versions of triton differ about others; for 3.6 also −0.0 is 0.
    """
    if number.__class__ is float:
        if number == 0.0:
            return math.copysign(1.0, number) > 0
        return _SMALLEST <= abs(number) <= _LARGEST or math.isinf(number)
    return number.__class__ is int and -_INT32 < number < _INT32


class _Types:
    """The interpreter's types and what comes of them."""

    def __init__(self, interp: Any) -> None:
        self._interp = interp
        core = interp.tl.core
        self.tensor, self.block = core.tensor, core.block_type
        self.boolean = interp.tl.int1
        self._alone = core.tuple([]), core.constexpr(1)

    def maker(self) -> Callable[..., Any]:
        """(data, *Result) → a tensor: without a check that the data fit, which the plan knows."""
        tensor, of_handle, new = self.tensor, self._interp.TensorHandle, object.__new__

        def make(data: Any, kind: Any, dtype: Any, shape: Any, numel: Any) -> Any:
            handle = new(of_handle)
            handle.data, handle.dtype, handle.attr = data, dtype, {}
            result = new(tensor)
            result.handle, result.type, result.dtype = handle, kind, dtype
            result.shape, result.numel = shape, numel
            return result

        return make

    def result(self, shaped: Any, dtype: Any) -> Result | None:
        """Of the shape of ``shaped``, a type or None, with elements of ``dtype``."""
        if shaped is None:
            return None
        if not shaped.is_block():
            return dtype, dtype, *self._alone
        kind = shaped.with_element_ty(dtype)
        known = kind.__dict__.get("of_tensors")
        return None if known is None else (kind, dtype, *known)

    def broadcast(self, one: Any, other: Any) -> Any:
        """A type of the shape of both; None where they have none, or not by numpy's rule."""
        if one is None or not one.is_block() or not other.is_block():
            return other if one is not None and other.is_block() else one
        left, right = list(one.shape), list(other.shape)
        if len(left) != len(right):
            return None
        if any(a != b and 1 not in (a, b) for a, b in zip(left, right, strict=True)):
            return None
        shape = [b if a == 1 else a for a, b in zip(left, right, strict=True)]
        return self.block(one.scalar, shape)

    def numbers(self, dtype: Any) -> Any:
        """The numpy dtype of ``dtype``."""
        return self._interp._get_np_dtype(dtype)

    def cast(self, source: Any, target: Any) -> Any:
        """The numpy dtype of ``target``; None where nothing is cast."""
        return None if source.name == target.name else self.numbers(target)

    def common(self, left: Any, right: Any) -> Any:
        """The dtype in which two others are computed with."""
        semantic = self._interp.interpreter_semantic
        return semantic.computation_type_impl(left, False, right, False, False)


# ------------------------------------------------------------------ operators


def _operators(types: _Types) -> dict[str, Callable[[Any], Any]]:
    """Name of a tensor's method → (the interpreter's own) → what replaces it."""

    def of_two(
        kinds: frozenset[str], *, alike: bool = False, dtype: Any = None
    ) -> Callable[[Any, Any], Any]:
        """Plans of two types: (cast of the first, change of the second, result) or None."""

        def plan(one: Any, other: Any) -> Any:
            left, right = one.scalar, other.scalar
            if not {left.name, right.name} <= kinds or (alike and left.name != right.name):
                return None
            both = left if alike else types.common(left, right)
            result = types.result(types.broadcast(one, other), dtype or both)
            if result is None:
                return None
            cast = types.cast(right, both)
            change = None if cast is None else lambda data: data.astype(cast)
            return types.cast(left, both), change, result

        return plan

    def of_number(kinds: frozenset[str], dtype: Any = None) -> Callable[[Any, type], Any]:
        """Plans of a type and a Python number that is one of its own: a result or None."""

        def plan(one: Any, kind: type) -> Any:
            own = kinds if kind is int else kinds & _REAL
            return types.result(one, dtype or one.scalar) if one.scalar.name in own else None

        return plan

    numbers = _WHOLE | _REAL
    two, number = of_two(numbers), of_number(numbers)

    def add_two(one: Any, other: Any) -> Any:
        """As ``two``, and pointers with whole numbers behind them."""
        if not one.scalar.is_ptr() or other.scalar.name not in _WHOLE:
            return two(one, other)
        result = types.result(types.broadcast(one, other), one.scalar)
        # A truth value has one bit, and a byte in memory.
        size = max(1, one.scalar.element_ty.primitive_bitwidth // 8)
        return None if result is None else (None, lambda n: n.astype(np.uint64) * size, result)

    def unknown(*_types: Any) -> None:
        """Always the interpreter's own way."""

    bits = of_two(_WHOLE | {_BOOLEAN}, alike=True)
    compare, compare_number = (
        of_two(numbers, dtype=types.boolean),
        of_number(numbers, types.boolean),
    )
    table: dict[str, tuple[Any, Any, Any]] = {
        "__add__": (np.add, add_two, number),
        "__sub__": (np.subtract, two, number),
        "__mul__": (np.multiply, two, number),
        "__radd__": (np.add, unknown, number),
        "__rsub__": (lambda one, other: np.subtract(other, one), unknown, number),
        "__rmul__": (np.multiply, unknown, number),
        "__truediv__": (np.divide, of_two(_WIDE, alike=True), of_number(_WIDE)),
        # Toward zero, as the interpreter has it.
        "__floordiv__": (
            lambda one, other: (one - np.fmod(one, other)) // other,
            of_two(_WHOLE),
            of_number(_WHOLE),
        ),
        "__mod__": (np.fmod, of_two(_WHOLE), of_number(_WHOLE)),
        "__and__": (np.bitwise_and, bits, unknown),
        "__or__": (np.bitwise_or, bits, unknown),
        "__lt__": (np.less, compare, compare_number),
        "__le__": (np.less_equal, compare, compare_number),
        "__gt__": (np.greater, compare, compare_number),
        "__ge__": (np.greater_equal, compare, compare_number),
        "__eq__": (np.equal, compare, compare_number),
        "__ne__": (np.not_equal, compare, compare_number),
    }
    return {name: _planned_operator(types, *plans) for name, plans in table.items()}


def _planned_operator(
    types: _Types, ufunc: Any, of_two: Callable[..., Any], of_number: Callable[..., Any]
) -> Callable[[Any], Any]:
    tensor, make, known = types.tensor, types.maker(), _plan_table()

    def replace(stock: Any) -> Any:
        def operator(one: Any, other: Any) -> Any:
            if other.__class__ is tensor:
                key = id(one.type), id(other.type)
                plan = known.get(key)
                if plan is None:
                    plan = known[key] = of_two(one.type, other.type), one.type, other.type
                if plan[0] is None:
                    return stock(one, other)
                left, right, result = plan[0]
                a, b = one.handle.data, other.handle.data
                a, b = a if left is None else a.astype(left), right(b) if right else b
                return make(ufunc(a, b), *result)
            if not _is_usual(other):
                return stock(one, other)
            key = id(one.type), other.__class__
            plan = known.get(key)
            if plan is None:
                plan = known[key] = of_number(one.type, other.__class__), one.type
            if plan[0] is None:
                return stock(one, other)
            # numpy makes a Python number one of the array's own dtype, as the interpreter does.
            return make(ufunc(one.handle.data, other), *plan[0])

        return operator

    return replace


# ------------------------------------------------------------------ accesses

_EVERY = slice(None)


def _index_tensor(types: _Types, stock: Any) -> Any:
    """In place of ``tensor.__getitem__``: new axes alone."""
    make, known = types.maker(), _plan_table()

    def plan_for(kind: Any, new: tuple[bool, ...]) -> Any:
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
            plan = known[key] = plan_for(one.type, key[1]), one.type
        if plan[0] is None:
            return stock(one, slices)
        return make(one.handle.data[slices], *plan[0])

    return getitem


def _cast_tensor(types: _Types, stock: Any) -> Any:
    """In place of ``tensor.to``."""
    make, known = types.maker(), _plan_table()

    def plan_for(kind: Any, dtype: Any) -> Any:
        source, target = kind.scalar.name, dtype.scalar.name
        exact = source in {_BOOLEAN, *_WHOLE} and target in _WHOLE | _REAL
        rounds = source in _REAL and target in _REAL  # to nearest, as numpy does
        result = types.result(kind, dtype.scalar) if exact or rounds else None
        return None if result is None else (types.cast(kind.scalar, dtype.scalar), result)

    def to(one: Any, dtype: Any, *more: Any, **named: Any) -> Any:
        key = id(one.type), id(dtype)
        plan = known.get(key)
        if plan is None:
            scalar = hasattr(dtype, "scalar")
            plan = known[key] = plan_for(one.type, dtype) if scalar else None, one.type, dtype
        if plan[0] is None or more or named:
            return stock(one, dtype, *more, **named)
        cast, result = plan[0]
        return one if cast is None else make(one.handle.data.astype(cast), *result)

    return to


def _select(types: _Types, stock: Any) -> Any:
    """In place of ``tl.where``."""
    tensor, make, known = types.tensor, types.maker(), _plan_table()

    def plan_for(condition: Any, x: Any, y: Any) -> Any:
        tensors = [kind for kind in (x, y) if not isinstance(kind, type)]
        if condition.scalar.name != _BOOLEAN or not tensors:
            return None
        scalar = tensors[0].scalar
        if scalar.name not in _REAL or any(kind.scalar is not scalar for kind in tensors):
            return None
        if any(kind not in (float, int) for kind in (x, y) if isinstance(kind, type)):
            return None
        shape = condition
        for kind in tensors:
            shape = types.broadcast(shape, kind)
        result = types.result(shape, scalar)
        return None if result is None else (types.numbers(scalar).type, result)

    def where(condition: Any, x: Any, y: Any) -> Any:
        if condition.__class__ is not tensor:
            return stock(condition, x, y)
        of_x, of_y = (v.type if v.__class__ is tensor else v.__class__ for v in (x, y))
        key = id(condition.type), id(of_x), id(of_y)
        plan = known.get(key)
        if plan is None:
            plan = known[key] = plan_for(condition.type, of_x, of_y), condition.type, of_x, of_y
        if plan[0] is None or not all(v.__class__ is tensor or _is_usual(v) for v in (x, y)):
            return stock(condition, x, y)
        number, result = plan[0]
        a, b = (v.handle.data if v.__class__ is tensor else number(v) for v in (x, y))
        return make(np.where(condition.handle.data, a, b), *result)

    return where


def _load(types: _Types, stock: Any, load_array: Callable[..., Any]) -> Any:
    """In place of ``tl.load``, with a mask, and 0 or nothing where it hides."""
    tensor, make, known = types.tensor, types.maker(), _plan_table()

    def plan_for(pointer: Any, mask: Any) -> Any:
        if not pointer.scalar.is_ptr() or mask.scalar.name != _BOOLEAN:
            return None
        element = pointer.scalar.element_ty
        shape = types.broadcast(mask, pointer)
        if shape is None or element.name == _BOOLEAN or pointer.is_block() != shape.is_block():
            return None
        lengths = tuple(pointer.shape) if pointer.is_block() else (1,)
        if pointer.is_block() and tuple(shape.shape) != lengths:
            return None
        result = types.result(pointer, element)
        return None if result is None else (types.numbers(element), lengths, result)

    def load(pointer: Any, mask: Any = None, other: Any = None, **named: Any) -> Any:
        # All bits of what stands for hidden elements must be 0: −0.0 is another number.
        zero = other is None or (other.__class__ in (int, float) and repr(other) in {"0", "0.0"})
        if named or mask.__class__ is not tensor or not zero:
            return stock(pointer, mask, other, **named)
        key = id(pointer.type), id(mask.type)
        plan = known.get(key)
        if plan is None:
            plan = known[key] = plan_for(pointer.type, mask.type), pointer.type, mask.type
        if plan[0] is None:
            return stock(pointer, mask, other)
        dtype, lengths, result = plan[0]
        shown = mask.handle.data
        if shown.shape != lengths:
            shown = np.broadcast_to(shown, lengths)
        values = load_array(pointer.handle.data, shown, np.zeros(lengths, dtype), dtype)
        return make(values, *result)

    return load


def shortcuts(interp: Any) -> Callable[[Any, str, Any], Any]:
    """Return (owner, name, the interpreter's own builtin) → what replaces it, or itself."""
    types = _Types(interp)
    of_tensors = _operators(types)
    of_tensors["__getitem__"] = lambda stock: _index_tensor(types, stock)
    of_tensors["to"] = lambda stock: _cast_tensor(types, stock)

    def load_array(*args: Any) -> Any:
        return interp._interpreter.load(*args)  # looked up each time: who watches it is in it

    of_language: dict[str, Callable[[Any], Any]] = {
        "where": lambda stock: _select(types, stock),
        "load": lambda stock: _load(types, stock, load_array),
    }

    def shorter(owner: Any, name: str, stock: Any) -> Any:
        table = of_tensors if owner is types.tensor else {}
        if owner in (interp.tl, interp.tl.core):
            table = of_language
        return table[name](stock) if name in table else stock

    return shorter


# ------------------------------------------------------------------ launches


class _Language:
    """``triton.language`` with the interpreter's builtins, while a launch runs.

    The stock interpreter looks through the whole language again at every call of a jit function
    inside a kernel, and does not take back what it finds there. Here the changes are found once a
    process and are set and unset around a launch, whatever happens in it.
    """

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
            if len(_BLOCKS) > _MOST:
                _BLOCKS.clear()
                forget_plans()
            for owner, name, old, _ in reversed(self._changes):
                if old is self._interp._MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, old)


def _index(tensor: Any) -> int:
    return int(tensor.handle.data.item())


def _patch_functions(interp: Any, _stock: Stock) -> dict[str, Any]:
    builtin_code = interp.tl.core.builtin(_index).__code__

    def patch_attr(owner: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
        # The wrapper of a builtin only asks whether _semantic is given, and here it is.
        known = getattr(member, "__code__", None) is builtin_code
        target = member.__wrapped__ if known else member
        semantic = interp.interpreter_semantic

        def builtin(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return target(*args, **kwargs)

        scope.set_attr(owner, name, builtin)

    # The launch has patched everything that a kernel can reach.
    done = SimpleNamespace(restore=lambda: None)
    return {"_patch_attr": patch_attr, "_patch_lang": lambda _fn: done}


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
    methods=(_dtype_method, _patch_functions, _launch_methods, _type_methods),
    uses=(
        "InterpreterError",
        "InterpretedFunction.rewrite",
        "_LangPatchScope.set_attr",
        "_MISSING",
        "interpreter_semantic",
        "tl.core.builtin",
        "interpreter_builder.options.sanitize_overflow",
        "interpreter_semantic.computation_type_impl",
        "tl.core.constexpr",
    ),
)
"""The builder's overflow checks are switched off by ``enable``: no kernel of a GPU has them."""
