"""What an assertion that fails says is wrong: of tensors alone, nobody is called again."""

import math

import pytest
import torch

import attncheck
from attncheck.core.mod_spec import Spec
from attncheck.inputs import input_tensors
from attncheck.inputs.problem import Problem
from attncheck.suite import python_api

close = attncheck.assert_attention_close


@pytest.fixture(autouse=True)
def nobody_has_looked_yet(monkeypatch):
    monkeypatch.setattr(python_api, "_left", iter(range(3)))


@pytest.fixture
def given():
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(1, 2, 12, 16, generator=generator) for name in "qkv"}


def attention(q, k, v, seen=None):
    scores = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    return (torch.softmax(scores, -1) @ v.double()).to(q.dtype)


def one_key_wider(query):
    return torch.ones(query, query, dtype=torch.bool).tril(1)


def said(failing, label):
    """Lines of the message that begin with ``label``."""
    lines = str(failing.value).splitlines()
    return [line for line in lines if line.startswith(f"  {label} ")]


def test_a_causal_mask_that_is_one_key_too_wide_is_named(given):
    out = attention(**given, seen=one_key_wider(12))
    with pytest.raises(AssertionError) as failing:
        close(out, **given, is_causal=True)
    (likely,) = said(failing, "likely")
    assert "the causal mask is one key too wide" in likely
    assert "the causal mask is one key too wide" in str(failing.value).splitlines()[1]
    assert said(failing, "tiles")


@pytest.mark.parametrize("table", [True, False], ids=["a tensor", "a function"])
def test_a_mask_of_ones_own_is_known_when_the_text_is_read(given, table):
    near = (torch.arange(12)[:, None] - torch.arange(12)).abs() < 4
    mask = near if table else lambda b, h, i, j: (i - j).abs() < 4
    with pytest.raises(AssertionError) as failing:
        close(attention(**given), **given, mask=mask)
    (likely,) = said(failing, "likely")
    assert "the mask is ignored" in likely


def test_of_a_problem_too():
    problem = Problem(query=12, head_dim=16, mask=Spec.of("causal"), dtype="fp32")
    drawn = input_tensors.draw_inputs(problem)
    out = attention(drawn.q, drawn.k, drawn.v)
    for asked in (problem, drawn):
        with pytest.raises(AssertionError) as failing:
            close(out, problem=asked)
        assert "the mask is ignored" in said(failing, "likely")[0]


def test_where_none_fits_that_is_said(given):
    generator = torch.Generator().manual_seed(4)
    noise = torch.randn(given["q"].shape, generator=generator)
    with pytest.raises(AssertionError) as failing:
        close(attention(**given) + noise, **given)
    (likely,) = said(failing, "likely")
    assert likely.split(":")[0].split() == ["likely", "unknown"]
    assert likely.endswith("fault models fits")
    assert not said(failing, "or")


def test_tensors_that_are_written_to_afterwards_change_nothing(given):
    out = attention(**given, seen=one_key_wider(12))
    with pytest.raises(AssertionError) as failing:
        close(out, **given, is_causal=True)
    for tensor in (out, *given.values()):
        tensor.zero_()
    assert "the causal mask is one key too wide" in said(failing, "likely")[0]


def test_it_is_looked_for_when_the_text_is_read_and_once(given, monkeypatch):
    looked = []

    def look(answer):
        looked.append(answer)

    monkeypatch.setattr(python_api.UserOutputs, "diagnosis", look)
    with pytest.raises(AssertionError) as failing:
        close(torch.zeros(1, 2, 12, 16), **given)
    assert looked == []
    assert str(failing.value) == str(failing.value)
    assert len(looked) == 1


def test_of_many_failures_the_first_are_looked_into(given, monkeypatch):
    monkeypatch.setattr(python_api.UserOutputs, "diagnosis", lambda _: None)
    told = []
    for _ in range(4):
        with pytest.raises(AssertionError) as failing:
            close(torch.zeros(1, 2, 12, 16), **given)
        told += said(failing, "likely")
    assert told == ["  likely     not looked for, as it was of 24 failures before"]


def test_what_is_too_large_to_be_looked_at_is_not_kept(given, monkeypatch):
    from attncheck.diagnose import user_tensors

    monkeypatch.setattr(user_tensors, "LARGEST_DIAGNOSED", 2 * 12 * 12 - 1)
    with pytest.raises(AssertionError) as failing:
        close(torch.zeros(1, 2, 12, 16), **given)
    assert not said(failing, "likely")
    assert failing.value._answer is None


@pytest.mark.parametrize(
    "problem",
    [
        Problem(operation="softmax", query=6, kv=9, dtype="fp32"),
        Problem(query=6, head_dim=16, backward=True, dtype="fp32"),
        Problem(query=6, head_dim=16, dtype="e4m3"),
    ],
    ids=["softmax", "backward", "fp8"],
)
def test_every_kind_of_problem_has_a_message(problem):
    shape = (problem.batch, problem.heads, problem.query)
    columns = problem.kv if problem.operation == "softmax" else problem.value_dim
    with pytest.raises(AssertionError, match="attention: fail"):
        close(torch.full((*shape, columns), 3.0), problem=problem)
