"""The plan of one kernel in the making: what is chosen for a run, and what the kernel takes."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from operator import attrgetter
from typing import Any, Self, cast

import msgspec
from msgspec.structs import replace

from attncheck.cases.mask_samples import PLAIN_KIND, ProblemKind
from attncheck.cases.strategies.problems import nearest_supported
from attncheck.cases.tier import Tier, tier_named
from attncheck.core.errors import ProblemError, UsageError, require_known
from attncheck.core.formats import MEASURED_DTYPES
from attncheck.gate.other_commit import CommitTree
from attncheck.inputs.problem import Case, Problem
from attncheck.records.baseline_entries import Baseline, baseline_text
from attncheck.records.run_reports import STAGES, Answer, Stage
from attncheck.subjects.capabilities.subject import Subject
from attncheck.suite.kernel_support import KernelSupport
from attncheck.verify import question_fit
from attncheck.verify.executor import Executor, Failure
from attncheck.verify.run_case import new_record
from attncheck.workers.units import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Options of a gate run, the same for each of its kernels.

    Raises:
        UnknownName: for a dtype that kernels are not measured in.
    """

    tier: Tier
    stages: tuple[Stage, ...] = STAGES
    dtypes: tuple[str, ...] = ()  # only these; empty for all that a kernel takes
    seed: int = 0
    isolated: bool = True  # whether kernels run in processes of their own
    timeout: float = 0.0  # seconds that one call of a kernel may take; 0 for as many as is usual
    failures: str = ""  # folder in which failures are kept; empty for none
    sanitizer: bool = False  # whether a few problems are asked under compute-sanitizer
    # The files of another commit, whose kernels are measured too; None for none.
    tree: CommitTree | None = None
    held: BaselineCases | None = None  # what a baseline holds, and is asked again; None without one

    def __post_init__(self) -> None:
        require_known("dtype", self.dtypes, MEASURED_DTYPES)
        # In the table's order, so that a plan does not depend on what was typed first.
        ordered = tuple(name for name in MEASURED_DTYPES if name in self.dtypes)
        object.__setattr__(self, "dtypes", ordered)

    @classmethod
    def of_tier(cls, name: str, **others: Any) -> Choices:
        """Return choices in the tier ``name``; raises UnknownName for one that there is not."""
        return cls(tier=tier_named(name), **others)

    def options(self) -> dict[str, Any]:
        """Return it as JSON has it, for another process: what ``of`` reads."""
        options: dict[str, Any] = msgspec.to_builtins(self, enc_hook=str)
        return options

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Choices:
        """Return what ``options`` wrote."""
        return msgspec.convert(options, cls, dec_hook=lambda kind, text: kind(text))

    def plan(self) -> dict[str, Any]:
        """Return what of it makes two runs the same plan."""
        # Isolation, timeouts and folders change how a kernel is called, not what it is asked.
        stages, dtypes = ",".join(self.stages), ",".join(self.dtypes)
        plan = {"tier": self.tier.name, "stages": stages, "dtypes": dtypes, "seed": self.seed}
        plan |= {"sanitizer": True} if self.sanitizer else {}
        plan |= {"baseline": self.held.digest} if self.held else {}
        return plan | ({"against": self.tree.commit} if self.tree else {})


def parse_stages(names: Sequence[str], without: Sequence[str] = ()) -> tuple[Stage, ...]:
    """Return stages in their order; all where none is named.

    Raises:
        UnknownName: for one that there is not.
        UsageError: where none is left.
    """
    require_known("stage", (*names, *without), STAGES)
    # In the order of STAGES whatever was typed: units and reports are sorted by it.
    left = tuple(s for s in STAGES if (not names or s in names) and s not in without)
    if not left:
        raise UsageError("no stage is left: leave one of --stage and --skip out.")
    return left


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineCases:
    """The cases of a baseline, which a gate asks again."""

    digest: str  # of the baseline: another one makes another plan
    # Kernel, architecture, variant and Case, each as JSON has it.
    cases: tuple[tuple[str, str, str, dict[str, Any]], ...]

    @classmethod
    def of(cls, baseline: Baseline) -> Self:
        """Return those of its entries that say what was asked."""
        return cls(
            digest=hashlib.sha256(baseline_text(baseline).encode()).hexdigest()[:16],
            cases=tuple(
                (e.kernel, e.device, e.variant, e.asked) for e in baseline.entries if e.asked
            ),
        )

    def of_kernel(self, kernel: str, architecture: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield variant and Case of each that it holds of a kernel on an architecture."""
        for name, device, variant, case in self.cases:
            if (name, device) == (kernel, architecture):
                yield variant, case


# What a Problem may do without where the kernel does not take it.
_DROPS = ("sink", "dlse")
# In one of these a kernel takes a dtype, or nowhere.
_KINDS = (PLAIN_KIND, ProblemKind(paged=True), ProblemKind(sink=True))


class Planning(KernelSupport):
    """A kernel whose plan is made; it is asked nothing yet but what it takes."""

    def __init__(
        self,
        unit: Unit,
        subject: Subject,
        executor: Executor,
        choices: Choices,
        environment: str = "",
    ) -> None:
        super().__init__(subject, unit.device, executor)
        self.unit = unit  # the one that asks what it is: its kernel, convention, device, tier
        self.choices, self.environment = choices, environment
        self.refused: list[Answer] = []  # what of the plan it does not take: an answer each
        self.bounds: list[Unit] | None = None  # of stage bounds, once they are planned

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """Return those that are wanted and that the kernel takes somewhere."""
        # Whether it takes a dtype is asked once, over all families: every stage needs it.
        wanted = self.choices.dtypes or MEASURED_DTYPES
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
        return question_fit.adapted_problems(self.subject, problem, self.executor)

    def fitting(self, question: str, problem: Problem) -> Problem | None:
        """Return ``problem`` as the kernel takes it, if ``question`` can be asked of that."""
        try:
            moved = self.nearest(question_fit.question_problem(question, problem))
        except ProblemError:
            return None
        fits = moved is not None and question_fit.unfit_reason(question, moved) is None
        return moved if fits else None


def move_case(case: Case, problem: Problem) -> Case:
    """Return the question of ``case`` asked of ``problem``, with the nearest numbers allowed."""
    chosen = {}
    for name, values in question_fit.allowed_parameters(case.question, problem).items():
        # One in the middle where the case has none: the ends are special cases.
        wanted = case.parameters.get(name, values[len(values) // 2])
        chosen[name] = min(values, key=lambda value: abs(value - wanted))
    return Case(problem=problem, question=case.question, parameters=chosen)


# All of a Problem but its numbers, by which no kernel can go: it is asked before they are drawn.
_structure = attrgetter(
    *(each.name for each in fields(Problem) if each.name not in {"seed", "distribution"})
)


class CachingExecutor:
    """An executor of one kernel that remembers what it said of each Problem; not that it failed.

    A plan asks about the same problems many times, and each question crosses a process boundary.
    Those are the same that differ in their numbers alone.
    """

    _MOST = 20_000

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._answers: dict[tuple[Any, ...], Any] = {}
        self.absence, self.launches, self.run = executor.absence, executor.launches, executor.run

    def concerns(self, subject: Subject, problem: Problem) -> bool:
        """Return what the executor does, or did."""
        ask = functools.partial(self._executor.concerns, subject, problem)
        return cast("bool", self._remembered(("concerns", _structure(problem)), ask))

    def refusal(self, subject: Subject, problem: Problem, device: str) -> str | Failure | None:
        """Return what the executor does, or did."""
        ask = functools.partial(self._executor.refusal, subject, problem, device)
        return cast("str | None", self._remembered((device, _structure(problem)), ask))

    def _remembered(self, key: tuple[Any, ...], ask: Callable[[], Any]) -> Any:
        if key in self._answers:
            return self._answers[key]
        answer = ask()
        # A failure may be chance, so the kernel is asked again.
        if not isinstance(answer, Failure):
            if len(self._answers) >= self._MOST:
                self._answers.clear()
            self._answers[key] = answer
        return answer
