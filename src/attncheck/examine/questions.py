"""What can be asked of a kernel: comparing it, an exact probe, a relation, a check; by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.errors import UnknownName
from attncheck.examine.checks import CHECKS
from attncheck.probes import PROBES
from attncheck.relations import RELATIONS

if TYPE_CHECKING:
    from attncheck.examine.checks import Check
    from attncheck.probes import Probe
    from attncheck.problem import Problem
    from attncheck.question import Allowed
    from attncheck.relations import Relation

__all__ = ["COMPARE", "allowed", "asked_of", "check_question", "summary", "unfit"]

COMPARE = "compare"


def check_question(name: str) -> None:
    """Raises UnknownName for what is neither ``compare`` nor a relation, a probe or a check."""
    if name != COMPARE and not any(name in known for known in (RELATIONS, PROBES, CHECKS)):
        raise UnknownName("question", name, (COMPARE, *RELATIONS, *PROBES, *CHECKS))


def summary(question: str) -> str:
    """What a question asks, in one line; raises UnknownName."""
    check_question(question)
    if question == COMPARE:
        return "every element is exact attention up to rounding"
    return _named(question).summary


def asked_of(question: str, problem: Problem) -> Problem:
    """What is asked in place of ``problem``: a probe has no score mod, and its own inputs."""
    return PROBES[question].problem(problem) if question in PROBES else problem


def unfit(question: str, problem: Problem) -> str | None:
    """Why the question says nothing of ``problem``, in one line; None if it does."""
    check_question(question)
    if question == COMPARE:
        return None
    return _named(question).unfit(problem)


def allowed(question: str, problem: Problem) -> Allowed:
    """The numbers that the question may be asked with, by name."""
    check_question(question)
    if question == COMPARE:
        return {}
    return _named(question).allowed(problem)


def _named(question: str) -> Relation | Probe | Check:
    """What is asked by a name that was checked, and is not ``compare``."""
    if question in RELATIONS:
        return RELATIONS[question]
    return CHECKS[question] if question in CHECKS else PROBES[question]
