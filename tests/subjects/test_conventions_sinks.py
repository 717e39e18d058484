"""Functions with a parameter for sinks: asked of Problems with one, and given each head's."""

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


def required(q, k, v, sinks, scale=None, *, enable_gqa=False):
    return sdpa(q, k, v, scale=scale, sinks=sinks, enable_gqa=enable_gqa)


KERNELS = {"sdpa": sdpa, "flash_attn": flash_attn, "varlen": varlen}
MASKS = {"sdpa": PADDED, "flash_attn": Spec.of("causal_bottom_right"), "varlen": PADDED}


def status(kernel, of: Problem, **options: object) -> str:
    subject = make_subject(kernel, "kernel", options=ConventionOptions(**options))
    assert subject.concerns(of)
    return run_case(subject, Case(problem=of), device="cpu").status


@pytest.mark.parametrize("name", KERNELS)
def test_right_kernels_pass(name):
    subject = make_subject(KERNELS[name], "kernel")
    assert subject.convention == name
    assert subject.sinks
    for mask in (Spec.of("full"), MASKS[name]):
        assert status(KERNELS[name], problem(mask=mask)) == "pass"
        assert status(KERNELS[name], problem(mask=mask, sink=False)) == "pass"


@pytest.mark.parametrize("name", KERNELS)
def test_what_ignores_its_sinks_is_told(name):
    def ignoring(*tensors, **keywords):
        keywords = {n: None if n in SINKS else value for n, value in keywords.items()}
        return KERNELS[name](*tensors, **keywords)

    ignoring.__signature__ = inspect.signature(KERNELS[name])
    assert status(ignoring, problem(mask=MASKS[name])) == "fail"
    assert status(ignoring, problem(mask=MASKS[name], sink=False)) == "pass"


def test_every_spelling_is_one():
    for spelling in SINKS:
        scope = {"sdpa": sdpa}
        exec(f"def kernel(q, k, v, {spelling}=None): return sdpa(q, k, v, sinks={spelling})", scope)  # noqa: S102
        assert status(scope["kernel"], problem(kv_heads=4)) == "pass"


def test_what_takes_no_sinks_is_not_asked():
    """Nor what takes anything: who knows what becomes of it."""

    def plain(q, k, v, scale=None):
        return sdpa(q, k, v, scale=scale)

    def anything(q, k, v, **keywords):
        return sdpa(q, k, v, **keywords)

    for kernel in (plain, anything, torch.nn.functional.scaled_dot_product_attention):
        subject = make_subject(kernel, "kernel", "sdpa")
        assert not subject.sinks
        assert not subject.concerns(problem())
        assert subject.concerns(problem(sink=False))
        assert subject.unsupported(problem(kv_heads=4), "cpu") == "takes no sinks"


def test_one_that_needs_them_gets_minus_infinity():
    """It weighs nothing: a Problem without a sink is one with such."""
    for sink in (True, False):
        assert status(required, problem(sink=sink)) == "pass"


def test_sinks_are_fp32_whatever_the_dtype():
    given = []

    def kernel(q, k, v, sinks=None):
        given.append(sinks)
        return sdpa(q, k, v, sinks=sinks)

    inputs = draw_inputs(problem(kv_heads=4))
    make_subject(kernel, "kernel").run(inputs)
    assert torch.equal(given[0], inputs.sink)
    assert given[0].dtype == torch.float32
    assert given[0].shape == (4,)


def test_rows_without_keys_are_as_any_where_there_is_a_sink():
    """What a kernel does of them is declared for those that have nothing to weigh."""
    for empty_row in ("nan", "mean", "unspecified"):
        assert status(sdpa, problem(mask=PADDED), empty_row=empty_row) == "pass"


@pytest.mark.parametrize("question", ["head_permutation", "split_merge", "strides_gapped"])
def test_relations_pass_sinks_too(question):
    subject = make_subject(sdpa, "kernel")
    allowed = {"turn": 1} if question == "head_permutation" else {}
    allowed = {"cut": 5} if question == "split_merge" else allowed
    assert (
        check_relation(subject, Case(problem=problem(), question=question, parameters=allowed))
        is None
    )


@pytest.mark.parametrize("name", KERNELS)
def test_the_call_as_a_script(name):
    for sink in (True, False):
        of = problem(sink=sink)
        inputs, scope = draw_inputs(of), {"torch": torch}
        text = make_subject(KERNELS[name], "kernel").render(of)
        assert ("sink" in text) == sink
        exec(text, scope | ({"sink": inputs.sink} if sink else {}), scope)  # noqa: S102
        scope["call"].__globals__.update(scope)
        out, lse = scope["call"](KERNELS[name], inputs.q, inputs.k, inputs.v)
        mine = make_subject(KERNELS[name], "kernel").run(inputs)
        assert torch.equal(out, mine.out)
        assert torch.equal(lse, mine.lse)
