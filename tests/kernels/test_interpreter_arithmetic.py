"""Arithmetic in the repaired interpreter rounds once, and as a GPU does."""

# ruff: noqa: N803  # Triton: constexprs in capitals

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from tests.kernels.number_formats import TORCH, around, double_to, mismatches, patterns


@triton.jit
def binary_kernel(left, right, target, OP: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    a = tl.load(left + at)
    b = tl.load(right + at)
    if OP == "add":
        c = a + b
    elif OP == "sub":
        c = a - b
    elif OP == "mul":
        c = a * b
    elif OP == "max":
        c = tl.maximum(a, b)
    elif OP == "max_nan":
        c = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "less":
        c = tl.where(a < b, a, b)
    elif OP == "fma":
        c = tl.fma(a, b, b)
    elif OP == "abs":
        c = tl.abs(a)
    else:
        c = -a
    tl.store(target + at, c.to(target.dtype.element_ty))


@triton.jit
def atomic_kernel(target, values, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.atomic_add(target + at // 2, tl.load(values + at), mask=at < SIZE - 1)


def binary(op: str, a: torch.Tensor, b: torch.Tensor, out: torch.dtype | None = None):
    result = torch.zeros(a.shape, dtype=out or a.dtype)
    binary_kernel[(1,)](a, b, result, op, a.numel())
    return result


@pytest.mark.parametrize("op", ["add", "sub", "mul", "less", "abs", "neg"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_arithmetic_equals_torchs(dtype, op):
    a = patterns(dtype)
    b = a.view(torch.int16)[torch.randperm(len(a), generator=torch.Generator().manual_seed(1))]
    b = b.view(TORCH[dtype])
    expected = {
        "add": a + b,
        "sub": a - b,
        "mul": a * b,
        "less": torch.where(a < b, a, b),
        "abs": a.abs(),
        # Triton up to 3.7 has no negation: 0 - x, whose zero is positive.
        "neg": -a if binary("neg", a[:1].expand(4), a[:1]).signbit()[0] else 0 - a,
    }[op]
    assert mismatches(binary(op, a, b), expected) == 0


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_fma_rounds_once(dtype):
    a = around("bf16", "fp32")[: 1 << 16].to(TORCH[dtype])
    b = a.flip(0).contiguous()
    finite = a.isfinite() & b.isfinite()
    exact = a.numpy(force=True) if dtype == "fp32" else a.float().numpy()
    other = b.float().numpy()
    with np.errstate(all="ignore"):
        wide = exact.astype(np.longdouble) * other + other
        expected = torch.from_numpy(wide.astype(np.float64))
    got = binary("fma", a, b)[finite]
    # Exact except for sums of terms more than 48 bits apart, which are far from a tie here.
    near = double_to(expected[finite], dtype) if dtype != "fp32" else expected[finite].float()
    assert mismatches(got, near) == 0


def test_fma_differs_from_rounding_twice():
    one, tiny = np.float32(1 + 2.0**-12), np.float32(2.0**-80)
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24 is a tie in fp32, which the added 2^-80 breaks.
    a = torch.full((4,), float(one))
    from attncheck.kernels.interpreter.gpu_arithmetic import _fused_sum

    fused = _fused_sum(a.numpy(), a.numpy(), np.full(4, tiny, np.float32)).astype(np.float32)
    twice = (np.float64(one) * np.float64(one) + np.float64(tiny)).astype(np.float32)
    assert fused[0] == np.nextafter(twice, np.float32(2.0))


def test_maximum_drops_nan_unless_it_is_to_propagate():
    nan, one = torch.full((4,), np.nan).bfloat16(), torch.ones(4).bfloat16()
    assert binary("max", nan, one).tolist() == [1.0] * 4
    assert binary("max_nan", nan, one).isnan().all()


def test_nan_result_raises_no_warning(recwarn):
    infinite = torch.full((4,), np.inf)
    assert binary("sub", infinite, infinite).isnan().all()
    assert not recwarn.list


def test_atomic_add_of_two_values_to_one_address():
    target = torch.zeros(4, dtype=torch.bfloat16)
    atomic_kernel[(1,)](target, torch.arange(1, 9).bfloat16(), 8)
    assert target.tolist() == [3.0, 7.0, 11.0, 7.0]
