"""Reductions, scans and products in the repaired interpreter are exact where a GPU's are."""

# ruff: noqa: N803  # Triton: constexprs in capitals

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from tests.kernels.number_formats import TORCH, mismatches

from attncheck.kernels import interpreter


@triton.jit
def reduce_kernel(source, target, OP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    x = tl.load(source + rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    if OP == "sum":
        y = tl.sum(x, 1)
    elif OP == "max":
        y = tl.max(x, 1)
    elif OP == "min":
        y = tl.min(x, 1)
    elif OP == "argmax":
        y = tl.argmax(x, 1)
    elif OP == "argmin":
        y = tl.argmin(x, 1)
    elif OP == "all":
        y = tl.zeros((ROWS,), tl.float32) + tl.sum(x)
    else:
        y = tl.sum(tl.where(tl.arange(0, COLUMNS)[None, :] == COLUMNS - 1, tl.cumsum(x, 1), 0.0), 1)
    tl.store(target + rows, y.to(tl.float32))


@triton.jit
def dot_kernel(a, b, c, out, PRECISION: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    total = tl.load(c + at)
    total = tl.dot(
        tl.load(a + at),
        tl.load(b + at),
        total,
        input_precision=PRECISION,
        out_dtype=total.dtype,
    )
    tl.store(out + at, total)


def reduced(op: str, x: torch.Tensor) -> torch.Tensor:
    target = torch.zeros(x.shape[0])
    reduce_kernel[(1,)](x, target, op, *x.shape)
    return target


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("op", ["sum", "max", "min", "cumsum", "all", "argmax", "argmin"])
def test_reductions_of_integers_are_exact(op, dtype):
    x = torch.from_numpy(np.random.Generator(np.random.Philox(3)).integers(-2, 3, (8, 16)))
    x = x.to(TORCH[dtype])
    wide = x.float()
    expected = {
        "sum": wide.sum(1),
        "cumsum": wide.sum(1),
        "all": wide.sum().expand(8),
        "max": wide.amax(1),
        "min": wide.amin(1),
        "argmax": torch.from_numpy(np.argmax(wide.numpy(), 1)),
        "argmin": torch.from_numpy(np.argmin(wide.numpy(), 1)),
    }[op]
    assert torch.equal(reduced(op, x), expected.float())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_max_and_min_drop_nan_except_in_a_row_of_nan(dtype):
    x = torch.tensor(
        [[1.0, np.nan, 3.0, 2.0], [np.nan] * 4, [-np.inf] * 4, [np.nan, -np.inf, 0, 1]]
    )
    x = x.to(TORCH[dtype])
    assert mismatches(reduced("max", x), torch.tensor([3.0, np.nan, -np.inf, 1.0])) == 0
    assert mismatches(reduced("min", x), torch.tensor([1.0, np.nan, -np.inf, -np.inf])) == 0
    assert reduced("argmax", x).tolist() == [2.0, 3.0, 0.0, 3.0]
    assert reduced("sum", x).isnan().tolist() == [True, True, False, True]


@pytest.mark.parametrize(("dtype", "full"), [("bf16", 256.0), ("fp16", 2048.0)])
def test_sums_round_after_every_addition(dtype, full):
    x = torch.tensor([[full, 1.0, 1.0, 0.0]] * 2, dtype=TORCH[dtype])
    assert reduced("sum", x).tolist() == [full] * 2  # summed in fp32 it would be full + 2


def product(a: torch.Tensor, b: torch.Tensor, precision: str = "ieee", c=None) -> torch.Tensor:
    c = (
        torch.zeros(a.shape, dtype=torch.float64 if a.dtype == torch.float64 else torch.float32)
        if (c is None)
        else c
    )
    out = torch.zeros_like(c)
    dot_kernel[(1,)](a, b, c, out, precision, a.shape[0])
    return out


def uniform(*shape: int) -> torch.Tensor:
    draw = np.random.Generator(np.random.Philox(5)).integers(-(2**23), 2**23, shape)
    return torch.from_numpy(draw.astype(np.float32) / 2**23)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "fp8e4nv", "fp8e5"])
def test_dot_multiplies_in_fp32(dtype):
    a, b = (x.to(TORCH[dtype]) for x in uniform(2, 32, 32))
    assert torch.equal(product(a, b), torch.from_numpy(a.float().numpy() @ b.float().numpy()))


def test_dot_does_not_round_products_of_fp16():
    a = torch.full((16, 16), 1000.0, dtype=torch.float16)  # 10^6 is beyond fp16
    assert torch.equal(product(a, a), torch.full((16, 16), 16e6))


def test_dot_adds_in_the_dtype_of_its_accumulator():
    a = torch.eye(16, dtype=torch.bfloat16)
    c = torch.full((16, 16), 1.0 + 2.0**-20)
    assert torch.equal(product(a, a, c=c), c + torch.eye(16))
    half = torch.full((16, 16), 2048.0, dtype=torch.float16)
    assert torch.equal(product(a.half(), a.half(), c=half), half)  # 2049 rounds to 2048


def test_dot_of_fp64_stays_fp64():
    a = uniform(16, 16).double() / 3
    assert torch.equal(product(a, torch.eye(16).double()), a)


def test_tf32_dot_truncates_operands_to_ten_bits():
    a, one = uniform(32, 32), torch.eye(32)
    truncated = (a.view(torch.int32) & ~0x1FFF).view(torch.float32)
    assert torch.equal(product(a, one, "tf32"), truncated)
    assert torch.equal(product(one, a, "tf32"), truncated)
    assert torch.equal(product(a, one, "ieee"), a)
    assert not torch.equal(truncated, a)


@pytest.mark.parametrize("precision", ["tf32x3", "bf16x3", "bf16x6"])
def test_split_products_are_more_precise_than_their_format(precision):
    a, b = uniform(2, 32, 32)
    exact = a.double() @ b.double()
    plain = product(a, b, "tf32") if precision == "tf32x3" else product(a.bfloat16(), b.bfloat16())
    error, plain_error = ((x.double() - exact).norm() for x in (product(a, b, precision), plain))
    assert error < plain_error
    infinite = torch.full((16, 16), np.inf)
    assert torch.equal(product(infinite, torch.ones(16, 16), precision), infinite)


def test_stock_dot_of_bf16_ones_is_wrong():
    a = torch.ones(16, 16, dtype=torch.bfloat16)
    stock = interpreter.stock("InterpreterBuilder.create_dot")
    interp = sys.modules["triton.runtime.interpreter"]
    one = interp.TensorHandle(a.view(torch.uint16).numpy(), tl.bfloat16)
    zero = interp.TensorHandle(np.zeros((16, 16), np.float32), tl.float32)
    result = stock(interp.interpreter_builder, one, one, zero, SimpleNamespace(name="IEEE"), 0)
    assert not np.array_equal(result.data, np.full((16, 16), 16.0))
    assert torch.equal(product(a, a), torch.full((16, 16), 16.0))
