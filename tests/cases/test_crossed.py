"""Questions of a check that are rows of the axes: their choice, and which faults they find."""

import pytest
from tests.planted_kernels.by_convention import BY_CHECK, BY_GATE, MAKERS

from attncheck.cases.check_cases import call_cases, check_cases, crossed_cases
from attncheck.cases.covering import AXES, FewRows, plain_row, row_problem
from attncheck.gate.stages import _RELATIONS as RELATIONS
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.conventions.declarations import make_subject
from attncheck.subjects.ideal import Ideal
from attncheck.verify.claims import subject_takes
from attncheck.verify.run_case import run_case

pytestmark = pytest.mark.usefixtures("shared_evidence")

FAILED = {"fail", "error"}


def load_kernel(convention, fault=""):
    subject = make_subject(MAKERS[convention](fault), "planted", convention)
    return subject, subject_takes(subject, "cpu")


def run_statuses(subject, cases):
    """Name of the question → status of the kernel's Record."""
    return {one.name: run_case(subject, one.case, device="cpu", brief=True).status for one in cases}


def few_rows(takes):
    plain = plain_row(row_problem({"dtype": "bf16"}, "tiny", 0), "tiny")
    return FewRows(takes, plain, "tiny")


@pytest.mark.parametrize("convention", MAKERS)
def test_correct_kernel_passes_all_crossed_questions(convention):
    subject, takes = load_kernel(convention)
    statuses = run_statuses(subject, crossed_cases("bf16", (), takes))
    assert len(statuses) >= 15
    assert set(statuses.values()) == {"pass"}


def test_check_asks_nothing_of_what_its_page_leaves_to_a_gate():
    cases = [*check_cases("bf16"), *call_cases("bf16"), *crossed_cases("bf16", (), lambda _: True)]
    assert all(one.case.problem.scale > 0 for one in cases)
    questions = {one.case.question for one in cases}
    assert questions.isdisjoint({*RELATIONS["determinism"], *RELATIONS["memory"]} - {"call_order"})


def test_slopes_of_each_sequence_are_asked_of_several_sequences():
    cases = crossed_cases("bf16", (), lambda problem: problem.paging is None)
    problems = [one.case.problem for one in cases]
    sloped = [one for one in problems if "alibi_by_sequence" in str(one.score)]
    assert max(one.batch for one in sloped) > 1


PLANTED = [(name, *each) for name, faults in BY_CHECK.items() for each in faults]


@pytest.mark.parametrize(("parameter", "convention", "fault"), PLANTED)
def test_fault_at_one_value_of_a_parameter_is_found(parameter, convention, fault):
    subject, takes = load_kernel(convention, fault)
    cases = crossed_cases("bf16", (), takes)
    assert any(run_statuses(subject, [one])[one.name] in FAILED for one in cases), parameter


@pytest.mark.parametrize(("convention", "fault"), [each for of in BY_GATE.values() for each in of])
def test_fault_left_to_the_gate_is_found_by_rows_of_the_gate(convention, fault):
    subject, takes = load_kernel(convention, fault)
    rows = [{"dtype": "bf16", "shape": "ragged", "scale": scale} for scale in ("zero", "negative")]
    problems = [row_problem(row, "tiny", 0) for row in rows]
    cases = [Case(problem=problem) for problem in problems if takes(problem)]
    assert "fail" in [run_case(subject, case, device="cpu", brief=True).status for case in cases]


def test_named_questions_alone_miss_the_planted_faults():
    """These faults need the crossed questions; a sample of them, without ``clamped scores``.

    Ramps find ``clamped scores``.
    """
    named = [one for one in check_cases("bf16") if one.name in {"ragged", "causal", "gqa", "scale"}]
    for _, convention, fault in PLANTED[::6][1:]:
        subject, _ = load_kernel(convention, fault)
        assert set(run_statuses(subject, named).values()) <= {"pass", "unsupported"}, fault


# The choice of rows.


def test_rows_cover_every_supported_value_and_gradients_in_most_rows():
    few = few_rows(subject_takes(Ideal(), "cpu"))
    axes, rows = few.axes(), list(few.rows(14))
    for name in AXES:
        crossed = {row[name] for row in rows}
        alone = {row[name] for row in few.alone()}
        assert crossed | alone | {""} >= set(axes[name]), name
    assert sum(bool(row["backward"]) for row in rows) > len(rows) / 2


def test_two_thirds_of_the_pairs_of_each_row_are_new():
    rows = [list(row.items()) for row in few_rows(subject_takes(Ideal(), "cpu")).rows(14)]
    pairs = {frozenset((a, b)) for row in rows for a in row for b in row if a != b}
    assert len(pairs) > 14 * 55 * 2 / 3  # a row has 55 pairs of values


@pytest.mark.parametrize("sizes", [{"head_dim": 128}, {"query": 64, "kv": 64, "head_dim": 64}])
def test_narrow_kernel_gets_at_least_14_questions_that_it_takes(sizes):
    def takes(problem: Problem) -> bool:
        plain = problem.mask.name == "full" and problem.group == 1 and not problem.sink
        plain &= problem.score.name == "none" and problem.paging is None and not problem.backward
        return plain and all(getattr(problem, name) == value for name, value in sizes.items())

    cases = crossed_cases("bf16", (), takes)
    assert all(takes(one.case.problem) for one in cases)
    assert len({one.case.id for one in cases}) == len(cases) >= 14


def test_kernel_that_takes_nothing_gets_no_questions():
    assert crossed_cases("bf16", (), lambda _: False) == []
