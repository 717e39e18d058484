"""What a terminal and the summary of a step show of a gate."""

import pytest
from msgspec.structs import replace
from rich.cells import cell_len
from tests.reporting import gate_reports as made

from attncheck.reporting.gate_document import MOST_ON_TERMINAL, gate_document
from attncheck.reporting.rendering import render
from attncheck.reporting.terminal import document_lines


@pytest.mark.parametrize(("fmt", "suffix"), [("table", "txt"), ("md", "md")])
def test_a_run_as_it_is_shown(matches_snapshot, fmt, suffix):
    matches_snapshot(f"gate.{suffix}", render(made.sample(), fmt))


def test_more_failures_than_are_shown_are_counted():
    answers = [made.answer(made.wrong(f"kernel{i}")) for i in range(MOST_ON_TERMINAL + 3)]
    page = render(made.report(*answers), "table")
    assert page.count("Reproduce: attncheck repro ") == MOST_ON_TERMINAL
    assert "and 3 more kinds of failure" in page


@pytest.mark.parametrize("width", [60, 80, 120])
def test_tables_keep_to_the_width(width):
    answers = [made.answer(made.record("kernel" * 20, status="unsupported", reason="why " * 50))]
    report = made.report(*answers, kernels={"kernel" * 20: "s " * 100}, harness=("x" * 300,))
    assert max(
        cell_len(line.plain) for line in document_lines(gate_document(report), width)
    ) <= max(width, 90)


def test_what_was_not_looked_at_is_said():
    report = made.report(
        made.answer(made.record("k", status="unsupported", reason="no fp8")),
        stages=("bounds",),
        shard="2/4",
        absent={"gone": "needs a GPU"},
        unfinished=3,
        unfinished_because="an interrupt",
        harness=("disk full",),
    )
    page = render(report, "table")
    for said in (
        "the gate itself: disk full",
        "3 questions not asked: an interrupt. Run the same command again to go on.",
        "gone is absent: needs a GPU",
        "not part of this run: contract, probes, properties, memory, determinism, baseline",
        "this is part 2/4",
        "k does not support 1 question: no fp8",
    ):
        assert said in page


def _warning(kernel, reason):
    record = made.wrong(kernel)
    odd = replace(record.judgement, status="warn", rule="relation", reason=reason)
    return made.answer(replace(record, status="warn", judgement=odd))


def test_warnings_of_one_question_are_counted_by_what_they_say():
    """Their numbers apart; most frequent first."""
    lse = "lse[0, 2] = -3.5e-04"
    heads = [f"RMSE of head [0, {i}] is {1.4 + i} × the largest of ideal kernels'" for i in (1, 2)]
    page = render(made.report(*(_warning("k", reason) for reason in (lse, *heads))), "table")
    lines = [line for line in page.splitlines() if line.startswith("k compare")]
    assert lines == [f"k compare (2 times): {heads[0]}", f"k compare: {lse}"]


def test_warnings_say_why_and_a_strict_gate_has_failures_in_their_place():
    reason = "hidden keys must be finite: 0 · NaN reaches row 3"
    several = [_warning(name, reason) for name in ("k", "k", *(f"kernel{i}" for i in range(6)))]
    page = render(made.report(*several), "table")
    assert f"k compare (2 times): {reason}" in page
    assert "and 2 other kinds" in page
    strict = render(made.report(*several, command="attncheck gate k --strict"), "table")
    assert "warnings" not in strict.splitlines()
    assert "FAIL" in strict
