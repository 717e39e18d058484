"""Rows that see no key: what a kernel declares, it must give."""

import math

import pytest
import torch

from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.capabilities.capability_table import EMPTY_ROWS
from attncheck.subjects.conventions.convention import ConventionOptions
from attncheck.subjects.conventions.declarations import make_subject
from attncheck.subjects.conventions.empty_rows import (
    WrongEmptyRows,
    empty_rows,
    mean_allowance,
    settle_empty_rows,
)
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.run_case import run_case

SENTINEL = -1e30


def problem_of(**changes) -> Problem:
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 12, "kv": 9, "head_dim": 16}
    return Problem(**(sizes | {"mask": Spec.of("causal_bottom_right"), "dtype": "fp32"} | changes))


def given(hidden, broken=None):
    """A kernel in plain torch that fills hidden scores with ``hidden``."""

    def kernel(q, k, v, attn_mask=None, enable_gqa=False):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~attn_mask, hidden)
        out = scores.softmax(-1).to(q.dtype) @ v
        if broken:
            broken(out)
        return out, scores.logsumexp(-1)

    return kernel


def zeroed(out):
    out[:, :, 0] = 0


def off(out):
    out[1, 2, 0, 3] *= 1 + 2.0**-7


def record_of(kernel, how, **changes):
    subject = make_subject(kernel, "kernel", "sdpa", ConventionOptions(empty_row=how))
    evidence = EvidenceBuilder(Case(problem=problem_of(**changes)), "cpu")
    return run_case(subject, evidence.case, device=evidence.device, evidence=evidence)


@pytest.mark.parametrize(
    ("hidden", "how"),
    [(-math.inf, "nan"), (SENTINEL, "mean"), (-math.inf, "unspecified"), (SENTINEL, "unspecified")],
)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_kernel_that_gives_what_it_declares_passes(hidden, how, dtype):
    record = record_of(given(hidden), how, dtype=dtype)
    assert record.status == "pass", record.reason
    assert record.out.dead_rows == 2 * 4 * 3


@pytest.mark.parametrize(
    ("hidden", "broken", "how", "status", "says"),
    [
        (-math.inf, None, "zero", "fail", ""),
        (SENTINEL, None, "zero", "fail", ""),
        (SENTINEL, None, "nan", "error", "should be NaN, as declared: 24 rows are not"),
        (-math.inf, zeroed, "nan", "error", "out[0, 0, 0] begins with 0, but the row sees no key"),
        (
            -math.inf,
            None,
            "mean",
            "error",
            "begins with nan, but the row sees no key and should be",
        ),
        (SENTINEL, zeroed, "mean", "error", "the mean of V, as declared: 8 rows are not"),
        (SENTINEL, off, "mean", "error", "out[1, 2, 0] begins with"),
    ],
)
def test_anything_else_is_found(hidden, broken, how, status, says):
    record = record_of(given(hidden, broken), how)
    assert record.status == status
    assert says in record.reason


@pytest.mark.parametrize(
    ("mask", "dead"),
    [
        (Spec.of("causal_bottom_right"), [3, 3]),
        (Spec.of("padding", lengths=[0, 4]), [12, 0]),
        (Spec.of("sliding_window", window=0), [12, 12]),
        (Spec.of("full"), [0, 0]),
        (Spec.of("not", Spec.of("causal")), [4, 4]),
    ],
)
def test_empty_rows_are_those_of_the_callable(mask, dead):
    rows = empty_rows(problem_of(mask=mask))
    assert rows.shape == (2, 4, 12)
    assert rows.sum((1, 2)).tolist() == [4 * n for n in dead]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_the_mean_is_asked_sharply(dtype):
    """A key more or less, of 9, is seen in every dtype."""
    inputs = draw_inputs(problem_of(dtype=dtype, distribution="uniform"))
    values = inputs.promoted()[2].repeat_interleave(2, dim=1)
    allowed = mean_allowance(inputs)
    moved = (values[:, :, :-1].mean(2, keepdim=True) - values.mean(2, keepdim=True)).abs()
    assert (moved > allowed).double().mean() > 0.5


def test_lse_of_empty_rows():
    inputs = draw_inputs(problem_of())
    dead = empty_rows(inputs.problem)
    out = torch.where(dead[..., None], math.nan, 1.0).expand(2, 4, 12, 16)
    for lse, right in ((math.nan, True), (-math.inf, True), (math.inf, False), (0.0, False)):
        outputs = Outputs(out, torch.where(dead, lse, 1.0))
        if not right:
            with pytest.raises(WrongEmptyRows, match=r"lse.*NaN or -inf"):
                settle_empty_rows(outputs, inputs, "nan")
            continue
        plain = settle_empty_rows(outputs, inputs, "nan")
        assert (plain.out == torch.where(dead[..., None], 0.0, 1.0)).all()
        assert (plain.lse == torch.where(dead, -math.inf, 1.0)).all()


def test_a_positive_infinity_is_taken_where_it_is_the_convention_and_no_finite_number():
    inputs = draw_inputs(problem_of())
    dead = empty_rows(inputs.problem)
    out = torch.zeros(2, 4, 12, 16)
    lse = torch.where(dead, math.inf, 1.0)
    assert (settle_empty_rows(Outputs(out, lse), inputs, "zero").lse == lse).all()
    both = (-math.inf, math.inf)
    assert (settle_empty_rows(Outputs(out, lse), inputs, "zero", both).lse[dead] == -math.inf).all()
    finite = lse.clamp(max=88)
    assert (settle_empty_rows(Outputs(out, finite), inputs, "zero", both).lse == finite).all()


@pytest.mark.parametrize("how", EMPTY_ROWS)
def test_what_is_no_output_is_left_to_the_executor(how):
    inputs = draw_inputs(problem_of())
    for out in (None, torch.zeros(3), torch.zeros(2, 4, 12, 16, dtype=torch.int32)):
        assert settle_empty_rows(Outputs(out), inputs, how).out is out
