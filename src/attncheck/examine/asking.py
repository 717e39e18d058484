"""What a check of memory or determinism is, and how it asks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attncheck import inputs as inputs_room
from attncheck.errors import ProblemError
from attncheck.examine.executor import Failure, Origin
from attncheck.question import Allowed, check_parameters, fits_all, no_parameters

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.examine.circumstances import Circumstances
    from attncheck.examine.executor import Execution, Executor
    from attncheck.gate_record import Stage
    from attncheck.inputs import Inputs
    from attncheck.judgement import Judgement
    from attncheck.problem import Case, Problem
    from attncheck.subjects.contract import Subject

__all__ = ["Asking", "Check", "Unanswered", "remarks"]


class Unanswered(Exception):
    """There are no outputs to look at.

    Attributes:
        failure: Why.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(slots=True, kw_only=True)
class Asking:
    """One kernel, asked one check.

    Attributes:
        subject: The kernel.
        case: The Case.
        device: ``cpu`` or ``cuda``.
        executor: How to call the kernel.
    """

    subject: Subject
    case: Case
    device: str
    executor: Executor
    _inputs: Inputs | None = field(default=None, init=False)

    def run(self, under: Circumstances) -> Execution:
        """What the kernel gives ``under`` these circumstances; raises Unanswered."""
        if self._inputs is None:
            self._inputs = inputs_room.draw(self.case.problem, self.device)
        result = self.executor.run(
            self.subject, self._inputs, origin=Origin(case=self.case), under=under
        )
        if isinstance(result, Failure):
            raise Unanswered(result)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Something that must hold of a call beside its numbers.

    Attributes:
        name: The question of a Case.
        summary: What must hold, in one line.
        stage: The part of a gate that asks it.
        look: Asks, and says what was found; raises Unanswered.
        gpu: Whether it can be asked on a GPU alone.
        unfit: Why the check says nothing of a Problem, in one line; None if it does.
        allowed: The numbers that may be asked of a Problem, by name, smallest first.
    """

    name: str
    summary: str
    stage: Stage
    look: Callable[[Asking], Judgement]
    gpu: bool = False
    unfit: Callable[[Problem], str | None] = fits_all
    allowed: Callable[[Problem], Allowed] = no_parameters

    def check(self, case: Case) -> None:
        """Raises ProblemError unless the check can be asked of the Case's Problem and numbers."""
        reason = self.unfit(case.problem)
        if reason:
            raise ProblemError(f"{self.name} says nothing of {case.problem}: {reason}.")
        check_parameters(self.name, case.parameters, self.allowed(case.problem))


def remarks(*found: str) -> tuple[str, ...]:
    """Those that say something, each once."""
    return tuple(dict.fromkeys(each for each in found if each))
