"""Inputs of attention: drawn once, rounded once, and checked against their Problem."""

import hashlib
import math

import numpy as np
import pytest
import torch
from tests.messages import one_line

from attncheck.core import draws, strided_alloc
from attncheck.core.errors import ProblemError
from attncheck.core.formats import DTYPES, FORMATS, MEASURED_DTYPES, round_to
from attncheck.inputs import distributions, input_tensors
from attncheck.inputs.distributions import DISTRIBUTIONS, Sizes
from attncheck.inputs.problem import Problem

UNSCALED = [name for name, dtype in DTYPES.items() if not dtype.scaled]  # fp8: test_inputs_fp8.py
SMALL = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 5, "kv": 7, "head_dim": 24}


def exact(problem: Problem) -> list[torch.Tensor]:
    sizes = Sizes(**{n: getattr(problem, n) for n in Sizes.__dataclass_fields__})
    drawn = distributions.draw(problem.distribution, sizes, problem.seed)
    return [torch.from_numpy(tensor) for tensor in drawn]


def tensors(drawn: input_tensors.Inputs) -> tuple[torch.Tensor, ...]:
    return drawn.q, drawn.k, drawn.v


def equal(a: input_tensors.Inputs, b: input_tensors.Inputs) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


@pytest.mark.parametrize("dtype", MEASURED_DTYPES)
def test_inputs_have_the_problems_shapes_and_storage_dtype(dtype):
    problem = Problem(**SMALL, value_dim=40, dtype=dtype)
    drawn = input_tensors.draw_inputs(problem)
    assert drawn.q.shape == (2, 4, 5, 24)
    assert drawn.k.shape == (2, 2, 7, 24)
    assert drawn.v.shape == (2, 2, 7, 40)
    stored = torch.float32 if dtype == "tf32" else FORMATS[dtype].torch_dtype
    assert {tensor.dtype for tensor in tensors(drawn)} == {stored}
    assert all(tensor.is_contiguous() for tensor in tensors(drawn))


@pytest.mark.parametrize("dtype", UNSCALED)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_stored_numbers_are_the_drawn_ones_rounded_once(dtype, name):
    problem = Problem(**SMALL, dtype=dtype, distribution=name, seed=3)
    fmt = problem.formats.storage
    for stored, drawn in zip(
        tensors(input_tensors.draw_inputs(problem)), exact(problem), strict=True
    ):
        assert torch.equal(stored.double(), round_to(drawn, fmt))


def test_inputs_in_several_chunks_are_rounded_once_where_a_cast_rounds_twice():
    problem = Problem(query=2**12, kv=1, head_dim=256, dtype="bf16")
    assert problem.query * problem.head_dim > 3 * input_tensors._CHUNK["cpu"]
    (q, *_), stored = exact(problem), input_tensors.draw_inputs(problem).q
    assert torch.equal(stored.double(), round_to(q, FORMATS["bf16"]))
    assert not torch.equal(stored, q.float().to(torch.bfloat16))


def test_inputs_have_the_golden_bits():
    drawn = input_tensors.draw_inputs(Problem(**SMALL, dtype="bf16", seed=2026))
    digest = hashlib.sha256()
    for tensor in tensors(drawn):
        digest.update(tensor.view(torch.int16).numpy().astype("<i2").tobytes())
    assert digest.hexdigest()[:16] == "7461bcd3177afa36"


def test_inputs_depend_on_the_problem_and_its_seed_alone():
    problem = Problem(**SMALL)
    assert equal(input_tensors.draw_inputs(problem), input_tensors.draw_inputs(problem))
    assert not equal(
        input_tensors.draw_inputs(problem), input_tensors.draw_inputs(problem.replace(seed=1))
    )


def test_fp32_and_tf32_problems_store_the_same_numbers():
    fp32, tf32 = (
        input_tensors.draw_inputs(Problem(**SMALL, dtype=dtype)) for dtype in ("fp32", "tf32")
    )
    assert equal(fp32, tf32)


@pytest.mark.parametrize("dtype", UNSCALED)
def test_promotion_to_float64_is_exact(dtype):
    drawn = input_tensors.draw_inputs(Problem(**SMALL, dtype=dtype, distribution="outliers"))
    for stored, promoted in zip(tensors(drawn), drawn.promoted(), strict=True):
        assert promoted.dtype == torch.float64
        assert torch.equal(promoted.to(stored.dtype), stored)


def largest(name: str, **sizes: int) -> float:
    """Return the largest magnitude of a distribution's numbers after rounding to fp16."""
    problem = Problem(**sizes, dtype="fp16", distribution=name)
    fp16 = FORMATS["fp16"]
    return max(float(round_to(tensor.abs().max(), fp16)) for tensor in exact(problem))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_fp16_never_overflows_at_any_head_dim(name):
    for head_dim in range(1, 257):
        assert math.isfinite(largest(name, query=5, kv=20, head_dim=head_dim)), head_dim


@pytest.mark.parametrize("name", ["one_hot", "sink"])  # their numbers grow with kv
def test_fp16_never_overflows_with_many_keys(name):
    for head_dim in (1, 15, 16, 31):
        assert math.isfinite(largest(name, query=1, kv=2**16, head_dim=head_dim, value_dim=1))


def test_overflow_test_fails_for_a_number_too_large(monkeypatch):
    huge = distributions.Distribution(
        name="normal",
        summary="too large for fp16",
        draw=lambda _draws, sizes: tuple(
            np.full(shape, 65521.0) for shape in (sizes.q, sizes.k, sizes.v)
        ),
    )
    monkeypatch.setitem(DISTRIBUTIONS, "normal", huge)
    with pytest.raises(AssertionError):
        test_fp16_never_overflows_at_any_head_dim("normal")


def test_replace_changes_the_given_fields_and_to_moves_all_tensors():
    drawn = input_tensors.draw_inputs(Problem(**SMALL))
    zero = torch.zeros_like(drawn.v)
    other = drawn.replace(v=zero)
    assert other.v is zero
    assert other.q is drawn.q
    assert other.problem is drawn.problem
    half = Problem(**SMALL | {"query": 4})
    assert drawn.replace(problem=half, q=drawn.q[:, :, :4]).q.shape[2] == 4
    assert {tensor.device.type for tensor in tensors(drawn.to("meta"))} == {"meta"}
    assert equal(drawn.to("cpu"), drawn)


def test_tensors_of_another_shape_or_dtype_are_rejected():
    drawn = input_tensors.draw_inputs(Problem(**SMALL))
    with one_line(ProblemError, whole="k.shape=(2, 1, 7, 24), but should be (2, 2, 7, 24)."):
        drawn.replace(k=drawn.k[:, :1])
    with one_line(ProblemError, whole="v.dtype=torch.float32, but should be torch.bfloat16."):
        drawn.replace(v=drawn.v.float())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("changes", [{}, {"dtype": "e4m3"}, {"backward": True}], ids=str)
def test_gpu_gives_the_same_bits(changes, monkeypatch):
    """With so small a SPAN, the GPU draws the numbers itself."""
    problem = Problem(**SMALL | changes)
    for module in (draws, input_tensors):
        monkeypatch.setattr(module, "SPAN", 16)
    on_gpu, on_cpu = (input_tensors.unrounded_inputs(problem, place) for place in ("cuda", "cpu"))
    assert equal(on_gpu.to("cpu"), on_cpu)
    assert input_tensors._is_drawn_there(problem, "cuda")
    drawn = input_tensors.draw_inputs(problem, "cuda")
    assert drawn.q.is_cuda
    assert equal(drawn.to("cpu"), input_tensors.draw_inputs(problem))


LARGE = Problem(heads=16, query=2048, kv=64, head_dim=64)  # 2 million numbers of q


@pytest.mark.parametrize(
    ("problem", "device", "gigabytes", "on_gpu"),
    [
        (LARGE, "cuda", 8, True),
        (LARGE, "cuda:1", 8, True),
        (LARGE, "cuda", 1, False),
        (LARGE.replace(query=64), "cuda", 8, False),
        (LARGE, "cpu", 8, False),
    ],
)
def test_gpu_draws_only_many_numbers_and_with_enough_memory(
    problem, device, gigabytes, on_gpu, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (gigabytes << 30, 80 << 30))
    assert input_tensors._is_drawn_there(problem, device) is on_gpu


def test_cpu_draws_where_the_gpu_runs_out_of_memory(monkeypatch):
    """Memory of the failed attempt is released, so that the kernel can use it."""
    released, unrounded = [], input_tensors.unrounded_inputs

    def exhausted(problem, place="cpu"):
        if place != "cpu":
            raise torch.OutOfMemoryError
        return unrounded(problem)

    monkeypatch.setattr(input_tensors, "_is_drawn_there", lambda *_: True)
    monkeypatch.setattr(input_tensors, "unrounded_inputs", exhausted)
    monkeypatch.setattr(strided_alloc, "release_cached_memory", released.append)
    problem = Problem(**SMALL)
    drawn = input_tensors.draw_inputs(problem, "meta")
    assert drawn.device.type == "meta"
    assert released == ["meta"]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.mT.contiguous().mT,
        lambda x: torch.nn.functional.pad(x, (3, 2), value=torch.nan)[..., 3:-2],
        lambda x: torch.cat((x.new_full((1,), torch.nan), x.flatten()))[1:].view(x.shape),
        lambda x: x[:, :1].expand_as(x),
    ],
    ids=["transposed", "gapped", "offset", "expanded"],
)
def test_clone_has_the_same_strides_and_its_own_memory(view):
    drawn = input_tensors.draw_inputs(Problem(**SMALL))
    laid_out = drawn.replace(k=view(drawn.k))
    cloned = laid_out.clone()
    assert torch.equal(cloned.k, laid_out.k)
    assert cloned.k.stride() == laid_out.k.stride()
    assert cloned.k.storage_offset() == laid_out.k.storage_offset()
    cloned.k.zero_()
    assert bool(laid_out.k.any())
