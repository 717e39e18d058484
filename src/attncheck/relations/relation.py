"""What a relation is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attncheck.errors import ProblemError
from attncheck.question import Allowed, Parameters, check_parameters, fits_all, no_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.relations.finding import Finding

__all__ = ["Parameters", "Relation"]


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
    unfit: Callable[[Problem], str | None] = fits_all
    allowed: Callable[[Problem], Allowed] = no_parameters

    def check(self, problem: Problem, parameters: Parameters) -> None:
        """Raises ProblemError unless the relation can be asked of ``problem`` with these."""
        reason = self.unfit(problem)
        if reason:
            raise ProblemError(f"{self.name} says nothing of {problem}: {reason}.")
        check_parameters(self.name, parameters, self.allowed(problem))
