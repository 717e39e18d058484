"""Types that are kept, and operands brought to one type: what the stock interpreter gives."""

from __future__ import annotations

import itertools
import sys
from operator import attrgetter

import numpy as np
import pytest
import triton.language as tl

from attncheck.kernels import interpreter

DTYPES = ("int1", "int32", "int64", "uint32", "uint64", "fp16", "bf16", "fp32", "fp64", "fp8e5")
SHAPES = ((), (4,), (1, 4), (8, 1), (8, 4))
NUMBERS = (0, -3, 2**31, 2.5, float("inf"), 1e300, True)
FLAGS = ((False, False, True, False), (False, False, True, True), (False, False, False, False))
CHECK = "interpreter_semantic.binary_op_type_checking_impl"
SPREAD = "interpreter_semantic.broadcast_impl_value"


@pytest.fixture(scope="module", autouse=True)
def _enabled():
    interpreter.enable()


def operand(name: str, shape: tuple[int, ...]) -> tl.tensor:
    interp = sys.modules["triton.runtime.interpreter"]
    dtype = tl.core.dtype(name)
    data = np.ones(shape or (1,), interp._get_np_dtype(dtype))
    kind = tl.core.block_type(dtype, list(shape)) if shape else dtype
    return tl.core.tensor(interp.TensorHandle(data, dtype), kind)


def described(values) -> list[object]:
    return [(str(v.type), v.handle.dtype.name, v.handle.data.tolist()) for v in values]


def outcome(check, *operands, flags) -> object:
    try:
        return described(check(*operands, *flags))
    except Exception as error:  # noqa: BLE001  (whatever the stock one raises)
        return type(error), str(error)


def agree(*operands, flags, name=CHECK) -> None:
    interp = sys.modules["triton.runtime.interpreter"]
    ours = outcome(attrgetter(name)(interp), *operands, flags=flags)
    assert ours == outcome(interpreter.stock(name), *operands, flags=flags)


@pytest.mark.parametrize("flags", FLAGS, ids=["arithmetic", "division", "neither"])
@pytest.mark.parametrize("left", DTYPES)
def test_two_tensors_become_what_the_stock_interpreter_makes_of_them(left, flags):
    for right, one, other in itertools.product(DTYPES, SHAPES, SHAPES):
        agree(operand(left, one), operand(right, other), flags=flags)


@pytest.mark.parametrize("flags", FLAGS, ids=["arithmetic", "division", "neither"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_and_a_number_become_what_the_stock_interpreter_makes_of_them(dtype, flags):
    for shape, number in itertools.product(((), (4,)), NUMBERS):
        agree(operand(dtype, shape), number, flags=flags)
        agree(number, operand(dtype, shape), flags=flags)


def test_two_shapes_become_what_the_stock_interpreter_makes_of_them():
    for one, other in itertools.product((*SHAPES, (2,), (4, 8), (1, 1, 4)), repeat=2):
        agree(operand("fp32", one), operand("int32", other), flags=(), name=SPREAD)


@pytest.mark.parametrize(("one", "other"), [((4,), (8,)), ((8, 4), (4, 8)), ((4,), (8, 4))])
def test_shapes_that_do_not_fit_are_refused_as_before(one, other):
    for flags in FLAGS:
        agree(operand("fp32", one), operand("fp32", other), flags=flags)


@pytest.mark.parametrize("flags", [(True, False), (True, True), (False, False), (False, True)])
def test_pointers_are_taken_where_they_were(flags):
    interp = sys.modules["triton.runtime.interpreter"]
    kind = tl.core.pointer_type(tl.float32)
    pointer = tl.core.tensor(interp.TensorHandle(np.zeros(1, np.uint64), kind), kind)
    for other in (*(operand(name, (4,)) for name in DTYPES), pointer, 1, 1.0):
        agree(pointer, other, flags=flags)
        agree(other, pointer, flags=flags)


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
