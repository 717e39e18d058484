"""The Problem that concerns a kernel where the one at hand does not: its keys in pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.examine.executor import InProcess
from attncheck.paging import Paging

if TYPE_CHECKING:
    from attncheck.examine.executor import Executor
    from attncheck.problem import Problem
    from attncheck.subjects.contract import Subject

__all__ = ["as_concerned", "unconcerned"]

_SIZES = (16, 64, 256)


def as_concerned(
    subject: Subject, problem: Problem, executor: Executor | None = None
) -> tuple[Problem, ...]:
    """``problem``, or the same in pages for a kernel that takes keys in pages alone.

    Then once for each of some usual sizes, of which a kernel may take one; nothing else differs,
    and with several sequences they share their first page. There are no gradients of keys in pages:
    a backward stays what it is.

    Args:
        subject: The kernel.
        problem: What it is to be asked.
        executor: How to ask it; in this process by default.
    """
    executor = executor or InProcess()
    if problem.operation != "attention" or problem.backward or executor.concerns(subject, problem):
        return (problem,)
    shared = int(problem.batch > 1)
    paged = tuple(problem.replace(paging=Paging(size=size, shared=shared)) for size in _SIZES)
    return paged if executor.concerns(subject, paged[0]) else (problem,)


def unconcerned(subject: Subject, problem: Problem, executor: Executor) -> str:
    """Why ``problem`` does not concern a kernel, in one line."""
    if problem.backward:
        forward = problem.replace(backward=False, dlse=False, dcaptured=False)
        if executor.concerns(subject, forward) or as_concerned(subject, forward, executor) != (
            forward,
        ):
            return "it gives no gradients"
    if problem.sink and executor.concerns(subject, problem.replace(sink=False)):
        return "it is not about sinks"
    if problem.paging is not None:
        return "it is not about keys in pages"
    if as_concerned(subject, problem, executor) != (problem,):
        return "it is about keys in pages, and these are in none"
    return "it is not about sinks" if problem.sink else f"it is not about {problem.operation}"
