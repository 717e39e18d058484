"""The arithmetic that each built-in kernel declares and is judged by; no test needs a GPU."""

import dataclasses

import pytest
import torch

from attncheck.core.declared_arithmetic import FP32, HOPPER_FP8, default_arithmetic
from attncheck.core.formats import FORMATS, round_to
from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import Problem
from attncheck.subjects.capabilities import subject
from attncheck.subjects.capabilities.named_kernels import builtin_names, subject_named
from attncheck.subjects.capabilities.subject import Subject, Tiling
from attncheck.subjects.ideal import Ideal
from attncheck.subjects.torch_kernels import Flex, Sdpa
from attncheck.subjects.triton_flash import (
    Flash1,
    Flash2,
    Flash2FastAccumulation,
    Flash2TransposedValues,
)

HOPPER = (9, 0)
FP8 = ("e4m3", "e5m2")
OTHERS = ("fp32", "fp16", "bf16")
ATTENTION = Problem(query=100)


@pytest.fixture
def hopper(monkeypatch):
    """Make kernels believe that "cuda" is a Hopper GPU."""
    capability = {"cpu": None, "cuda": HOPPER}
    monkeypatch.setattr(subject, "capability", capability.__getitem__)


class Undeclared(Subject):
    """A Subject that declares no arithmetic; tests set its tiling."""

    name, summary = "undeclared", "declares nothing"
    tiles: Tiling | None = None

    def unsupported(self, problem, device):
        return None

    def prepare(self, inputs):
        raise NotImplementedError

    def tiling(self, problem, device):
        return self.tiles


@pytest.mark.parametrize("dtype", [*OTHERS, "tf32", *FP8])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kernel_without_a_declaration_gets_the_default_arithmetic(hopper, dtype, device):
    problem = ATTENTION.replace(dtype=dtype)
    assumed = default_arithmetic(problem.formats, HOPPER if device == "cuda" else None)
    assert Undeclared().arithmetic(problem, device) == assumed


def test_declared_tiles_replace_the_default_only_where_they_allow_more_error(hopper):
    subject, default = Undeclared(), default_arithmetic(ATTENTION.formats, None)
    subject.tiles = Tiling(block_query=64, block_kv=2 * default.block_kv)
    assert subject.arithmetic(ATTENTION, "cpu") == default
    subject.tiles = Tiling(block_query=64, block_kv=2, lazy_rescale=8.0)
    declared = dataclasses.replace(default, block_kv=2, lazy_rescale=8.0)
    assert subject.arithmetic(ATTENTION, "cpu") == declared


@pytest.mark.parametrize("dtype", FP8)
def test_sums_of_fp8_products_are_judged_as_the_kernel_adds_them(hopper, dtype):
    """A kernel with fp32 sums is judged by these; fast accumulation on a GPU is looser.

    The interpreter adds in fp32 whatever the kernel asks for.
    """
    problem = ATTENTION.replace(dtype=dtype)
    assert Undeclared().arithmetic(problem, "cuda").scores == HOPPER_FP8  # else it is no evidence
    for kernel, device, sums in (
        (Flash1, "cuda", FP32),
        (Flash2, "cuda", FP32),
        (Flash2TransposedValues, "cuda", FP32),
        (Ideal, "cuda", FP32),
        (Flash2FastAccumulation, "cuda", HOPPER_FP8),
        (Flash2FastAccumulation, "cpu", FP32),
    ):
        arithmetic = kernel().arithmetic(problem, device)
        assert (arithmetic.scores, arithmetic.values) == (sums, sums), (kernel, device)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kernel", [Flash1, Flash2])
def test_triton_kernels_truncate_tf32_operands_on_every_device(hopper, kernel, device):
    problem = ATTENTION.replace(dtype="tf32")
    assert kernel().arithmetic(problem, device).truncates
    for dtype in (*OTHERS, *FP8):
        assert not kernel().arithmetic(problem.replace(dtype=dtype), device).truncates


@pytest.mark.parametrize(("tf32", "truncates"), [("nearest", False), ("truncate", True)])
def test_ideal_kernel_declares_its_tf32_rounding(hopper, tf32, truncates):
    kernel = Ideal(tf32=tf32)
    assert kernel.arithmetic(ATTENTION.replace(dtype="tf32"), "cuda").truncates is truncates
    assert not kernel.arithmetic(ATTENTION, "cuda").truncates


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("kernel", [Flash1, Flash2, Ideal])
def test_builtin_kernels_scale_p_into_the_range_of_fp8(hopper, kernel, dtype):
    problem = ATTENTION.replace(dtype=dtype)
    for device in ("cpu", "cuda"):
        arithmetic = kernel().arithmetic(problem, device)
        assert arithmetic.weights_scale == problem.formats.weights_scale > 1


def test_lazy_rescaling_reduces_the_scale_of_p():
    tiling = Tiling(block_query=64, block_kv=64, lazy_rescale=8.0)
    arithmetic = Ideal(tiling).arithmetic(ATTENTION.replace(dtype="e4m3"), "cpu")
    assert (arithmetic.weights_scale, arithmetic.lazy_rescale) == (1.0, 8.0)  # 256 = 1 · 2^8


@pytest.mark.parametrize("kernel", builtin_names())
@pytest.mark.parametrize("dtype", [*OTHERS, "tf32", *FP8])
def test_every_builtin_kernel_has_an_arithmetic_with_the_output_format(hopper, kernel, dtype):
    subject = subject_named(kernel)
    for problem in (ATTENTION.replace(dtype=dtype), Problem(operation="softmax", query=5)):
        if subject.concerns(problem):
            for device in ("cpu", "cuda"):
                arithmetic = subject.arithmetic(problem, device)
                assert arithmetic.output == problem.formats.output
                assert str(arithmetic)


def test_only_flash1_declares_division_after_every_tile():
    tiling = Tiling(block_query=32, block_kv=32, recurrence="flash1")
    assert Flash1().arithmetic(ATTENTION, "cpu").divides_each_step
    assert Ideal(tiling).arithmetic(ATTENTION, "cpu").divides_each_step
    assert not Flash2().arithmetic(ATTENTION, "cpu").divides_each_step


@pytest.mark.parametrize("kernel", [Flash1, Flash2, Ideal, Flex])
def test_kernels_with_an_exact_tanh_declare_it_for_score_mods_that_call_it(kernel):
    softcap = ATTENTION.replace(score=Spec.of("softcap", cap=20.0))
    assert kernel().arithmetic(softcap, "cpu").tanh_error == 0
    assert kernel().arithmetic(ATTENTION, "cpu").tanh_error > 0


@pytest.mark.parametrize(
    ("dim", "kv", "splits"),
    [(64, 256, 1), (64, 1024, 4), (64, 257, 2), (128, 1024, 8), (256, 1024, 16), (64, 10**6, 128)],
)
def test_sdpa_flash_splits_keys_into_whole_blocks_on_a_gpu(hopper, dim, kv, splits):
    problem = Problem(query=1, kv=kv, head_dim=dim, dtype="bf16")
    assert Sdpa("flash").arithmetic(problem, "cuda").splits == splits
    assert Sdpa("flash").arithmetic(problem, "cpu").splits == 1
    assert Sdpa("efficient").arithmetic(problem, "cuda").splits == 1


@pytest.mark.parametrize("dtype", OTHERS)
def test_sdpa_efficient_has_one_more_ulp_of_p_in_fp32(hopper, dtype):
    """It holds an fp32 weight as two tf32 numbers, which costs an ulp (shown below)."""
    problem = ATTENTION.replace(dtype=dtype)
    default = default_arithmetic(problem.formats, HOPPER).exp2_ulps
    expected = default + 1.0 if dtype == "fp32" else default
    assert Sdpa("efficient").arithmetic(problem, "cuda").exp2_ulps == expected


def test_two_tf32_numbers_hold_an_fp32_weight_within_one_ulp():
    ulp = 2.0 ** -FORMATS["fp32"].significand  # for numbers from 1/2 to 1
    weights = 0.75 + ulp * torch.arange(2**14, dtype=torch.float64)
    high = round_to(weights, FORMATS["tf32"])
    error = (high + round_to(weights - high, FORMATS["tf32"]) - weights).abs().max()
    assert error == ulp
