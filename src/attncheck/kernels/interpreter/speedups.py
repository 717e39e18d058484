"""Speed-ups of Triton's CPU interpreter.

Each speeds up launches by the following factors (processor time without it over that with it), for
FlashAttention-2 forwards and backwards, packed documents and decoding at lengths of 5 to 300:

* cached types, and the plans that need them: 4 to 6;
* plans of operators: 2.1 to 2.7; of ``x[:, None]``: 1.2 to 1.3; of ``where``: 1.2; of ``load`` and
  of ``to``: 1.1 each;
* cached numpy dtypes: 1.1; searching the language once per process and not at every call of a jit
  function inside a kernel: 1 to 1.1.

Results are the same, bit for bit; only repeated lookups are saved. A plan holds what the types of
an operation's operands determine: which operands to cast, and the type of the result. It is None
where the types do not determine this (bf16 and fp8, booleans in arithmetic, ranks that differ);
then the interpreter's own method runs.
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

    Result = tuple[Any, Any, Any, Any]  # a tensor's attributes: type, dtype, shape, numel

_INT32 = 2**31  # The first int beyond int32.

# ------------------------------------------------------------------ cached types

# Block types by the id of their element type, and their shape. A block type holds its element type,
# so that no other object gets this id while the entry exists.
_BLOCKS: dict[tuple[int, ...], Any] = {}
# Block types after which the cache is emptied. A kernel has a few dozen, but one that creates
# pointer types creates new ones in each launch.
_MOST_BLOCKS = 4096


def _type_methods(interp: Any, stock: Stock) -> dict[str, Any]:
    """Return cached methods of ``block_type`` and ``tensor``, and of the conversion of arguments.

    Every operation creates the type of its result, and of its operands once they are broadcast, and
    for each the shape again as a tuple of constants. A kernel has a few dozen types and tens of
    thousands of operations, and its next launch the same types: pointers of one dtype share one.
    """
    core = interp.tl.core
    block_type, constexpr = core.block_type, core.constexpr
    stock_block, stock_ir = stock("tl.core.block_type.__init__"), stock("tl.core.block_type.to_ir")
    shape_types = (list, core.tuple)
    scalar_attributes = core.tuple([]), constexpr(1)

    def new_block(cls: Any, *args: Any, **named: Any) -> Any:
        if cls is not block_type or named or len(args) != 2 or type(args[1]) not in shape_types:
            return object.__new__(cls)
        element, shape = args
        lengths = [length.value if type(length) is constexpr else length for length in shape]
        if {*map(type, lengths)} != {int}:  # the key of 2.0 equals that of 2, but Triton refuses it
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
        cached = self.__dict__.get("in_ir")
        if cached is None or builder is not interp.interpreter_builder:
            cached = stock_ir(self, builder)
            if builder is interp.interpreter_builder:
                self.in_ir = cached
        return cached

    stock_tensor = stock("tl.core.tensor.__init__")

    def init_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002  (its own signature)
        cached = type.__dict__.get("of_tensors") if type.is_block() else scalar_attributes
        if cached is None:
            stock_tensor(self, handle, type)
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = cached

    stock_argument = stock("_implicit_cvt")
    pointer_types: dict[tuple[type, Any], Any] = {}

    def convert_argument(arg: Any) -> Any:
        if type(arg) is int and -_INT32 <= arg < _INT32:
            handle = interp.TensorHandle(np.array([arg], np.int32), core.int32)
            return core.tensor(handle, core.int32)
        if not hasattr(arg, "data_ptr"):
            return stock_argument(arg)
        key = type(arg), arg.dtype
        if key not in pointer_types:
            pointer_types[key] = stock_argument(arg).type
        kind = pointer_types[key]
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
    """Return ``_get_np_dtype`` with a cache; the stock function builds its table at every call."""
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
_WIDE = frozenset({"fp32", "fp64"})  # narrower types are divided in fp32
_BOOLEAN = "int1"
_SMALLEST, _LARGEST = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127  # normal fp32 numbers
_PLANS: list[dict[Any, Any]] = []


def _plan_table() -> dict[Any, Any]:
    """Return a new table of plans by ids of types; entries must hold these types too."""
    table: dict[Any, Any] = {}
    _PLANS.append(table)
    return table


def forget_plans() -> None:
    """Empty all tables of plans, whose types exist no more."""
    for table in _PLANS:
        table.clear()


def _is_usual(number: Any) -> bool:
    """Return whether a number is int32, 0, infinite or a normal fp32 number.

    Versions of Triton treat others differently; in 3.6 also −0.0 becomes 0.
    """
    if number.__class__ is float:
        if number == 0.0:
            return math.copysign(1.0, number) > 0
        return _SMALLEST <= abs(number) <= _LARGEST or math.isinf(number)
    return number.__class__ is int and -_INT32 < number < _INT32


class _Types:
    """The interpreter's types, and the types of results."""

    def __init__(self, interp: Any) -> None:
        self._interp = interp
        core = interp.tl.core
        self.tensor, self.block = core.tensor, core.block_type
        self.boolean = interp.tl.int1
        self._alone = core.tuple([]), core.constexpr(1)

    def maker(self) -> Callable[..., Any]:
        """Return a function (data, *Result) → tensor, which does not check that the data fit."""
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
        """Return the attributes of a tensor of type ``shaped`` with elements of ``dtype``."""
        if shaped is None:
            return None
        if not shaped.is_block():
            return dtype, dtype, *self._alone
        kind = shaped.with_element_ty(dtype)
        cached = kind.__dict__.get("of_tensors")
        return None if cached is None else (kind, dtype, *cached)

    def broadcast(self, one: Any, other: Any) -> Any:
        """Return a type of the broadcast shape; None if the shapes are not numpy-compatible."""
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
        return self._interp._get_np_dtype(dtype)

    def cast(self, source: Any, target: Any) -> Any:
        """Return the numpy dtype of ``target``; None if no cast is needed."""
        return None if source.name == target.name else self.numbers(target)

    def common(self, left: Any, right: Any) -> Any:
        """Return the dtype in which ``left`` and ``right`` are combined."""
        semantic = self._interp.interpreter_semantic
        return semantic.computation_type_impl(left, False, right, False, False)


# ------------------------------------------------------------------ operators


def _operators(types: _Types) -> dict[str, Callable[[Any], Any]]:
    """Return functions (stock method) → replacement, by names of a tensor's methods."""

    def plan_two(
        kinds: frozenset[str], *, same_type: bool = False, dtype: Any = None
    ) -> Callable[[Any, Any], Any]:
        """Return a planner for two types: (first cast, second conversion, result) or None."""

        def plan(one: Any, other: Any) -> Any:
            left, right = one.scalar, other.scalar
            if not {left.name, right.name} <= kinds or (same_type and left.name != right.name):
                return None
            both = left if same_type else types.common(left, right)
            result = types.result(types.broadcast(one, other), dtype or both)
            if result is None:
                return None
            cast = types.cast(right, both)
            change = None if cast is None else lambda data: data.astype(cast)
            return types.cast(left, both), change, result

        return plan

    def plan_number(kinds: frozenset[str], dtype: Any = None) -> Callable[[Any, type], Any]:
        """Return a planner for a type and a Python number of its kind: a result or None."""

        def plan(one: Any, kind: type) -> Any:
            own = kinds if kind is int else kinds & _REAL
            return types.result(one, dtype or one.scalar) if one.scalar.name in own else None

        return plan

    numbers = _WHOLE | _REAL
    two, number = plan_two(numbers), plan_number(numbers)

    def add_two(one: Any, other: Any) -> Any:
        """Plan as ``two``, and also the sum of pointers and integers."""
        if not one.scalar.is_ptr() or other.scalar.name not in _WHOLE:
            return two(one, other)
        result = types.result(types.broadcast(one, other), one.scalar)
        # A boolean has one bit, but takes a byte in memory.
        size = max(1, one.scalar.element_ty.primitive_bitwidth // 8)
        return None if result is None else (None, lambda n: n.astype(np.uint64) * size, result)

    def no_plan(*_types: Any) -> None:
        """Plan nothing, so that the stock method runs."""

    bits = plan_two(_WHOLE | {_BOOLEAN}, same_type=True)
    compare, compare_number = (
        plan_two(numbers, dtype=types.boolean),
        plan_number(numbers, types.boolean),
    )
    table: dict[str, tuple[Any, Any, Any]] = {
        "__add__": (np.add, add_two, number),
        "__sub__": (np.subtract, two, number),
        "__mul__": (np.multiply, two, number),
        "__radd__": (np.add, no_plan, number),
        "__rsub__": (lambda one, other: np.subtract(other, one), no_plan, number),
        "__rmul__": (np.multiply, no_plan, number),
        "__truediv__": (np.divide, plan_two(_WIDE, same_type=True), plan_number(_WIDE)),
        # Rounds toward zero, as the interpreter does.
        "__floordiv__": (
            lambda one, other: (one - np.fmod(one, other)) // other,
            plan_two(_WHOLE),
            plan_number(_WHOLE),
        ),
        "__mod__": (np.fmod, plan_two(_WHOLE), plan_number(_WHOLE)),
        "__and__": (np.bitwise_and, bits, no_plan),
        "__or__": (np.bitwise_or, bits, no_plan),
        "__lt__": (np.less, compare, compare_number),
        "__le__": (np.less_equal, compare, compare_number),
        "__gt__": (np.greater, compare, compare_number),
        "__ge__": (np.greater_equal, compare, compare_number),
        "__eq__": (np.equal, compare, compare_number),
        "__ne__": (np.not_equal, compare, compare_number),
    }
    return {name: _planned_operator(types, *plans) for name, plans in table.items()}


def _planned_operator(
    types: _Types, ufunc: Any, plan_two: Callable[..., Any], plan_number: Callable[..., Any]
) -> Callable[[Any], Any]:
    tensor, make, plans = types.tensor, types.maker(), _plan_table()

    def replace(stock: Any) -> Any:
        def operator(one: Any, other: Any) -> Any:
            if other.__class__ is tensor:
                key = id(one.type), id(other.type)
                plan = plans.get(key)
                if plan is None:
                    plan = plans[key] = plan_two(one.type, other.type), one.type, other.type
                if plan[0] is None:
                    return stock(one, other)
                left, right, result = plan[0]
                a, b = one.handle.data, other.handle.data
                a, b = a if left is None else a.astype(left), right(b) if right else b
                return make(ufunc(a, b), *result)
            if not _is_usual(other):
                return stock(one, other)
            key = id(one.type), other.__class__
            plan = plans.get(key)
            if plan is None:
                plan = plans[key] = plan_number(one.type, other.__class__), one.type
            if plan[0] is None:
                return stock(one, other)
            # numpy converts a Python number to the array's dtype, as the interpreter does.
            return make(ufunc(one.handle.data, other), *plan[0])

        return operator

    return replace


# ------------------------------------------------------------------ accesses

_EVERY = slice(None)


def _index_tensor(types: _Types, stock: Any) -> Any:
    """Return a replacement of ``tensor.__getitem__``, with plans for new axes alone."""
    make, plans = types.maker(), _plan_table()

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
        plan = plans.get(key)
        if plan is None:
            plan = plans[key] = plan_for(one.type, key[1]), one.type
        if plan[0] is None:
            return stock(one, slices)
        return make(one.handle.data[slices], *plan[0])

    return getitem


def _cast_tensor(types: _Types, stock: Any) -> Any:
    """Return a replacement of ``tensor.to``."""
    make, plans = types.maker(), _plan_table()

    def plan_for(kind: Any, dtype: Any) -> Any:
        source, target = kind.scalar.name, dtype.scalar.name
        exact = source in {_BOOLEAN, *_WHOLE} and target in _WHOLE | _REAL
        rounds = source in _REAL and target in _REAL  # to nearest, as numpy does
        result = types.result(kind, dtype.scalar) if exact or rounds else None
        return None if result is None else (types.cast(kind.scalar, dtype.scalar), result)

    def to(one: Any, dtype: Any, *more: Any, **named: Any) -> Any:
        key = id(one.type), id(dtype)
        plan = plans.get(key)
        if plan is None:
            scalar = hasattr(dtype, "scalar")
            plan = plans[key] = plan_for(one.type, dtype) if scalar else None, one.type, dtype
        if plan[0] is None or more or named:
            return stock(one, dtype, *more, **named)
        cast, result = plan[0]
        return one if cast is None else make(one.handle.data.astype(cast), *result)

    return to


def _select(types: _Types, stock: Any) -> Any:
    """Return a replacement of ``tl.where``."""
    tensor, make, plans = types.tensor, types.maker(), _plan_table()

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
        left, right = (v.type if v.__class__ is tensor else v.__class__ for v in (x, y))
        key = id(condition.type), id(left), id(right)
        plan = plans.get(key)
        if plan is None:
            plan = plans[key] = plan_for(condition.type, left, right), condition.type, left, right
        if plan[0] is None or not all(v.__class__ is tensor or _is_usual(v) for v in (x, y)):
            return stock(condition, x, y)
        number, result = plan[0]
        a, b = (v.handle.data if v.__class__ is tensor else number(v) for v in (x, y))
        return make(np.where(condition.handle.data, a, b), *result)

    return where


def _load(types: _Types, stock: Any, load_array: Callable[..., Any]) -> Any:
    """Return a replacement of ``tl.load``, with plans for a mask and no ``other``, or 0."""
    tensor, make, plans = types.tensor, types.maker(), _plan_table()

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
        # Plans fill masked elements with zero bits, so ``other`` must not be −0.0.
        zero = other is None or (other.__class__ in (int, float) and repr(other) in {"0", "0.0"})
        if named or mask.__class__ is not tensor or not zero:
            return stock(pointer, mask, other, **named)
        key = id(pointer.type), id(mask.type)
        plan = plans.get(key)
        if plan is None:
            plan = plans[key] = plan_for(pointer.type, mask.type), pointer.type, mask.type
        if plan[0] is None:
            return stock(pointer, mask, other)
        dtype, lengths, result = plan[0]
        visible = mask.handle.data
        if visible.shape != lengths:
            visible = np.broadcast_to(visible, lengths)
        values = load_array(pointer.handle.data, visible, np.zeros(lengths, dtype), dtype)
        return make(values, *result)

    return load


def shortcuts(interp: Any) -> Callable[[Any, str, Any], Any]:
    """Return a function (owner, name, stock builtin) → its replacement, or the builtin itself."""
    types = _Types(interp)
    tensor_methods = _operators(types)
    tensor_methods["__getitem__"] = lambda stock: _index_tensor(types, stock)
    tensor_methods["to"] = lambda stock: _cast_tensor(types, stock)

    def load_array(*args: Any) -> Any:
        return interp._interpreter.load(*args)  # looked up at each call, as tests replace it

    language_functions: dict[str, Callable[[Any], Any]] = {
        "where": lambda stock: _select(types, stock),
        "load": lambda stock: _load(types, stock, load_array),
    }

    def shorten(owner: Any, name: str, stock: Any) -> Any:
        table = tensor_methods if owner is types.tensor else {}
        if owner in (interp.tl, interp.tl.core):
            table = language_functions
        return table[name](stock) if name in table else stock

    return shorten


# ------------------------------------------------------------------ launches


class _Language:
    """``triton.language`` with the interpreter's builtins, while a launch runs.

    The stock interpreter searches the whole language at every call of a jit function inside a
    kernel, and does not undo its changes. Here the changes are found once per process, set before a
    launch, and undone after it, also if it raises.
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
        # Triton 3.6 calls int() on a one-element array for a loop bound; numpy 2.4 refuses that.
        changes = [(o, n, old, _index if n == "__index__" else new) for o, n, old, new in changes]
        shorten = shortcuts(self._interp)
        return [(o, n, old, shorten(o, n, new)) for o, n, old, new in changes]

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        if self._changes is None:
            self._changes = self._find_changes()
        self.active = True
        try:
            for owner, name, _, new in self._changes:
                setattr(owner, name, new)
            # Kernels may compute inf - inf and the like; that gives NaN here as on a GPU.
            with np.errstate(all="ignore"):
                yield
        finally:
            self.active = False
            if len(_BLOCKS) > _MOST_BLOCKS:
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
        # A builtin's wrapper only checks that _semantic is given, which it is here.
        is_builtin = getattr(member, "__code__", None) is builtin_code
        target = member.__wrapped__ if is_builtin else member
        semantic = interp.interpreter_semantic

        def builtin(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return target(*args, **kwargs)

        scope.set_attr(owner, name, builtin)

    # The launch has already patched all that a kernel can call.
    no_changes = SimpleNamespace(restore=lambda: None)
    return {"_patch_attr": patch_attr, "_patch_lang": lambda _fn: no_changes}


def _launch_methods(interp: Any, stock: Stock) -> dict[str, Any]:
    language = _Language(interp, stock("_patch_lang"))
    stock_launch = stock("GridExecutor.__call__")

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if language.active:  # a pre-run hook launched a kernel
            return stock_launch(self, *args, **kwargs)
        with language.patched():
            return stock_launch(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not language.active:  # called on the host, outside of a launch
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
"""``enable`` also switches off the builder's overflow checks, which a GPU's kernels do not have."""
