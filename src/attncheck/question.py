"""The numbers that a relation or a probe may be asked with, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attncheck.errors import ProblemError

if TYPE_CHECKING:
    from attncheck.problem import Problem

__all__ = ["Allowed", "Parameters", "check_parameters", "fits_all", "no_parameters"]

Parameters = Mapping[str, int | float]
Allowed = Mapping[str, Sequence[int]]


def fits_all(problem: Problem) -> None:
    """No reason against any Problem."""
    del problem


def no_parameters(problem: Problem) -> Allowed:
    """Nothing to choose."""
    del problem
    return {}


def check_parameters(question: str, parameters: Parameters, allowed: Allowed) -> None:
    """Raises ProblemError unless ``parameters`` are those ``allowed``, each one of its numbers.

    Args:
        question: Name of the relation or probe.
        parameters: What is asked.
        allowed: What may be asked of the Problem.
    """
    if set(parameters) != set(allowed):
        wanted = ", ".join(allowed) or "none"
        raise ProblemError(f"{question} has parameters {dict(parameters)}: it needs {wanted}.")
    for name, value in parameters.items():
        if value not in allowed[name]:
            raise ProblemError(f"{question}.{name}={value} must be one of {list(allowed[name])}.")
