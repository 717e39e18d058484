"""Certificates of the oracles: what is proven holds, and a wrong oracle is not proven."""

import math

import pytest
import torch

pytest.importorskip("flint", reason="python-flint is an optional extra")

from attncheck import oracles
from attncheck.cases.variants import VARIANTS, Shape
from attncheck.core.errors import UsageError
from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.inputs.problem import Problem
from attncheck.surveys import oracle_certificates
from attncheck.surveys.oracle_certificates import certify_oracles

SMALL = Problem(heads=2, kv_heads=1, query=6, kv=5, head_dim=4, value_dim=3, dtype="fp32")


def variant_problem(name, shape, **fields):
    parsed = Shape.parse(shape)
    return Problem(**VARIANTS[name].fields(parsed, parsed.kv_heads), **fields)


IN_DTYPES = [
    (name, dtype)
    for dtype in ("fp32", "e4m3")
    for name, variant in VARIANTS.items()
    if variant.exists(dtype, "normal")  # softmax does not exist in fp8
]


def truth_record(problem):
    (record,) = certify_oracles([("x", problem)], command="").truths
    return record


@pytest.mark.parametrize(("name", "dtype"), IN_DTYPES)
@pytest.mark.parametrize("distribution", ["normal", "large_logits", "sink", "zero_q"])
def test_a_priori_bound_covers_the_proven_error(name, distribution, dtype, monkeypatch):
    """Compares two proofs: the a-priori bound of float64, and the exact result."""
    monkeypatch.setattr(oracle_certificates, "_dense_oracles", lambda inputs: {})
    record = truth_record(
        variant_problem(name, "1x2/1x23/30x20/7", dtype=dtype, distribution=distribution)
    )
    assert record.within_a_priori, record
    assert record.out.a_priori > 0
    assert record.lse.a_priori > 0
    assert record.holds(oracle_certificates.PROVEN)
    assert record.proven_rows == record.rows
    assert not record.out.unproven
    assert not record.lse.unproven


@pytest.fixture
def move_truth(monkeypatch):
    """Moves one number of the truth."""

    def move(part, at, by):
        truth = oracles.truth

        def moved_truth(inputs):
            outputs = truth(inputs)
            out, lse = outputs.out.clone(), outputs.lse.clone()
            {"out": out, "lse": lse}[part][at] += by
            return Outputs(out, lse)

        monkeypatch.setattr(oracles, "truth", moved_truth)

    return move


@pytest.mark.parametrize(("part", "at"), [("out", (0, 1, 4, 2)), ("lse", (0, 1, 4))])
def test_truth_off_by_1e_12_exceeds_the_a_priori_bound(move_truth, part, at):
    """The error is still far below what an fp32 kernel is allowed."""
    move_truth(part, at, 1e-12)
    record = truth_record(SMALL)
    assert not record.within_a_priori
    assert record.holds(oracle_certificates.PROVEN)
    tensor = getattr(record, part)
    assert tensor.error > 0.99e-12  # its own error is below 1 % of that
    assert tensor.share == tensor.error / tensor.allowance
    assert (tensor.at.head, tensor.at.query) == at[1:3]
    assert tensor.at.dim == (at[3] if part == "out" else -1)


@pytest.mark.parametrize(("part", "at"), [("out", (0, 1, 4, 2)), ("lse", (0, 1, 4))])
def test_truth_holds_only_up_to_a_hundredth_of_the_allowance(move_truth, part, at):
    move_truth(part, at, 1e-5)
    allowance = getattr(truth_record(SMALL), part).allowance  # at the moved number, the worst
    limit = oracle_certificates.PROVEN * allowance
    move_truth(part, at, limit / 2 - 1e-5)
    assert truth_record(SMALL).holds(oracle_certificates.PROVEN)
    move_truth(part, at, limit)
    assert not truth_record(SMALL).holds(oracle_certificates.PROVEN)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_element_is_unproven_and_does_not_hold(move_truth, value):
    move_truth("out", (0, 0, 1, 1), value)
    record = truth_record(SMALL)
    assert (record.out.unproven, record.out.elements) == (1, 35)
    assert record.lse.unproven == 0
    assert not record.holds(oracle_certificates.PROVEN)


def test_row_without_keys_must_be_exactly_zero(move_truth):
    problem = SMALL.replace(mask=Spec.of("sliding_window", window=1), kv=4, query=6)
    right = truth_record(problem)
    assert right.holds(oracle_certificates.PROVEN)
    move_truth("out", (0, 0, 5, 1), 1e-300)
    wrong = truth_record(problem)
    assert wrong.out.allowance == 0
    assert wrong.out.at.query == 5
    assert not wrong.holds(oracle_certificates.PROVEN)


def test_all_oracles_hold_except_the_naive_one_where_it_overflows():
    sharp = SMALL.replace(
        score=Spec.of("temperature", temperature=2.0**-4), distribution="large_logits"
    )
    softmax = variant_problem("softmax", "1x1x6x4", dtype="fp32")
    report = certify_oracles([("sharp", sharp), ("softmax", softmax)], command="")
    oracles_of = {}
    for record in report.records:
        oracles_of.setdefault(record.variant, []).append(record.oracle)
        if record.oracle != "naive":
            assert record.holds(report.limit), record
    assert oracles_of == {
        "sharp": ["truth", "naive", "safe", "online", "flash1", "flash2", "split"],
        "softmax": ["truth", "naive", "safe", "online"],
    }
    (naive,) = [r for r in report.records if (r.variant, r.oracle) == ("sharp", "naive")]
    assert naive.lse.unproven > 0
    assert list(report.arithmetics) == ["fp32"]


def test_large_problem_is_proven_on_the_judges_sample(monkeypatch):
    monkeypatch.setattr("attncheck.oracles.row_conditions._CPU_WHOLE", 2**12)
    problem = Problem(heads=2, query=90, head_dim=8, dtype="bf16", mask=Spec.of("causal"))
    report = certify_oracles([("causal", problem)], command="")
    (record,) = report.records  # oracles that hold all scores are left out
    assert record.oracle == "truth"
    assert (record.rows, record.proven_rows) == (180, 64)
    assert record.out.elements == 64 * 8
    assert record.within_a_priori


def test_rows_without_a_finite_bound_are_counted_and_do_not_matter(monkeypatch):
    """No element of a row is compared where the judge allows a kernel anything."""

    def bounds(evidence, arithmetic, rows):
        out, lse = row_bounds(evidence, arithmetic, rows)
        out[:, 2], lse[:, 2] = torch.inf, torch.inf
        return out, lse

    row_bounds = oracle_certificates.row_bounds
    monkeypatch.setattr(oracle_certificates, "row_bounds", bounds)
    record = truth_record(SMALL)
    assert (record.out.unbounded, record.out.elements) == (6, 30)
    assert (record.lse.unbounded, record.lse.elements) == (2, 10)
    assert record.holds(oracle_certificates.PROVEN)


def test_certify_rejects_huge_problems_and_an_empty_list():
    large = Problem(heads=64, query=4096, head_dim=128)
    with pytest.raises(UsageError, match="products of balls; at most"):
        certify_oracles([("full", large)], command="")
    with pytest.raises(UsageError, match="nothing can be proven"):
        certify_oracles([], command="")
