"""A failing ``assert_attention_close`` diagnoses the tensors, without calling the kernel."""

import math
import os
import subprocess
import sys

import pytest
import torch

import attncheck
from attncheck.core.mod_spec import Spec
from attncheck.inputs import input_tensors
from attncheck.inputs.problem import Problem
from attncheck.suite import python_api

close = attncheck.assert_attention_close


@pytest.fixture(autouse=True)
def forget_earlier_tests(monkeypatch):
    """Their diagnoses count, and a message has one more line once they ran Triton's interpreter."""
    monkeypatch.setattr(python_api, "_left", iter(range(3)))
    monkeypatch.setattr(python_api, "has_stock_interpreter", lambda: False)


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(1, 2, 12, 16, generator=generator) for name in "qkv"}


def attention(q, k, v, seen=None):
    scores = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    return (torch.softmax(scores, -1) @ v.double()).to(q.dtype)


def one_key_wider(query):
    return torch.ones(query, query, dtype=torch.bool).tril(1)


def labelled_lines(failing, label):
    """Lines of the message that begin with ``label``."""
    lines = str(failing.value).splitlines()
    return [line for line in lines if line.startswith(f"  {label} ")]


def test_causal_mask_one_key_too_wide_is_named(qkv):
    out = attention(**qkv, seen=one_key_wider(12))
    with pytest.raises(AssertionError) as failing:
        close(out, **qkv, is_causal=True)
    (likely,) = labelled_lines(failing, "likely")
    assert "the causal mask is one key too wide" in likely
    assert "the causal mask is one key too wide" in str(failing.value).splitlines()[1]
    assert labelled_lines(failing, "tiles")


@pytest.mark.parametrize("table", [True, False], ids=["a tensor", "a function"])
def test_users_mask_is_available_when_the_message_is_read(qkv, table):
    near = (torch.arange(12)[:, None] - torch.arange(12)).abs() < 4
    mask = near if table else lambda b, h, i, j: (i - j).abs() < 4
    with pytest.raises(AssertionError) as failing:
        close(attention(**qkv), **qkv, mask=mask)
    (likely,) = labelled_lines(failing, "likely")
    assert "the mask is ignored" in likely


def test_diagnosis_works_with_a_problem_or_its_inputs():
    problem = Problem(query=12, head_dim=16, mask=Spec.of("causal"), dtype="fp32")
    inputs = input_tensors.draw_inputs(problem)
    out = attention(inputs.q, inputs.k, inputs.v)
    for argument in (problem, inputs):
        with pytest.raises(AssertionError) as failing:
            close(out, problem=argument)
        assert "the mask is ignored" in labelled_lines(failing, "likely")[0]


def test_message_says_unknown_where_no_fault_model_fits(qkv):
    generator = torch.Generator().manual_seed(4)
    noise = torch.randn(qkv["q"].shape, generator=generator)
    with pytest.raises(AssertionError) as failing:
        close(attention(**qkv) + noise, **qkv)
    (likely,) = labelled_lines(failing, "likely")
    assert likely.split(":")[0].split() == ["likely", "unknown"]
    assert likely.endswith("fault models fits")
    assert not labelled_lines(failing, "or")


def test_diagnosis_is_not_affected_by_later_writes_to_the_tensors(qkv):
    out = attention(**qkv, seen=one_key_wider(12))
    with pytest.raises(AssertionError) as failing:
        close(out, **qkv, is_causal=True)
    for tensor in (out, *qkv.values()):
        tensor.zero_()
    assert "the causal mask is one key too wide" in labelled_lines(failing, "likely")[0]


def test_diagnosis_runs_once_when_the_message_is_read(qkv, monkeypatch):
    calls = []

    def diagnose(answer):
        calls.append(answer)

    monkeypatch.setattr(python_api.UserOutputs, "diagnosis", diagnose)
    with pytest.raises(AssertionError) as failing:
        close(torch.zeros(1, 2, 12, 16), **qkv)
    assert calls == []
    assert str(failing.value) == str(failing.value)
    assert len(calls) == 1


def test_only_the_first_failures_of_a_process_are_diagnosed(qkv, monkeypatch):
    monkeypatch.setattr(python_api.UserOutputs, "diagnosis", lambda _: None)
    lines = []
    for _ in range(4):
        with pytest.raises(AssertionError) as failing:
            close(torch.zeros(1, 2, 12, 16), **qkv)
        lines += labelled_lines(failing, "likely")
    assert lines == ["  likely     not looked for, as it was of 24 failures before"]


def test_large_tensors_are_neither_diagnosed_nor_kept(qkv, monkeypatch):
    from attncheck.diagnose import user_tensors

    monkeypatch.setattr(user_tensors, "LARGEST_DIAGNOSED", 2 * 12 * 12 - 1)
    with pytest.raises(AssertionError) as failing:
        close(torch.zeros(1, 2, 12, 16), **qkv)
    assert not labelled_lines(failing, "likely")
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


def test_exchanged_axes_are_a_possible_cause(qkv):
    out = attention(**qkv)
    exchanged = {name: tensor.transpose(1, 2) for name, tensor in qkv.items()}
    with pytest.raises(AssertionError) as failing:
        close(out.transpose(1, 2), **exchanged)
    perhaps = labelled_lines(failing, "perhaps")
    assert any("axes 1 and 2 are exchanged: q, k and v each" in line for line in perhaps)


_IN_TRITONS_INTERPRETER = """
import torch
import triton
import triton.language as tl
import attncheck

if REPAIRED:
    attncheck.repair_interpreter()

@triton.jit
def double(values):
    tl.store(values, tl.load(values) + tl.load(values))

value = torch.full((1,), 1.5, dtype=torch.bfloat16)
double[(1,)](value)
print(value.item() == 3.0)
q = torch.ones(1, 1, 2, 16)
try:
    attncheck.assert_attention_close(q + 1, q=q, k=q, v=q)
except AssertionError as error:
    print("attncheck.repair_interpreter() in conftest.py" in str(error))
"""


@pytest.mark.parametrize("repaired", [False, True], ids=["stock", "repaired"])
def test_unrepaired_interpreter_is_a_possible_cause(repaired, tmp_path):
    """In a process of its own, as this one may have repaired the interpreter already."""
    pytest.importorskip("triton", reason="Triton's interpreter")
    file = tmp_path / "script.py"  # Triton reads the source of a function from its file.
    file.write_text(f"REPAIRED = {repaired}\n{_IN_TRITONS_INTERPRETER}")
    run = subprocess.run(
        [sys.executable, file],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert run.stdout.split() == [str(repaired), str(not repaired)]
