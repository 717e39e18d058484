"""The arithmetic by which each kernel of ours is judged; nothing here needs a GPU."""

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
    """A GPU, as far as a kernel that is asked for its arithmetic can tell."""
    capability = {"cpu": None, "cuda": HOPPER}
    monkeypatch.setattr(subject, "capability", capability.__getitem__)


class Silent(Subject):
    """Declares nothing; tests say how it is tiled."""

    name, summary = "silent", "declares nothing"
    tiles: Tiling | None = None

    def unsupported(self, problem, device):
        return None

    def prepare(self, inputs):
        raise NotImplementedError

    def tiling(self, problem, device):
        return self.tiles


@pytest.mark.parametrize("dtype", [*OTHERS, "tf32", *FP8])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_of_a_kernel_that_declares_nothing_the_default_is_assumed(hopper, dtype, device):
    problem = ATTENTION.replace(dtype=dtype)
    assumed = default_arithmetic(problem.formats, HOPPER if device == "cuda" else None)
    assert Silent().arithmetic(problem, device) == assumed


def test_tiles_that_are_declared_are_taken_where_they_allow_more(hopper):
    silent, assumed = Silent(), default_arithmetic(ATTENTION.formats, None)
    silent.tiles = Tiling(block_query=64, block_kv=2 * assumed.block_kv)
    assert silent.arithmetic(ATTENTION, "cpu") == assumed
    silent.tiles = Tiling(block_query=64, block_kv=2, lazy_rescale=8.0)
    declared = dataclasses.replace(assumed, block_kv=2, lazy_rescale=8.0)
    assert silent.arithmetic(ATTENTION, "cpu") == declared


@pytest.mark.parametrize("dtype", FP8)
def test_fp8_kernels_that_ask_for_fp32_sums_are_judged_by_these(hopper, dtype):
    problem = ATTENTION.replace(dtype=dtype)
    assert Silent().arithmetic(problem, "cuda").scores == HOPPER_FP8  # or this shows nothing
    for kernel in (Flash1, Flash2, Flash2TransposedValues):
        found = kernel().arithmetic(problem, "cuda")
        assert (found.scores, found.values) == (FP32, FP32)
    left = Flash2FastAccumulation().arithmetic(problem, "cuda")
    assert (left.scores, left.values) == (HOPPER_FP8, HOPPER_FP8)


@pytest.mark.parametrize("dtype", FP8)
def test_the_interpreter_adds_up_in_fp32(hopper, dtype):
    found = Flash2FastAccumulation().arithmetic(ATTENTION.replace(dtype=dtype), "cpu")
    assert (found.scores, found.values) == (FP32, FP32)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kernel", [Flash1, Flash2])
def test_tf32_operands_of_triton_are_truncated_everywhere(hopper, kernel, device):
    problem = ATTENTION.replace(dtype="tf32")
    assert kernel().arithmetic(problem, device).truncates
    for dtype in (*OTHERS, *FP8):
        assert not kernel().arithmetic(problem.replace(dtype=dtype), device).truncates


@pytest.mark.parametrize(("tf32", "truncates"), [("nearest", False), ("truncate", True)])
def test_the_ideal_kernel_rounds_tf32_as_it_was_made_to(hopper, tf32, truncates):
    kernel = Ideal(tf32=tf32)
    assert kernel.arithmetic(ATTENTION.replace(dtype="tf32"), "cuda").truncates is truncates
    assert not kernel.arithmetic(ATTENTION, "cuda").truncates


@pytest.mark.parametrize("dtype", FP8)
def test_the_ideal_kernel_adds_up_in_fp32_on_a_gpu_too(hopper, dtype):
    found = Ideal().arithmetic(ATTENTION.replace(dtype=dtype), "cuda")
    assert (found.scores, found.values) == (FP32, FP32)


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("kernel", [Flash1, Flash2, Ideal])
def test_ours_multiply_p_by_the_scale_of_the_dtype(hopper, kernel, dtype):
    problem = ATTENTION.replace(dtype=dtype)
    for device in ("cpu", "cuda"):
        found = kernel().arithmetic(problem, device)
        assert found.weights_scale == problem.formats.weights_scale > 1


def test_a_lazy_maximum_takes_its_part_of_the_scale():
    tiling = Tiling(block_query=64, block_kv=64, lazy_rescale=8.0)
    found = Ideal(tiling).arithmetic(ATTENTION.replace(dtype="e4m3"), "cpu")
    assert (found.weights_scale, found.lazy_rescale) == (1.0, 8.0)  # 256 = 1 · 2^8


@pytest.mark.parametrize("kernel", builtin_names())
@pytest.mark.parametrize("dtype", [*OTHERS, "tf32", *FP8])
def test_every_kernel_has_one_with_the_output_of_the_problem(hopper, kernel, dtype):
    subject = subject_named(kernel)
    for problem in (ATTENTION.replace(dtype=dtype), Problem(operation="softmax", query=5)):
        if subject.concerns(problem):
            for device in ("cpu", "cuda"):
                found = subject.arithmetic(problem, device)
                assert found.output == problem.formats.output
                assert str(found)


@pytest.mark.parametrize("kernel", [Flash1, Ideal])
def test_flash1_declares_that_it_divides_after_every_tile(kernel):
    tiling = Tiling(block_query=32, block_kv=32, recurrence="flash1")
    subject = Ideal(tiling) if kernel is Ideal else kernel()
    assert subject.arithmetic(ATTENTION, "cpu").divides_each_step
    assert not Flash2().arithmetic(ATTENTION, "cpu").divides_each_step


@pytest.mark.parametrize("kernel", [Flash1, Flash2, Ideal, Flex])
def test_kernels_that_call_a_full_tanh_declare_it_where_a_score_mod_may_call_it(kernel):
    softcap = ATTENTION.replace(score=Spec.of("softcap", cap=20.0))
    assert kernel().arithmetic(softcap, "cpu").tanh_error == 0
    assert kernel().arithmetic(ATTENTION, "cpu").tanh_error > 0


@pytest.mark.parametrize(
    ("dim", "kv", "splits"),
    [(64, 256, 1), (64, 1024, 4), (64, 257, 2), (128, 1024, 8), (256, 1024, 16), (64, 10**6, 128)],
)
def test_flash_of_torch_may_cut_keys_on_a_gpu_into_whole_blocks(hopper, dim, kv, splits):
    problem = Problem(query=1, kv=kv, head_dim=dim, dtype="bf16")
    assert Sdpa("flash").arithmetic(problem, "cuda").splits == splits
    assert Sdpa("flash").arithmetic(problem, "cpu").splits == 1
    assert Sdpa("efficient").arithmetic(problem, "cuda").splits == 1


@pytest.mark.parametrize("dtype", OTHERS)
def test_the_efficient_kernel_has_p_in_two_tf32_numbers_in_fp32_alone(hopper, dtype):
    problem = ATTENTION.replace(dtype=dtype)
    assumed = default_arithmetic(problem.formats, HOPPER).exp2_ulps
    expected = assumed + 1.0 if dtype == "fp32" else assumed
    assert Sdpa("efficient").arithmetic(problem, "cuda").exp2_ulps == expected


def test_two_tf32_numbers_hold_an_fp32_weight_to_an_ulp():
    ulp = 2.0 ** -FORMATS["fp32"].significand  # of numbers from 1/2 to 1
    weights = 0.75 + ulp * torch.arange(2**14, dtype=torch.float64)
    high = round_to(weights, FORMATS["tf32"])
    off = (high + round_to(weights - high, FORMATS["tf32"]) - weights).abs().max()
    assert off == ulp
