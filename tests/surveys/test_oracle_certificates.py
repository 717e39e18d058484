"""What is proven of the oracles is what they are, and what they are not is not proven."""

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


def of_variant(name, shape, **fields):
    parsed = Shape.parse(shape)
    return Problem(**VARIANTS[name].fields(parsed, parsed.kv_heads), **fields)


IN_DTYPES = [
    (name, dtype)
    for dtype in ("fp32", "e4m3")
    for name, variant in VARIANTS.items()
    if variant.exists(dtype, "normal")  # softmax has no fp8
]


def truth_of(problem):
    (record,) = certify_oracles([("x", problem)], command="").truths
    return record


@pytest.mark.parametrize(("name", "dtype"), IN_DTYPES)
@pytest.mark.parametrize("distribution", ["normal", "large_logits", "sink", "zero_q"])
def test_what_is_assumed_of_the_truth_is_never_less_than_what_is_proven(
    name, distribution, dtype, monkeypatch
):
    """The a-priori bound of float64 against the exact result: a proof against a proof."""
    monkeypatch.setattr(oracle_certificates, "_dense_oracles", lambda inputs: {})
    record = truth_of(of_variant(name, "1x2/1x23/30x20/7", dtype=dtype, distribution=distribution))
    assert record.within_a_priori, record
    assert record.out.a_priori > 0
    assert record.lse.a_priori > 0
    assert record.holds(oracle_certificates.PROVEN)
    assert record.proven_rows == record.rows
    assert not record.out.unproven
    assert not record.lse.unproven


@pytest.fixture
def moved(monkeypatch):
    """Moves one number of the truth."""

    def move(part, at, by):
        truth = oracles.truth

        def planted(inputs):
            given = truth(inputs)
            out, lse = given.out.clone(), given.lse.clone()
            {"out": out, "lse": lse}[part][at] += by
            return Outputs(out, lse)

        monkeypatch.setattr(oracles, "truth", planted)

    return move


@pytest.mark.parametrize(("part", "at"), [("out", (0, 1, 4, 2)), ("lse", (0, 1, 4))])
def test_a_truth_that_is_off_by_1e_12_is_beyond_what_is_assumed_of_it(moved, part, at):
    """And still far below what an fp32 kernel is allowed."""
    moved(part, at, 1e-12)
    record = truth_of(SMALL)
    assert not record.within_a_priori
    assert record.holds(oracle_certificates.PROVEN)
    found = getattr(record, part)
    assert found.error > 0.99e-12  # what it was off by before is below 1 % of that
    assert found.share == found.error / found.allowance
    assert (found.at.head, found.at.query) == at[1:3]
    assert found.at.dim == (at[3] if part == "out" else -1)


@pytest.mark.parametrize(("part", "at"), [("out", (0, 1, 4, 2)), ("lse", (0, 1, 4))])
def test_a_truth_that_is_off_by_a_hundredth_of_the_allowance_does_not_hold(moved, part, at):
    allowance = getattr(truth_of(SMALL), part).allowance
    moved(part, at, 100 * allowance)
    record = truth_of(SMALL)
    assert not record.holds(oracle_certificates.PROVEN)
    assert getattr(record, part).share > oracle_certificates.PROVEN


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_counted_and_does_not_hold(moved, value):
    moved("out", (0, 0, 1, 1), value)
    record = truth_of(SMALL)
    assert (record.out.unproven, record.out.elements) == (1, 35)
    assert record.lse.unproven == 0
    assert not record.holds(oracle_certificates.PROVEN)


def test_a_row_without_keys_must_be_exactly_zero(moved):
    problem = SMALL.replace(mask=Spec.of("sliding_window", window=1), kv=4, query=6)
    right = truth_of(problem)
    assert right.holds(oracle_certificates.PROVEN)
    moved("out", (0, 0, 5, 1), 1e-300)
    wrong = truth_of(problem)
    assert wrong.out.allowance == 0
    assert wrong.out.at.query == 5
    assert not wrong.holds(oracle_certificates.PROVEN)


def test_all_oracles_have_a_certificate_and_the_naive_one_is_not_proven_where_it_overflows():
    sharp = SMALL.replace(
        score=Spec.of("temperature", temperature=2.0**-4), distribution="large_logits"
    )
    softmax = of_variant("softmax", "1x1x6x4", dtype="fp32")
    report = certify_oracles([("sharp", sharp), ("softmax", softmax)], command="")
    asked = {}
    for record in report.records:
        asked.setdefault(record.variant, []).append(record.oracle)
        if record.oracle != "naive":
            assert record.holds(report.limit), record
    assert asked == {
        "sharp": ["truth", "naive", "safe", "online", "flash1", "flash2", "split"],
        "softmax": ["truth", "naive", "safe", "online"],
    }
    (naive,) = [r for r in report.records if (r.variant, r.oracle) == ("sharp", "naive")]
    assert naive.lse.unproven > 0
    assert list(report.arithmetics) == ["fp32"]


def test_of_a_large_problem_the_judge_s_own_sample_is_proven(monkeypatch):
    monkeypatch.setattr("attncheck.oracles.row_conditions._CPU_WHOLE", 2**12)
    problem = Problem(heads=2, query=90, head_dim=8, dtype="bf16", mask=Spec.of("causal"))
    report = certify_oracles([("causal", problem)], command="")
    (record,) = report.records  # no oracle that holds all scores
    assert record.oracle == "truth"
    assert (record.rows, record.proven_rows) == (180, 64)
    assert record.out.elements == 64 * 8
    assert record.within_a_priori


def test_a_jump_of_a_score_mod_leaves_rows_without_an_allowance_or_within_it(monkeypatch):
    """Nothing of a row is compared where the judge asks nothing of a kernel."""

    def bounds(evidence, arithmetic, rows):
        out, lse = real(evidence, arithmetic, rows)
        out[:, 2], lse[:, 2] = torch.inf, torch.inf
        return out, lse

    real = oracle_certificates.row_bounds
    monkeypatch.setattr(oracle_certificates, "row_bounds", bounds)
    record = truth_of(SMALL)
    assert (record.out.unbounded, record.out.elements) == (6, 30)
    assert (record.lse.unbounded, record.lse.elements) == (2, 10)
    assert record.holds(oracle_certificates.PROVEN)


def test_what_would_take_hours_and_nothing_at_all_are_refused():
    large = Problem(heads=64, query=4096, head_dim=128)
    with pytest.raises(UsageError, match="products of balls; at most"):
        certify_oracles([("full", large)], command="")
    with pytest.raises(UsageError, match="nothing can be proven"):
        certify_oracles([], command="")
