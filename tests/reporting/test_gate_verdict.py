"""The exit code of a gate, what it calls a failure, and which comes first."""

import msgspec
import pytest
from tests.reporting import gate_reports as made

from attncheck.reporting.gate_document import not_covered
from attncheck.reporting.gate_verdict import (
    Policy,
    failure_groups,
    gate_exit_code,
    gate_verdict,
    policy_of,
)


def exit_code(report, **policy):
    return gate_exit_code(report, Policy(**policy))


def sentence(report):
    verdict = gate_verdict(report)
    return f"{verdict.word}  {verdict.text}"


WRONG = ("fail", "error", "crash", "timeout", "oom")
DOUBT = "inconclusive"
STANDINGS = ("worse", "identical", "within rounding", "new", "gone", "better")
OF_BASELINE = {"strict_baseline": True}


def of(*statuses, **changes):
    answers = [
        made.answer(made.record(asked={"seed": i}, status=status))
        for i, status in enumerate(statuses)
    ]
    return made.report(*answers, **changes)


def change(standing):
    return made.Change(kernel="k", case_id="abcdefghij", standing=standing)


DISK, REST = {"harness": ("disk full",)}, {"unfinished": 3}
STRICT = {"strict": True}
EXIT_CODES = [
    *((("pass", status), {}, {}, 1) for status in WRONG),
    *(((status, *more), {}, {}, 0) for status in ("pass", "warn") for more in ((), (DOUBT,))),
    *((("pass", status), {}, STRICT, 1) for status in ("warn", DOUBT)),
    (("pass",), {}, STRICT, 0),
    *((("pass", "flaky", "flaky"), {}, {"flaky": n}, int(n < 2)) for n in (0, 1, 2)),
    *((("pass",), missing, {}, 3) for missing in (DISK, REST)),
    *((("fail",), missing, {}, 1) for missing in (DISK, REST)),
    *(((), missing, {}, 3) for missing in (DISK, REST)),
    (("pass", "oracle disagrees"), {}, {}, 3),
    (("fail", "oracle disagrees"), {}, {}, 1),
    *((statuses, {}, {}, 5) for statuses in ((), ("unsupported",), (DOUBT,))),
    *((("pass",), {"changes": (change(kind),)}, {}, int(kind == "worse")) for kind in STANDINGS),
    *((("pass",), {"changes": (change(kind),)}, OF_BASELINE, 1) for kind in ("better", "gone")),
]


@pytest.mark.parametrize(("statuses", "changes", "policy", "code"), EXIT_CODES, ids=str)
def test_the_exit_code(statuses, changes, policy, code):
    """1 wrong or worse, 3 incomplete, 5 nothing tested; the first of them that is so."""
    assert exit_code(of(*statuses, **changes), **policy) == code


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


@pytest.mark.parametrize(
    ("command", "policy"),
    [
        ("attncheck gate k", Policy()),
        ("attncheck gate k --strict --flaky 3", Policy(strict=True, flaky=3)),
        ("attncheck gate k --strict-baseline --flaky=2", Policy(strict_baseline=True, flaky=2)),
        ("attncheck gate 'never closed --strict", Policy(strict=True)),
        ("attncheck gate --flaky many", Policy()),
        ("attncheck gate --flaky", Policy()),
        (f"attncheck gate {'k.py::f ' * 2000} --strict", Policy(strict=True)),
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


@pytest.mark.parametrize(("shares", "largest"), [((3.0, 300.0), 1), ((3.0, float("nan"), 8.0), 1)])
def test_alike_failures_are_one_and_the_largest_is_shown(shares, largest):
    some = [
        made.answer(made.wrong(share=share, asked={"seed": seed}))
        for seed, share in enumerate(shares)
    ]
    (one,) = failure_groups(made.report(*some))
    assert one.answer is some.pop(largest)
    assert len(one.others) == len(some)


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
    allowed = msgspec.structs.replace(report, command="attncheck gate k --flaky 1")
    assert failure_groups(allowed) == ()


def test_the_sentence_counts_everything():
    missing = {"changes": (change("worse"),), "unfinished": 4, "harness": ("no disk",)}
    report = of("pass", "fail", "warn", "unsupported", **missing)
    assert sentence(report) == (
        "FAIL  1 of 3 questions failed, 1 not as the baseline, 4 not asked, 1 warn, "
        "1 not supported, 1 error of the gate itself"
    )
