"""The exit code of a gate, what it calls a failure, and which comes first."""

from pathlib import Path

import msgspec
import pytest

from attncheck.core.source_files import import_file
from attncheck.reporting.gate_document import not_covered
from attncheck.reporting.gate_verdict import (
    Policy,
    failure_groups,
    gate_exit_code,
    gate_verdict,
    policy_of,
)

made = import_file(Path(__file__).parent / "gate_reports.py", "gate reports")


def exit_code(report, **policy):
    return gate_exit_code(report, Policy(**policy))


def sentence(report):
    verdict = gate_verdict(report)
    return f"{verdict.word}  {verdict.text}"


WRONG = ("fail", "error", "crash", "timeout", "oom")


def of(*statuses, **changes):
    answers = [
        made.answer(made.record(asked={"seed": i}, status=status))
        for i, status in enumerate(statuses)
    ]
    return made.report(*answers, **changes)


def change(standing):
    return made.Change(kernel="k", case_id="abcdefghij", standing=standing)


@pytest.mark.parametrize("status", WRONG)
def test_what_is_wrong_fails(status):
    assert exit_code(of("pass", status)) == 1


@pytest.mark.parametrize("status", ["pass", "warn"])
def test_what_is_not_wrong_passes(status):
    assert exit_code(of(status)) == 0
    assert exit_code(of(status, "inconclusive")) == 0


@pytest.mark.parametrize("status", ["warn", "inconclusive"])
def test_strict_fails_what_is_in_doubt(status):
    assert exit_code(of("pass", status), strict=True) == 1
    assert exit_code(of("pass"), strict=True) == 0


def test_as_many_may_be_flaky_as_are_allowed():
    report = of("pass", "flaky", "flaky")
    assert [exit_code(report, flaky=n) for n in (0, 1, 2)] == [1, 1, 0]


@pytest.mark.parametrize(
    "changes", [{"harness": ("disk full",)}, {"unfinished": 3}], ids=["harness", "unfinished"]
)
def test_incomplete_is_three_and_a_failure_is_still_one(changes):
    assert exit_code(of("pass", **changes)) == 3
    assert exit_code(of("fail", **changes)) == 1
    assert exit_code(of(**changes)) == 3


def test_a_doubtful_truth_is_incomplete():
    assert exit_code(of("pass", "oracle disagrees")) == 3
    assert exit_code(of("fail", "oracle disagrees")) == 1


@pytest.mark.parametrize("statuses", [(), ("unsupported",), ("inconclusive",)])
def test_nothing_tested_is_five(statuses):
    assert exit_code(of(*statuses)) == 5


@pytest.mark.parametrize("status", ["unsupported", "inconclusive", ""])
def test_a_kernel_of_which_nothing_was_tested_is_five_and_named(status):
    other = [made.answer(made.record("other", status=status))] if status else []
    kernels = {"mine": "", "other": ""}

    def beside(first, **changes):
        mine = made.answer(made.record("mine", status=first))
        return made.report(mine, *other, kernels=kernels, **changes)

    report = beside("pass")
    assert exit_code(report) == 5
    assert sentence(report).startswith("NOT ALL TESTED  ")
    assert "1 kernel untested" in sentence(report)
    assert "other is untested: no answer says anything of it" in list(not_covered(report))
    assert exit_code(beside("fail")) == 1
    assert exit_code(beside("pass", harness=("no disk",))) == 3
    assert exit_code(beside("pass", unfinished=1)) == 3
    assert exit_code(beside("pass", shard="1/2")) == 0


def test_an_absent_kernel_is_untested():
    report = of("pass", absent={"gone": "no GPU"})
    assert exit_code(report) == 5
    assert "gone is absent: no GPU" in list(not_covered(report))


def test_what_is_worse_than_its_baseline_fails():
    assert exit_code(of("pass", changes=(change("worse"),))) == 1


@pytest.mark.parametrize("standing", ["identical", "within rounding", "new", "gone", "better"])
def test_what_is_not_worse_passes(standing):
    assert exit_code(of("pass", changes=(change(standing),))) == 0


@pytest.mark.parametrize("standing", ["better", "gone"])
def test_better_and_gone_fail_a_strict_baseline(standing):
    report = of("pass", changes=(change(standing),))
    assert exit_code(report, strict_baseline=True) == 1


@pytest.mark.parametrize(
    ("command", "policy"),
    [
        ("attncheck gate k", Policy()),
        ("attncheck gate k --strict --flaky 3", Policy(strict=True, flaky=3)),
        ("attncheck gate k --strict-baseline --flaky=2", Policy(strict_baseline=True, flaky=2)),
        ("attncheck gate 'never closed --strict", Policy(strict=True)),
        ("attncheck gate --flaky many", Policy()),
        ("attncheck gate --flaky", Policy()),
    ],
)
def test_pages_judge_by_the_command_line(command, policy):
    assert policy_of(of("pass", command=command)) == policy


def test_a_smaller_case_is_no_question_of_its_own():
    original = made.wrong()
    first = made.answer(original)
    smallest = made.answer(made.wrong(asked={"query": 2}), smallest_of=original.case_id)
    report = made.report(first, smallest)
    (one,) = failure_groups(report)
    assert (one.answer, one.smallest, one.shown) == (first, smallest, smallest)
    assert sentence(report) == "FAIL  1 of 1 question failed"


def test_a_smaller_case_belongs_to_its_own_kernel():
    original = made.wrong()
    other = msgspec.structs.replace(made.wrong("other"), kernel="other")
    smallest = made.answer(other, smallest_of=original.case_id)
    (one,) = failure_groups(made.report(made.answer(original), smallest))
    assert one.smallest is None


def test_alike_failures_are_one_and_the_largest_is_shown():
    small, large = (
        made.answer(made.wrong(share=share, asked={"seed": seed}))
        for seed, share in enumerate((3.0, 300.0))
    )
    (one,) = failure_groups(made.report(small, large))
    assert (one.answer, one.others) == (large, (small,))


def test_nan_is_the_largest():
    some = [
        made.answer(made.wrong(share=share, asked={"seed": seed}))
        for seed, share in enumerate((3.0, float("nan"), 8.0))
    ]
    (one,) = failure_groups(made.report(*some))
    assert one.answer is some[1]


def test_a_lost_process_comes_before_a_bound_and_a_bound_before_precision():
    answers = [
        made.answer(made.wrong(rule="precision", asked={"seed": 1})),
        made.answer(made.wrong(rule="bound", asked={"seed": 2})),
        made.answer(made.record(asked={"seed": 3}, status="crash", reason="SIGSEGV")),
    ]
    found = failure_groups(made.report(*answers))
    assert [one.answer for one in found] == answers[::-1]


def test_what_is_allowed_to_be_flaky_is_no_failure():
    report = of("pass", "flaky")
    assert len(failure_groups(report)) == 1
    assert (
        failure_groups(msgspec.structs.replace(report, command="attncheck gate k --flaky 1")) == ()
    )


def test_the_sentence_counts_everything():
    report = of(
        "pass",
        "fail",
        "warn",
        "unsupported",
        changes=(change("worse"),),
        unfinished=4,
        harness=("no disk",),
    )
    assert sentence(report) == (
        "FAIL  1 of 3 questions failed, 1 not as the baseline, 4 not asked, 1 warn, "
        "1 not supported, 1 error of the gate itself"
    )
