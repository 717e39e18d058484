"""A kernel as a property sees it: what it takes, and that a relation holds for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.examine.executor import Executor, InProcess
from attncheck.examine.relate import Broken, relate

if TYPE_CHECKING:
    from attncheck.problem import Case, Problem
    from attncheck.subjects.contract import Subject

__all__ = ["UnderTest"]


class UnderTest:
    """A subject on one device.

    Attributes:
        name: What it was asked for by: a name, or ``file.py::name``.
        subject: The kernel.
        device: ``cpu`` or ``cuda``.
        refused: Why it did not take the last Problem that it did not take; empty if it took all.
    """

    def __init__(
        self, name: str, subject: Subject, device: str, executor: Executor | None = None
    ) -> None:
        self.name = name
        self.subject = subject
        self.device = device
        self.refused = ""
        self._executor = executor or InProcess()

    def __repr__(self) -> str:
        return f"UnderTest({self.name!r}, device={self.device!r})"

    def supports(self, problem: Problem) -> bool:
        """Whether the kernel takes ``problem``: for ``strategies.problems(supports=…)``."""
        reason: str | None = "such problems do not concern it"
        if self.subject.concerns(problem):
            reason = self.subject.unsupported(problem, self.device)
        self.refused = reason or self.refused
        return reason is None

    def must_hold(self, case: Case) -> None:
        """Raises AssertionError, with the whole reproducer, unless the Case's relation holds."""
        __tracebackhide__ = True
        found = relate(self.subject, case, self._executor, device=self.device)
        if found is not None:
            raise AssertionError(str(Broken(kernel=self.name, case=case, found=found)))
