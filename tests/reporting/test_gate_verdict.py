"""A gate's exit code, its one-sentence verdict, and the grouping and order of its failures."""

import msgspec
import pytest
from tests.reporting import gate_reports as gates

from attncheck.reporting.gate_document import not_covered
from attncheck.reporting.gate_verdict import (
    Policy,
    chosen_dtypes,
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
STANDINGS = ("worse", "identical", "within rounding", "new", "gone", "not asked", "better")
STRICT_BASELINE = {"strict_baseline": True}


def gate_of(*statuses, **changes):
    answers = [
        gates.answer(gates.record(problem={"seed": i}, status=status))
        for i, status in enumerate(statuses)
    ]
    return gates.report(*answers, **changes)


def change(standing):
    return gates.Change(kernel="k", case_id="abcdefghij", standing=standing)


def test_verdict_says_how_much_of_the_baseline_was_compared():
    changes = [change(kind) for kind in ("identical", "new", "not asked", "not asked")]
    text = sentence(gate_of("pass", changes=tuple(changes)))
    assert text == "PASS  1 question, 1 of 3 baseline cases compared (--dtype leaves 2 out)"


@pytest.mark.parametrize("words", ["--dtype bf16 --dtype=fp32", "--dtype=bf16 -q --dtype fp32"])
def test_chosen_dtypes_are_those_of_the_command_line(words):
    assert chosen_dtypes(gate_of("pass", command=f"attncheck gate k {words}")) == ("bf16", "fp32")
    assert chosen_dtypes(gate_of("pass", command="attncheck gate k")) == ()


DISK, UNFINISHED = {"harness": ("disk full",)}, {"unfinished": 3}
STRICT = {"strict": True}
EXIT_CODES = [
    *((("pass", status), {}, {}, 1) for status in WRONG),
    *(((status, *more), {}, {}, 0) for status in ("pass", "warn") for more in ((), (DOUBT,))),
    *((("pass", status), {}, STRICT, 1) for status in ("warn", DOUBT)),
    (("pass",), {}, STRICT, 0),
    *((("pass", "flaky", "flaky"), {}, {"flaky": n}, int(n < 2)) for n in (0, 1, 2)),
    *((("pass",), missing, {}, 3) for missing in (DISK, UNFINISHED)),
    *((("fail",), missing, {}, 1) for missing in (DISK, UNFINISHED)),
    *(((), missing, {}, 3) for missing in (DISK, UNFINISHED)),
    (("pass", "oracle disagrees"), {}, {}, 3),
    (("fail", "oracle disagrees"), {}, {}, 1),
    *((statuses, {}, {}, 5) for statuses in ((), ("unsupported",), (DOUBT,))),
    *((("pass",), {"changes": (change(kind),)}, {}, int(kind == "worse")) for kind in STANDINGS),
    *((("pass",), {"changes": (change(kind),)}, STRICT_BASELINE, 1) for kind in ("better", "gone")),
]


@pytest.mark.parametrize(("statuses", "changes", "policy", "code"), EXIT_CODES, ids=str)
def test_exit_code(statuses, changes, policy, code):
    """1 wrong or worse, 3 incomplete, 5 nothing tested; the first of these that applies."""
    assert exit_code(gate_of(*statuses, **changes), **policy) == code


@pytest.mark.parametrize("status", ["unsupported", "inconclusive", ""])
def test_untested_kernel_exits_5_and_is_named(status):
    other = [gates.answer(gates.record("other", status=status))] if status else []
    kernels = {"mine": "", "other": ""}

    def gate_of_mine(first, **changes):
        mine = gates.answer(gates.record("mine", status=first))
        return gates.report(mine, *other, kernels=kernels, **changes)

    report = gate_of_mine("pass")
    assert exit_code(report) == 5
    assert sentence(report).startswith("NOT ALL TESTED  ")
    assert "1 kernel untested" in sentence(report)
    assert "other is untested: no answer says anything of it" in list(not_covered(report))
    assert exit_code(gate_of_mine("fail")) == 1
    assert exit_code(gate_of_mine("pass", harness=("no disk",))) == 3
    assert exit_code(gate_of_mine("pass", unfinished=1)) == 3
    assert exit_code(gate_of_mine("pass", shard="1/2")) == 0


def test_absent_kernel_counts_as_untested():
    report = gate_of("pass", absent={"gone": "no GPU"})
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
def test_policy_is_read_from_the_command_line(command, policy):
    assert policy_of(gate_of("pass", command=command)) == policy


def test_shrunk_case_is_not_counted_as_a_question():
    original = gates.wrong()
    first = gates.answer(original)
    smallest = gates.answer(gates.wrong(problem={"query": 2}), smallest_of=original.case_id)
    report = gates.report(first, smallest)
    (one,) = failure_groups(report)
    assert (one.answer, one.smallest, one.shown) == (first, smallest, smallest)
    assert sentence(report) == "FAIL  1 of 1 question failed"


def test_shrunk_case_of_another_kernel_is_ignored():
    original = gates.wrong()
    other = msgspec.structs.replace(gates.wrong("other"), kernel="other")
    smallest = gates.answer(other, smallest_of=original.case_id)
    (one,) = failure_groups(gates.report(gates.answer(original), smallest))
    assert one.smallest is None


@pytest.mark.parametrize(("shares", "largest"), [((3.0, 300.0), 1), ((3.0, float("nan"), 8.0), 1)])
def test_similar_failures_are_grouped_under_the_largest(shares, largest):
    some = [
        gates.answer(gates.wrong(share=share, problem={"seed": seed}))
        for seed, share in enumerate(shares)
    ]
    (one,) = failure_groups(gates.report(*some))
    assert one.answer is some.pop(largest)
    assert len(one.others) == len(some)


def test_failures_are_ordered_crash_bound_precision():
    answers = [
        gates.answer(gates.wrong(rule="precision", problem={"seed": 1})),
        gates.answer(gates.wrong(rule="bound", problem={"seed": 2})),
        gates.answer(gates.record(problem={"seed": 3}, status="crash", reason="SIGSEGV")),
    ]
    groups = failure_groups(gates.report(*answers))
    assert [one.answer for one in groups] == answers[::-1]


def test_tolerated_flaky_answers_are_not_failures():
    report = gate_of("pass", "flaky")
    assert len(failure_groups(report)) == 1
    allowed = msgspec.structs.replace(report, command="attncheck gate k --flaky 1")
    assert failure_groups(allowed) == ()


def test_verdict_sentence_counts_everything():
    missing = {"changes": (change("worse"),), "unfinished": 4, "harness": ("no disk",)}
    report = gate_of("pass", "fail", "warn", "unsupported", **missing)
    assert sentence(report) == (
        "FAIL  1 of 3 questions failed, 1 not as the baseline, 4 not asked, 1 warn, "
        "1 not supported, 1 error of the gate itself"
    )
