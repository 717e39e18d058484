"""Speed-ups of the interpreter (cached types, shortcuts of builtins) change no result."""

# ruff: noqa: N803  # Triton: constexprs in capitals

import itertools
import sys

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from attncheck.kernels import interpreter
from attncheck.kernels.interpreter import speedups
from attncheck.kernels.interpreter.speedups import shortcuts

DTYPES = ("int1", "int8", "int32", "int64", "uint32", "fp16", "bf16", "fp32", "fp64", "fp8e5")
SHAPES = ((), (4,), (1, 4), (8, 1), (8, 4))
NUMBERS = (0, -3, 7, 70_000, 2**31, 2.5, -0.0, float("inf"), float("nan"), 1e300, True, None)
OPERATORS = (
    *("add", "sub", "mul", "radd", "rsub", "rmul", "truediv", "floordiv", "mod", "and", "or"),
    *("lt", "le", "gt", "ge", "eq", "ne"),
)
PLAIN = ("int32", "int64", "fp16", "fp32", "fp64")


@pytest.fixture(scope="module", autouse=True)
def _enabled():
    interpreter.enable()


class Comparison:
    """Compares a builtin with its shortcut, and counts how often the shortcut is taken."""

    def __init__(self, owner, name: str) -> None:
        self.interp = sys.modules["triton.runtime.interpreter"]
        self._builtin = getattr(owner, name)
        self._shortcut = shortcuts(self.interp)(owner, name, self._fall_back)
        self._calls = self._fallbacks = 0

    def _call_builtin(self, *operands, **named):
        return self._builtin(*operands, **named, _semantic=self.interp.interpreter_semantic)

    def _fall_back(self, *operands, **named):
        self._fallbacks += 1
        return self._call_builtin(*operands, **named)

    def assert_equal(self, *operands, **named) -> None:
        self._calls += 1
        result = outcome(self._shortcut, operands, named)
        assert result == outcome(self._call_builtin, operands, named), (operands, named)

    @property
    def shortcuts_taken(self) -> int:
        return self._calls - self._fallbacks


def outcome(function, operands, named) -> object:
    """The exception of a call, or its result with type, shape and bytes."""
    try:
        with np.errstate(all="ignore"):
            result = function(*operands, **named)
    except Exception as error:  # noqa: BLE001  (whatever the interpreter raises)
        return type(error), str(error)
    if not isinstance(result, tl.core.tensor):
        return result
    shape, data = [length.value for length in result.shape], result.handle.data
    types = str(result.type), str(result.dtype), shape, result.numel.value
    return *types, str(data.dtype), data.shape, data.tobytes()


def operand(name: str, shape: tuple[int, ...]) -> tl.tensor:
    """A tensor of numbers of both signs, 0 and, for floats, some that are not finite."""
    interp = sys.modules["triton.runtime.interpreter"]
    dtype = getattr(tl, name.replace("bf", "bfloat").replace("fp", "float"))
    size = int(np.prod(shape))
    numbers = np.resize(np.array([3, -2, 0, 1, 5, -7]), size)
    data = numbers.astype(interp._get_np_dtype(dtype)).reshape(shape or (1,))
    if name in {"fp16", "fp32", "fp64"} and size > 4:
        data.flat[-3:] = np.nan, np.inf, -0.0
    kind = tl.core.block_type(dtype, list(shape)) if shape else dtype
    return tl.core.tensor(interp.TensorHandle(data, dtype), kind)


def pointer(source: torch.Tensor, shape: tuple[int, ...]) -> tl.tensor:
    interp = sys.modules["triton.runtime.interpreter"]
    one = interp._implicit_cvt(source)
    if not shape:
        return one
    places = np.arange(np.prod(shape), dtype=np.uint64).reshape(shape) * source.element_size()
    data = one.handle.data + places.astype(np.uint64)
    return tl.core.tensor(
        interp.TensorHandle(data, one.dtype), tl.core.block_type(one.dtype, list(shape))
    )


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_of_two_tensors_is_unchanged(name):
    comparison = Comparison(tl.tensor, f"__{name}__")
    shapes = list(itertools.product(SHAPES, repeat=2))
    for left, right in itertools.product(DTYPES, repeat=2):
        for one, other in shapes if left in PLAIN and right in PLAIN else shapes[::8]:
            comparison.assert_equal(operand(left, one), operand(right, other))
    assert comparison.shortcuts_taken > 0 or name.startswith(
        "r"
    )  # Python calls reflected operators for numbers only


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_of_a_tensor_and_a_number_is_unchanged(name):
    comparison = Comparison(tl.tensor, f"__{name}__")
    for dtype, shape, number in itertools.product(DTYPES, ((), (8, 1), (8, 4)), NUMBERS):
        comparison.assert_equal(operand(dtype, shape), number)
        comparison.assert_equal(operand(dtype, shape), tl.core.constexpr(number))
    assert comparison.shortcuts_taken > 0 or name in {"and", "or"}


@pytest.mark.parametrize("name", ["add", "radd", "sub", "eq", "and"])
def test_operator_of_pointers_is_unchanged(name):
    comparison = Comparison(tl.tensor, f"__{name}__")
    source = torch.zeros(64)
    for shape, other, dtype in itertools.product(SHAPES, SHAPES, DTYPES):
        comparison.assert_equal(pointer(source, shape), operand(dtype, other))
        comparison.assert_equal(operand(dtype, other), pointer(source, shape))
    comparison.assert_equal(pointer(source, ()), pointer(source, ()))
    assert (comparison.shortcuts_taken > 0) == (name == "add")


def test_errors_of_mismatched_shapes_are_unchanged():
    for name in ("__add__", "__lt__", "__and__"):
        comparison = Comparison(tl.tensor, name)
        for one, other in (((4,), (8,)), ((8, 4), (4, 8)), ((4,), (8, 4)), ((4,), (2,))):
            comparison.assert_equal(operand("int32", one), operand("int32", other))
        assert comparison.shortcuts_taken == 0


@pytest.mark.parametrize("name", DTYPES)
def test_indexing_and_casts_are_unchanged(name):
    indexed, cast = Comparison(tl.tensor, "__getitem__"), Comparison(tl.tensor, "to")
    every = slice(None)
    indices = (None, every, (every, None), (None, every), (None,), (every, every, None))
    for shape, index in itertools.product(SHAPES, (*indices, (0, every), (slice(1), None))):
        indexed.assert_equal(operand(name, shape), index)
    targets = (tl.int1, tl.int8, tl.int32, tl.int64, tl.float16, tl.bfloat16, tl.float32)
    for shape, target in itertools.product(SHAPES, (*targets, tl.float64, tl.float8e5, 3)):
        cast.assert_equal(operand(name, shape), target)
    cast.assert_equal(operand(name, (4,)), tl.float16, "rtz")
    assert indexed.shortcuts_taken > 0
    assert cast.shortcuts_taken > 0 or name not in PLAIN


def test_where_is_unchanged():
    comparison = Comparison(tl, "where")
    values = [operand(name, shape) for name in DTYPES for shape in ((), (8, 1), (8, 4))]
    values += [0, 2.5, 1e300, float("-inf"), True]
    for shape in ((), (1, 4), (8, 4)):
        for x, y in itertools.product(values, repeat=2):
            comparison.assert_equal(operand("int1", shape), x, y)
    assert comparison.shortcuts_taken > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_load_is_unchanged(dtype):
    comparison = Comparison(tl, "load")
    source = torch.arange(64).to(dtype)
    others = (None, 0, 0.0, -0.0, 1.0, float("-inf"), operand("fp32", ()))
    for shape, hides, other in itertools.product(SHAPES, (None, *SHAPES), others):
        mask = None if hides is None else operand("int1", hides)
        if shape or not hides:
            comparison.assert_equal(pointer(source, shape), mask, other)
    assert (comparison.shortcuts_taken > 0) == (dtype != torch.bool)


@triton.jit
def copy_kernel(source, target, size, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(target + places, tl.load(source + places, mask=places < size, other=0.0))


def test_repeated_launches_do_not_grow_the_caches():
    speedups._BLOCKS.clear()  # of earlier tests: a full cache would be emptied midway
    speedups.forget_plans()
    sizes = []
    for _ in range(3):
        copy_kernel[(1,)](torch.arange(4.0), target := torch.zeros(4), 3, 4)
        assert target.tolist() == [0.0, 1.0, 2.0, 0.0]
        sizes.append((len(speedups._BLOCKS), sum(map(len, speedups._PLANS))))
    assert sizes[0] == sizes[1] == sizes[2]


def test_full_cache_of_types_is_emptied_with_its_plans(monkeypatch):
    monkeypatch.setattr(speedups, "_MOST_BLOCKS", 0)
    copy_kernel[(1,)](torch.arange(4.0), torch.zeros(4), 3, 4)
    assert not speedups._BLOCKS
    assert not any(speedups._PLANS)


def test_block_types_are_cached_by_pointer_type_and_shape():
    first, second = tl.core.pointer_type(tl.float32), tl.core.pointer_type(tl.int32)
    assert tl.core.block_type(first, [4]) is tl.core.block_type(first, [tl.core.constexpr(4)])
    assert tl.core.block_type(second, [4]).element_ty is second
    assert tl.core.block_type(first, [4]).with_element_ty(second).element_ty is second


@pytest.mark.parametrize("shape", [[4.0], [3], []])
def test_invalid_shape_is_refused_even_if_a_similar_one_is_cached(shape):
    tl.core.block_type(tl.float32, [4])
    with pytest.raises((TypeError, ValueError)):
        tl.core.block_type(tl.float32, shape)
