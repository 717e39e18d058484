"""How a Problem is adapted to a kernel for paged keys and values, and why one is not applicable."""

from attncheck.core.paged_layout import Paging
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.ideal import Ideal
from attncheck.verify.executor import InProcess
from attncheck.verify.question_fit import (
    adapted_problems,
    not_applicable_reason,
    taken_problem,
)
from attncheck.verify.run_case import run_case

PROBLEM = Problem(batch=2, query=5, kv=20)
SOFTMAX = Problem(operation="softmax", query=4)


class Kernel(Ideal):
    """A kernel for paged or contiguous keys, for softmax or attention, with or without sinks."""

    def __init__(self, *, pages: bool = False, softmax: bool = False, sinks: bool = True) -> None:
        super().__init__()
        self._supported, self.sinks = (pages, softmax), sinks

    def concerns(self, problem: Problem) -> bool:
        kind = (problem.paging is not None, problem.operation == "softmax")
        return kind == self._supported and (self.sinks or not problem.sink)


def test_paged_kernel_gets_the_problem_in_usual_page_sizes():
    problems = adapted_problems(Kernel(pages=True), PROBLEM, InProcess())
    assert [each.paging for each in problems] == [
        Paging(size=size, shared=1) for size in (16, 64, 256)
    ]
    assert {each.replace(paging=None) for each in problems} == {PROBLEM}
    (first, *_) = adapted_problems(Kernel(pages=True), PROBLEM.replace(batch=1), InProcess())
    assert first.paging == Paging(size=16)


def test_taken_problem_has_a_page_size_that_the_kernel_supports():
    class LargePages(Kernel):
        def unsupported(self, problem, device):
            del device
            return "small pages" if problem.paging.size < 100 else None

    taken = taken_problem(LargePages(pages=True), PROBLEM, InProcess(), "cpu")
    assert taken == PROBLEM.replace(paging=Paging(size=256, shared=1))
    assert taken_problem(Kernel(), PROBLEM, InProcess(), "cpu") == PROBLEM
    assert taken_problem(Kernel(pages=True), SOFTMAX, InProcess(), "cpu") is None


def test_other_problems_are_not_adapted():
    paged = PROBLEM.replace(paging=Paging(size=3))
    for subject, problem in (
        (Kernel(), PROBLEM),
        (Kernel(pages=True), paged),
        (Kernel(softmax=True), PROBLEM),
        (Kernel(pages=True), SOFTMAX),
        (Kernel(), paged),
    ):
        assert adapted_problems(subject, problem, InProcess()) == (problem,)


def test_reasons_why_a_problem_is_not_applicable():
    for subject, problem, reason in (
        (Kernel(), PROBLEM.replace(paging=Paging(size=3)), "it takes no paged keys and values"),
        (Kernel(pages=True), PROBLEM, "it takes paged keys and values alone"),
        (Kernel(sinks=False), PROBLEM.replace(sink=True), "it takes no sinks"),
        (Kernel(softmax=True), PROBLEM, "it does not compute attention"),
        (Kernel(), SOFTMAX, "it does not compute softmax"),
    ):
        assert not_applicable_reason(subject, problem, InProcess()) == reason


def test_backward_of_a_paged_kernel_is_unsupported():
    """No Problem has both pages and a backward: adapting one to a paged kernel once raised."""
    backward = PROBLEM.replace(backward=True, dlse=True)
    assert adapted_problems(Kernel(pages=True), backward, InProcess()) == (backward,)
    assert (
        not_applicable_reason(Kernel(pages=True), backward, InProcess()) == "it gives no gradients"
    )
    for question in ("compare", "guards", "repeats"):
        parameters = {"calls": 8} if question == "repeats" else {}
        case = Case(problem=backward, question=question, parameters=parameters)
        record = run_case(Kernel(pages=True), case, device="cpu")
        assert (record.status, record.reason) == ("unsupported", "it gives no gradients")
