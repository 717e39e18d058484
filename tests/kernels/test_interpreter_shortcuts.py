"""Types made once, operators and accesses by the shorter way: the bits of the interpreter's own."""

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


class Ways:
    """A builtin by its own way and by the shorter one, and how often the shorter one was gone."""

    def __init__(self, owner, name: str) -> None:
        self.interp = sys.modules["triton.runtime.interpreter"]
        self._builtin = getattr(owner, name)
        self._shorter = shortcuts(self.interp)(owner, name, self._counted)
        self.asked = self.stock = 0

    def own(self, *operands, **named):
        return self._builtin(*operands, **named, _semantic=self.interp.interpreter_semantic)

    def _counted(self, *operands, **named):
        self.stock += 1
        return self.own(*operands, **named)

    def agree(self, *operands, **named) -> None:
        self.asked += 1
        ours = outcome(self._shorter, operands, named)
        assert ours == outcome(self.own, operands, named), (operands, named)

    @property
    def short(self) -> int:
        return self.asked - self.stock


def outcome(way, operands, named) -> object:
    try:
        with np.errstate(all="ignore"):
            given = way(*operands, **named)
    except Exception as error:  # noqa: BLE001  (whatever the interpreter raises)
        return type(error), str(error)
    if not isinstance(given, tl.core.tensor):
        return given
    shape, data = [length.value for length in given.shape], given.handle.data
    described = str(given.type), str(given.dtype), shape, given.numel.value
    return *described, str(data.dtype), data.shape, data.tobytes()


def operand(name: str, shape: tuple[int, ...]) -> tl.tensor:
    """Numbers of both signs, 0 and, of floats, some that are not finite."""
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
def test_two_tensors_give_what_they_gave(name):
    ways = Ways(tl.tensor, f"__{name}__")
    shapes = list(itertools.product(SHAPES, repeat=2))
    for left, right in itertools.product(DTYPES, repeat=2):
        for one, other in shapes if left in PLAIN and right in PLAIN else shapes[::8]:
            ways.agree(operand(left, one), operand(right, other))
    assert ways.short > 0 or name.startswith("r")  # Python asks those of numbers alone


@pytest.mark.parametrize("name", OPERATORS)
def test_a_tensor_and_a_number_give_what_they_gave(name):
    ways = Ways(tl.tensor, f"__{name}__")
    for dtype, shape, number in itertools.product(DTYPES, ((), (8, 1), (8, 4)), NUMBERS):
        ways.agree(operand(dtype, shape), number)
        ways.agree(operand(dtype, shape), tl.core.constexpr(number))
    assert ways.short > 0 or name in {"and", "or"}


@pytest.mark.parametrize("name", ["add", "radd", "sub", "eq", "and"])
def test_pointers_give_what_they_gave(name):
    ways = Ways(tl.tensor, f"__{name}__")
    source = torch.zeros(64)
    for shape, other, dtype in itertools.product(SHAPES, SHAPES, DTYPES):
        ways.agree(pointer(source, shape), operand(dtype, other))
        ways.agree(operand(dtype, other), pointer(source, shape))
    ways.agree(pointer(source, ()), pointer(source, ()))
    assert (ways.short > 0) == (name == "add")


def test_shapes_that_do_not_fit_are_refused_as_before():
    for name in ("__add__", "__lt__", "__and__"):
        ways = Ways(tl.tensor, name)
        for one, other in (((4,), (8,)), ((8, 4), (4, 8)), ((4,), (8, 4)), ((4,), (2,))):
            ways.agree(operand("int32", one), operand("int32", other))
        assert ways.short == 0


@pytest.mark.parametrize("name", DTYPES)
def test_what_is_indexed_and_cast_is_what_it_was(name):
    indexed, cast = Ways(tl.tensor, "__getitem__"), Ways(tl.tensor, "to")
    every = slice(None)
    indices = (None, every, (every, None), (None, every), (None,), (every, every, None))
    for shape, index in itertools.product(SHAPES, (*indices, (0, every), (slice(1), None))):
        indexed.agree(operand(name, shape), index)
    targets = (tl.int1, tl.int8, tl.int32, tl.int64, tl.float16, tl.bfloat16, tl.float32)
    for shape, target in itertools.product(SHAPES, (*targets, tl.float64, tl.float8e5, 3)):
        cast.agree(operand(name, shape), target)
    cast.agree(operand(name, (4,)), tl.float16, "rtz")
    assert indexed.short > 0
    assert cast.short > 0 or name not in PLAIN


def test_what_is_selected_is_what_it_was():
    ways = Ways(tl, "where")
    values = [operand(name, shape) for name in DTYPES for shape in ((), (8, 1), (8, 4))]
    values += [0, 2.5, 1e300, float("-inf"), True]
    for shape in ((), (1, 4), (8, 4)):
        for x, y in itertools.product(values, repeat=2):
            ways.agree(operand("int1", shape), x, y)
    assert ways.short > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_what_is_loaded_is_what_it_was(dtype):
    ways = Ways(tl, "load")
    source = torch.arange(64).to(dtype)
    others = (None, 0, 0.0, -0.0, 1.0, float("-inf"), operand("fp32", ()))
    for shape, hides, other in itertools.product(SHAPES, (None, *SHAPES), others):
        mask = None if hides is None else operand("int1", hides)
        if shape or not hides:
            ways.agree(pointer(source, shape), mask, other)
    assert (ways.short > 0) == (dtype != torch.bool)


@triton.jit
def copy_kernel(source, target, size, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(target + places, tl.load(source + places, mask=places < size, other=0.0))


def test_a_launch_of_what_was_launched_keeps_no_more():
    speedups._BLOCKS.clear()  # of whatever ran before: with too many of them all are forgotten
    speedups.forget_plans()
    kept = []
    for _ in range(3):
        copy_kernel[(1,)](torch.arange(4.0), target := torch.zeros(4), 3, 4)
        assert target.tolist() == [0.0, 1.0, 2.0, 0.0]
        kept.append((len(speedups._BLOCKS), sum(map(len, speedups._PLANS))))
    assert kept[0] == kept[1] == kept[2]


def test_too_many_types_are_forgotten_with_their_plans(monkeypatch):
    monkeypatch.setattr(speedups, "_MOST_BLOCKS", 0)
    copy_kernel[(1,)](torch.arange(4.0), torch.zeros(4), 3, 4)
    assert not speedups._BLOCKS
    assert not any(speedups._PLANS)


def test_a_type_is_made_once_and_is_another_for_another_pointer():
    first, second = tl.core.pointer_type(tl.float32), tl.core.pointer_type(tl.int32)
    assert tl.core.block_type(first, [4]) is tl.core.block_type(first, [tl.core.constexpr(4)])
    assert tl.core.block_type(second, [4]).element_ty is second
    assert tl.core.block_type(first, [4]).with_element_ty(second).element_ty is second


@pytest.mark.parametrize("shape", [[4.0], [3], []])
def test_a_shape_that_is_none_is_refused_also_where_its_like_is_known(shape):
    tl.core.block_type(tl.float32, [4])
    with pytest.raises((TypeError, ValueError)):
        tl.core.block_type(tl.float32, shape)
