"""Reports of many questions: a gate, and a run of the property suite."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from attncheck.records.record import Environment, Record

Stage = Literal["contract", "probes", "bounds", "properties", "memory", "determinism", "baseline"]
"""Questions, in this order."""

STAGES: tuple[Stage, ...] = get_args(Stage)

BaselineStanding = Literal["identical", "within rounding", "better", "worse", "new", "gone"]
STANDINGS: tuple[BaselineStanding, ...] = get_args(BaselineStanding)
"""A case beside its baseline: the same bits; others, and no less accurate than rounding explains;
more accurate; less; a case that the baseline does not have; one that was not asked now."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One question to one kernel, answered."""

    unit: str  # id of the piece of work that it is the result of
    stage: Stage  # which part of the gate asked
    record: Record
    test: str = ""  # ``test_causal.py::test_attention_is_exact``; empty where none drew the Case
    seconds: float = 0.0  # from question to verdict
    compiling: float = 0.0  # of these, in compilers
    attempts: int = 1  # how often it was asked: twice where the first time its process died
    # Id of the Case that failed and of which this is the smallest that does; empty where nothing
    # was shrunk.
    # Shrinking is no question that was planned: counts leave these answers out.
    smallest_of: str = ""
    failure: str = ""  # id for ``attncheck repro``; empty where nothing failed


class FailureCause(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One cause of failures of one kernel."""

    kernel: str
    cause: str  # in plain words; of an unknown one the rule that is broken
    known: bool  # whether it was shown to explain each of the failures
    model: str = ""  # id of the fault model or sign; empty where there is none
    case_ids: tuple[str, ...]  # the Cases that fail for it
    smallest: str  # the smallest Problem known that does, in a few words
    failure: str  # argument of ``attncheck repro`` that asks that one again


class Change(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One case of one kernel beside its baseline."""

    kernel: str
    case_id: str
    standing: BaselineStanding  # see ``BaselineStanding``
    reason: str = ""  # why, in one line: by what numbers
    # before, after: RMSE of out; None where it was not measured.
    before: float | None = None
    after: float | None = None


class BaselineComparison(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes in the cases of a baseline."""

    schema: int = 1
    command: str
    baseline: str  # the file or the commit that the cases are compared with
    problems: dict[str, str] = {}  # what each case is, in a few words, by its id
    changes: tuple[Change, ...]  # the worst first


class GateReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a gate found."""

    schema: int = 1
    command: str
    tier: str  # ``smoke``, ``pr`` or ``nightly``
    started: str  # when, UTC, as ``2026-11-22T17:30:00Z``
    seconds: float  # from then to the end, of all parts of a run that was resumed
    shard: str = ""  # ``2/4``; empty where there is one
    environments: dict[str, Environment]
    kernels: dict[str, str]  # name of each kernel → its one-line summary
    absent: dict[str, str] = {}  # kernels that can run nothing here → why
    stages: tuple[Stage, ...] = STAGES  # those that were asked for, in order
    # Beside the answers, so that a gate that was cut short cannot look finished.
    planned: dict[Stage, int] = {}  # questions of each stage that there are
    # Of these, not answered: an interrupt, a time limit, or a stop at a failure.
    unfinished: int = 0
    unfinished_because: str = ""  # why; empty where none is
    # Kernel → stage → how many of these; a kernel that was not even described, of which nobody
    # knows how many there are, has none.
    missing: dict[str, dict[Stage, int]] = {}
    # Apart: a broken harness must look neither like a broken kernel nor like a pass.
    harness: tuple[str, ...] = ()  # what went wrong that is no kernel's fault, a line each
    baseline: str = ""  # the file or commit that the kernels are beside; empty for none
    changes: tuple[Change, ...] = ()  # cases beside it
    causes: tuple[FailureCause, ...] = ()  # of the failures, worst first: made of the answers
    answers: tuple[Answer, ...] = ()  # in the order of stages, kernels, cases


# Not frozen, unlike the others: it is counted up while the tests run.
class Tally(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Problems that one kernel was asked."""

    # By status: those of a Record. A Case is one problem, however many runs it takes.
    problems: dict[str, int] = msgspec.field(default_factory=dict)
    seconds: float = 0.0  # in the kernel, the oracle and the judge
    compiling: float = 0.0  # of these, in compilers

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
    """One test."""

    file: str  # name of its file, ``test_causal.py``
    test: str  # name of the function
    # kernel, dtype, family: what its id says.
    kernel: str
    dtype: str
    family: str
    # ``known`` where it fails as a known failure does.
    outcome: Literal["passed", "failed", "known", "skipped"]
    # Why it was skipped, what is known, or the first line of the failure; of one that passed what
    # was odd, where its kernel promises no better.
    reason: str = ""
    tally: Tally  # its problems


class PropertyReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Outcomes with what they share."""

    schema: int = 1
    command: str
    environment: Environment
    tier: str  # how hard was asked
    processes: int  # that shared the work
    seconds: float  # from the first test to the last, collection included
    untaken: dict[str, dict[str, str]]  # kernel → dtype → why it takes nothing of it
    outcomes: tuple[PropertyOutcome, ...]  # in the order of files, tests, kernels
