"""Gradients of torch's own kernels on a CPU, and what they round on the way."""

import pytest
import torch
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

MASKS = {
    "full": Spec.of("full"),
    "causal": Spec.of("causal"),
    "window": Spec.of("sliding_window", window=7),
    "padding": Spec.of("padding", lengths=[0, 33]),
}


def small(**changes) -> Problem:
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 40, "kv": 57, "head_dim": 16}
    return Problem(**(sizes | {"backward": True} | changes))


def rounded_sums(problem: Problem) -> int:
    """How often flash rounds a running dK: tiles of 32 rows, of every head that shares it."""
    tiles = -(-problem.query // 32)
    return tiles * problem.group if problem.dtype != "fp32" else 0


def run(subject, inputs):
    assert subject.unsupported(inputs.problem, "cpu") is None
    found = InProcess().run(subject, inputs)
    assert isinstance(found, Execution), found
    return found.outputs


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("backend", ["math", "flash"])
def test_gradients_of_sdpa(backend, dtype, mask):
    problem = small(dtype=dtype, mask=MASKS[mask])
    inputs = draw_inputs(problem)
    sums = rounded_sums(problem) if backend == "flash" else 0
    outputs = run(Sdpa(backend), inputs)
    assert exact_gradients(inputs, sums_in_storage=sums).excess(outputs) <= 1


@pytest.mark.parametrize("backend", ["math", "flash"])
def test_an_added_score_has_no_gradient_of_its_own(backend):
    inputs = draw_inputs(small(dtype="bf16", score=Spec.of("alibi"), mask=MASKS["causal"]))
    sums = rounded_sums(inputs.problem) if backend == "flash" else 0
    outputs = run(Sdpa(backend), inputs)
    assert exact_gradients(inputs, sums_in_storage=sums).excess(outputs) <= 1


@pytest.mark.parametrize("backend", ["math", "flash"])
def test_another_loss_is_more_than_rounding(backend):
    """Of the mask beside the one that was asked for."""
    inputs = draw_inputs(small(dtype="bf16", mask=MASKS["window"]))
    wider = inputs.problem.replace(mask=Spec.of("sliding_window", window=8))
    sums = rounded_sums(inputs.problem)
    outputs = Sdpa(backend).run(inputs.replace(problem=wider))
    assert exact_gradients(inputs, sums_in_storage=sums).excess(outputs) > 1


class Rounded(TorchDispatchMode):
    """Operations of a backward that give 16-bit numbers, by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = func(*args, **(kwargs or {}))
        first = given[0] if isinstance(given, tuple) else given
        if isinstance(first, torch.Tensor) and first.dtype == torch.bfloat16:
            self.names.append(func.overloadpacket.__name__)
        return given


def test_the_unfused_formula_rounds_only_its_results():
    """Neither dP nor the gradients of a head: its arithmetic declares no such thing."""
    problem = small(dtype="bf16")
    call = Sdpa("math").prepare(draw_inputs(problem))
    with Rounded() as rounded:
        call()
    assert set(rounded.names) <= {"_to_copy", "detach", "alias"}
    assert rounded.names.count("_to_copy") <= 5  # out, its weights, dq, dk and dv
    arithmetic = Sdpa("math").arithmetic(problem, "cpu")
    assert arithmetic.rounds_value_products is None
    assert not arithmetic.sums_rounded_heads


@pytest.mark.parametrize(("query", "heads"), [(160, 1), (32, 8)], ids=["tiles", "heads"])
def test_flash_adds_gradients_of_16_bits_up_in_16_bits(query, heads):
    """With one key dV is the sum of dO: 2,048 of the first 32 rows, and 4 of all 32 that follow.

    Beside 2,048 bf16 has numbers 16 apart: what is added in it stays there.
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
def test_tiles_of_flash_on_the_cpu_grow_with_the_rows(query, rows):
    """With 2,048 in a row of the first tile and less than 8 in each other one, all others are lost.

    Were the tile longer, it would hold two of them: 12 beside 2,048 are not lost.
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


def test_a_gpus_fused_kernels_declare_what_they_round():
    shared = small(heads=4, kv_heads=2, dtype="bf16")
    alone, wide = shared.replace(kv_heads=4), shared.replace(dtype="fp32")
    found = [
        with_rounded_sums(default_arithmetic(each.formats), each, "cuda")
        for each in (shared, alone, wide)
    ]
    assert [each.sums_rounded_heads for each in found] == [True, False, False]
    assert [each.dkv_parts for each in found] == [1, 1, 1]
    assert with_rounded_weights(default_arithmetic(shared.formats)).rereads_weights
    assert not with_rounded_weights(default_arithmetic(wide.formats)).rereads_weights


def test_who_gives_gradients_and_of_what():
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


def test_the_graph_is_gone():
    outputs = Sdpa("flash").run(draw_inputs(small()))
    assert not any(tensor.requires_grad for tensor in outputs.tensors().values())
    call = Sdpa("flash").prepare(draw_inputs(small()))
    assert torch.equal(call().dk, call().dk)
