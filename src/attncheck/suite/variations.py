"""The same structure with other numbers: what a compiled kernel takes without being compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncheck.core.errors import ProblemError, without_recorded
from attncheck.inputs.distributions import DISTRIBUTIONS
from attncheck.inputs.problem import Case, Problem
from attncheck.verify import question_fit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["variations"]

_SEEDS = 1000  # as strategies.problems draws


def variations(
    case: Case,
    count: int,
    *,
    fits: Callable[[str, Problem], bool],
    lengths: bool,
    distributions: Sequence[str] = (),
) -> Iterator[Case]:
    """Up to ``count`` Cases beside ``case``, of the same dtype, dims and mods.

    Each has another seed and distribution, the relation's numbers move on, and with ``lengths``
    query and kv shrink towards a half. They follow from ``case`` alone: a failure of one of them
    shrinks as ``case`` does.

    Args:
        case: What was drawn.
        count: How many.
        fits: (question, Problem) → whether it may be asked.
        lengths: Whether lengths may be others, where the mask's numbers allow it.
        distributions: To choose from (default: all).
    """
    for turn in range(1, count + 1):
        numbers = _numbers(case.problem, turn, distributions)
        sizes = _lengths(case.problem, turn, count) if lengths else {}
        problem = _first(case, fits, (numbers | sizes, numbers))
        if problem is not None:
            yield _moved(case, problem, turn)


def _numbers(problem: Problem, turn: int, only: Sequence[str]) -> dict[str, Any]:
    softmax = problem.operation == "softmax"
    names = list(only) or [
        name
        for name in without_recorded(DISTRIBUTIONS)
        if DISTRIBUTIONS[name].scores is not None or not softmax
    ]
    if problem.distribution not in names:
        names = [problem.distribution]
    index = names.index(problem.distribution)
    return {
        "seed": (problem.seed + turn) % _SEEDS,
        "distribution": names[(index + turn) % len(names)],
    }


def _lengths(problem: Problem, turn: int, count: int) -> dict[str, int]:
    """More than half of each: 1 stays 1, and 2 stays 2."""

    def less(length: int) -> int:
        return -(-length * (2 * (count + 1) - turn) // (2 * (count + 1)))

    return {"query": less(problem.query), "kv": less(problem.kv)}


def _first(
    case: Case, fits: Callable[[str, Problem], bool], changes: tuple[dict[str, Any], ...]
) -> Problem | None:
    for each in changes:
        try:
            problem = question_fit.question_problem(case.question, case.problem.replace(**each))
        except ProblemError:  # documents that must cover a length, padding beyond it
            continue
        if fits(case.question, problem):
            return problem
    return None


def _moved(case: Case, problem: Problem, turn: int) -> Case:
    allowed = question_fit.allowed_parameters(case.question, problem)
    chosen = {
        name: values[(_index(values, case.parameters.get(name)) + turn) % len(values)]
        for name, values in allowed.items()
    }
    return Case(problem=problem, question=case.question, parameters=chosen)


def _index(values: Any, value: object) -> int:
    return list(values).index(value) if value in values else 0
