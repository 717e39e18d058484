"""Declared arithmetic: defaults, text and validation, and what its accumulators may lose."""

from dataclasses import replace

import pytest
import torch

from attncheck.core.declared_arithmetic import (
    AMPERE,
    FP32,
    FP64,
    FP64_ORACLE,
    HOPPER_FP8,
    VOLTA,
    Accumulator,
    default_arithmetic,
)
from attncheck.core.errors import ProblemError
from attncheck.core.formats import DTYPES, FORMATS

U = 2.0**-24


def test_deterministic_error_of_round_to_nearest_is_gamma_n():
    assert FP32.det(3.0) == 3 * U / (1 - 3 * U)
    assert FP64.det(3.0) == 3 * 2.0**-53 / (1 - 3 * 2.0**-53)
    assert FP32.bias(100.0) == 0


def test_deterministic_error_is_infinite_from_one_over_u_roundings():
    for n in (2.0**24, 2.0**24 + 2, 2.0**30):
        assert FP32.det(n) == float("inf")
        assert FP32.det(torch.tensor([1.0, n], dtype=torch.float64)).tolist()[1] == float("inf")
    assert 0 < FP32.det(2.0**24 - 1) < float("inf")


def test_truncating_accumulator_loses_a_fixed_share_per_step():
    # 33 numbers are aligned a step, to 13 bits below the largest, and the sum keeps 13 more.
    step = 33 * 2.0**-13 + 2.0**-13
    for n, steps in ((1.0, 1), (32.0, 1), (33.0, 2), (128.0, 4)):
        assert HOPPER_FP8.det(n) == FP32.det(n) + steps * step
    assert torch.equal(HOPPER_FP8.bias(torch.tensor([32.0, 33.0])), torch.tensor([step, 2 * step]))


def test_truncation_error_is_capped_at_the_whole_sum():
    assert HOPPER_FP8.det(2.0**20) == FP32.det(2.0**20) + 1
    many = torch.tensor(2.0**20, dtype=torch.float64)
    assert float(HOPPER_FP8.det(many)) == HOPPER_FP8.det(2.0**20)


@pytest.mark.parametrize("accumulator", [FP32, AMPERE, VOLTA, HOPPER_FP8], ids=lambda a: a.name)
def test_deterministic_error_never_decreases_with_more_terms(accumulator):
    n = torch.arange(1, 4097, dtype=torch.float64)
    assert bool((accumulator.det(n).diff() >= 0).all())


def test_only_the_13_bit_accumulator_is_coarse():
    assert [a.name for a in (FP32, FP64, AMPERE, VOLTA, HOPPER_FP8) if a.coarse] == [
        HOPPER_FP8.name
    ]


@pytest.mark.parametrize(
    ("dtype", "capability", "name"),
    [
        ("e4m3", None, "fp32"),
        ("e4m3", (8, 9), HOPPER_FP8.name),
        ("e5m2", (9, 0), HOPPER_FP8.name),
        ("e4m3", (10, 0), "fp32"),
        ("bf16", (9, 0), "fp32"),
        ("bf16", (8, 0), AMPERE.name),
        ("fp16", (7, 0), VOLTA.name),
        ("fp32", (8, 0), "fp32"),
    ],
)
def test_default_accumulator_depends_on_dtype_and_capability(dtype, capability, name):
    profile = default_arithmetic(DTYPES[dtype], capability)
    assert (profile.scores.name, profile.values.name) == (name, name)


def test_tf32_operands_are_truncated_on_a_gpu_and_rounded_elsewhere():
    near, cut = default_arithmetic(DTYPES["tf32"]), default_arithmetic(DTYPES["tf32"], (9, 0))
    assert (near.truncates, cut.truncates) == (False, True)
    assert (near.operand_error, cut.operand_error) == (2.0**-11, 2.0**-10)
    assert (near.weights_error, cut.weights_error) == (2.0**-11, 2.0**-10)


def test_weights_error_is_zero_where_weights_keep_the_computing_format():
    assert default_arithmetic(DTYPES["fp32"]).weights_error == 0
    assert default_arithmetic(DTYPES["bf16"]).weights_error == 2.0**-8
    assert default_arithmetic(DTYPES["fp64"]) is FP64_ORACLE
    assert FP64_ORACLE.weights_error == 0
    assert FP64_ORACLE.unit == 2.0**-53


def test_arithmetic_text_lists_every_declared_fact():
    profile = default_arithmetic(DTYPES["e4m3"], (9, 0))
    assert str(profile) == (
        "products of e4m3; P in e4m3; sums in 13-bit, 32 products a step; exp2 within 2 ulp; "
        "out in bf16"
    )
    custom = replace(
        profile,
        scores=FP32,
        weights_scale=128.0,
        lazy_rescale=1.0,
        sums_rounded_weights=True,
        scaled_query=FORMATS["bf16"],
        splits=2,
    )
    assert str(custom) == (
        "products of e4m3; P in e4m3 × 128; q·k in fp32, P·V in 13-bit, 32 products a step; "
        "maximum may lag by 1 binades; row sum of rounded P; scale · q rounded to bf16; "
        "exp2 within 2 ulp; up to 2 parts merged; out in bf16"
    )


def test_lazy_rescale_is_rejected_when_p_could_overflow():
    profile = replace(default_arithmetic(DTYPES["e4m3"]), weights_scale=256.0)
    with pytest.raises(ProblemError, match=r"512; the largest e4m3 is 448"):
        replace(profile, lazy_rescale=1.0)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("products", "bf16", TypeError),
        ("scores", 13, TypeError),
        ("exp2_ulps", -1.0, ValueError),
        ("tanh_error", float("nan"), ValueError),
        ("weights_scale", 0.0, ValueError),
        ("block_kv", 0, ValueError),
        ("splits", 1.5, ValueError),
    ],
)
def test_arithmetic_rejects_invalid_fields(field, value, error):
    with pytest.raises(error, match=field):
        replace(default_arithmetic(DTYPES["bf16"]), **{field: value})


@pytest.mark.parametrize("numbers", [{"block": 0}, {"alignment": 0}, {"result": 0}])
def test_accumulator_rejects_zero_sizes(numbers):
    with pytest.raises(ValueError, match=next(iter(numbers))):
        Accumulator(name="mine", **numbers)
