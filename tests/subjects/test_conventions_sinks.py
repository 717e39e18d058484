"""Sinks of attention in every convention: which functions take them, and what they get."""

import inspect

import pytest
import torch
from tests.subjects import plain_kernels as plain

from attncheck.core.mod_spec import Spec
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.conventions.convention import SINKS, ConventionOptions
from attncheck.subjects.conventions.declarations import make_subject
from attncheck.verify.relation_runs import check_relation
from attncheck.verify.run_case import run_case

SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 12, "kv": 12, "head_dim": 16}
PADDED = Spec.of("padding", lengths=[0, 7])


def problem(**changes: object) -> Problem:
    return Problem(**(SIZES | {"dtype": "bf16", "sink": True} | changes))


def sdpa(q, k, v, attn_mask=None, scale=None, sinks=None, *, enable_gqa=False, return_lse=False):
    del enable_gqa, return_lse
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool) if attn_mask is None else attn_mask
    return plain.attend(q, k, v, seen, scale, sinks=sinks)


def flash_attn(q, k, v, softmax_scale=None, causal=False, s_aux=None):
    return plain.flash(q, k, v, softmax_scale, causal, (-1, -1), 0.0, None, sinks=s_aux)


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False, sink=None):
    parts = []
    for i in range(len(cu_seqlens_q) - 1):
        rows, keys = (slice(*at[i : i + 2].tolist()) for at in (cu_seqlens_q, cu_seqlens_k))
        one = flash_attn(q[None, rows], k[None, keys], v[None, keys], softmax_scale, causal, sink)
        parts.append(one)
    return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)


def requires_sinks(q, k, v, sinks, scale=None, *, enable_gqa=False):
    return sdpa(q, k, v, scale=scale, sinks=sinks, enable_gqa=enable_gqa)


KERNELS = {"sdpa": sdpa, "flash_attn": flash_attn, "varlen": varlen}
MASKS = {"sdpa": PADDED, "flash_attn": Spec.of("causal_bottom_right"), "varlen": PADDED}


def judge(kernel, problem: Problem, **options: object) -> str:
    """The status of the kernel's Record."""
    subject = make_subject(kernel, "kernel", options=ConventionOptions(**options))
    assert subject.concerns(problem)
    return run_case(subject, Case(problem=problem), device="cpu").status


@pytest.mark.parametrize("name", KERNELS)
def test_correct_kernels_pass_with_and_without_sinks(name):
    subject = make_subject(KERNELS[name], "kernel")
    assert subject.convention == name
    assert subject.sinks
    for mask in (Spec.of("full"), MASKS[name]):
        assert judge(KERNELS[name], problem(mask=mask)) == "pass"
        assert judge(KERNELS[name], problem(mask=mask, sink=False)) == "pass"


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_that_ignores_its_sinks_fails(name):
    def ignoring(*tensors, **keywords):
        keywords = {n: None if n in SINKS else value for n, value in keywords.items()}
        return KERNELS[name](*tensors, **keywords)

    ignoring.__signature__ = inspect.signature(KERNELS[name])
    assert judge(ignoring, problem(mask=MASKS[name])) == "fail"
    assert judge(ignoring, problem(mask=MASKS[name], sink=False)) == "pass"


@pytest.mark.parametrize("spelling", SINKS)
def test_every_spelling_of_sinks_is_recognised(spelling):
    scope = {"sdpa": sdpa}
    exec(f"def kernel(q, k, v, {spelling}=None): return sdpa(q, k, v, sinks={spelling})", scope)  # noqa: S102
    assert judge(scope["kernel"], problem(kv_heads=4)) == "pass"


def test_sinks_do_not_concern_functions_that_name_none():
    """Arbitrary keywords do not count: the function may drop them."""

    def without_sinks(q, k, v, scale=None):
        return sdpa(q, k, v, scale=scale)

    def starred(q, k, v, **keywords):
        return sdpa(q, k, v, **keywords)

    for kernel in (without_sinks, starred, torch.nn.functional.scaled_dot_product_attention):
        subject = make_subject(kernel, "kernel", "sdpa")
        assert not subject.sinks
        assert not subject.concerns(problem())
        assert subject.concerns(problem(sink=False))
        assert subject.unsupported(problem(kv_heads=4), "cpu") == "takes no sinks"


@pytest.mark.parametrize("sink", [True, False])
def test_required_sinks_are_minus_infinity_for_a_problem_without(sink):
    """A sink of −∞ has no weight."""
    assert judge(requires_sinks, problem(sink=sink)) == "pass"


def test_sinks_are_passed_in_fp32_whatever_the_dtype():
    received = []

    def kernel(q, k, v, sinks=None):
        received.append(sinks)
        return sdpa(q, k, v, sinks=sinks)

    inputs = draw_inputs(problem(kv_heads=4))
    make_subject(kernel, "kernel").run(inputs)
    assert torch.equal(received[0], inputs.sink)
    assert received[0].dtype == torch.float32
    assert received[0].shape == (4,)


@pytest.mark.parametrize("empty_row", ["nan", "mean", "unspecified"])
def test_declared_empty_row_does_not_apply_to_rows_with_a_sink(empty_row):
    """Rows without keys still have the sink to weigh, and are judged as any row."""
    assert judge(sdpa, problem(mask=PADDED), empty_row=empty_row) == "pass"


@pytest.mark.parametrize(
    ("question", "parameters"),
    [("head_permutation", {"turn": 1}), ("split_merge", {"cut": 5}), ("strides_gapped", {})],
)
def test_relations_pass_sinks(question, parameters):
    case = Case(problem=problem(), question=question, parameters=parameters)
    assert check_relation(make_subject(sdpa, "kernel"), case) is None


@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("name", KERNELS)
def test_rendered_script_gives_the_same_bits(name, sink):
    subject, inputs = make_subject(KERNELS[name], "kernel"), draw_inputs(problem(sink=sink))
    text = subject.render(inputs.problem)
    assert ("sink" in text) == sink
    scope = {"torch": torch} | ({"sink": inputs.sink} if sink else {})
    exec(text, scope)  # noqa: S102
    out, lse = scope["call"](KERNELS[name], inputs.q, inputs.k, inputs.v)
    expected = subject.run(inputs)
    assert torch.equal(out, expected.out)
    assert torch.equal(lse, expected.lse)
