"""Reports of many questions: a gate, and a run of the property suite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from attncheck.records.record import Environment, Record

if TYPE_CHECKING:
    from collections.abc import Sequence

Stage = Literal["contract", "probes", "bounds", "properties", "memory", "determinism", "baseline"]
"""Questions, in this order."""

STAGES: tuple[Stage, ...] = Stage.__args__  # type: ignore[attr-defined]  # a Literal has them

BaselineStanding = Literal["identical", "within rounding", "better", "worse", "new", "gone"]
"""A case beside its baseline: the same bits; others, and no less accurate than rounding explains;
more accurate; less; a case that the baseline does not have; one that was not asked now."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One question to one kernel, answered.

    Attributes:
        unit: Id of the piece of work that it is the result of.
        stage: Which part of the gate asked.
        test: ``test_causal.py::test_attention_is_exact``; empty where none drew the Case.
        seconds: From question to verdict.
        compiling: Of these, in compilers.
        attempts: How often it was asked: twice where the first time its process died.
        smallest_of: Id of the Case that failed and of which this is the smallest that does; empty
            where nothing was shrunk.
        failure: Id for ``attncheck repro``; empty where nothing failed.
    """

    unit: str
    stage: Stage
    record: Record
    test: str = ""
    seconds: float = 0.0
    compiling: float = 0.0
    attempts: int = 1
    # Shrinking is no question that was planned: counts leave these answers out.
    smallest_of: str = ""
    failure: str = ""


class FailureCause(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One cause of failures of one kernel.

    Attributes:
        cause: In plain words; of an unknown one the rule that is broken.
        known: Whether it was shown to explain each of the failures.
        model: Id of the fault model or sign; empty where there is none.
        case_ids: The Cases that fail for it.
        smallest: The smallest Problem known that does, in a few words.
        failure: Argument of ``attncheck repro`` that asks that one again.
    """

    kernel: str
    cause: str
    known: bool
    model: str = ""
    case_ids: tuple[str, ...]
    smallest: str
    failure: str


class Change(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One case of one kernel beside its baseline.

    Attributes:
        standing: See ``BaselineStanding``.
        reason: Why, in one line: by what numbers.
        before, after: RMSE of out; None where it was not measured.
    """

    kernel: str
    case_id: str
    standing: BaselineStanding
    reason: str = ""
    before: float | None = None
    after: float | None = None


class BaselineComparison(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes in the cases of a baseline.

    Attributes:
        baseline: The file or the commit that the cases are compared with.
        problems: What each case is, in a few words, by its id.
        changes: The worst first.
    """

    schema: int = 1
    command: str
    baseline: str
    problems: dict[str, str] = {}
    changes: tuple[Change, ...]


class GateReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a gate found.

    Attributes:
        tier: ``smoke``, ``pr`` or ``nightly``.
        started: When, UTC, as ``2026-11-22T17:30:00Z``.
        seconds: From then to the end, of all parts of a run that was resumed.
        shard: ``2/4``; empty where there is one.
        kernels: Name of each kernel → its one-line summary.
        absent: Kernels that can run nothing here → why.
        stages: Those that were asked for, in order.
        planned: Questions of each stage that there are.
        unfinished: Of these, not answered: an interrupt, a time limit, or a stop at a failure.
        unfinished_because: Why; empty where none is.
        missing: Kernel → stage → how many of these; a kernel that was not even described, of which
            nobody knows how many there are, has none.
        harness: What went wrong that is no kernel's fault, a line each.
        baseline: The file or commit that the kernels are beside; empty for none.
        changes: Cases beside it.
        causes: Of the failures, worst first: made of the answers.
        answers: In the order of stages, kernels, cases.
    """

    schema: int = 1
    command: str
    tier: str
    started: str
    seconds: float
    shard: str = ""
    environments: dict[str, Environment]
    kernels: dict[str, str]
    absent: dict[str, str] = {}
    stages: tuple[Stage, ...] = STAGES
    # Beside the answers, so that a gate that was cut short cannot look finished.
    planned: dict[Stage, int] = {}
    unfinished: int = 0
    unfinished_because: str = ""
    missing: dict[str, dict[Stage, int]] = {}
    # Apart: a broken harness must look neither like a broken kernel nor like a pass.
    harness: tuple[str, ...] = ()
    baseline: str = ""
    changes: tuple[Change, ...] = ()
    causes: tuple[FailureCause, ...] = ()
    answers: tuple[Answer, ...] = ()


# Not frozen, unlike the others: it is counted up while the tests run.
class Tally(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Problems that one kernel was asked.

    Attributes:
        problems: By status: those of a Record. A Case is one problem, however many runs it takes.
        seconds: In the kernel, the oracle and the judge.
        compiling: Of these, in compilers.
    """

    problems: dict[str, int] = msgspec.field(default_factory=dict)
    seconds: float = 0.0
    compiling: float = 0.0

    @property
    def total(self) -> int:
        """Problems that were answered: refusals do not count."""
        # A refusal is said beforehand: the kernel was asked nothing.
        return sum(count for status, count in self.problems.items() if status != "unsupported")

    def add(self, other: Tally) -> None:
        """Count what ``other`` counted too."""
        for status, count in other.problems.items():
            self.problems[status] = self.problems.get(status, 0) + count
        self.seconds += other.seconds
        self.compiling += other.compiling


class PropertyOutcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One test.

    Attributes:
        file: Name of its file, ``test_causal.py``.
        test: Name of the function.
        kernel, dtype, family: What its id says.
        outcome: ``known`` where it fails as a known failure does.
        reason: Why it was skipped, what is known, or the first line of the failure; of one that
            passed what was odd, where its kernel promises no better.
        tally: Its problems.
    """

    file: str
    test: str
    kernel: str
    dtype: str
    family: str
    outcome: Literal["passed", "failed", "known", "skipped"]
    reason: str = ""
    tally: Tally


class PropertyReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Outcomes with what they share.

    Attributes:
        tier: How hard was asked.
        processes: That shared the work.
        seconds: From the first test to the last, collection included.
        untaken: Kernel → dtype → why it takes nothing of it.
        outcomes: In the order of files, tests, kernels.
    """

    schema: int = 1
    command: str
    environment: Environment
    tier: str
    processes: int
    seconds: float
    untaken: dict[str, dict[str, str]]
    outcomes: tuple[PropertyOutcome, ...]


def join_property_reports(reports: Sequence[PropertyReport]) -> PropertyReport:
    """Several runs of one tier on one machine, as one: of a test that ran again its last outcome.

    Raises:
        ValueError: if there are none, or their tiers or environments differ.
    """
    if len({(one.tier, str(one.environment)) for one in reports}) != 1:
        raise ValueError("reports of one tier in one environment can be joined, and no others.")
    # A test that was run again after a fix counts as it ended, not as it began.
    last: dict[tuple[str, ...], PropertyOutcome] = {}
    untaken: dict[str, dict[str, str]] = {}
    for report in reports:
        for one in report.outcomes:
            last[one.file, one.test, one.kernel, one.dtype, one.family] = one
        for kernel, of_dtypes in report.untaken.items():
            untaken.setdefault(kernel, {}).update(of_dtypes)
    return PropertyReport(
        command=" && ".join(dict.fromkeys(one.command for one in reports)),
        environment=reports[0].environment,
        tier=reports[0].tier,
        processes=max(one.processes for one in reports),
        # The runs came one after the other, so their times add up.
        seconds=sum(one.seconds for one in reports),
        untaken=untaken,
        outcomes=tuple(sorted(last.values(), key=lambda one: (one.file, one.test, one.kernel))),
    )
