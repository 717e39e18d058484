"""One kernel as a plan sees it: what it takes, and the questions that follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from attncheck.cases.mask_samples import NOT_APPLICABLE, PLAIN_KIND, ProblemKind, refusal
from attncheck.cases.strategies.families import MASK_FAMILIES
from attncheck.cases.strategies.problems import nearest_supported
from attncheck.core.errors import ProblemError
from attncheck.core.formats import DTYPES
from attncheck.inputs.problem import Case, Problem
from attncheck.records.run_reports import Answer
from attncheck.suite.pytest_options import SOFTMAX
from attncheck.verify.call_conditions import PLAIN_CALL, CallConditions
from attncheck.verify.executor import Failure
from attncheck.verify.question_fit import (
    adapted_problems,
    allowed_parameters,
    question_problem,
    unfit_reason,
)
from attncheck.verify.run_case import new_record
from attncheck.workers.units import Unit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attncheck.capabilities.subject import Subject
    from attncheck.gate.choices import Choices
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.records.run_reports import Stage
    from attncheck.verify.executor import Execution, Executor, Origin

__all__ = ["CachingExecutor", "Planning", "move_case"]


_DROPS = ("sink", "dlse")


class Planning:
    """What a kernel is asked; it is asked nothing yet but what it takes.

    Attributes:
        unit: The one that asks what it is: its kernel, convention, device, tier.
        subject, executor: The kernel, and how to ask it.
        choices: What is asked.
        environment: Fingerprint of where.
        refused: What of the plan it does not take: an answer each.
        reason: Why it did not take the last Problem that it did not take.
    """

    def __init__(
        self,
        unit: Unit,
        subject: Subject,
        executor: Executor,
        choices: Choices,
        environment: str = "",
    ) -> None:
        self.unit = unit
        self.subject, self.executor = subject, executor
        self.choices, self.environment = choices, environment
        self.refused: list[Answer] = []
        self.reason = ""
        self._refusals: dict[tuple[str, str, ProblemKind], str] = {}
        self._dtypes: tuple[str, ...] | None = None

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.unit.device

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Those that are wanted and that the kernel takes somewhere."""
        if self._dtypes is None:
            wanted = self.choices.dtypes or [n for n, d in DTYPES.items() if d.measured]
            self._dtypes = tuple(dtype for dtype in wanted if self._takes(dtype))
        return self._dtypes

    def supports(self, problem: Problem) -> bool:
        """Whether the kernel takes ``problem``; where even asking raises it is to be asked."""
        said: str | Failure | None = NOT_APPLICABLE
        if self.executor.concerns(self.subject, problem):
            said = self.executor.refusal(self.subject, problem, self.device)
        if isinstance(said, str):
            self.reason = said
        return not isinstance(said, str)

    def nearest(self, problem: Problem) -> Problem | None:
        """``problem`` itself, the nearest that the kernel takes, or None."""
        return nearest_supported(problem, self.supports, (problem.dtype,), drops=_DROPS)

    def refusal(self, family: str, dtype: str, kind: ProblemKind = PLAIN_KIND) -> str:
        """Why it takes nothing of a mask family in a dtype; empty if it does."""
        key = (family, dtype, kind)
        if key not in self._refusals:
            self._refusals[key] = refusal(
                self.subject, family, dtype, self.device, kind, self.executor
            )
        return self._refusals[key]

    def ask(self, stage: Stage, case: Case, variant: str, test: str = "") -> Unit:
        """The piece of work that asks ``case``."""
        return Unit(
            kind="ask",
            stage=stage,
            kernel=self.unit.kernel,
            convention=self.unit.convention,
            device=self.device,
            tier=self.unit.tier,
            variant=variant,
            test=test,
            case=case.to_json(),
        )

    def asked_nearest(
        self, stage: Stage, problem: Problem, variant: str, question: str = "compare"
    ) -> Unit | None:
        """The work that asks ``question`` of ``problem`` or the nearest one; None of a refusal.

        What is refused is kept as an answer, so that no plan is shorter than it looks.
        """
        found = self.nearest(question_problem(question, problem))
        if found is None:
            self.drop(stage, Case(problem=problem, question=question), variant, self.reason)
            return None
        return self.ask(stage, Case(problem=found, question=question), variant)

    def drop(self, stage: Stage, case: Case, variant: str, reason: str) -> None:
        """Keep that ``case`` is not asked, and why."""
        record = new_record(
            self.subject, case, device=self.device, variant=variant, environment=self.environment
        )
        record = replace(record, status="unsupported", reason=reason)
        self.refused.append(Answer(unit=self.unit.id, stage=stage, record=record))

    def concerned(self, problem: Problem) -> tuple[Problem, ...]:
        """``problem``, or the same in pages for a kernel that takes keys in pages alone."""
        return adapted_problems(self.subject, problem, self.executor)

    def fitting(self, question: str, problems: Sequence[Problem]) -> list[Problem]:
        """Those that ``question`` says something of, as the kernel takes them."""
        found = []
        for problem in problems:
            try:
                moved = self.nearest(question_problem(question, problem))
            except ProblemError:
                continue
            if moved is not None and unfit_reason(question, moved) is None:
                found.append(moved)
        return found

    def _takes(self, dtype: str) -> bool:
        kinds = (PLAIN_KIND, ProblemKind(paged=True), ProblemKind(sink=True))
        return any(
            not self.refusal(family, dtype, kind)
            for kind in kinds
            for family in (*MASK_FAMILIES, SOFTMAX)
        )


def move_case(case: Case, problem: Problem) -> Case:
    """The question of ``case`` asked of ``problem``, with the nearest numbers that it allows."""
    chosen = {}
    for name, values in allowed_parameters(case.question, problem).items():
        wanted = case.parameters.get(name, values[len(values) // 2])
        chosen[name] = min(values, key=lambda value: abs(value - wanted))
    return Case(problem=problem, question=case.question, parameters=chosen)


_MOST = 20_000


class CachingExecutor:
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
