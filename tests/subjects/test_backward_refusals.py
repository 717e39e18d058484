"""Functions of a convention without gradients: how each is refused, and who is asked for any.

Standalone scripts have no gradients either.
"""

import pytest
import torch
from tests.subjects.plain_gradients import exact_gradients
from tests.subjects.plain_kernels import flash_attn_with
from tests.subjects.test_backward_conventions import PADDING, Native, Tampered, run, sdpa, small
from torch.nn.attention.flex_attention import flex_attention

from attncheck.core.errors import UsageError
from attncheck.core.mod_spec import Spec
from attncheck.core.paged_layout import Paging
from attncheck.diagnose.standalone_script import render_script
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.conventions.convention import ConventionOptions
from attncheck.subjects.conventions.declarations import make_subject
from attncheck.subjects.ideal import Ideal
from attncheck.verify.executor import Failure, InProcess
from attncheck.verify.run_case import run_case


def no_gradient(q, k, v, causal=False, softmax_scale=None):
    with torch.no_grad():
        return flash_attn_with()(q, k, v, 0.0, softmax_scale, causal)


def detached_lse(q, k, v, causal=False, softmax_scale=None, return_lse=False):
    out, lse = flash_attn_with()(q, k, v, 0.0, softmax_scale, causal, return_attn_probs=True)[:2]
    return (out, lse.detach()) if return_lse else out


def key_detached(q, k, v, causal=False, softmax_scale=None):
    return flash_attn_with()(q, k.detach(), v, 0.0, softmax_scale, causal)


def no_lse(q, k, v, causal=False, softmax_scale=None):
    return flash_attn_with()(q, k, v, 0.0, softmax_scale, causal)


def backward_raises(q, k, v, causal=False, softmax_scale=None):
    def refuse(gradient):
        raise NotImplementedError("no backward yet")

    return flash_attn_with()(Tampered.apply(q, refuse), k, v, 0.0, softmax_scale, causal)


@pytest.mark.parametrize(
    ("function", "changes", "kind", "message"),
    [
        (no_gradient, {}, "refused", "its result has no gradient"),
        (detached_lse, {"dlse": True}, "refused", "its LSE has no gradient"),
        (no_lse, {"dlse": True}, "refused", "it gives no LSE, of which the loss is a function"),
        (backward_raises, {}, "refused", "NotImplementedError: no backward yet"),
        (
            key_detached,
            {},
            "contract",
            "its result has no gradient with respect to k.",
        ),
    ],
)
def test_missing_gradient_is_refused_or_breaks_the_contract(function, changes, kind, message):
    failure = InProcess().run(make_subject(function, "kernel"), draw_inputs(small(**changes)))
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.message) == (kind, message)


def test_flex_attention_refuses_a_backward_on_the_cpu():
    failure = InProcess().run(
        make_subject(flex_attention, "flex"), draw_inputs(small(head_dim=16, value_dim=16))
    )
    assert isinstance(failure, Failure)
    assert failure.kind == "refused"
    assert "does not support backward on CPU" in failure.message


def test_wrong_shape_of_out_is_reported_before_gradients_are_taken():
    def transposed(q, k, v, is_causal=False, enable_gqa=False):
        return sdpa(q, k, v).transpose(1, 2)

    failure = InProcess().run(make_subject(transposed, "kernel"), draw_inputs(small()))
    assert isinstance(failure, Failure)
    assert failure.kind == "contract"
    assert failure.message.startswith("out.shape=")


@pytest.mark.parametrize("empty_row", ["mean", "unspecified"])
def test_empty_rows_declared_nonzero_are_excluded_from_the_loss(empty_row):
    def sentinel(query, key, value, attn_mask=None, enable_gqa=False):
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        scores = query @ key.mT * query.shape[-1] ** -0.5
        scores = scores if attn_mask is None else torch.where(attn_mask, scores, -1e9)
        return scores.softmax(-1) @ value

    inputs = draw_inputs(small(dtype="fp32", mask=Spec.of("padding", lengths=[0, 30])))
    undeclared = make_subject(sentinel, "kernel")
    declared = make_subject(sentinel, "kernel", options=ConventionOptions(empty_row=empty_row))
    assert exact_gradients(inputs).excess(undeclared.run(inputs)) > 1
    assert exact_gradients(inputs).excess(run(declared, inputs)) <= 1


def test_backward_with_empty_rows_of_nan_is_unsupported():
    options = ConventionOptions(empty_row="nan")
    subject = make_subject(sdpa, "kernel", "sdpa", options)
    with_empty_rows = small(mask=Spec.of("padding", lengths=[0, 30]))
    assert subject.unsupported(with_empty_rows, "cpu") == (
        "its rows that see no key are NaN, and so is every gradient of a key beside them"
    )
    assert subject.unsupported(with_empty_rows.replace(backward=False), "cpu") is None
    assert subject.unsupported(small(mask=PADDING), "cpu") is None


def test_backward_concerns_only_subjects_that_declare_one():
    class ForwardOnly(Native):
        backward = False

    without = ConventionOptions(backward=None)
    for subject, backward in (
        (make_subject(sdpa, "kernel", "sdpa", ConventionOptions()), True),
        (make_subject(sdpa, "kernel", "sdpa", without), False),
        (Native(), True),
        (ForwardOnly(), False),
    ):
        assert subject.backward == subject.concerns(small()) == backward
        assert subject.concerns(small(backward=False))


def test_loss_of_lse_is_unsupported_without_lse():
    subject = make_subject(detached_lse, "kernel", options=ConventionOptions(returns_lse=False))
    reason = "it gives no LSE, of which the loss is a function"
    assert subject.unsupported(small(dlse=True), "cpu") == reason
    assert subject.unsupported(small(), "cpu") is None


def test_paged_convention_has_no_gradients():
    def paged(q, k, v, cache_seqlens, block_table):
        return q

    subject = make_subject(paged, "kernel")
    assert not subject.backward
    assert not subject.concerns(small())
    assert subject.concerns(small(backward=False, paging=Paging(size=16)))


def test_standalone_script_for_gradients_is_refused(tmp_path):
    case = Case(problem=Problem(query=16, head_dim=16, dtype="fp32"))
    record, path = run_case(Ideal(), case, device="cpu"), tmp_path / "repro.py"
    arguments = {"kernel": "ideal", "convention": "", "device": "cpu", "facts": {}, "path": path}
    assert render_script(Ideal(), case, record, **arguments)
    case = Case(problem=case.problem.replace(backward=True))
    with pytest.raises(UsageError, match=r"^the script would ask for out and LSE: .*gradients\.$"):
        render_script(Ideal(), case, record, **arguments)
