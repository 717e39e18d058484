"""What a kernel of pages is asked in place of what does not concern it."""

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


class Of(Ideal):
    def __init__(self, *, pages: bool = False, softmax: bool = False, sinks: bool = True) -> None:
        super().__init__()
        self._wants, self.sinks = (pages, softmax), sinks

    def concerns(self, problem: Problem) -> bool:
        is_one = (problem.paging is not None, problem.operation == "softmax")
        return is_one == self._wants and (self.sinks or not problem.sink)


def test_a_kernel_of_pages_gets_pages_of_usual_sizes():
    found = adapted_problems(Of(pages=True), PROBLEM, InProcess())
    assert [each.paging for each in found] == [
        Paging(size=size, shared=1) for size in (16, 64, 256)
    ]
    assert {each.replace(paging=None) for each in found} == {PROBLEM}
    (first, *_) = adapted_problems(Of(pages=True), PROBLEM.replace(batch=1), InProcess())
    assert first.paging == Paging(size=16)


def test_what_it_takes_is_of_a_size_that_it_does_not_refuse():
    class OfLargePages(Of):
        def unsupported(self, problem, device):
            del device
            return "small pages" if problem.paging.size < 100 else None

    taken = taken_problem(OfLargePages(pages=True), PROBLEM, InProcess(), "cpu")
    assert taken == PROBLEM.replace(paging=Paging(size=256, shared=1))
    assert taken_problem(Of(), PROBLEM, InProcess(), "cpu") == PROBLEM
    assert taken_problem(Of(pages=True), SOFTMAX, InProcess(), "cpu") is None


def test_any_other_gets_what_it_was_to_get():
    paged = PROBLEM.replace(paging=Paging(size=3))
    for subject, problem in (
        (Of(), PROBLEM),
        (Of(pages=True), paged),
        (Of(softmax=True), PROBLEM),
        (Of(pages=True), SOFTMAX),
        (Of(), paged),
    ):
        assert adapted_problems(subject, problem, InProcess()) == (problem,)


def test_why_not():
    for subject, problem, reason in (
        (Of(), PROBLEM.replace(paging=Paging(size=3)), "it takes no paged keys and values"),
        (Of(pages=True), PROBLEM, "it takes paged keys and values alone"),
        (Of(sinks=False), PROBLEM.replace(sink=True), "it takes no sinks"),
        (Of(softmax=True), PROBLEM, "it does not compute attention"),
        (Of(), SOFTMAX, "it does not compute softmax"),
    ):
        assert not_applicable_reason(subject, problem, InProcess()) == reason


def test_a_backward_in_pages_there_is_not():
    """There is no such Problem: asking for one of a kernel of pages raised."""
    backward = PROBLEM.replace(backward=True, dlse=True)
    assert adapted_problems(Of(pages=True), backward, InProcess()) == (backward,)
    assert not_applicable_reason(Of(pages=True), backward, InProcess()) == "it gives no gradients"
    for question in ("compare", "guards", "repeats"):
        numbers = {"calls": 8} if question == "repeats" else {}
        case = Case(problem=backward, question=question, parameters=numbers)
        record = run_case(Of(pages=True), case, device="cpu")
        assert (record.status, record.reason) == ("unsupported", "it gives no gradients")
