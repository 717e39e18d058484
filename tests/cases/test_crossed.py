"""Questions made of the axes: what they are, that right functions pass, which faults they show."""

import pytest
from tests.planted_kernels.by_convention import BY_CHECK, BY_GATE, MAKERS

from attncheck.cases.check_cases import check_cases, crossed_cases
from attncheck.cases.covering import AXES, FewRows, plain_row, row_problem
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.conventions.declarations import make_subject
from attncheck.subjects.ideal import Ideal
from attncheck.verify.claims import subject_takes
from attncheck.verify.run_case import run_case

pytestmark = pytest.mark.usefixtures("shared_evidence")

FAILED = {"fail", "error"}


def kernel(convention, fault=""):
    subject = make_subject(MAKERS[convention](fault), "planted", convention)
    return subject, subject_takes(subject, "cpu")


def statuses(subject, cases):
    return {one.name: run_case(subject, one.case, device="cpu", brief=True).status for one in cases}


@pytest.mark.parametrize("convention", MAKERS)
def test_a_right_function_passes_all_of_it(convention):
    subject, takes = kernel(convention)
    found = statuses(subject, crossed_cases("bf16", (), takes))
    assert len(found) >= 15
    assert set(found.values()) == {"pass"}


PLANTED = [(name, *each) for name, faults in BY_CHECK.items() for each in faults]


@pytest.mark.parametrize(("parameter", "convention", "fault"), PLANTED)
def test_a_fault_of_one_value_is_shown(parameter, convention, fault):
    subject, takes = kernel(convention, fault)
    cases = crossed_cases("bf16", (), takes)
    assert any(statuses(subject, [one])[one.name] in FAILED for one in cases), parameter


@pytest.mark.parametrize(("convention", "fault"), [each for of in BY_GATE.values() for each in of])
def test_a_fault_that_a_check_leaves_to_the_gate_is_shown_by_its_rows(convention, fault):
    subject, takes = kernel(convention, fault)
    rows = [{"dtype": "bf16", "shape": "ragged", "scale": scale} for scale in ("zero", "negative")]
    rows.append({"score": "alibi by sequence", "mask": "causal", "shape": "even"})
    rows[-1]["heads"] = "sequences GQA"
    problems = [row_problem(row, "tiny", 0) for row in rows]
    cases = [Case(problem=problem) for problem in problems if takes(problem)]
    found = [run_case(subject, case, device="cpu", brief=True).status for case in cases]
    assert "fail" in found


def test_no_question_of_before_shows_them():
    """But for ``clamped scores``, which ramps do."""
    known = [one for one in check_cases("bf16") if one.name in {"ragged", "causal", "gqa", "scale"}]
    for _, convention, fault in PLANTED[::6][1:]:
        subject, _ = kernel(convention, fault)
        assert set(statuses(subject, known).values()) <= {"pass", "unsupported"}, fault


# What is chosen.


def test_every_value_that_is_taken_is_asked_and_its_gradients():
    ideal = Ideal()
    takes = subject_takes(ideal, "cpu")
    few = FewRows(takes, plain_row(row_problem({"dtype": "bf16"}, "tiny", 0), "tiny"), "tiny")
    axes, rows = few.axes(), list(few.rows(14))
    for name in AXES:
        asked = {row[name] for row in rows}
        alone = {row[name] for row in few.alone()}
        assert asked | alone | {""} >= set(axes[name]), name
    assert sum(bool(row["backward"]) for row in rows) > len(rows) / 2


def test_fewer_rows_have_most_of_the_pairs_of_many():
    takes = subject_takes(Ideal(), "cpu")

    def pairs(count):
        few = FewRows(takes, plain_row(row_problem({"dtype": "bf16"}, "tiny", 0), "tiny"), "tiny")
        items = [list(row.items()) for row in few.rows(count)]
        return len({frozenset((a, b)) for row in items for a in row for b in row if a != b})

    # Each row brings as many new ones as it can: two thirds of all pairs of values in it.
    assert pairs(14) > 14 * 55 * 2 / 3


@pytest.mark.parametrize("taken", [{"head_dim": 128}, {"query": 64, "kv": 64, "head_dim": 64}])
def test_a_kernel_of_one_layout_is_asked_as_much_within_it(taken):
    def takes(problem: Problem) -> bool:
        plain = problem.mask.name == "full" and problem.group == 1 and not problem.sink
        plain &= problem.score.name == "none" and problem.paging is None and not problem.backward
        return plain and all(getattr(problem, name) == value for name, value in taken.items())

    cases = crossed_cases("bf16", (), takes)
    assert all(takes(one.case.problem) for one in cases)
    assert len({one.case.id for one in cases}) == len(cases) >= 14


def test_nothing_is_asked_of_a_kernel_that_takes_nothing():
    assert crossed_cases("bf16", (), lambda _: False) == []
