"""A gate report on the terminal and in the summary of a CI step."""

import pytest
from msgspec.structs import replace
from rich.cells import cell_len
from tests.reporting import gate_reports as gates

from attncheck.reporting.gate_document import MOST_ON_TERMINAL, gate_document
from attncheck.reporting.rendering import render
from attncheck.reporting.terminal import document_lines


@pytest.mark.parametrize(("fmt", "suffix"), [("table", "txt"), ("md", "md")])
def test_page_matches_snapshot(matches_snapshot, fmt, suffix):
    matches_snapshot(f"gate.{suffix}", render(gates.sample(), fmt))


def test_failures_beyond_the_terminal_limit_are_counted():
    answers = [gates.answer(gates.wrong(f"kernel{i}")) for i in range(MOST_ON_TERMINAL + 3)]
    page = render(gates.report(*answers), "table")
    assert page.count("Reproduce: attncheck repro ") == MOST_ON_TERMINAL
    assert "and 3 more kinds of failure" in page


@pytest.mark.parametrize("width", [60, 80, 120])
def test_tables_fit_the_width(width):
    answers = [gates.answer(gates.record("kernel" * 20, status="unsupported", reason="why " * 50))]
    report = gates.report(*answers, kernels={"kernel" * 20: "s " * 100}, harness=("x" * 300,))
    assert max(
        cell_len(line.plain) for line in document_lines(gate_document(report), width)
    ) <= max(width, 90)


def test_untested_parts_are_listed():
    report = gates.report(
        gates.answer(gates.record("k", status="unsupported", reason="no fp8")),
        stages=("bounds",),
        shard="2/4",
        absent={"gone": "needs a GPU"},
        unfinished=3,
        unfinished_because="an interrupt",
        harness=("disk full",),
    )
    page = render(report, "table")
    for text in (
        "the gate itself: disk full",
        "3 questions not asked: an interrupt. Run the same command again to go on.",
        "gone is absent: needs a GPU",
        "not part of this run: contract, probes, properties, memory, determinism, baseline",
        "this is part 2/4",
        "k does not support 1 question: no fp8",
    ):
        assert text in page


def _warning(kernel, reason):
    record = gates.wrong(kernel)
    judgement = replace(record.judgement, status="warn", rule="relation", reason=reason)
    return gates.answer(replace(record, status="warn", judgement=judgement))


def test_warnings_are_grouped_ignoring_numbers_most_frequent_first():
    lse = "lse[0, 2] = -3.5e-04"
    heads = [f"RMSE of head [0, {i}] is {1.4 + i} × the largest of ideal kernels'" for i in (1, 2)]
    page = render(gates.report(*(_warning("k", reason) for reason in (lse, *heads))), "table")
    lines = [line for line in page.splitlines() if line.startswith("k compare")]
    assert lines == [f"k compare (2 times): {heads[0]}", f"k compare: {lse}"]


def test_warnings_give_reasons_and_become_failures_when_strict():
    reason = "hidden keys must be finite: 0 · NaN reaches row 3"
    warnings = [_warning(name, reason) for name in ("k", "k", *(f"kernel{i}" for i in range(6)))]
    page = render(gates.report(*warnings), "table")
    assert f"k compare (2 times): {reason}" in page
    assert "and 2 other kinds" in page
    strict = render(gates.report(*warnings, command="attncheck gate k --strict"), "table")
    assert "warnings" not in strict.splitlines()
    assert "FAIL" in strict
