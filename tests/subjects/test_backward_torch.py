"""Gradients of torch's own kernels on a CPU, and the roundings that their arithmetic declares."""

import pytest
import torch
from tests.subjects import sample_problems
from tests.subjects.plain_gradients import exact_gradients
from torch.utils._python_dispatch import TorchDispatchMode

from attncheck.core.declared_arithmetic import default_arithmetic
from attncheck.core.mod_spec import Spec
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.subjects.capabilities import named_kernels
from attncheck.subjects.conventions.torch_arithmetic import with_rounded_sums, with_rounded_weights
from attncheck.subjects.torch_kernels import Flex, Sdpa
from attncheck.verify.executor import Execution, InProcess

CAUSAL, WINDOW = Spec.of("causal"), Spec.of("sliding_window", window=7)
PROBLEMS = {
    "full": {},
    "causal": {"mask": CAUSAL},
    "window": {"mask": WINDOW},
    "padding": {"mask": Spec.of("padding", lengths=[0, 33])},
    "alibi": {"mask": CAUSAL, "score": Spec.of("alibi")},
}


def small(**changes) -> Problem:
    return sample_problems.small(**({"kv": 57, "backward": True} | changes))


def count_rounded_sums(problem: Problem) -> int:
    """How often flash rounds a running dK: once for 32 rows of each head that shares it."""
    tiles = -(-problem.query // 32)
    return tiles * problem.group if problem.dtype != "fp32" else 0


def run(subject, inputs):
    assert subject.unsupported(inputs.problem, "cpu") is None
    result = InProcess().run(subject, inputs)
    assert isinstance(result, Execution), result
    return result.outputs


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("backend", ["math", "flash"])
def test_gradients_of_sdpa_are_within_rounding(backend, dtype, name):
    problem = small(dtype=dtype, **PROBLEMS[name])
    inputs = draw_inputs(problem)
    sums = count_rounded_sums(problem) if backend == "flash" else 0
    outputs = run(Sdpa(backend), inputs)
    assert exact_gradients(inputs, sums_in_storage=sums).excess(outputs) <= 1


@pytest.mark.parametrize("backend", ["math", "flash"])
def test_gradients_of_a_window_one_key_too_wide_are_more_than_rounding(backend):
    inputs = draw_inputs(small(dtype="bf16", mask=WINDOW))
    wider = inputs.problem.replace(mask=Spec.of("sliding_window", window=8))
    sums = count_rounded_sums(inputs.problem)
    outputs = Sdpa(backend).run(inputs.replace(problem=wider))
    assert exact_gradients(inputs, sums_in_storage=sums).excess(outputs) > 1


class RoundingOperations(TorchDispatchMode):
    """Names of the operations that return bf16."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple) else result
        if isinstance(first, torch.Tensor) and first.dtype == torch.bfloat16:
            self.names.append(func.overloadpacket.__name__)
        return result


def test_sdpa_math_rounds_only_its_results():
    """It rounds neither dP nor the gradients of a head, as its arithmetic declares."""
    problem = small(dtype="bf16")
    call = Sdpa("math").prepare(draw_inputs(problem))
    with RoundingOperations() as rounding:
        call()
    assert set(rounding.names) <= {"_to_copy", "detach", "alias"}
    assert rounding.names.count("_to_copy") <= 5  # out, its weights, dq, dk and dv
    arithmetic = Sdpa("math").arithmetic(problem, "cpu")
    assert arithmetic.rounds_value_products is None
    assert not arithmetic.sums_rounded_heads


@pytest.mark.parametrize(("query", "heads"), [(160, 1), (32, 8)], ids=["tiles", "heads"])
def test_sdpa_flash_sums_bf16_gradients_in_bf16(query, heads):
    """With one key dV is the sum of dO: 2,048 from the first 32 rows, 4 from each further 32.

    Near 2,048 bf16 numbers are 16 apart: a running sum in bf16 loses every 4 that is added.
    """
    problem = small(batch=1, heads=heads, kv_heads=1, query=query, kv=1, dtype="bf16")
    inputs = draw_inputs(problem)
    dout = torch.full_like(inputs.dout, 4 / 32)
    dout[:, 0, :32] = 2048 / 32
    inputs = inputs.replace(dout=dout)
    exact = dout.double().sum((1, 2))
    assert (exact > 2048 + 8).all()
    fp32 = Sdpa("math").run(inputs).dv[:, 0, 0]
    assert torch.equal(fp32, exact.bfloat16())
    assert (Sdpa("flash").run(inputs).dv == 2048).all()
    parts = heads * -(-query // 32)
    assert Sdpa("flash").arithmetic(problem, "cpu").dkv_parts == parts
    assert Sdpa("flash").arithmetic(problem.replace(dtype="fp32"), "cpu").dkv_parts == 1


@pytest.mark.parametrize(("query", "rows"), [(191, 32), (192, 64), (767, 64), (768, 256)])
def test_tiles_of_sdpa_flash_on_the_cpu_grow_with_the_rows(query, rows):
    """A tile of ``rows`` rows loses a single 6 beside 2,048, and keeps the sum of two, 12.

    The first tile has 2,048 in a row. One 6 in each other tile is lost; with two in each, or if
    the tiles were longer, the sums are not lost.
    """
    problem = small(batch=1, heads=1, kv_heads=1, query=query, kv=1, dtype="bf16")
    inputs = draw_inputs(problem)
    dout = torch.zeros_like(inputs.dout)
    dout[:, :, 0] = 2048
    dout[:, :, rows::rows] = 6
    assert (Sdpa("flash").run(inputs.replace(dout=dout)).dv == 2048).all()
    dout[:, :, rows + 1 :: rows] = 6
    assert (Sdpa("flash").run(inputs.replace(dout=dout)).dv > 2048).all()
    assert Sdpa("flash").arithmetic(problem, "cpu").dkv_parts == -(-query // rows)


def test_fused_kernels_on_a_gpu_declare_their_roundings():
    shared = small(heads=4, kv_heads=2, dtype="bf16")
    alone, wide = shared.replace(kv_heads=4), shared.replace(dtype="fp32")
    arithmetics = [
        with_rounded_sums(default_arithmetic(each.formats), each, "cuda")
        for each in (shared, alone, wide)
    ]
    assert [each.sums_rounded_heads for each in arithmetics] == [True, False, False]
    assert [each.dkv_parts for each in arithmetics] == [1, 1, 1]
    assert with_rounded_weights(default_arithmetic(shared.formats)).rereads_weights
    assert not with_rounded_weights(default_arithmetic(wide.formats)).rereads_weights


def test_builtin_kernels_declare_and_refuse_gradients():
    assert all(
        named_kernels.subject_named(name).backward for name in ("ideal", "sdpa-math", "flex")
    )
    assert not named_kernels.subject_named("triton-flash1").concerns(small())
    reason = "it gives no LSE, of which the loss is a function"
    assert Sdpa("math").unsupported(small(dlse=True), "cpu") == reason
    on_cpu = Flex().unsupported(small(), "cpu")
    assert on_cpu == "torch: FlexAttention does not support backward on CPU"
    assert Flex().unsupported(small(), "cuda") is None
    assert Flex().unsupported(small(backward=False), "cpu") is None
    large = small(query=30_000, kv=30_000, batch=64)
    assert "scores and weights in fp32" in Sdpa("math").unsupported(large, "cpu")


def test_repeated_calls_give_equal_gradients_without_a_graph():
    outputs = Sdpa("flash").run(draw_inputs(small()))
    assert not any(tensor.requires_grad for tensor in outputs.tensors().values())
    call = Sdpa("flash").prepare(draw_inputs(small()))
    assert torch.equal(call().dk, call().dk)
