"""The ideal kernel and torch's kernels: correct for all masks, score mods, scales and heads."""

import pytest
import torch
from tests.subjects.sample_problems import MASKS, SCORES, small

from attncheck.core.formats import DTYPES, MEASURED_DTYPES
from attncheck.core.mod_spec import Spec
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.subjects.capabilities import subject
from attncheck.subjects.ideal import Ideal
from attncheck.subjects.torch_kernels import Flex, Sdpa

KERNELS = {
    "ideal": Ideal(),
    "flex": Flex(),
    "sdpa-math": Sdpa("math"),
    "sdpa-flash": Sdpa("flash"),
}
TORCH_KERNELS = ("flex", "sdpa-math", "sdpa-flash")
IN_DTYPES = [("ideal", dtype) for dtype in MEASURED_DTYPES]
IN_DTYPES += [(kernel, dtype) for kernel in TORCH_KERNELS for dtype in ("fp32", "bf16")]
WINDOW_0 = Spec.of("sliding_window", window=0)


@pytest.mark.parametrize("lengths", [(40, 150), (150, 40)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("kernel", "dtype"), IN_DTYPES)
def test_masked_attention_is_within_rounding(kernel, dtype, mask, lengths, exact):
    query, kv = lengths
    wide = {} if kernel == "sdpa-flash" else {"value_dim": 8}
    problem = small(query=query, kv=kv, dtype=dtype, mask=MASKS[mask], **wide)
    assert KERNELS[kernel].unsupported(problem, "cpu") is None
    inputs = draw_inputs(problem)
    outputs = KERNELS[kernel].run(inputs)
    assert outputs.out.dtype == DTYPES[dtype].output.torch_dtype
    if kernel.startswith("sdpa"):
        assert outputs.lse is None
    else:
        assert outputs.lse.dtype == torch.float32
    assert exact(inputs).excess(outputs) <= 1


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [*IN_DTYPES[: len(MEASURED_DTYPES)], *(("flex", d) for d in ("fp32", "fp16", "bf16"))],
)
def test_attention_with_a_score_mod_is_within_rounding(kernel, dtype, score, exact):
    inputs = draw_inputs(small(kv=101, dtype=dtype, score=SCORES[score], mask=MASKS["causal"]))
    assert exact(inputs).excess(KERNELS[kernel].run(inputs)) <= 1


@pytest.mark.parametrize("kernel", TORCH_KERNELS)
@pytest.mark.parametrize("score", ["none", "alibi"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_with_scale_and_grouped_heads_is_within_rounding(kv_heads, score, kernel, exact):
    """The scale differs from torch's default, 1/√head_dim."""
    problem = small(batch=3, kv_heads=kv_heads, scale=0.7, score=Spec.of(score))
    assert KERNELS[kernel].unsupported(problem, "cpu") is None
    inputs = draw_inputs(problem)
    assert exact(inputs).excess(KERNELS[kernel].run(inputs)) <= 1


@pytest.mark.parametrize("kernel", TORCH_KERNELS)
def test_a_window_one_key_too_wide_is_more_than_rounding(kernel, exact):
    inputs = draw_inputs(small(dtype="bf16", mask=MASKS["window"]))
    wider = inputs.problem.replace(mask=Spec.of("sliding_window", window=8))
    assert exact(inputs).excess(KERNELS[kernel].run(inputs.replace(problem=wider))) > 1


@pytest.mark.parametrize("spec", [MASKS["padding"], WINDOW_0], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_empty_rows_have_zero_out_and_lse_of_minus_infinity(kernel, spec):
    outputs = KERNELS[kernel].run(draw_inputs(small(mask=spec)))
    assert torch.equal(outputs.out[0], torch.zeros_like(outputs.out[0]))
    assert outputs.lse is None or torch.isneginf(outputs.lse[0]).all()


@pytest.mark.parametrize(
    ("kernel", "changes", "size"),
    [
        ("flex", {}, 8 * 2 * 4 * 40 * 57),  # scores and weights in fp32, of every head
        ("sdpa-math", {}, 8 * 2 * 4 * 40 * 57),
        ("sdpa-flash", {"mask": MASKS["window"]}, 40 * 57),  # a byte a pair, shared by all heads
        ("sdpa-flash", {"score": Spec.of("alibi")}, 4 * 2 * 4 * 40 * 57),
    ],
)
def test_problem_may_fill_the_memory_to_the_byte(kernel, changes, size, monkeypatch):
    problem = small(kv=57, **changes)
    sizes = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": size}
    monkeypatch.setattr(subject.os, "sysconf", sizes.__getitem__)
    assert KERNELS[kernel].unsupported(problem, "cpu") is None
    sizes["SC_PHYS_PAGES"] -= 1
    assert "would take" in KERNELS[kernel].unsupported(problem, "cpu")
