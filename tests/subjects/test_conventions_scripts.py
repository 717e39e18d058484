"""The call as a script: the same bits as the Subject's, with torch and the kernel alone."""

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
    return plain.attend(q, k, v, seen, scale)


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


def called(text, kernel, inputs):
    """What the script gives; its names are torch and the mask alone."""
    assert "attncheck" not in text
    scope = {"torch": torch}
    if re.search(r"\bmask\b", text):
        scope["mask"] = attention_mask(inputs.problem)
    exec(text, scope)  # noqa: S102  # a script is there to be run
    return scope["call"](kernel, inputs.q, inputs.k, inputs.v)


def problem_of(changes):
    sizes = {"batch": 2, "heads": 4, "query": 20, "head_dim": 16, "dtype": "bf16"}
    return Problem(**(sizes | changes))


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("called_like", KERNELS)
def test_a_script_gives_the_same_bits(called_like, name):
    function = KERNELS[called_like]
    subject, inputs = make_subject(function, "kernel"), draw_inputs(problem_of(PROBLEMS[name]))
    text = subject.render(inputs.problem)
    if subject.unsupported(inputs.problem, "cpu"):
        assert text is None
        return
    out, lse = called(text, function, inputs)
    ours = subject.run(inputs)
    assert torch.equal(out, ours.out)
    assert torch.equal(lse, ours.lse)


def test_every_convention_has_scripts():
    """Or the test above asks nothing."""
    able = {
        kernel: sum(
            make_subject(function, "kernel").render(problem_of(changes)) is not None
            for changes in PROBLEMS.values()
        )
        for kernel, function in KERNELS.items()
    }
    expected = {"sdpa": 6, "flash_attn": 5, "varlen": 7, "total_first": 7}
    assert able == expected | {"flex": 9, "flex_callable": 9}


@pytest.mark.parametrize("options", [{"lse": "base2"}, {"returns_lse": False}], ids=str)
def test_options_are_in_the_script(options):
    function = plain.flash_attn_with("base2")
    subject = make_subject(function, "kernel", None, ConventionOptions(**options))
    inputs = draw_inputs(problem_of({"mask": Spec.of("causal_bottom_right"), "query": 31}))
    out, lse = called(subject.render(inputs.problem), function, inputs)
    ours = subject.run(inputs)
    assert torch.equal(out, ours.out)
    assert lse is ours.lse is None or torch.equal(lse, ours.lse)


def test_what_cannot_be_said_in_a_line_is_none():
    learned = problem_of({"score": Spec.of("relative_bias", distance=4, seed=0)})
    assert make_subject(flex, "kernel").render(learned) is None


def test_a_script_that_says_otherwise_is_found():
    """The comparison above would see a wrong alignment."""
    function = KERNELS["flash_attn"]
    inputs = draw_inputs(problem_of(PROBLEMS["causal"]))
    text = make_subject(function, "kernel").render(inputs.problem)
    out, _ = called(text.replace("causal=True", "causal=False"), function, inputs)
    assert not torch.equal(out, make_subject(function, "kernel").run(inputs).out)
