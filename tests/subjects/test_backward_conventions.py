"""Gradients of functions of every convention, taken by autograd and mapped to the Problem's."""

import inspect
import math

import pytest
import torch
from tests.subjects.plain_gradients import exact_gradients, plain_attention
from tests.subjects.plain_kernels import attend, flash_attn_with, varlen_with
from torch.nn.functional import scaled_dot_product_attention

from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.subjects.capabilities.subject import Subject
from attncheck.subjects.conventions.convention import ConventionOptions
from attncheck.subjects.conventions.declarations import make_subject
from attncheck.verify.executor import Execution, Failure, InProcess

CAUSAL, BOTTOM_RIGHT = Spec.of("causal"), Spec.of("causal_bottom_right")
PADDING = Spec.of("padding", lengths=[9, 30])
DOCUMENTS = Spec.of("document", lengths=[7, 13, 30])


def small(**changes) -> Problem:
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 20, "kv": 30, "head_dim": 16}
    return Problem(**(sizes | {"value_dim": 8, "backward": True} | changes))


class Tampered(torch.autograd.Function):
    """The identity, whose backward applies ``change`` to the gradient."""

    @staticmethod
    def forward(ctx, tensor, change):
        ctx.change = change
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.change(gradient), None


def drop_last_row(gradient):
    return torch.cat([gradient[..., :-1, :], torch.zeros_like(gradient[..., -1:, :])], -2)


FAULTS = {
    "dq": (0, lambda gradient: gradient * 1.5),
    "dk": (1, drop_last_row),
    "dv": (2, lambda gradient: gradient.roll(1, -1)),
    "no delta": (1, torch.zeros_like),
}


def tamper(tensors, fault):
    """``tensors``, of which one has a wrong gradient."""
    place, change = FAULTS[fault]
    return [Tampered.apply(t, change) if i == place else t for i, t in enumerate(tensors)]


def with_fault(kernel, fault):
    """``kernel`` with an input whose gradient is wrong."""

    def tampered(*tensors, **keywords):
        return kernel(*tamper(tensors, fault), **keywords)

    tampered.__signature__ = inspect.signature(kernel)
    return tampered


def sdpa(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    assert not enable_gqa or query.shape[1] > key.shape[1]
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    seen = seen.tril() if is_causal else seen if attn_mask is None else attn_mask
    return attend(query, key, value, seen, scale)[0]


def flex(query, key, value, score_mod=None, mask_mod=None, scale=None, return_lse=False,
         enable_gqa=False):  # fmt: skip
    del enable_gqa
    at = torch.meshgrid(*(torch.arange(n) for n in (*query.shape[:3], key.shape[2])), indexing="ij")
    seen = torch.ones_like(at[0], dtype=torch.bool) if mask_mod is None else mask_mod(*at)
    out, lse = attend(query, key, value, seen, scale, score_mod)
    return (out, lse) if return_lse else out


class Native(Subject):
    name = "mine"
    summary = "a Subject with gradients"
    backward = True
    fault = ""

    def unsupported(self, problem, device):
        del problem, device

    def prepare(self, inputs):
        def call():
            q, k, v = leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
            if self.fault:
                q, k, v = tamper(leaves, self.fault)
            plain = plain_attention(inputs, q.double(), k.double(), v.double())
            out, lse = plain.out.to(inputs.v.dtype), plain.lse.float()
            dq, dk, dv = torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse))
            return Outputs(out.detach(), lse.detach(), dq, dk, dv)

        return call


KERNELS = {
    "sdpa": (sdpa, {"mask": CAUSAL, "kv": 20}),
    "flash_attn": (flash_attn_with(), {"mask": BOTTOM_RIGHT, "dlse": True}),
    "varlen": (varlen_with(), {"mask": DOCUMENTS, "dlse": True, "query": 30}),
    "flex": (flex, {"mask": PADDING, "score": Spec.of("softcap", cap=2.0), "dlse": True}),
    "native": (Native, {"dlse": True}),
}


def wrap_kernel(convention, fault=""):
    kernel = KERNELS[convention][0]
    if convention == "native":
        subject = Native()
        subject.fault = fault
        return subject
    subject = make_subject(with_fault(kernel, fault) if fault else kernel, "kernel", convention)
    assert isinstance(subject, Subject), subject
    return subject


def run(subject, inputs) -> Outputs:
    result = InProcess().run(subject, inputs)
    assert isinstance(result, Execution), result
    return result.outputs


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("convention", KERNELS)
def test_gradients_are_within_rounding(convention, dtype):
    subject = wrap_kernel(convention)
    problem = small(dtype=dtype, **KERNELS[convention][1])
    assert subject.concerns(problem)
    assert subject.unsupported(problem, "cpu") is None
    inputs = draw_inputs(problem)
    assert exact_gradients(inputs).excess(run(subject, inputs)) <= 1


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("convention", KERNELS)
def test_wrong_backward_is_more_than_rounding_and_leaves_out_unchanged(convention, fault):
    problem = small(dtype="bf16", **KERNELS[convention][1])
    inputs = draw_inputs(problem)
    outputs = run(wrap_kernel(convention, fault), inputs)
    assert exact_gradients(inputs).excess(outputs) > 1
    right = run(wrap_kernel(convention), inputs)
    assert torch.equal(outputs.out, right.out)


def test_padded_keys_have_gradients_of_zero_in_varlen():
    inputs = draw_inputs(small(mask=PADDING))
    outputs = run(wrap_kernel("varlen"), inputs)
    assert exact_gradients(inputs).excess(outputs) <= 1
    assert outputs.dk[0, :, :9].any()
    assert not outputs.dk[0, :, 9:].any()


def test_repeated_calls_give_equal_tensors_without_a_graph():
    inputs = draw_inputs(small(mask=DOCUMENTS, query=30))
    call = wrap_kernel("varlen").prepare(inputs)
    one, other = call().tensors(), call().tensors()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not any(tensor.requires_grad for tensor in one.values())


def test_forward_alone_runs_without_autograd():
    tracked = []

    def kernel(q, k, v):
        tracked.append(torch.is_grad_enabled() or q.requires_grad)
        return scaled_dot_product_attention(q, k, v)

    plain = small(backward=False, kv_heads=4, value_dim=16)
    assert run(make_subject(kernel, "kernel"), draw_inputs(plain)).gradients() == {}
    assert tracked == [False]


def test_gradient_of_base_2_lse_is_converted():
    def base2(q, k, v, softmax_scale=None, causal=False, return_lse=False):
        kernel = flash_attn_with()
        out, lse, _ = kernel(q, k, v, 0.0, softmax_scale, causal, return_attn_probs=True)
        return (out, lse / math.log(2)) if return_lse else out

    inputs = draw_inputs(small(dlse=True))
    right = make_subject(base2, "kernel", options=ConventionOptions(lse="base2"))
    assert exact_gradients(inputs).excess(run(right, inputs)) <= 1
    assert exact_gradients(inputs).excess(run(make_subject(base2, "kernel"), inputs)) > 1


def test_gradients_of_sinks_are_within_rounding_or_refused():
    def kernel(query, key, value, sinks=None, enable_gqa=False):
        seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
        return attend(query, key, value, seen, sinks=sinks)[0]

    def constant(query, key, value, sinks=None, enable_gqa=False):
        return kernel(query, key, value, sinks.detach(), enable_gqa)

    inputs = draw_inputs(small(sink=True))
    assert exact_gradients(inputs).excess(run(make_subject(kernel, "kernel"), inputs)) <= 1
    failure = InProcess().run(make_subject(constant, "kernel"), inputs)
    assert isinstance(failure, Failure)
    assert failure.kind == "refused"
    assert failure.message == "its result has no gradient with respect to its sinks"
