"""torch's flex_attention as a Subject: LSE, compilation, block masks, settings and refusals."""

import math

import pytest
import torch
from tests.subjects import sample_problems
from tests.subjects.sample_problems import MASKS, SCORES
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention

from attncheck.core.formats import fp32
from attncheck.core.mod_spec import Entry, Spec
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.mods import library
from attncheck.subjects import torch_kernels
from attncheck.subjects.capabilities.subject import Refused
from attncheck.subjects.torch_kernels import Flex


def small(**changes) -> Problem:
    return sample_problems.small(**({"value_dim": 8} | changes))


def test_lse_is_natural():
    """With q = 0, LSE is log n. torch computes it in base 2 and converts: two more roundings."""
    inputs = draw_inputs(small(kv=64, dtype="fp32"))
    lse = Flex().run(inputs.replace(q=torch.zeros_like(inputs.q))).lse
    log_n = fp32(math.log(64))
    ulp = math.ulp(log_n) * 2**29  # fp32's
    assert (lse.double() - log_n).abs().max() <= 2 * ulp


def test_nineteen_problems_run_without_hitting_the_recompile_limit():
    """torch stops compiling one function at the ninth structure, or fails."""
    for window in range(1, 20):
        Flex().run(
            draw_inputs(small(query=8 + window, mask=Spec.of("sliding_window", window=window)))
        )


def test_each_problem_structure_is_compiled_as_a_separate_function():
    codes = set()
    for query in range(1, 20):
        compiled = torch_kernels._compiled(small(query=query))
        codes.add(compiled._torchdynamo_orig_callable.__code__)
    assert len(codes) == 19
    assert torch_kernels._compiled(small(query=3)) is torch_kernels._compiled(small(query=3))


@pytest.mark.parametrize(("mask", "sequences"), [("causal", 1), ("padding", 2), ("full", 1)])
def test_block_mask_has_only_the_axes_that_the_mask_depends_on(mask, sequences):
    blocks = torch_kernels.flex_block_mask(small(mask=MASKS[mask]), "cpu")
    assert blocks.shape == (sequences, 1, 40, 40)


def test_unsupported_problems_have_a_reason():
    assert Flex().unsupported(small(dtype="tf32"), "cpu") == "the CPU has no tf32 products"
    reason = "head_dim=16 value_dim=8: compiled flex_attention needs at least 16"
    assert Flex().unsupported(small(), "cuda") == reason
    assert Flex().unsupported(small(value_dim=16, dtype="tf32"), "cuda") is None


def test_settings_of_torch_are_restored():
    def settings():
        return (
            flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG,
            torch.backends.cuda.matmul.fp32_precision,
            torch.get_float32_matmul_precision(),
            torch.is_grad_enabled(),
        )

    before = settings()
    call = Flex().prepare(draw_inputs(small(mask=MASKS["causal"], score=SCORES["softcap"])))
    assert torch.equal(call().out, call().out)
    assert settings() == before


TABLE = torch.arange(57, dtype=torch.float64) / 8


@pytest.mark.parametrize(
    "wide",
    [
        lambda score, b, h, q_idx, kv_idx: score + TABLE[kv_idx],
        lambda score, b, h, q_idx, kv_idx: score.to(torch.float64) * 2.0,
    ],
    ids=["a table", "a cast"],
)
def test_float64_score_mod_is_within_rounding(wide, exact, monkeypatch):
    monkeypatch.setitem(library.SCORES, "wide", Entry(summary="", build=lambda *_: wide))
    inputs = draw_inputs(small(kv=57, dtype="bf16", score=Spec.of("wide")))
    outputs = Flex().run(inputs)
    assert (outputs.out.dtype, outputs.lse.dtype) == (torch.bfloat16, torch.float32)
    assert exact(inputs).excess(outputs) <= 1


def test_other_numbers_of_a_score_mod_do_not_recompile():
    """dynamo compares a function's code and captures, so the wrapper must be the same each time."""
    counter = CompileCounter()
    compiled = torch.compile(_apply, backend=counter, fullgraph=True, dynamic=False)
    for seed in (1, 1, 2, 3):
        spec = Spec.of("relative_bias", distance=9, seed=seed)
        mod = torch_kernels.flex_score_mod(small(score=spec), "cpu")
        for _ in range(2):
            compiled(mod, torch.zeros(4))
    assert counter.frame_count == 1


def _apply(mod, scores):
    index = torch.arange(4)
    return mod(scores, index * 0, index % 2, index, index)


@pytest.mark.parametrize(
    ("message", "refuses"),
    [
        ("NoValidChoicesError: No choices to select", True),
        ("OutOfMemoryError: out of resource: Required: 245760 Hardware limit:232448", True),
        ("AssertionError: a bug", False),
    ],
)
def test_inductor_error_is_a_refusal_only_where_no_tile_fits_the_gpu(message, refuses):
    from torch._inductor.exc import InductorError

    def call():
        raise InductorError(RuntimeError(message), None)

    with pytest.raises(Refused if refuses else InductorError):
        torch_kernels._compile_now(call)
