"""A backward function of a kernel's own: what it is passed, and what a table says of gradients."""

import math

import pytest
import torch
from tests.subjects.plain_gradients import exact_gradients
from tests.subjects.plain_kernels import banded

from attncheck.core.errors import UsageError
from attncheck.core.formats import FORMATS
from attncheck.core.mod_spec import Spec
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.subjects.capabilities.capability_table import read_table, render_table
from attncheck.subjects.capabilities.declared import Declared
from attncheck.subjects.conventions.convention import ConventionOptions
from attncheck.subjects.conventions.declarations import make_subject
from attncheck.subjects.ideal import Ideal
from attncheck.subjects.load import load_subject
from attncheck.verify.executor import Execution, Failure, InProcess

BOTTOM_RIGHT = Spec.of("causal_bottom_right")


def small(**changes) -> Problem:
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 20, "kv": 30, "head_dim": 16}
    return Problem(**(sizes | {"value_dim": 8, "backward": True} | changes))


def scores(q, k, causal, scale):
    """Of ``(batch, heads, length, dim)`` in fp32, hidden ones −∞."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    x = q.float() @ k.float().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    at = k.shape[2] - q.shape[2]
    seen = banded(q.shape[2], k.shape[2], -1, 0 if causal else -1, at)
    return x.masked_fill(~seen, -math.inf), scale


@torch.no_grad()
def forward(q, k, v, softmax_scale=None, causal=False, return_lse=False):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    x, _ = scores(q, k, causal, softmax_scale)
    out = x.softmax(-1) @ v.float().repeat_interleave(q.shape[1] // k.shape[1], 1)
    out = out.to(q.dtype).transpose(1, 2)
    return (out, x.logsumexp(-1)) if return_lse else out


def backward(dout, q, k, v, out, lse, *, softmax_scale=None, causal=False, dlse=None):
    assert dout.is_contiguous()
    assert not torch.is_grad_enabled()
    dout, q, k, v, out = (x.float().transpose(1, 2) for x in (dout, q, k, v, out))
    group = q.shape[1] // k.shape[1]
    x, scale = scores(q, k, causal, softmax_scale)
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


def subject_with(function):
    return make_subject(forward, "kernel", "flash_attn", ConventionOptions(backward=function))


@pytest.mark.parametrize(
    "changes", [{}, {"mask": BOTTOM_RIGHT}, {"scale": 0.7}, {"dlse": True}], ids=str
)
def test_gradients_are_those_of_the_function(changes):
    inputs = draw_inputs(small(**changes))
    found = InProcess().run(subject_with(backward), inputs)
    assert isinstance(found, Execution), found
    assert exact_gradients(inputs).excess(found.outputs) <= 1
    wrong = InProcess().run(subject_with(without_delta), inputs)
    assert isinstance(wrong, Execution), wrong
    assert exact_gradients(inputs).excess(wrong.outputs) > 1


def test_what_it_cannot_be_passed_is_not_asked():
    subject = subject_with(without_causal)
    assert subject.unsupported(small(), "cpu") is None
    masked = small(mask=BOTTOM_RIGHT)
    assert subject.unsupported(masked, "cpu") == "its backward takes no causal"
    assert subject.unsupported(masked.replace(backward=False), "cpu") is None
    assert subject.unsupported(small(dlse=True), "cpu") == "its backward takes no dlse"


@pytest.mark.parametrize(
    ("give", "said"),
    [
        (lambda found: found[:2], "its backward returned list of 2: it should give (dq, dk, dv)"),
        (lambda found: found[0], "its backward returned Tensor: it should give (dq, dk, dv)"),
        (lambda found: [found[1], *found[1:]], "dq.shape=(2, 30, 2, 16), but should be (2, 20, 4"),
        (lambda found: [x.float() for x in found], "dq.dtype=torch.float32, but should be torch"),
        (lambda found: [None, *found[1:]], "dq is NoneType, but should be a tensor"),
    ],
)
def test_what_are_no_gradients_is_said(give, said):
    def other(dout, q, k, v, out, lse, **keywords):
        return give(backward(dout, q, k, v, out, lse, **keywords))

    found = InProcess().run(subject_with(other), draw_inputs(small()))
    assert isinstance(found, Failure)
    assert found.kind == "contract"
    assert found.message.startswith(said)


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
def mine(tmp_path, monkeypatch):
    (tmp_path / "kernels.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)

    def loaded(backward):
        (tmp_path / "attncheck.toml").write_text(TABLE.format(backward=backward))
        return load_subject("mine")

    return loaded


def test_a_table_names_the_function(mine):
    inputs = draw_inputs(small(mask=BOTTOM_RIGHT))
    outputs = mine('"kernels.py::backward"').run(inputs)
    assert exact_gradients(inputs).excess(outputs) <= 1
    wrong = mine('"kernels.py::without_delta"').run(inputs)
    assert exact_gradients(inputs).excess(wrong) > 1


def test_a_table_says_that_there_is_none(mine):
    subject = mine("false")
    assert not subject.backward
    assert not subject.concerns(small())
    assert subject.concerns(small(backward=False))
    assert mine('"autograd"').concerns(small())


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ('"kernels.py::gone"', "its backward: .*has no 'gone'"),
        ('"kernels.py::__name__"', "its backward .* is str: it must be a function"),
        ('"autogard"', 'backward="autogard" must be "autograd", FILE.py::NAME, package.module'),
        ("true", 'backward=true must be "autograd", FILE.py::NAME, package.module:NAME or false'),
        ("3", "backward: expected .*, got whole number"),
    ],
)
def test_what_a_table_cannot_say(mine, said, error):
    with pytest.raises(UsageError, match=error):
        mine(said)


def test_what_a_table_declares_must_be_given():
    table = {"entry": "mine.py::kernel", "dtypes": ["bf16"], "masks": ["none"], "head_dims": "any"}
    table |= {"gqa": True, "rectangular": True, "scale": True}
    problem = small()
    silent, said = (read_table(table | more, "mine") for more in ({}, {"backward": "autograd"}))
    assert not silent.declares(problem)
    assert silent.declares(problem.replace(backward=False))
    assert said.declares(problem)
    subject = Declared(make_subject(forward, "kernel", "flash_attn"), said, "mine")
    found = InProcess().run(subject, draw_inputs(problem))
    assert isinstance(found, Failure)
    assert found.kind == "error"
    assert "declared, but refused: its result has no gradient" in found.message
    assert 'backward = "autograd"' in render_table(said, "kernels.mine", {})


def test_a_table_without_lse_keeps_the_gradients():
    table = read_table({"entry": "ideal", "lse": False}, "mine")
    outputs = Declared(Ideal(), table, "mine").run(draw_inputs(small()))
    assert outputs.lse is None
    assert set(outputs.gradients()) == {"dq", "dk", "dv"}


def test_an_override_for_gradients_holds_for_them_alone():
    override = {"when": {"phase": "backward"}, "max_query": 8}
    table = read_table({"entry": "ideal", "override": [override]}, "mine")
    assert table.refuses(small()) == "length 20: its table says max_query = 8"
    assert table.refuses(small(backward=False)) is None


def test_a_table_declares_what_gradients_round():
    said = {"rounds_value_products": "bf16", "sums_rounded_heads": False}
    table = read_table({"entry": "mine.py::kernel", "arithmetic": said}, "mine")
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


def test_a_function_is_assumed_to_round_as_an_unfused_formula_does():
    subject = make_subject(forward, "kernel", "flash_attn")
    for dtype, fmt in (("bf16", FORMATS["bf16"]), ("fp16", FORMATS["fp16"]), ("fp32", None)):
        arithmetic = subject.arithmetic(small(dtype=dtype), "cpu")
        assert arithmetic.rounds_value_products == fmt
        assert arithmetic.sums_rounded_heads == (fmt is not None)
        alone = subject.arithmetic(small(dtype=dtype, backward=False), "cpu")
        assert alone.rounds_value_products is None


@pytest.mark.parametrize("changes", [{}, {"dlse": True}], ids=str)
def test_keywords_behind_any_number_of_tensors_are_its_keywords(changes):
    def behind(*tensors, softmax_scale=None, causal=False, dlse=None):
        return backward(*tensors, softmax_scale=softmax_scale, causal=causal, dlse=dlse)

    inputs = draw_inputs(small(**changes))
    found = InProcess().run(subject_with(behind), inputs)
    assert isinstance(found, Execution), found
    assert exact_gradients(inputs).excess(found.outputs) <= 1


@pytest.mark.parametrize("changes", [{}, {"dlse": True}], ids=str)
def test_one_that_needs_the_gradient_of_lse_is_given_none_where_there_is_none(changes):
    def needing(dout, q, k, v, out, lse, dlse, **keywords):
        return backward(dout, q, k, v, out, lse, dlse=dlse, **keywords)

    inputs = draw_inputs(small(**changes))
    found = InProcess().run(subject_with(needing), inputs)
    assert isinstance(found, Execution), found
    assert exact_gradients(inputs).excess(found.outputs) <= 1


def test_what_it_does_to_the_forwards_results_is_not_the_forwards_fault():
    def using_up(dout, q, k, v, out, lse, **keywords):
        found = backward(dout, q, k, v, out.clone(), lse.clone(), **keywords)
        out.zero_()
        lse.zero_()
        return found

    inputs = draw_inputs(small())
    right, found = (InProcess().run(subject_with(f), inputs) for f in (backward, using_up))
    assert torch.equal(found.outputs.out, right.outputs.out)
    assert exact_gradients(inputs).excess(found.outputs) <= 1


def test_a_table_has_no_place_for_a_loss_of_lse():
    table = {"entry": "mine.py::kernel", "dtypes": ["bf16"], "masks": ["none"], "head_dims": "any"}
    table |= {"gqa": True, "rectangular": True, "scale": True, "backward": "autograd"}
    assert read_table(table, "mine").declares(small())
    assert not read_table(table, "mine").declares(small(dlse=True))
    assert not read_table(table, "mine").declares(small(sink=True))
    assert not read_table(table | {"empty_row": "nan"}, "mine").declares(small())


def test_a_kernel_without_lse_may_refuse_a_loss_of_it_whatever_its_table_says():
    def plain(q, k, v, softmax_scale=None, causal=False):
        return forward(q, k, v, softmax_scale=softmax_scale, causal=causal)

    table = {"entry": "mine.py::kernel", "dtypes": ["bf16"], "masks": ["none"], "head_dims": "any"}
    table |= {"gqa": True, "rectangular": True, "scale": True, "backward": "autograd", "lse": False}
    subject = Declared(
        make_subject(plain, "kernel", "flash_attn"), read_table(table, "mine"), "mine"
    )
    found = InProcess().run(subject, draw_inputs(small(dlse=True)))
    assert isinstance(found, Failure)
    assert found.kind == "refused"
