"""A FaultReport as a page: what is missed shows as missed, what is flagged as flagged."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from attncheck.core.errors import UsageError
from attncheck.records.fault_scores import (
    ControlScore,
    Detection,
    FaultReport,
    FaultScore,
    OwnTestsReport,
    OwnTestsScore,
    PeerVerdict,
    Total,
    WrongAnswer,
)
from attncheck.records.json_reports import load_report
from attncheck.records.record import Explanation
from attncheck.reporting.exit_codes import exit_code
from attncheck.reporting.rendering import render

FIRST = WrongAnswer(
    stage="probes",
    question="ones",
    status="fail",
    rule="structure",
    reason="row 4 | is wrong",
    problem="bf16 full B1 H2 Q77 K93 D64",
    case={"question": "ones"},
)
OTHER = Explanation(model="other", sentence="a", share=0.9, explains_all=False)
CAUGHT = FaultScore(
    fault="missing-alpha",
    category="online softmax",
    host="ideal",
    outcome="caught",
    problems=23,
    seconds=6.64,
    caught=Detection(first=FIRST, shrunk=replace(FIRST, problem="bf16 full B1 H1 Q1 K65 D16")),
    peers=(
        PeerVerdict(rule="allclose(1e-2)", problems=9, caught=True),
        PeerVerdict(rule="2×", problems=22, alarms=3),
    ),
    diagnosis=(OTHER, replace(OTHER, model="alpha")),
    rank=2,
)
MISSED = FaultScore(
    fault="window-left",
    category="sliding window",
    summary="the window is one wider",
    host="ideal",
    outcome="missed",
    problems=250,
    seconds=31.0,
)
BROKEN = replace(MISSED, fault="gone", outcome="harness", reason="NameError: x")
SAME = replace(MISSED, fault="same", outcome="equivalent", reason="the bits are the same")
NOWHERE = replace(MISSED, fault="race", host="", outcome="unplanted", reason="no threads")
CLEAN = ControlScore(control="split", host="ideal", outcome="clean", problems=250, seconds=30.0)
FLAGGED = replace(CLEAN, control="lazy", outcome="flagged", flagged=(FIRST,))


def report(*scores, controls=(), **fields):
    return FaultReport(
        command="attncheck faults",
        tier="smoke",
        device="cpu",
        scores=scores,
        controls=controls,
        **fields,
    )


def line(text, start):
    (found,) = [each for each in text.splitlines() if each.split()[:1] == [start]]
    return " ".join(found.split())


def test_one_line_says_all_of_a_fault():
    text = render(report(CAUGHT), "table")
    said = line(text, "missing-alpha")
    assert said.startswith("missing-alpha online softmax caught probes ones bf16 full B1 H1 Q1")
    assert said.endswith("23 6.6 9 0/19 2")
    assert text.rstrip().endswith("1 of 1 faults caught.")


def test_a_missed_fault_shows_as_missed():
    text = render(report(CAUGHT, MISSED), "table")
    assert line(text, "window-left").startswith("window-left sliding window missed — —")
    assert "└ the window is one wider: 250 problems, and every answer was right" in text
    assert "1 of 2 faults caught." in text


def test_a_flagged_control_shows_as_flagged():
    text = render(report(controls=(CLEAN, FLAGGED)), "table")
    assert line(text, "lazy") == "lazy ideal flagged 250 30.0"
    assert line(text, "split") == "split ideal clean 250 30.0"
    assert "└ probes ones: fail on bf16 full B1 H2 Q77 K93 D64: row 4 | is wrong" in text
    assert "no fault was scored, 1 of 2 controls flagged." in text


def test_what_has_no_score_says_why():
    text = render(report(BROKEN, SAME, NOWHERE, unfinished=3), "table")
    assert "└ NameError: x" in text
    assert line(text, "same") == "same the bits are the same"
    assert line(text, "race") == "race no threads"
    assert "3 have no score" in text
    assert "1 could not be scored" in text


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (report(CAUGHT), 0),
        (report(CAUGHT, SAME, NOWHERE, controls=(CLEAN,)), 0),
        (report(CAUGHT, MISSED), 1),
        (report(CAUGHT, controls=(FLAGGED,)), 1),
        (report(CAUGHT, BROKEN), 3),
        (report(CAUGHT, unfinished=1), 3),
        (report(SAME, NOWHERE), 5),
        (report(), 5),
    ],
)
def test_the_exit_code(found, code):
    assert exit_code(found) == code


def test_markdown_has_the_score_of_each_category_and_the_reason():
    totals = (
        Total(host="ideal", caught=1, missed=1, unscored=2, seconds=6.64, problems=23.0),
        Total(host="ideal", category="online softmax", caught=1, peers={"2×": 1}),
    )
    text = render(report(CAUGHT, MISSED, totals=totals), "md")
    assert "| online softmax | 1/1 | 0 | — | — | 1/1 | — | — |" in text
    assert "| all | 1/2 | **1** | 6.6 | 23 | 0/2 | — | — | 2 not scored |" in text
    assert "fail (structure): row 4 &#124; is wrong" in text


def test_json_comes_back():
    found = report(CAUGHT, MISSED, NOWHERE, controls=(FLAGGED,))
    assert load_report(render(found, "json"), FaultReport) == found
    with pytest.raises(UsageError, match="schema is 7"):
        load_report('{"schema": 7}', FaultReport)


def own(*statuses):
    scores = tuple(
        OwnTestsScore(
            fault=f"f{number}",
            category="gqa",
            host="ideal",
            status=status,
            reason="why" if status == "not scored" else "",
            tests=("test_a.py::test_b",) if status == "caught" else (),
        )
        for number, status in enumerate(statuses)
    )
    return OwnTestsReport(command="attncheck faults", pytest="tests", replace="a:b", scores=scores)


def test_of_ones_own_tests_what_shows_is_scored():
    text = render(own("caught", "missed", "not shown", "not reached"), "table")
    assert line(text, "f0") == "f0 gqa caught test_a.py::test_b 0.0"
    assert line(text, "f1").startswith("f1 gqa missed")
    assert line(text, "all") == "all 1/2 1 1 1 0"
    assert "1 of 2 faults that show are caught by these tests." in text


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (("caught", "not shown"), 0),
        (("caught", "missed"), 1),
        (("caught", "not scored"), 3),
        (("not shown", "not reached"), 5),
    ],
)
def test_the_exit_code_of_ones_own_tests(statuses, code):
    assert exit_code(own(*statuses)) == code


def test_what_has_no_score_yet_is_said_and_has_its_exit_code():
    report = replace(own("caught"), unfinished=2, unfinished_because="interrupted")
    assert exit_code(report) == 3
    assert "2 have no score: interrupted." in render(report, "table")
    assert exit_code(replace(own("missed"), unfinished=1)) == 1
