"""On a GPU ``_quotient`` multiplies by a moderate divisor's reciprocal, with a division's bits."""

# ruff: noqa: N803  # Triton: constexprs in capitals

import pytest
import torch
import triton
import triton.language as tl

from attncheck.mods.triton_functions import _quotient

COUNT = 2**10


@triton.jit
def count_kernel(a_ptr, b_ptr, out_ptr, QUOTIENT: tl.constexpr, COUNT: tl.constexpr):
    places = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    a, b = tl.load(a_ptr + places), tl.load(b_ptr + places)
    different = (a / b).to(tl.int32, bitcast=True) != QUOTIENT(a, b).to(tl.int32, bitcast=True)
    tl.store(out_ptr + places, different.to(tl.int32))


def count_differences(b):
    """Count the quotients of drawn numbers and ``b`` (a multiple of COUNT) whose bits differ."""
    generator = torch.Generator("cuda").manual_seed(1)
    a = torch.randn(b.shape, generator=generator, device="cuda")
    a *= 2.0 ** torch.randint(-40, 40, b.shape, generator=generator, device="cuda")
    out = torch.empty_like(b, dtype=torch.int32)
    count_kernel[(b.numel() // COUNT,)](a, b, out, _quotient, COUNT)
    return out.sum().item()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_quotient_has_bits_of_triton_division():
    fractions = torch.arange(2**23, device="cuda")  # every one that fp32 has
    for exponent in (1, 60, 127, 128, 200, 252):  # from 2^-126 on, and below 2^126
        divisors = (fractions + (exponent << 23)).to(torch.int32).view(torch.float32)
        assert count_differences(divisors) == 0
    # Beyond, the two differ: a reciprocal below 2^-126 is flushed to 0.
    assert count_differences((fractions + (254 << 23)).to(torch.int32).view(torch.float32)) > 0
