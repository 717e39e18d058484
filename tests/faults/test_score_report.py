"""Fault scores in the report: totals, and units without a score."""

from __future__ import annotations

from msgspec import to_builtins

from attncheck.faults.fault_selection import FaultSelection
from attncheck.faults.score_report import fault_report, score_of, totals
from attncheck.records.fault_scores import FaultScore, PeerVerdict
from attncheck.records.record import Explanation
from attncheck.workers.journal_format import JournalContent
from attncheck.workers.units import Unit, UnitResult


def score(fault, outcome, category="gqa", **fields):
    return FaultScore(fault=fault, category=category, host="ideal", outcome=outcome, **fields)


def unit(fault):
    return Unit(kind="fault", stage="contract", kernel=f"{fault}@ideal", device="cpu", tier="smoke")


NAMED = (Explanation(model="m", sentence="s", share=1.0, explains_all=True),)


def test_totals_by_outcome_and_category():
    peers = (PeerVerdict(rule="2×", problems=3, caught=True),)
    scores = [
        score("a", "caught", seconds=1.0, problems=10, peers=peers, diagnosis=NAMED, rank=1),
        score("b", "caught", seconds=3.0, problems=30, diagnosis=NAMED, rank=3),
        score("c", "missed", "softcap", seconds=50.0, problems=200),
        score("d", "equivalent", "softcap"),
        score("e", "harness", "softcap"),
    ]
    whole, gqa, softcap = totals(scores)
    assert (whole.caught, whole.missed, whole.equivalent, whole.unscored) == (2, 1, 1, 1)
    assert (whole.seconds, whole.problems) == (2.0, 20.0)
    assert (whole.named_first, whole.named_third, whole.diagnosed) == (1, 2, 2)
    assert whole.peers == {"2×": 1}
    assert (gqa.category, gqa.caught, gqa.missed) == ("gqa", 2, 0)
    assert (softcap.category, softcap.caught, softcap.missed) == ("softcap", 0, 1)
    assert softcap.seconds is None


def test_totals_leave_out_unplanted_faults():
    assert list(totals([FaultScore(fault="x", category="gqa", outcome="unplanted")])) == []


def test_totals_expect_no_diagnosis_of_a_fault_that_is_not_discrete():
    (whole, _) = totals([score("a", "caught", discrete=False, diagnosis=NAMED, rank=1)])
    assert whole.diagnosed == 0


def test_report_counts_units_without_a_result_as_unfinished():
    first, second = unit("missing-alpha-on-acc"), unit("missing-alpha-on-l")
    facts = {"score": to_builtins(score("missing-alpha-on-acc", "caught")), "kind": "fault"}
    content = JournalContent(
        head={"tier": "smoke", "device": "cpu"},
        results={first.id: UnitResult(unit=first.id, facts=facts)},
        why="interrupted",
    )
    selection = FaultSelection(units=(first, second))
    report = fault_report(content, selection, command="attncheck faults")
    assert [each.fault for each in report.scores] == ["missing-alpha-on-acc"]
    assert (report.unfinished, report.unfinished_because) == (1, "interrupted")


def test_unit_that_failed_in_the_harness_keeps_its_reason():
    failed = unit("missing-alpha-on-acc")
    result = score_of(failed, UnitResult(unit=failed.id, harness="its process died twice"))
    assert (result.outcome, result.reason) == ("harness", "its process died twice")
    assert result.category == "online softmax"
