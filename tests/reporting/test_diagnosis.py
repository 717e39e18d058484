"""The plain-text diagnosis of a failed record, as pytest and `attncheck repro` print it."""

import math

import pytest

from attncheck.core.judgement import Judgement, Place, Worst
from attncheck.core.mod_spec import Spec
from attncheck.core.paged_layout import Paging
from attncheck.inputs.problem import Case, Problem
from attncheck.records.failures import StoredFailure
from attncheck.records.problem_summary import problem_of
from attncheck.reporting.check_document import explanation
from attncheck.reporting.diagnosis_text import diagnosis_text, kept_failure_text
from attncheck.reporting.terminal import plain_text

PROBLEM = Problem(query=1, kv=2, head_dim=1, mask=Spec.of("causal"))
HIDDEN = """\
FAIL relation hidden_keys_nan: out[0, 0, 0, 0] = nan, but should be 0.46875 bit for bit
  kernel     mine.py::kernel on cpu
  problem    bf16 causal B1 H1 Q1 K2 D1 normal seed 0
  question   hidden_keys_nan row=0: every bit stays
  test       test_poison.py::test_hidden
  worst      out[0, 0, 0, 0] (batch, head, query, dim) in query tile 0, rows 0–0
  got        nan
  should be  0.46875
  allowed    0 (bit for bit)
  wrong      1 of 1 elements
Reproduce: attncheck repro abcdefghij"""


def relation_failure(allowance=0.0, **changes):
    worst = Worst(
        tensor="out",
        at=Place(batch=0, head=0, query=0, dim=0),
        tile="query tile 0, rows 0–0",
        got=math.nan,
        exact=0.46875,
        allowance=allowance,
        budget={},
    )
    fields = {
        "status": "fail",
        "rule": "relation",
        "reason": "out[0, 0, 0, 0] = nan, but should be 0.46875 bit for bit",
        "worst": worst,
        "wrong": 1,
        "compared": 1,
    }
    return Judgement(**(fields | changes))


@pytest.fixture
def hidden(make):
    case = Case(problem=PROBLEM, question="hidden_keys_nan", parameters={"row": 0})
    return make.record(
        case=case.to_json(),
        status="fail",
        judgement=relation_failure(),
        interpreted=False,
        out=None,
        lse=None,
    )


def stored(make, record, **changes):
    fields = {"id": "abcdefghij", "kernel": "mine.py::kernel", "device": "cpu"}
    fields |= {"question": "every bit stays", "test": "test_poison.py::test_hidden"}
    return StoredFailure(
        **(fields | {"record": record, "environment": make.environment()} | changes)
    )


def test_failed_relation_text(make, hidden):
    assert kept_failure_text(stored(make, hidden)) == HIDDEN


def test_bound_failure_lists_allowance_terms_and_arithmetic(make):
    record = make.judged(
        status="fail",
        rule="bound",
        reason="out[0, 1, 127, 63] is off",
        wrong=3,
        compared=32768,
        warnings=("lse is off, too",),
    )
    lines = diagnosis_text(record, kernel="mine", device="cpu").splitlines()
    assert lines[0] == "FAIL bound compare: out[0, 1, 127, 63] is off"
    assert lines[1:3] == [
        "  kernel     mine on cpu in Triton's interpreter",
        "  problem    bf16 full B1 H4 Q128 K96 D64 normal seed 0",
    ]
    assert lines[-4:] == [
        "  allowed    3.12e-02 = output rounding 2.3e-02 + weights 7.8e-03",
        "  wrong      3 of 32768 elements",
        "  also       lse is off, too",
        "  judged as  bf16 products, fp32 sums, P in bf16, bf16 out",
    ]


@pytest.mark.parametrize(
    ("status", "head"),
    [("error", "ERROR compare: RuntimeError: planted"), ("unsupported", "NOT SUPPORTED compare: ")],
)
def test_unjudged_record_shows_status_and_reason(make, status, head):
    text = diagnosis_text(make.refused("k", status, "RuntimeError: planted"), kernel="k")
    assert text.splitlines()[0].startswith(head)
    assert "worst" not in text


def test_long_message_is_truncated(make):
    text = diagnosis_text(make.refused("k", "error", "word " * 1000), kernel="k")
    assert max(map(len, text.splitlines())) < 600
    assert text.splitlines()[0].endswith("…")


def test_control_characters_are_removed(make, hidden):
    foul = "\x1b[31mred\x1b[0m\n\u202eback"
    failed = stored(make, hidden, kernel=foul, question=foul, test=foul)
    text = kept_failure_text(failed)
    assert text.count("\n") == HIDDEN.count("\n")
    assert text.count("red back") == 3
    assert not set(text) & {"\x1b", "\u202e"}


def test_relation_with_allowance_names_both_runs_bounds(make, hidden):
    judgement = relation_failure(allowance=0.5)
    record = make.record(case=hidden.case, status="fail", judgement=judgement)
    text = diagnosis_text(record, kernel="k")
    assert "  allowed    5.00e-01 (the judge's bounds of the runs that are compared)" in text


@pytest.mark.parametrize(
    "problem",
    [
        Problem(heads=4, kv_heads=2, query=5, mask=Spec.of("sliding_window", window=3)),
        Problem(query=5, score=Spec.of("softcap", cap=20.0), dtype="e4m3"),
        Problem(query=5, head_dim=48, value_dim=16),
        Problem(query=5, head_dim=48, scale=0.3),
        Problem(operation="softmax", query=4, kv=7, dtype="fp32"),
        Problem(query=5, mask=Spec.of("and", Spec.of("causal"), Spec.of("padding", lengths=[3]))),
        Problem(query=5, score=Spec.of("softcap", cap=20.0), sink=True),
        Problem(query=5, sink=True, paging=Paging(size=16, shared=1), scale=0.3),
    ],
    ids=["window", "softcap", "dims", "scale", "softmax", "and", "sink", "pages"],
)
def test_full_line_matches_str_of_problem(make, problem):
    record = make.record(case=Case(problem=problem).to_json())
    assert problem_of(record).full_line == str(problem)


def test_explanation_of_relation_omits_bounds(make, hidden):
    page = plain_text(explanation(hidden))
    assert "fail: relation: out[0, 0, 0, 0] = nan" in page
    assert "allowed    0, bit for bit\n  wrong      1 of 1 elements\n" in page
    assert "bound" not in page.replace("the element", "")
    assert "judged as" not in page
