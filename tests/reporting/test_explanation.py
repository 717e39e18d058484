"""The explanation page of one record: its verdict and the allowance term by term."""

import re
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from attncheck.core.declared_arithmetic import default_arithmetic
from attncheck.core.formats import FORMATS
from attncheck.core.judgement import Place
from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import Case, Problem
from attncheck.reporting import check_document, diagnosis_text
from attncheck.reporting.check_document import explanation
from attncheck.reporting.terminal import plain_text
from attncheck.subjects.ideal import Ideal
from attncheck.verify.allowances import budget, gradient_allowance
from attncheck.verify.evidence_builder import EvidenceBuilder


def as_page(record, width=120):
    return plain_text(explanation(record), width)


MEANINGS = {"output rounding": "out is rounded once", "weights": "what scores make of them"}


@pytest.fixture(autouse=True)
def meanings(monkeypatch):
    monkeypatch.setattr(check_document, "TERMS", MEANINGS)


def test_explanation_matches_snapshot(make, matches_snapshot):
    reason = "out[0, 1, 127, 63] is off by 0.84, 26.9 times what is allowed"
    record = make.judged(
        status="fail",
        rule="bound",
        reason=reason,
        warnings=("z = 3.2",),
        worst=make.worst(got=1.0821875),
        out_over_bound=26.88,
    )
    matches_snapshot("explanation.txt", as_page(record))


def test_residual_is_shown_with_its_limit(make):
    precision = msgspec.structs.replace(make.judgement().precision, residual_allowed=0.15)
    page = as_page(make.judged(precision=precision))
    assert re.search(r"residual +0.04, 0.15 +distance .*, and the largest allowed", page)


def test_problem_line_lists_score_mod_backward_and_scale():
    """Each part of a problem that a planted fault may ignore must show in the problem's line.

    The case this guards: a score mod was reported as ignored, but the line showed none.
    """
    problem = Problem(query=4, kv=4, score=Spec.of("alibi"), backward=True, scale=0.5)
    text = check_document._problem(SimpleNamespace(case=Case(problem=problem).to_json()))
    assert text.split()[:3] == ["full", "alibi", "backward"]
    assert text.endswith("scale 0.5")


def test_problem_of_a_cause_has_the_parameters_of_its_mods():
    """The case this guards: a cap of 10,000, which changes nothing, was shown as any softcap."""
    problem = Problem(query=4, kv=4, score=Spec.of("softcap", cap=10000.0), backward=True)
    record = SimpleNamespace(case=Case(problem=problem).to_json())
    assert check_document._full_problem(record).startswith("full softcap(cap=10000.0) backward B1")


def test_allowance_terms_are_sorted_with_share_and_meaning(make):
    worst = make.worst(budget={"weights": 0.0078125, "output rounding": 0.0234375})
    lines = as_page(make.judged(worst=worst)).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("what is allowed there"))
    assert [line.split() for line in lines[at + 2 : at + 4]] == [
        ["output", "rounding", "2.34e-02", "75", "%", *MEANINGS["output rounding"].split()],
        ["weights", "7.81e-03", "25", "%", *MEANINGS["weights"].split()],
    ]


@pytest.mark.parametrize(
    ("status", "rule", "title"),
    [
        ("pass", "", "the largest error ÷ bound: out["),
        ("warn", "improbable", "the largest error ÷ bound: out["),
        ("fail", "precision", "the largest error ÷ bound: out["),
        ("fail", "finite", "the element that shows it: out["),
        ("fail", "bound", "the element that shows it: out["),
    ],
)
def test_title_says_why_the_element_is_shown(make, status, rule, title):
    assert f"\n{title}" in as_page(make.judged(status=status, rule=rule, reason="why"))


def test_lse_place_has_no_dim(make):
    worst = make.worst(tensor="lse", at=make.lse().max_at)
    assert "lse[0, 0, 3] (batch, head, query)" in as_page(make.judged(worst=worst))


def test_zero_allowance_does_not_divide_by_zero(make):
    worst = make.worst(allowance=0.0, budget={"weights": 0.0})
    assert "allowed    0\n" in as_page(make.judged(worst=worst))


@pytest.mark.parametrize("status", ["error", "unsupported"])
def test_unjudged_record_shows_status_and_reason(make, status):
    page = as_page(make.refused("k", status, "RuntimeError: planted"))
    assert page.splitlines()[1:] == [f"{status}: RuntimeError: planted"]


def test_record_without_comparisons_is_explained(make):
    record = make.judged(worst=None, precision=None, out_over_bound=None, lse_over_bound=None)
    page = as_page(record)
    assert "bound (a proof), 512 rows     —" in page
    assert "what is allowed there" not in page


def test_control_characters_are_removed(make):
    worst = make.worst(tile="\x1b[31mtile", budget={"\x1b[31mpart\n": 1.0})
    page = as_page(make.judged("\x1b[31mred\nline", worst=worst))
    assert page.startswith("red line · full")
    assert "\x1b" not in page


def test_page_fits_its_width(make, monkeypatch):
    monkeypatch.setattr(check_document, "TERMS", {"weights": "word " * 60})
    assert max(map(len, as_page(make.record()).splitlines())) <= 120


PROBLEMS = [
    Problem(query=9, kv=20, head_dim=8, dtype="tf32", score=Spec.of("softcap", cap=20.0)),
    Problem(query=9, kv=20, head_dim=8, dtype="bf16"),
    Problem(operation="softmax", query=9, kv=20, dtype="fp16"),
]
BACKWARDS = [
    Problem(query=9, kv=20, head_dim=8, dtype="tf32", score=Spec.of("softcap", cap=20.0)),
    Problem(heads=2, kv_heads=1, query=9, kv=20, head_dim=8, dtype="bf16", sink=True),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("sums_rounded_weights", [False, True])
def test_every_allowance_term_has_a_meaning(problem, sums_rounded_weights):
    evidence = EvidenceBuilder(Case(problem=problem), "cpu")
    arithmetic = replace(
        default_arithmetic(problem.formats), sums_rounded_weights=sums_rounded_weights
    )
    for dim in (-1, 0):
        parts = budget(evidence.evidence, arithmetic, Place(batch=0, head=0, query=8, dim=dim))
        assert set(parts) <= set(diagnosis_text.TERMS)


@pytest.mark.parametrize("problem", BACKWARDS, ids=str)
@pytest.mark.parametrize(
    "declared",
    [{}, {"sums_rounded_heads": True, "rounds_value_products": FORMATS["bf16"]}],
    ids=["fused", "not fused"],
)
def test_every_gradient_allowance_term_has_a_meaning(problem, declared):
    evidence = EvidenceBuilder(Case(problem=problem.replace(backward=True)), "cpu")
    arithmetic = replace(default_arithmetic(problem.formats), **declared)
    allowance = gradient_allowance(evidence.evidence, arithmetic, Ideal().run(evidence.inputs))
    assert set(allowance.terms) == set(evidence.truth.gradients())
    assert set().union(*allowance.terms.values()) <= set(diagnosis_text.TERMS)


def test_each_gradient_has_a_row_within_80_columns(make):
    far = Place(batch=1, head=15, query=4095, dim=127)
    record = make.backward(sink=True, gradients={"dk": make.gradient(max_at=far, rmse=2.12)})
    lines = as_page(record, 80).splitlines()
    assert " ".join(map(str.strip, lines[:2])).endswith(" · seed 0 · backward")
    at, times = lines.index("gradients"), ("2.00e+03×", "1.06e+03×")
    assert [line.split() for line in lines[at + 1 : at + 6]] == [
        ["÷", "bound", "RMSE", "×floor", "×ideal", "max", "error", "at"],
        ["dq", "0.61", "2.12e-03", "2.00×", "1.06×", "1.50e-02", "0,1,95,7"],
        ["dk", "0.42", "2.12e+00", *times, "1.50e-02", "1,15,4095,127"],
        ["dv", "0.33", "2.12e-03", "2.00×", "1.06×", "1.50e-02", "0,1,95,7"],
        ["dsink", "0.90", "2.12e-03", "2.00×", "1.06×", "1.50e-02", "2"],
    ]
    assert max(map(len, lines[at : at + 6])) <= 80
