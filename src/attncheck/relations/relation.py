"""What a relation is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attncheck.errors import ProblemError

if TYPE_CHECKING:
    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.relations.finding import Finding

__all__ = ["Parameters", "Relation"]

Parameters = Mapping[str, int | float]


def _always(problem: Problem) -> None:
    del problem


def _none(problem: Problem) -> Mapping[str, Sequence[int]]:
    del problem
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """Something that holds to the last bit between what a right kernel gives.

    All of it is pure: no kernel, no oracle.

    Attributes:
        name: The question of a Case.
        summary: What must hold, and of which kernels if not of every right one, in one line: a
            failure quotes it.
        runs: (inputs, parameters) → the inputs of each run of the kernel, in order. What is given
            is not changed; tensors may be shared between runs.
        holds: (inputs of each run, outputs of each run, parameters) → what is wrong, or None.
        unfit: Why the relation says nothing of a Problem, in one line; None if it does.
        allowed: The numbers that may be asked of a Problem, by name, smallest first.
    """

    name: str
    summary: str
    runs: Callable[[Inputs, Parameters], tuple[Inputs, ...]]
    holds: Callable[[Sequence[Inputs], Sequence[Outputs], Parameters], Finding | None]
    unfit: Callable[[Problem], str | None] = _always
    allowed: Callable[[Problem], Mapping[str, Sequence[int]]] = _none

    def check(self, problem: Problem, parameters: Parameters) -> None:
        """Raises ProblemError unless the relation can be asked of ``problem`` with these."""
        reason = self.unfit(problem)
        if reason:
            raise ProblemError(f"{self.name} says nothing of {problem}: {reason}.")
        allowed = self.allowed(problem)
        if set(parameters) != set(allowed):
            wanted = ", ".join(allowed) or "none"
            raise ProblemError(f"{self.name} has parameters {dict(parameters)}: it needs {wanted}.")
        for name, value in parameters.items():
            if value not in allowed[name]:
                raise ProblemError(
                    f"{self.name}.{name}={value} must be one of {list(allowed[name])}."
                )
