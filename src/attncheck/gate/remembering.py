"""What a kernel takes, asked once: planning asks the same again, in another process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.verify.call_conditions import PLAIN_CALL, CallConditions
from attncheck.verify.executor import Failure

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attncheck.capabilities.subject import Subject
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Problem
    from attncheck.verify.executor import Execution, Executor, Origin

__all__ = ["Remembering"]

_MOST = 20_000


class Remembering:
    """An executor of one kernel that remembers what it said of each Problem; not that it failed.

    Args:
        executor: That asks it.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._concerns: dict[Problem, bool] = {}
        self._refusals: dict[tuple[Problem, str], str | None] = {}

    def absence(self, subject: Subject, device: str) -> str | None:
        """As the other one says."""
        return self._executor.absence(subject, device)

    def concerns(self, subject: Subject, problem: Problem) -> bool:
        """As the other one says, or said."""
        if problem not in self._concerns:
            if len(self._concerns) >= _MOST:
                self._concerns.clear()
            self._concerns[problem] = self._executor.concerns(subject, problem)
        return self._concerns[problem]

    def refusal(self, subject: Subject, problem: Problem, device: str) -> str | Failure | None:
        """As the other one says, or said."""
        key = (problem, device)
        if key in self._refusals:
            return self._refusals[key]
        found = self._executor.refusal(subject, problem, device)
        if not isinstance(found, Failure):
            if len(self._refusals) >= _MOST:
                self._refusals.clear()
            self._refusals[key] = found
        return found

    def launches(
        self, subject: Subject, problem: Problem, device: str
    ) -> Mapping[str, Subject] | Failure:
        """As the other one says."""
        return self._executor.launches(subject, problem, device)

    def run(
        self,
        subject: Subject,
        inputs: Inputs,
        *,
        origin: Origin | None = None,
        timed: bool = False,
        under: CallConditions = PLAIN_CALL,
    ) -> Execution | Failure:
        """As the other one does."""
        return self._executor.run(subject, inputs, origin=origin, timed=timed, under=under)
