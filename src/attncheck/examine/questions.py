"""What can be asked of a kernel: comparing it, an exact probe, or a relation; by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.errors import UnknownName
from attncheck.probes import PROBES
from attncheck.relations import RELATIONS

if TYPE_CHECKING:
    from attncheck.problem import Problem
    from attncheck.question import Allowed

__all__ = ["COMPARE", "allowed", "asked_of", "check_question", "summary", "unfit"]

COMPARE = "compare"


def check_question(name: str) -> None:
    """Raises UnknownName for what is neither ``compare`` nor a relation nor a probe."""
    if name != COMPARE and name not in RELATIONS and name not in PROBES:
        raise UnknownName("question", name, (COMPARE, *RELATIONS, *PROBES))


def summary(question: str) -> str:
    """What a question asks, in one line; raises UnknownName."""
    check_question(question)
    if question == COMPARE:
        return "every element is exact attention up to rounding"
    return RELATIONS[question].summary if question in RELATIONS else PROBES[question].summary


def asked_of(question: str, problem: Problem) -> Problem:
    """What is asked in place of ``problem``: a probe has no score mod, and its own inputs."""
    return PROBES[question].problem(problem) if question in PROBES else problem


def unfit(question: str, problem: Problem) -> str | None:
    """Why the question says nothing of ``problem``, in one line; None if it does."""
    check_question(question)
    if question == COMPARE:
        return None
    if question in RELATIONS:
        return RELATIONS[question].unfit(problem)
    return PROBES[question].unfit(problem)


def allowed(question: str, problem: Problem) -> Allowed:
    """The numbers that the question may be asked with, by name."""
    check_question(question)
    if question == COMPARE:
        return {}
    if question in RELATIONS:
        return RELATIONS[question].allowed(problem)
    return PROBES[question].allowed(problem)
