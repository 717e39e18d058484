"""Scripts of a Subject's call: they use torch and the kernel alone and give the same bits."""

import re

import pytest
import torch
from tests.subjects import plain_kernels as plain

from attncheck.core.mod_spec import Spec
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.subjects.conventions.call_tensors import attention_mask
from attncheck.subjects.conventions.convention import ConventionOptions
from attncheck.subjects.conventions.declarations import make_subject

CAUSAL = Spec.of("causal")
SOFTCAP, ALIBI = Spec.of("softcap", cap=2), Spec.of("alibi")


def sdpa(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    seen = attn_mask
    if seen is None:
        at = (-1, 0) if is_causal else (-1, -1)
        seen = plain.banded(q.shape[2], k.shape[2], *at, 0)
    if seen.dtype == torch.bool:
        return plain.attend(q, k, v, seen, scale)
    return plain.attend(q, k, v, ~seen.isneginf(), scale, lambda score, *_: score + seen)


def flex(q, k, v, score_mod=None, block_mask=None, scale=None, *, enable_gqa):
    b, h, i, j = plain.indices(torch.zeros(*q.shape[:3], k.shape[2]))
    seen = b >= 0 if block_mask is None else block_mask.mask_mod(b, h, i, j)
    return plain.attend(q, k, v, seen | torch.zeros_like(b, dtype=torch.bool), scale, score_mod)


def flex_callable(q, k, v, score_mod=None, mask_mod=None, scale=None, *, enable_gqa):
    b, h, i, j = plain.indices(torch.zeros(*q.shape[:3], k.shape[2]))
    seen = b >= 0 if mask_mod is None else mask_mod(b, h, i, j)
    return plain.attend(q, k, v, seen | torch.zeros_like(b, dtype=torch.bool), scale, score_mod)


KERNELS = {
    "sdpa": sdpa,
    "flash_attn": plain.flash_attn_with(),
    "varlen": plain.varlen_with(),
    "total_first": plain.varlen_with("total_first"),
    "flex": flex,
    "flex_callable": flex_callable,
}
PROBLEMS = {
    "plain": {"kv_heads": 2, "scale": 0.7},
    "causal": {"mask": CAUSAL},
    "bottom_right": {"mask": Spec.of("causal_bottom_right"), "query": 31, "kv": 20},
    "window": {"mask": Spec.of("sliding_window", window=5), "score": ALIBI},
    "chain": {"mask": CAUSAL, "score": Spec.of("chain", SOFTCAP, ALIBI)},
    "documents": {"mask": Spec.of("and", CAUSAL, Spec.of("document", lengths=[8, 0, 12]))},
    "padding": {"mask": Spec.of("padding", lengths=[7, 20])},
    "prefix": {"mask": Spec.of("prefix_lm", prefix=3)},
    "temperature": {"score": Spec.of("temperature", temperature=3)},
}


def run_script(text, kernel, inputs):
    """Out and LSE of the script, which may use no other names than torch and mask."""
    assert "attncheck" not in text
    scope = {"torch": torch}
    if re.search(r"\bmask\b", text):
        scope["mask"] = attention_mask(inputs.problem)
    exec(text, scope)  # noqa: S102  # a script is there to be run
    return scope["call"](kernel, inputs.q, inputs.k, inputs.v)


def make_problem(changes):
    sizes = {"batch": 2, "heads": 4, "query": 20, "head_dim": 16, "dtype": "bf16"}
    return Problem(**(sizes | changes))


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_script_gives_the_same_bits(kernel, name):
    function = KERNELS[kernel]
    subject, inputs = make_subject(function, "kernel"), draw_inputs(make_problem(PROBLEMS[name]))
    text = subject.render(inputs.problem)
    if subject.unsupported(inputs.problem, "cpu"):
        assert text is None
        return
    out, lse = run_script(text, function, inputs)
    expected = subject.run(inputs)
    assert torch.equal(out, expected.out)
    assert torch.equal(lse, expected.lse)


def test_every_convention_renders_scripts():
    """Without scripts, the test above would check nothing."""
    counts = {
        kernel: sum(
            make_subject(function, "kernel").render(make_problem(changes)) is not None
            for changes in PROBLEMS.values()
        )
        for kernel, function in KERNELS.items()
    }
    expected = {"sdpa": 7, "flash_attn": 5, "varlen": 7, "total_first": 7}
    assert counts == expected | {"flex": 9, "flex_callable": 9}


@pytest.mark.parametrize("options", [{"lse": "base2"}, {"returns_lse": False}], ids=str)
def test_script_applies_the_options(options):
    function = plain.flash_attn_with("base2")
    subject = make_subject(function, "kernel", None, ConventionOptions(**options))
    inputs = draw_inputs(make_problem({"mask": Spec.of("causal_bottom_right"), "query": 31}))
    out, lse = run_script(subject.render(inputs.problem), function, inputs)
    expected = subject.run(inputs)
    assert torch.equal(out, expected.out)
    assert lse is expected.lse is None or torch.equal(lse, expected.lse)


def test_score_mod_with_a_captured_tensor_has_no_script():
    learned = make_problem({"score": Spec.of("relative_bias", distance=4, seed=0)})
    assert make_subject(flex, "kernel").render(learned) is None


def test_mask_of_floats_that_would_be_rounded_has_no_script():
    for heads in (4, 3):
        problem = make_problem({"score": ALIBI, "heads": heads})
        assert (make_subject(sdpa, "kernel").render(problem) is None) == (heads == 3)


def test_script_with_another_mask_gives_other_bits():
    """The comparison of the tests above would notice a wrong mask."""
    function = KERNELS["flash_attn"]
    inputs = draw_inputs(make_problem(PROBLEMS["causal"]))
    text = make_subject(function, "kernel").render(inputs.problem)
    out, _ = run_script(text.replace("causal=True", "causal=False"), function, inputs)
    assert not torch.equal(out, make_subject(function, "kernel").run(inputs).out)
