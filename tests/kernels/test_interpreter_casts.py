"""Casts in the repaired interpreter give the same bits as torch's."""

import numpy as np
import pytest
import torch
import triton.language as tl
from tests.kernels.number_formats import (
    TORCH,
    TRITON,
    around,
    cast,
    double_to,
    mismatches,
    patterns,
)

from attncheck.kernels import interpreter
from attncheck.kernels.interpreter import casts

NARROW = ("fp16", "bf16", "fp8e4nv", "fp8e5")
LARGEST = {"fp8e4nv": 448.0, "fp8e5": 57344.0}


def in_range(source: torch.Tensor, target: str) -> torch.Tensor:
    """Clamp to the largest fp8 number, as a GPU does; torch saturates in some versions only."""
    if target not in LARGEST:
        return source
    limit = LARGEST[target]
    return source.double().clamp(-limit, limit).to(source.dtype)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (source, target)
        for source in NARROW
        for target in (*NARROW, "fp32", "fp64")
        if source != target
    ],
)
def test_cast_of_every_bit_pattern(source, target):
    numbers = patterns(source)
    if (source, target) in {("fp8e4nv", "fp64"), ("fp8e5", "fp64")}:
        # Triton cannot compile this cast for an H200; kernels cast through fp32, which is exact.
        assert mismatches(cast(cast(numbers, "fp32"), "fp64"), numbers.double()) == 0
    expected = in_range(numbers.float(), target).to(TORCH[target])
    assert mismatches(cast(numbers, target), expected) == 0


@pytest.mark.parametrize("target", NARROW)
def test_narrowing_cast_of_fp32(target):
    numbers = around(target, "fp32")
    assert mismatches(cast(numbers, target), in_range(numbers, target).to(TORCH[target])) == 0


@pytest.mark.parametrize("target", [*NARROW, "fp32"])
def test_narrowing_cast_of_fp64_rounds_once(target):
    numbers = around(target if target in NARROW else "bf16", "fp64")
    if target == "fp32":
        assert mismatches(cast(numbers, target), numbers.float()) == 0
    else:
        expected = double_to(in_range(numbers, target), target)
        assert mismatches(cast(numbers, target), expected) == 0


def test_fp64_cast_differs_from_a_cast_through_fp32():
    numbers = around("bf16", "fp64")
    assert mismatches(cast(numbers, "bf16"), numbers.float().bfloat16()) > 0


@pytest.mark.parametrize("target", ["bf16", "fp16"])
def test_cast_rounding_toward_zero(target):
    numbers = around(target, "fp32")
    got = cast(numbers, target, "rtz").double()
    exact = numbers.double()
    above = torch.nextafter(got.to(TORCH[target]), torch.full_like(got, np.inf).to(TORCH[target]))
    finite = exact.isfinite()
    assert (got.abs() <= exact.abs())[finite].all()
    assert (above.double() > exact)[finite & (exact > 0)].all()
    assert got[finite].isfinite().all()
    assert mismatches(got[~finite], exact[~finite]) == 0


@pytest.mark.parametrize("target", ["bf16", "fp8e4nv", "fp8e5"])
def test_stock_cast_differs_from_torchs(target):
    numbers = around(target, "fp32")
    with np.errstate(all="ignore"):
        bits = interpreter.stock("_convert_float")(
            numbers.numpy(), tl.float32, TRITON[target], _rtne() if target != "bf16" else None
        )
    got = torch.from_numpy(bits).view(TORCH[target])
    assert mismatches(got, in_range(numbers, target).to(TORCH[target])) > 0


def _rtne():
    from triton._C.libtriton import ir  # private, and only this check needs it

    return ir.ROUNDING_MODE.RTNE


def test_cast_of_integers_to_bf16():
    numbers = torch.tensor([0, 1, -1, 255, 257, 2**24 + 1, -(2**31), 2**31 - 1], dtype=torch.int32)
    assert mismatches(cast(numbers, "bf16"), numbers.float().bfloat16()) == 0


def test_formats_have_tritons_names():
    assert casts.FORMATS.keys() == TORCH.keys()
    assert all(getattr(TRITON[name], "name", None) == name for name in TORCH)
