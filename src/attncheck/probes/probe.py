"""What a probe is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attncheck.errors import ProblemError
from attncheck.mods import library
from attncheck.probes.margins import USUAL, WeightErrors
from attncheck.probes.tied_keys import tied_keys
from attncheck.question import Allowed, Parameters, check_parameters, fits_all, no_parameters

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.probes.finding import Finding, Seen
    from attncheck.problem import Problem

__all__ = ["Parameters", "Probe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Inputs whose right answer is known beforehand, on any Problem of attention.

    All of it is pure: no kernel, no oracle. ``docs/probes.md`` proves what each asks.

    Attributes:
        name: The question of a Case.
        summary: What it asks, in one line.
        fill: (Problem, parameters) → its Inputs on the CPU; the Problem is ``problem``'s.
        unable: Why there are no such inputs of a Problem, in one line; None if there are.
        allowed: The numbers that may be asked of a Problem, by name, the most telling first.
    """

    name: str
    summary: str
    fill: Callable[[Problem, Parameters], Inputs]
    unable: Callable[[Problem], str | None] = fits_all
    allowed: Callable[[Problem], Allowed] = no_parameters

    def problem(self, problem: Problem) -> Problem:
        """What is asked in place of ``problem``: without score mod, its distribution not drawn.

        Layout, mask, dtype, scale and seed stay.
        """
        if problem.operation != "attention":
            return problem
        return problem.replace(score=library.NONE, distribution="normal", dcaptured=False)

    def unfit(self, problem: Problem) -> str | None:
        """Why the probe cannot be asked of ``problem``, in one line; None if it can."""
        if problem.operation != "attention":
            return "it is about attention"
        if problem.sink:
            return "it has a sink, and counts are of keys alone"
        if problem.backward:
            return "it says nothing of gradients"
        return self.unable(problem)

    def check(self, problem: Problem, parameters: Parameters) -> None:
        """Raises ProblemError unless the probe can be asked of ``problem`` with these."""
        reason = self.unfit(problem)
        if reason is None and self.problem(problem) != problem:
            reason = "it takes no score mod and the distribution 'normal', which it does not draw"
        if reason:
            raise ProblemError(f"{self.name} cannot be asked of {problem}: {reason}.")
        check_parameters(self.name, parameters, self.allowed(problem))

    def inputs(self, problem: Problem, parameters: Parameters) -> Inputs:
        """The Inputs, on the CPU; raises ProblemError as ``check`` does."""
        self.check(problem, parameters)
        return self.fill(problem, parameters)

    def read(
        self, inputs: Inputs, outputs: Outputs, seen: Seen, *, errors: WeightErrors = USUAL
    ) -> Finding | None:
        """What is wrong by the exact rule, or None; see ``tied_keys``."""
        return tied_keys(inputs, outputs, seen, errors=errors)
