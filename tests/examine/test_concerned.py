"""What a kernel of pages is asked in place of what does not concern it."""

from __future__ import annotations

from attncheck.examine.concerned import as_concerned, unconcerned
from attncheck.examine.executor import InProcess
from attncheck.paging import Paging
from attncheck.problem import Problem
from attncheck.subjects.ideal import Ideal

PROBLEM = Problem(batch=2, query=5, kv=20)
SOFTMAX = Problem(operation="softmax", query=4)


class Of(Ideal):
    def __init__(self, *, pages: bool = False, softmax: bool = False, sinks: bool = True) -> None:
        super().__init__()
        self._wants, self.sinks = (pages, softmax), sinks

    def concerns(self, problem: Problem) -> bool:
        is_one = (problem.paging is not None, problem.operation == "softmax")
        return is_one == self._wants and (self.sinks or not problem.sink)


def test_a_kernel_of_pages_gets_pages_of_usual_sizes() -> None:
    found = as_concerned(Of(pages=True), PROBLEM)
    assert [each.paging for each in found] == [
        Paging(size=size, shared=1) for size in (16, 64, 256)
    ]
    assert {each.replace(paging=None) for each in found} == {PROBLEM}
    (first, *_) = as_concerned(Of(pages=True), PROBLEM.replace(batch=1))
    assert first.paging == Paging(size=16)


def test_any_other_gets_what_it_was_to_get() -> None:
    paged = PROBLEM.replace(paging=Paging(size=3))
    for subject, problem in (
        (Of(), PROBLEM),
        (Of(pages=True), paged),
        (Of(softmax=True), PROBLEM),
        (Of(pages=True), SOFTMAX),
        (Of(), paged),
    ):
        assert as_concerned(subject, problem) == (problem,)


def test_why_not() -> None:
    for subject, problem, reason in (
        (Of(), PROBLEM.replace(paging=Paging(size=3)), "it is not about keys in pages"),
        (Of(pages=True), PROBLEM, "it is about keys in pages, and these are in none"),
        (Of(sinks=False), PROBLEM.replace(sink=True), "it is not about sinks"),
        (Of(softmax=True), PROBLEM, "it is not about attention"),
        (Of(), SOFTMAX, "it is not about softmax"),
    ):
        assert unconcerned(subject, problem, InProcess()) == reason
