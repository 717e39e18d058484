from __future__ import annotations

import msgspec
import pytest

from attncheck.core.errors import UsageError
from attncheck.records.json_reports import load_report
from attncheck.records.record import Environment
from attncheck.records.run_reports import (
    PropertyOutcome,
    PropertyReport,
    Tally,
    join_property_reports,
)
from attncheck.reporting.rendering import render

ENVIRONMENT = Environment(
    device="cpu", machine="x86_64", python="3.11", torch="2.13", numpy="2", attncheck="1"
)


def outcome(kernel="ideal", outcome="passed", reason="", **problems):
    return PropertyOutcome(
        file="test_causal.py",
        test="test_first_row",
        kernel=kernel,
        dtype="bf16",
        family="causal",
        outcome=outcome,
        reason=reason,
        tally=Tally(problems=problems, seconds=0.5, compiling=0.1),
    )


def report(*outcomes, seconds=2.0, processes=1):
    return PropertyReport(
        command="pytest properties",
        environment=ENVIRONMENT,
        tier="smoke",
        processes=processes,
        seconds=seconds,
        untaken={"sdpa-math": {"e4m3": "takes no fp8", "e5m2": "takes no fp8", "tf32": "no GPU"}},
        outcomes=outcomes,
    )


MIXED = report(
    outcome(**{"pass": 3, "warn": 1}),
    outcome("flex", "known", "0 · NaN", fail=1),
    outcome("mine", "failed", "relation repeat: out moved", fail=1, unsupported=2),
    outcome("mine", "skipped", "takes no mask"),
    processes=4,
)


def test_the_table_says_how_many_and_how_fast() -> None:
    text = render(MIXED, "table")
    assert "tier smoke, 4 processes: 6 problems in 2 s (3 a second), 20% of the work" in text
    assert "sdpa-math does not support e4m3, e5m2: takes no fp8; tf32: no GPU" in text
    assert "4 tests: 1 passed, 1 known, 1 failed, 1 skipped" in text


def test_several_runs_are_one_in_which_the_last_outcome_counts() -> None:
    again = msgspec.structs.replace(
        report(outcome("mine", **{"pass": 4}), processes=9, seconds=1000.0),
        command="pytest properties -k mine",
    )
    found = join_property_reports([MIXED, again])
    assert {one.kernel: one.outcome for one in found.outcomes} == {
        "ideal": "passed",
        "flex": "known",
        "mine": "passed",
    }
    assert found.command == "pytest properties && pytest properties -k mine"
    assert (found.processes, found.seconds) == (9, 1002.0)
    assert "9 in 1,002 s" in render(found, "md").replace(" problems", "")
    other = msgspec.structs.replace(again, tier="pr")
    with pytest.raises(ValueError, match="of one tier in one environment"):
        join_property_reports([MIXED, other])
    with pytest.raises(ValueError, match="of one tier in one environment"):
        join_property_reports([])


def test_a_kernel_has_a_row_of_its_own() -> None:
    rows = [line.split() for line in render(MIXED, "table").splitlines()]
    kernels = {row[0]: row[1:] for row in rows if len(row) == 12}  # 500 ms are two words
    assert kernels["ideal"][:3] == ["1", "4", "1"]
    assert kernels["mine"][:2] == ["2", "1"], "a refusal is no problem that was answered"


@pytest.mark.parametrize("reason", ["0 · NaN", "relation repeat: out moved"])
def test_failures_say_why(reason: str) -> None:
    assert reason in render(MIXED, "md")


def test_json_comes_back() -> None:
    assert load_report(render(MIXED, "json"), PropertyReport) == MIXED


def test_another_schema_is_refused() -> None:
    with pytest.raises(UsageError):
        load_report('{"schema": 99}', PropertyReport)


def test_nothing_asked_divides_by_nothing() -> None:
    text = render(report(seconds=0.0), "table")
    assert "0 problems in 0 s\n" in text
