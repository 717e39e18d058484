"""Planning of one kernel's questions: the options of a run, and what the kernel takes."""

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
    dtypes: tuple[str, ...] = ()  # Only these; empty for all that a kernel takes.
    seed: int = 0
    isolated: bool = True  # Whether kernels run in processes of their own.
    timeout: float = 0.0  # Time limit of one call of a kernel in seconds; 0 for the default.
    failures: str = ""  # Folder in which failures are stored; empty for none.
    sanitizer: bool = False  # Whether a few problems are run under compute-sanitizer.
    # The files of another commit, whose kernels are measured too; None for none.
    tree: CommitTree | None = None
    # Cases of a baseline, which are asked again; None for none.
    baseline_cases: BaselineCases | None = None

    def __post_init__(self) -> None:
        require_known("dtype", self.dtypes, MEASURED_DTYPES)
        # In the table's order, so that a plan does not depend on the order on the command line.
        ordered = tuple(name for name in MEASURED_DTYPES if name in self.dtypes)
        object.__setattr__(self, "dtypes", ordered)

    @classmethod
    def of_tier(cls, name: str, **others: Any) -> Choices:
        """Return choices in the tier ``name``; raise UnknownName if there is no such tier."""
        return cls(tier=tier_named(name), **others)

    def options(self) -> dict[str, Any]:
        """Return the choices as JSON-compatible data, which ``of`` reads in another process."""
        options: dict[str, Any] = msgspec.to_builtins(self, enc_hook=str)
        return options

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Choices:
        """Return the choices from which ``options`` was made."""
        return msgspec.convert(options, cls, dec_hook=lambda kind, text: kind(text))

    def plan(self) -> dict[str, Any]:
        """Return the choices that identify a plan, for the header of a journal."""
        # Isolation, timeouts and folders do not change the questions.
        stages, dtypes = ",".join(self.stages), ",".join(self.dtypes)
        plan = {"tier": self.tier.name, "stages": stages, "dtypes": dtypes, "seed": self.seed}
        plan |= {"sanitizer": True} if self.sanitizer else {}
        plan |= {"baseline": self.baseline_cases.digest} if self.baseline_cases else {}
        return plan | ({"against": self.tree.commit} if self.tree else {})


def parse_stages(names: Sequence[str], without: Sequence[str] = ()) -> tuple[Stage, ...]:
    """Return the selected stages in their order; all but those in ``without`` if none is named.

    Raises:
        UnknownName: for an unknown stage.
        UsageError: if no stage remains.
    """
    require_known("stage", (*names, *without), STAGES)
    # In the order of STAGES, by which units and reports are sorted.
    stages = tuple(s for s in STAGES if (not names or s in names) and s not in without)
    if not stages:
        raise UsageError("no stage is left: leave one of --stage and --skip out.")
    return stages


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineCases:
    """The cases of a baseline, which a gate asks again."""

    digest: str  # Digest of the baseline, on which the plan depends.
    # Kernel, architecture, variant and Case, each as JSON has it.
    cases: tuple[tuple[str, str, str, dict[str, Any]], ...]

    @classmethod
    def of(cls, baseline: Baseline) -> Self:
        """Return the cases of all entries that contain their Case."""
        return cls(
            digest=hashlib.sha256(baseline_text(baseline).encode()).hexdigest()[:16],
            cases=tuple(
                (e.kernel, e.device, e.variant, e.asked) for e in baseline.entries if e.asked
            ),
        )

    def of_kernel(self, kernel: str, architecture: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (variant, Case as JSON) for a kernel on an architecture."""
        for name, device, variant, case in self.cases:
            if (name, device) == (kernel, architecture):
                yield variant, case


# Features that may be dropped from a Problem if the kernel does not take them.
_DROPS = ("sink", "dlse")
# A kernel takes a dtype if it takes a Problem of one of these kinds.
_KINDS = (PLAIN_KIND, ProblemKind(paged=True), ProblemKind(sink=True))


class Planning(KernelSupport):
    """A kernel whose plan is being made, by asking it only which Problems it takes."""

    def __init__(
        self,
        unit: Unit,
        subject: Subject,
        executor: Executor,
        choices: Choices,
        environment: str = "",
        *,
        lse_loss_refusal: str = "",
    ) -> None:
        """Create a plan without units.

        Args:
            lse_loss_refusal: Why the kernel is known to refuse a loss of LSE, which some kernels
                do in the call alone; empty if it is not known to.
        """
        super().__init__(subject, unit.device, executor)
        self._lse_loss_refusal = lse_loss_refusal
        self.unit = unit  # The unit being done: its kernel, convention, device and tier.
        self.choices, self.environment = choices, environment
        self.refused: list[Answer] = []  # An answer for each refused part of the plan.
        self.bounds: list[Unit] | None = None  # Units of the stage bounds, once they are planned.

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """Selected dtypes in which the kernel takes some Problem."""
        # Cached, since every stage needs them.
        wanted = self.choices.dtypes or MEASURED_DTYPES
        return tuple(dtype for dtype in wanted if self.refusals(dtype, _KINDS) is None)

    def supports(self, problem: Problem) -> bool:
        """Return whether the kernel takes ``problem``; ``reason`` says why not."""
        # Known in advance, so that the problem is asked without this loss, and not lost.
        if problem.dlse and self._lse_loss_refusal:
            self.reason = self._lse_loss_refusal
            return False
        return super().supports(problem)

    def nearest(self, problem: Problem) -> Problem | None:
        """Return the Problem nearest to ``problem`` that the kernel takes, or None."""
        return nearest_supported(problem, self.supports, (problem.dtype,), drops=_DROPS)

    def unit_of(self, stage: Stage, case: Case, variant: str, test: str = "") -> Unit:
        """Return the unit that asks ``case``."""
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

    def nearest_unit(self, problem: Problem, variant: str) -> Unit | None:
        """Return the unit of bounds with the nearest Problem; None if the kernel takes none.

        Refusals are recorded as answers, so that they are visible in the report.
        """
        moved = self.nearest(problem)
        if moved is None:
            self.drop("bounds", Case(problem=problem), variant, self.reason)
            return None
        return self.unit_of("bounds", Case(problem=moved), variant)

    def drop(self, stage: Stage, case: Case, variant: str, reason: str) -> None:
        """Record an answer that says why ``case`` is not asked."""
        record = new_record(
            self.subject, case, device=self.device, variant=variant, environment=self.environment
        )
        record = replace(record, status="unsupported", reason=reason)
        self.refused.append(Answer(unit=self.unit.id, stage=stage, record=record))

    def fitting(self, question: str, problem: Problem) -> Problem | None:
        """Return the nearest Problem that the kernel takes and that fits ``question``, or None."""
        try:
            moved = self.nearest(question_fit.question_problem(question, problem))
        except ProblemError:
            return None
        fits = moved is not None and question_fit.question_named(question).unfit(moved) is None
        return moved if fits else None


def move_case(case: Case, problem: Problem) -> Case:
    """Return ``case`` with another Problem, and the nearest parameters that this one allows."""
    chosen = {}
    for name, values in question_fit.question_named(case.question).allowed(problem).items():
        # The default is the middle value, since the ends are special cases.
        wanted = case.parameters.get(name, values[len(values) // 2])
        chosen[name] = min(values, key=lambda value: abs(value - wanted))
    return Case(problem=problem, question=case.question, parameters=chosen)


# All fields of a Problem but those of its random numbers, which cannot affect a refusal.
_structure = attrgetter(
    *(each.name for each in fields(Problem) if each.name not in {"seed", "distribution"})
)


class CachingExecutor:
    """An executor of one kernel that caches which Problems it takes, except for failures.

    A plan asks about the same Problems many times, and each question crosses a process boundary.
    Problems that only differ in their random numbers share a cache entry.
    """

    _MOST = 20_000

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._answers: dict[tuple[Any, ...], Any] = {}
        self.absence, self.launches, self.run = executor.absence, executor.launches, executor.run

    def concerns(self, subject: Subject, problem: Problem) -> bool:
        """Return the executor's answer, cached."""
        ask = functools.partial(self._executor.concerns, subject, problem)
        return cast("bool", self._cached(("concerns", _structure(problem)), ask))

    def refusal(self, subject: Subject, problem: Problem, device: str) -> Failure | None:
        """Return the executor's answer, cached."""
        ask = functools.partial(self._executor.refusal, subject, problem, device)
        return cast("Failure | None", self._cached((device, _structure(problem)), ask))

    def _cached(self, key: tuple[Any, ...], ask: Callable[[], Any]) -> Any:
        if key in self._answers:
            return self._answers[key]
        answer = ask()
        # Any other failure may be accidental, so that it is not cached.
        if not isinstance(answer, Failure) or answer.kind == "refused":
            if len(self._answers) >= self._MOST:
                self._answers.clear()
            self._answers[key] = answer
        return answer
