"""Empty rows, which see no key: a kernel must return what it declares for them."""

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


def make_problem(**changes) -> Problem:
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 12, "kv": 9, "head_dim": 16}
    return Problem(**(sizes | {"mask": Spec.of("causal_bottom_right"), "dtype": "fp32"} | changes))


def make_kernel(hidden, damage=None):
    """A kernel in plain torch that fills hidden scores with ``hidden`` and damages its out."""

    def kernel(q, k, v, attn_mask=None, enable_gqa=False):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~attn_mask, hidden)
        out = scores.softmax(-1).to(q.dtype) @ v
        if damage:
            damage(out)
        return out, scores.logsumexp(-1)

    return kernel


def zero_first_row(out):
    out[:, :, 0] = 0


def perturb_one_number(out):
    out[1, 2, 0, 3] *= 1 + 2.0**-7


def judge(kernel, empty_row, **changes):
    subject = make_subject(kernel, "kernel", "sdpa", ConventionOptions(empty_row=empty_row))
    evidence = EvidenceBuilder(Case(problem=make_problem(**changes)), "cpu")
    return run_case(subject, evidence.case, device=evidence.device, evidence=evidence)


@pytest.mark.parametrize(
    ("hidden", "empty_row"),
    [(-math.inf, "nan"), (SENTINEL, "mean"), (-math.inf, "unspecified"), (SENTINEL, "unspecified")],
)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_declared_empty_rows_pass(hidden, empty_row, dtype):
    record = judge(make_kernel(hidden), empty_row, dtype=dtype)
    assert record.status == "pass", record.reason
    assert record.out.dead_rows == 2 * 4 * 3


@pytest.mark.parametrize(
    ("hidden", "damage", "empty_row", "status", "message"),
    [
        (-math.inf, None, "zero", "fail", ""),
        (SENTINEL, None, "zero", "fail", ""),
        (SENTINEL, None, "nan", "error", "should be NaN, as declared: 24 rows are not"),
        (
            -math.inf,
            zero_first_row,
            "nan",
            "error",
            "out[0, 0, 0] begins with 0, but the row sees no key",
        ),
        (
            -math.inf,
            None,
            "mean",
            "error",
            "begins with nan, but the row sees no key and should be",
        ),
        (SENTINEL, zero_first_row, "mean", "error", "the mean of V, as declared: 8 rows are not"),
        (SENTINEL, perturb_one_number, "mean", "error", "out[1, 2, 0] begins with"),
    ],
)
def test_empty_rows_other_than_declared_fail(hidden, damage, empty_row, status, message):
    record = judge(make_kernel(hidden, damage), empty_row)
    assert record.status == status
    assert message in record.reason


@pytest.mark.parametrize(
    ("mask", "counts"),
    [
        (Spec.of("causal_bottom_right"), [3, 3]),
        (Spec.of("padding", lengths=[0, 4]), [12, 0]),
        (Spec.of("sliding_window", window=0), [12, 12]),
        (Spec.of("full"), [0, 0]),
        (Spec.of("not", Spec.of("causal")), [4, 4]),
    ],
)
def test_empty_rows_are_counted_for_each_sequence(mask, counts):
    rows = empty_rows(make_problem(mask=mask))
    assert rows.shape == (2, 4, 12)
    assert rows.sum((1, 2)).tolist() == [4 * n for n in counts]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_allowance_of_the_mean_is_smaller_than_one_key_of_nine(dtype):
    """A mean over one key more or less is noticed in every dtype."""
    inputs = draw_inputs(make_problem(dtype=dtype, distribution="uniform"))
    values = inputs.promoted()[2].repeat_interleave(2, dim=1)
    allowed = mean_allowance(inputs)
    moved = (values[:, :, :-1].mean(2, keepdim=True) - values.mean(2, keepdim=True)).abs()
    assert (moved > allowed).double().mean() > 0.5


@pytest.mark.parametrize("lse", [math.nan, -math.inf])
def test_nan_rows_with_lse_of_nan_or_minus_infinity_are_settled(lse):
    inputs = draw_inputs(make_problem())
    empty = empty_rows(inputs.problem)
    outputs = settle_empty_rows(nan_rows(empty, lse), inputs, "nan")
    assert (outputs.out == torch.where(empty[..., None], 0.0, 1.0)).all()
    assert (outputs.lse == torch.where(empty, -math.inf, 1.0)).all()


@pytest.mark.parametrize("lse", [math.inf, 0.0])
def test_nan_rows_with_another_lse_are_wrong(lse):
    inputs = draw_inputs(make_problem())
    with pytest.raises(WrongEmptyRows, match=r"lse.*NaN or -inf"):
        settle_empty_rows(nan_rows(empty_rows(inputs.problem), lse), inputs, "nan")


def nan_rows(empty, lse):
    out = torch.where(empty[..., None], math.nan, 1.0).expand(2, 4, 12, 16)
    return Outputs(out, torch.where(empty, lse, 1.0))


def test_lse_of_plus_infinity_is_settled_only_where_the_convention_allows_it():
    """A finite LSE of an empty row is never settled."""
    inputs = draw_inputs(make_problem())
    empty = empty_rows(inputs.problem)
    out = torch.zeros(2, 4, 12, 16)
    lse = torch.where(empty, math.inf, 1.0)
    assert (settle_empty_rows(Outputs(out, lse), inputs, "zero").lse == lse).all()
    both = (-math.inf, math.inf)
    settled = settle_empty_rows(Outputs(out, lse), inputs, "zero", both)
    assert (settled.lse[empty] == -math.inf).all()
    finite = lse.clamp(max=88)
    assert (settle_empty_rows(Outputs(out, finite), inputs, "zero", both).lse == finite).all()


@pytest.mark.parametrize("empty_row", EMPTY_ROWS)
def test_invalid_out_is_returned_unchanged_for_the_executor_to_refuse(empty_row):
    inputs = draw_inputs(make_problem())
    for out in (None, torch.zeros(3), torch.zeros(2, 4, 12, 16, dtype=torch.int32)):
        assert settle_empty_rows(Outputs(out), inputs, empty_row).out is out
