"""Functions of a convention that have no gradients to give: what each says."""

import pytest
import torch
from tests.subjects.plain_gradients import exact_gradients
from tests.subjects.plain_kernels import flash_attn_with
from tests.subjects.test_backward_conventions import PADDING, Native, Tampered, run, sdpa, small
from torch.nn.attention.flex_attention import flex_attention

from attncheck.core.mod_spec import Spec
from attncheck.core.paged_layout import Paging
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.subjects.conventions.convention import ConventionOptions
from attncheck.subjects.conventions.declarations import make_subject
from attncheck.verify.executor import Failure, InProcess


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
def test_what_has_no_gradient_says_so(function, changes, kind, message):
    found = InProcess().run(make_subject(function, "kernel"), draw_inputs(small(**changes)))
    assert isinstance(found, Failure)
    assert (found.kind, found.message) == (kind, message)


def test_torchs_flex_attention_refuses_on_the_cpu():
    found = InProcess().run(
        make_subject(flex_attention, "flex"), draw_inputs(small(head_dim=16, value_dim=16))
    )
    assert isinstance(found, Failure)
    assert found.kind == "refused"
    assert "does not support backward on CPU" in found.message


def test_a_wrong_shape_is_the_executors_to_say():
    def transposed(q, k, v, is_causal=False, enable_gqa=False):
        return sdpa(q, k, v).transpose(1, 2)

    found = InProcess().run(make_subject(transposed, "kernel"), draw_inputs(small()))
    assert isinstance(found, Failure)
    assert found.kind == "contract"
    assert found.message.startswith("out.shape=")


@pytest.mark.parametrize("how", ["mean", "unspecified"])
def test_rows_that_see_no_key_and_give_something_are_no_part_of_the_loss(how):
    def sentinel(query, key, value, attn_mask=None, enable_gqa=False):
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        scores = query @ key.mT * query.shape[-1] ** -0.5
        scores = scores if attn_mask is None else torch.where(attn_mask, scores, -1e9)
        return scores.softmax(-1) @ value

    inputs = draw_inputs(small(dtype="fp32", mask=Spec.of("padding", lengths=[0, 30])))
    zero = make_subject(sentinel, "kernel")
    said = make_subject(sentinel, "kernel", options=ConventionOptions(empty_row=how))
    assert exact_gradients(inputs).excess(zero.run(inputs)) > 1
    assert exact_gradients(inputs).excess(run(said, inputs)) <= 1


def test_rows_of_nan_leave_no_gradient_to_ask_for():
    options = ConventionOptions(empty_row="nan")
    subject = make_subject(sdpa, "kernel", "sdpa", options)
    dead = small(mask=Spec.of("padding", lengths=[0, 30]))
    assert subject.unsupported(dead, "cpu") == (
        "its rows that see no key are NaN, and so is every gradient of a key beside them"
    )
    assert subject.unsupported(dead.replace(backward=False), "cpu") is None
    assert subject.unsupported(small(mask=PADDING), "cpu") is None


def test_who_is_asked():
    asked, forward = small(), small(backward=False)
    without = ConventionOptions(backward=None)
    for options in (ConventionOptions(), without):
        subject = make_subject(sdpa, "kernel", "sdpa", options)
        assert subject.backward == subject.concerns(asked) == (options is not without)
        assert subject.concerns(forward)
    quiet = make_subject(detached_lse, "kernel", options=ConventionOptions(returns_lse=False))
    assert quiet.unsupported(small(dlse=True), "cpu") == (
        "it gives no LSE, of which the loss is a function"
    )
    assert quiet.unsupported(asked, "cpu") is None

    class Forward(Native):
        backward = False

    assert Native().concerns(asked)
    assert not Forward().concerns(asked)
    assert Forward().concerns(forward)


def test_the_paged_convention_has_no_gradients():
    def paged(q, k, v, cache_seqlens, block_table):
        return q

    subject = make_subject(paged, "kernel")
    assert not subject.backward
    assert not subject.concerns(small())
    assert subject.concerns(small(backward=False, paging=Paging(size=16)))
