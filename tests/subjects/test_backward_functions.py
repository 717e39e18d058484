"""Backward functions that a user names, and what a capability table declares of gradients."""

import math

import pytest
import torch
from tests.subjects.plain_gradients import exact_gradients
from tests.subjects.plain_kernels import banded
from tests.subjects.test_backward_conventions import run, small

from attncheck.core.errors import UsageError
from attncheck.core.formats import FORMATS
from attncheck.core.mod_spec import Spec
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.subjects.capabilities.capability_table import read_table, render_table
from attncheck.subjects.capabilities.declared import Declared
from attncheck.subjects.conventions.convention import ConventionOptions
from attncheck.subjects.conventions.declarations import make_subject
from attncheck.subjects.ideal import Ideal
from attncheck.subjects.load import load_subject
from attncheck.verify.executor import Failure, InProcess

BOTTOM_RIGHT = Spec.of("causal_bottom_right")


def masked_scores(q, k, causal, scale):
    """Scores of ``(batch, heads, length, dim)`` in fp32, −∞ where hidden, and the scale."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    x = q.float() @ k.float().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    at = k.shape[2] - q.shape[2]
    seen = banded(q.shape[2], k.shape[2], -1, 0 if causal else -1, at)
    return x.masked_fill(~seen, -math.inf), scale


@torch.no_grad()
def forward(q, k, v, softmax_scale=None, causal=False, return_lse=False):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    x, _ = masked_scores(q, k, causal, softmax_scale)
    out = x.softmax(-1) @ v.float().repeat_interleave(q.shape[1] // k.shape[1], 1)
    out = out.to(q.dtype).transpose(1, 2)
    return (out, x.logsumexp(-1)) if return_lse else out


def backward(dout, q, k, v, out, lse, *, softmax_scale=None, causal=False, dlse=None):
    assert dout.is_contiguous()
    assert not torch.is_grad_enabled()
    dout, q, k, v, out = (x.float().transpose(1, 2) for x in (dout, q, k, v, out))
    group = q.shape[1] // k.shape[1]
    x, scale = masked_scores(q, k, causal, softmax_scale)
    p = torch.exp(x - lse[..., None])
    delta = (dout * out).sum(-1) - (0 if dlse is None else dlse)
    ds = p * (dout @ v.repeat_interleave(group, 1).mT - delta[..., None])
    dq = scale * ds @ k.repeat_interleave(group, 1)
    dk, dv = ((x.mT @ y).unflatten(1, (-1, group)).sum(2) for x, y in ((ds, q), (p, dout)))
    return [x.transpose(1, 2).to(DTYPE) for x in (dq, scale * dk, dv)]


DTYPE = torch.bfloat16


def without_delta(dout, q, k, v, out, lse, **keywords):
    return backward(dout, q, k, v, torch.zeros_like(out), lse, **keywords)


def without_causal(dout, q, k, v, out, lse, softmax_scale=None):
    return backward(dout, q, k, v, out, lse, softmax_scale=softmax_scale)


def subject_with_backward(function):
    return make_subject(forward, "kernel", "flash_attn", ConventionOptions(backward=function))


@pytest.mark.parametrize(
    "changes", [{}, {"mask": BOTTOM_RIGHT}, {"scale": 0.7}, {"dlse": True}], ids=str
)
def test_gradients_are_those_of_the_function(changes):
    inputs = draw_inputs(small(**changes))
    exact = exact_gradients(inputs)
    assert exact.excess(run(subject_with_backward(backward), inputs)) <= 1
    assert exact.excess(run(subject_with_backward(without_delta), inputs)) > 1


def test_arguments_that_the_backward_lacks_are_unsupported():
    subject = subject_with_backward(without_causal)
    assert subject.unsupported(small(), "cpu") is None
    masked = small(mask=BOTTOM_RIGHT)
    assert subject.unsupported(masked, "cpu") == "its backward takes no causal"
    assert subject.unsupported(masked.replace(backward=False), "cpu") is None
    assert subject.unsupported(small(dlse=True), "cpu") == "its backward takes no dlse"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda grads: grads[:2], "its backward returned list of 2: it should give (dq, dk, dv)"),
        (lambda grads: grads[0], "its backward returned Tensor: it should give (dq, dk, dv)"),
        (lambda grads: [grads[1], *grads[1:]], "dq.shape=(2, 30, 2, 16), but should be (2, 20, 4"),
        (lambda grads: [x.float() for x in grads], "dq.dtype=torch.float32, but should be torch"),
        (lambda grads: [None, *grads[1:]], "dq is NoneType, but should be a tensor"),
    ],
)
def test_invalid_gradients_break_the_contract(damage, message):
    def invalid(dout, q, k, v, out, lse, **keywords):
        return damage(backward(dout, q, k, v, out, lse, **keywords))

    failure = InProcess().run(subject_with_backward(invalid), draw_inputs(small()))
    assert isinstance(failure, Failure)
    assert failure.kind == "contract"
    assert failure.message.startswith(message)


FILE = """
from tests.subjects.test_backward_functions import backward, forward, without_delta
"""
TABLE = """
[kernels.mine]
entry = "kernels.py::forward"
convention = "flash_attn"
backward = {backward}
"""


@pytest.fixture
def load_mine(tmp_path, monkeypatch):
    """``load_mine(backward)``: the kernel of a table with this entry for its backward."""
    (tmp_path / "kernels.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)

    def load(backward):
        (tmp_path / "attncheck.toml").write_text(TABLE.format(backward=backward))
        return load_subject("mine")

    return load


def test_table_names_the_backward(load_mine):
    inputs = draw_inputs(small(mask=BOTTOM_RIGHT))
    outputs = load_mine('"kernels.py::backward"').run(inputs)
    assert exact_gradients(inputs).excess(outputs) <= 1
    wrong = load_mine('"kernels.py::without_delta"').run(inputs)
    assert exact_gradients(inputs).excess(wrong) > 1


def test_table_declares_that_there_is_no_backward(load_mine):
    subject = load_mine("false")
    assert not subject.backward
    assert not subject.concerns(small())
    assert subject.concerns(small(backward=False))
    assert load_mine('"autograd"').concerns(small())


@pytest.mark.parametrize(
    ("backward", "error"),
    [
        ('"kernels.py::gone"', "its backward: .*has no 'gone'"),
        ('"kernels.py::__name__"', "its backward .* is str: it must be a function"),
        ('"autogard"', 'backward="autogard" must be "autograd", FILE.py::NAME, package.module'),
        ("true", 'backward=true must be "autograd", FILE.py::NAME, package.module:NAME or false'),
        ("3", "backward: expected .*, got whole number"),
    ],
)
def test_invalid_backward_in_a_table_is_refused(load_mine, backward, error):
    with pytest.raises(UsageError, match=error):
        load_mine(backward)


DECLARATION = {
    "entry": "mine.py::kernel",
    "dtypes": ["bf16"],
    "masks": ["none"],
    "head_dims": "any",
    "gqa": True,
    "rectangular": True,
    "scale": True,
}


def test_declared_backward_that_refuses_is_an_error():
    problem = small()
    forward_only = read_table(DECLARATION, "mine")
    assert not forward_only.declares(problem)
    assert forward_only.declares(problem.replace(backward=False))
    table = read_table(DECLARATION | {"backward": "autograd"}, "mine")
    assert table.declares(problem)
    subject = Declared(make_subject(forward, "kernel", "flash_attn"), table, "mine")
    failure = InProcess().run(subject, draw_inputs(problem))
    assert isinstance(failure, Failure)
    assert failure.kind == "error"
    assert "declared, but refused: its result has no gradient" in failure.message
    assert 'backward = "autograd"' in render_table(table, "kernels.mine", {})


def test_table_without_lse_keeps_the_gradients():
    table = read_table({"entry": "ideal", "lse": False}, "mine")
    outputs = Declared(Ideal(), table, "mine").run(draw_inputs(small()))
    assert outputs.lse is None
    assert set(outputs.gradients()) == {"dq", "dk", "dv"}


def test_override_of_the_backward_leaves_the_forward_alone():
    override = {"when": {"phase": "backward"}, "max_query": 8}
    table = read_table({"entry": "ideal", "override": [override]}, "mine")
    assert table.refuses(small()) == "length 20: its table says max_query = 8"
    assert table.refuses(small(backward=False)) is None


def test_table_declares_the_roundings_of_gradients():
    rounded = {"rounds_value_products": "bf16", "sums_rounded_heads": False}
    table = read_table({"entry": "mine.py::kernel", "arithmetic": rounded}, "mine")
    assert 'rounds_value_products = "bf16"' in render_table(table, "kernels.mine", {})
    subject = Declared(make_subject(forward, "kernel", "flash_attn"), table, "mine")
    assert subject.summary.endswith("declares looser arithmetic: rounds_value_products=bf16")
    arithmetic = subject.arithmetic(small(dtype="fp16"), "cpu")
    assert arithmetic.rounds_value_products == FORMATS["bf16"]
    assert not arithmetic.sums_rounded_heads
    fused = {"rounds_value_products": False}
    table = read_table({"entry": "mine.py::kernel", "arithmetic": fused}, "mine")
    subject = Declared(make_subject(forward, "kernel", "flash_attn"), table, "mine")
    assert subject.arithmetic(small(), "cpu").rounds_value_products is None
    assert "rounds_value_products = false" in render_table(table, "kernels.mine", {})
    with pytest.raises(UsageError, match="rounds_value_products=true must be a format or false"):
        read_table({"entry": "a:b", "arithmetic": {"rounds_value_products": True}}, "mine")


def test_undeclared_function_is_assumed_to_round_as_an_unfused_formula():
    subject = make_subject(forward, "kernel", "flash_attn")
    for dtype, fmt in (("bf16", FORMATS["bf16"]), ("fp16", FORMATS["fp16"]), ("fp32", None)):
        arithmetic = subject.arithmetic(small(dtype=dtype), "cpu")
        assert arithmetic.rounds_value_products == fmt
        assert arithmetic.sums_rounded_heads == (fmt is not None)
        of_forward = subject.arithmetic(small(dtype=dtype, backward=False), "cpu")
        assert of_forward.rounds_value_products is None


def with_starred_tensors(*tensors, softmax_scale=None, causal=False, dlse=None):
    return backward(*tensors, softmax_scale=softmax_scale, causal=causal, dlse=dlse)


def with_positional_dlse(dout, q, k, v, out, lse, dlse, **keywords):
    return backward(dout, q, k, v, out, lse, dlse=dlse, **keywords)


@pytest.mark.parametrize("changes", [{}, {"dlse": True}], ids=str)
@pytest.mark.parametrize("function", [with_starred_tensors, with_positional_dlse])
def test_backward_may_have_starred_tensors_or_a_required_dlse(function, changes):
    """Keywords after ``*tensors`` are found; a required dlse is None without a loss of LSE."""
    inputs = draw_inputs(small(**changes))
    assert exact_gradients(inputs).excess(run(subject_with_backward(function), inputs)) <= 1


def test_backward_that_overwrites_out_and_lse_leaves_the_forward_results_intact():
    def overwrite(dout, q, k, v, out, lse, **keywords):
        grads = backward(dout, q, k, v, out.clone(), lse.clone(), **keywords)
        out.zero_()
        lse.zero_()
        return grads

    inputs = draw_inputs(small())
    expected, outputs = (run(subject_with_backward(f), inputs) for f in (backward, overwrite))
    assert torch.equal(outputs.out, expected.out)
    assert exact_gradients(inputs).excess(outputs) <= 1


def test_table_with_autograd_does_not_declare_dlse_sinks_or_nan_in_empty_rows():
    autograd = DECLARATION | {"backward": "autograd"}
    assert read_table(autograd, "mine").declares(small())
    assert not read_table(autograd, "mine").declares(small(dlse=True))
    assert not read_table(autograd, "mine").declares(small(sink=True))
    assert not read_table(autograd | {"empty_row": "nan"}, "mine").declares(small())


def test_kernel_declared_without_lse_may_refuse_a_loss_of_lse():
    def plain(q, k, v, softmax_scale=None, causal=False):
        return forward(q, k, v, softmax_scale=softmax_scale, causal=causal)

    table = read_table(DECLARATION | {"backward": "autograd", "lse": False}, "mine")
    subject = Declared(make_subject(plain, "kernel", "flash_attn"), table, "mine")
    failure = InProcess().run(subject, draw_inputs(small(dlse=True)))
    assert isinstance(failure, Failure)
    assert failure.kind == "refused"
