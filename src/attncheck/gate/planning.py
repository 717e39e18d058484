"""One kernel as a plan sees it: what it takes, and the units of work that follow."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from msgspec.structs import replace

from attncheck.cases.mask_samples import PLAIN_KIND, ProblemKind
from attncheck.cases.strategies.problems import nearest_supported
from attncheck.core.errors import ProblemError
from attncheck.core.formats import DTYPES
from attncheck.inputs.problem import Case, Problem
from attncheck.records.run_reports import Answer
from attncheck.suite.kernel_support import KernelSupport
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
    from collections.abc import Mapping

    from attncheck.gate.choices import Choices
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.records.run_reports import Stage
    from attncheck.subjects.capabilities.subject import Subject
    from attncheck.verify.executor import Execution, Executor, Origin

# What a Problem may do without where the kernel does not take it.
_DROPS = ("sink", "dlse")
# In one of these a kernel takes a dtype, or nowhere.
_KINDS = (PLAIN_KIND, ProblemKind(paged=True), ProblemKind(sink=True))


class Planning(KernelSupport):
    """A kernel whose plan is made; it is asked nothing yet but what it takes.

    Attributes:
        unit: The one that asks what it is: its kernel, convention, device, tier.
        choices: What the run asks.
        refused: What of the plan it does not take: an answer each.
    """

    def __init__(
        self,
        unit: Unit,
        subject: Subject,
        executor: Executor,
        choices: Choices,
        environment: str = "",
    ) -> None:
        super().__init__(subject, unit.device, executor)
        self.unit = unit
        self.choices, self.environment = choices, environment
        self.refused: list[Answer] = []

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """Return those that are wanted and that the kernel takes somewhere."""
        # Whether it takes a dtype is asked once, over all families: every stage needs it.
        wanted = self.choices.dtypes or [n for n, d in DTYPES.items() if d.measured]
        return tuple(dtype for dtype in wanted if self.refusals(dtype, _KINDS) is None)

    def nearest(self, problem: Problem) -> Problem | None:
        """Return ``problem`` itself, the nearest that the kernel takes, or None."""
        return nearest_supported(problem, self.supports, (problem.dtype,), drops=_DROPS)

    def unit_of(self, stage: Stage, case: Case, variant: str, test: str = "") -> Unit:
        """Return the unit of work that asks ``case``."""
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

    def nearest_unit(self, stage: Stage, problem: Problem, variant: str) -> Unit | None:
        """Return the unit that compares ``problem`` or the nearest one; None of a refusal.

        What is refused is kept as an answer, so that no plan is shorter than it looks.
        """
        moved = self.nearest(problem)
        if moved is None:
            self.drop(stage, Case(problem=problem), variant, self.reason)
            return None
        return self.unit_of(stage, Case(problem=moved), variant)

    def drop(self, stage: Stage, case: Case, variant: str, reason: str) -> None:
        """Keep that ``case`` is not asked, and why."""
        record = new_record(
            self.subject, case, device=self.device, variant=variant, environment=self.environment
        )
        record = replace(record, status="unsupported", reason=reason)
        self.refused.append(Answer(unit=self.unit.id, stage=stage, record=record))

    def adapted(self, problem: Problem) -> tuple[Problem, ...]:
        """Return ``problem``, or the same in pages for a kernel that takes keys in pages alone."""
        return adapted_problems(self.subject, problem, self.executor)

    def fitting(self, question: str, problem: Problem) -> Problem | None:
        """Return ``problem`` as the kernel takes it, if ``question`` can be asked of that."""
        try:
            moved = self.nearest(question_problem(question, problem))
        except ProblemError:
            return None
        fits = moved is not None and unfit_reason(question, moved) is None
        return moved if fits else None


def move_case(case: Case, problem: Problem) -> Case:
    """Return the question of ``case`` asked of ``problem``, with the nearest numbers allowed."""
    chosen = {}
    for name, values in allowed_parameters(case.question, problem).items():
        # One in the middle where the case has none: the ends are special cases.
        wanted = case.parameters.get(name, values[len(values) // 2])
        chosen[name] = min(values, key=lambda value: abs(value - wanted))
    return Case(problem=problem, question=case.question, parameters=chosen)


class CachingExecutor:
    """An executor of one kernel that remembers what it said of each Problem; not that it failed.

    A plan asks about the same problems many times, and each question crosses a process boundary.
    """

    _MOST = 20_000

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._concerns: dict[Problem, bool] = {}
        self._refusals: dict[tuple[Problem, str], str | None] = {}

    def absence(self, subject: Subject, device: str) -> str | None:
        """Return what the executor does."""
        return self._executor.absence(subject, device)

    def concerns(self, subject: Subject, problem: Problem) -> bool:
        """Return what the executor does, or did."""
        if problem not in self._concerns:
            if len(self._concerns) >= self._MOST:
                self._concerns.clear()
            self._concerns[problem] = self._executor.concerns(subject, problem)
        return self._concerns[problem]

    def refusal(self, subject: Subject, problem: Problem, device: str) -> str | Failure | None:
        """Return what the executor does, or did."""
        key = (problem, device)
        if key in self._refusals:
            return self._refusals[key]
        answer = self._executor.refusal(subject, problem, device)
        # A failure may be chance, so the kernel is asked again.
        if not isinstance(answer, Failure):
            if len(self._refusals) >= self._MOST:
                self._refusals.clear()
            self._refusals[key] = answer
        return answer

    def launches(
        self, subject: Subject, problem: Problem, device: str
    ) -> Mapping[str, Subject] | Failure:
        """Return what the executor does."""
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
        """Return what the executor does."""
        return self._executor.run(subject, inputs, origin=origin, timed=timed, under=under)
