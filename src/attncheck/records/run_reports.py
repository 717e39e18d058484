"""Reports of a gate, of a comparison with a baseline, and of the property suite."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from attncheck.records.record import Environment, Record

Stage = Literal["contract", "probes", "bounds", "properties", "memory", "determinism", "baseline"]
"""Stages of a gate, in the order in which they are asked."""

STAGES: tuple[Stage, ...] = get_args(Stage)

BaselineStanding = Literal[
    "identical", "within rounding", "better", "worse", "new", "gone", "not asked"
]
STANDINGS: tuple[BaselineStanding, ...] = get_args(BaselineStanding)
"""A case compared with its baseline: identical bits; different bits, but no significant change of
accuracy; more accurate; less accurate; missing in the baseline; not asked in this run."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One answer of one kernel to one question."""

    unit: str  # id of the unit of work that produced it
    stage: Stage  # which part of the gate asked
    record: Record
    test: str = ""  # ``test_causal.py::test_attention_is_exact``; empty where none drew the Case
    seconds: float = 0.0  # from question to verdict
    compiling: float = 0.0  # seconds of these that compilers took
    attempts: int = 1  # how often it was asked: twice if its process died the first time
    # Id of the Case that failed and was shrunk to this one; empty where nothing was shrunk.
    # Answers from shrinking are not part of the plan and are not counted.
    smallest_of: str = ""
    failure: str = ""  # id for ``attncheck repro``; empty where nothing failed


class FailureCause(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One cause of failures of one kernel."""

    kernel: str
    cause: str  # the cause in plain words, or the broken rule if it is unknown
    known: bool  # whether it was shown to explain each of the failures
    model: str = ""  # id of the fault model or sign; empty where there is none
    case_ids: tuple[str, ...]  # ids of the Cases that fail for this cause
    smallest: str  # the smallest Problem that fails for this cause, in a few words
    failure: str  # argument of ``attncheck repro`` that repeats the smallest Problem


class Change(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One case of one kernel compared with its baseline."""

    kernel: str
    case_id: str
    standing: BaselineStanding  # see ``BaselineStanding``
    reason: str = ""  # why, in one line, with the numbers
    # before, after: RMSE of out; None where it was not measured.
    before: float | None = None
    after: float | None = None


class BaselineComparison(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes in the cases of a baseline."""

    schema: int = 1
    command: str
    baseline: str  # the file or the commit that the cases are compared with
    problems: dict[str, str] = {}  # description of each case in a few words, by its id
    changes: tuple[Change, ...]  # the worst first


class GateReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The results of a gate."""

    schema: int = 1
    command: str
    tier: str  # ``smoke``, ``pr`` or ``nightly``
    started: str  # start, UTC, as ``2026-11-22T17:30:00Z``
    seconds: float  # from start to end, summed over the parts of a run that was resumed
    shard: str = ""  # ``2/4``; empty for an unsharded run
    environments: dict[str, Environment]
    kernels: dict[str, str]  # name of each kernel → its one-line summary
    absent: dict[str, str] = {}  # kernels that can run nothing here → why
    stages: tuple[Stage, ...] = STAGES  # the requested stages, in order
    # Reported so that a gate that was cut short cannot look finished.
    planned: dict[Stage, int] = {}  # number of planned questions in each stage
    # Planned questions without an answer, after an interrupt, a time limit or a stop at a failure.
    unfinished: int = 0
    unfinished_because: str = ""  # why they are unanswered; empty if all are answered
    # Kernel → stage → number of unanswered questions; empty for a kernel that was not described,
    # whose questions are unknown.
    missing: dict[str, dict[Stage, int]] = {}
    # A broken harness must look neither like a broken kernel nor like a pass.
    harness: tuple[str, ...] = ()  # errors of the harness rather than of a kernel, a line each
    baseline: str = ""  # the file or commit that kernels are compared with; empty for none
    changes: tuple[Change, ...] = ()  # results of that comparison
    causes: tuple[FailureCause, ...] = ()  # causes of the failures in ``answers``, worst first
    answers: tuple[Answer, ...] = ()  # in the order of stages, kernels, cases


# Not frozen, unlike the other structs: it is updated while the tests run.
class Tally(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Number of problems that one kernel was asked, and the time that they took."""

    # Number of problems by their Record's status; a Case counts once, however many runs it takes.
    problems: dict[str, int] = msgspec.field(default_factory=dict)
    seconds: float = 0.0  # in the kernel, the oracle and the judge
    compiling: float = 0.0  # seconds of these that compilers took

    @property
    def total(self) -> int:
        """Number of answered problems, without refusals."""
        # After a refusal the kernel is not called.
        return sum(count for status, count in self.problems.items() if status != "unsupported")

    def add(self, other: Tally) -> None:
        """Add the counts and times of ``other``."""
        for status, count in other.problems.items():
            self.problems[status] = self.problems.get(status, 0) + count
        self.seconds += other.seconds
        self.compiling += other.compiling


class PropertyOutcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The outcome of one test of the property suite."""

    file: str  # name of its file, ``test_causal.py``
    test: str  # name of the function
    # kernel, dtype, family: the parameters in the test's id.
    kernel: str
    dtype: str
    family: str
    # ``known`` for a known failure that still fails.
    outcome: Literal["passed", "failed", "known", "skipped"]
    # Why it was skipped, the reason of the known failure, or the first line of the failure; for a
    # pass, a deviation that the kernel does not promise to avoid.
    reason: str = ""
    tally: Tally  # the problems that the test asked


class PropertyReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Outcomes of a run of the property suite, with the data that they share."""

    schema: int = 1
    command: str
    environment: Environment
    tier: str  # how hard kernels were asked
    processes: int  # number of processes that shared the work
    seconds: float  # from the first test to the last, collection included
    untaken: dict[str, dict[str, str]]  # kernel → dtype that it does not take → why
    outcomes: tuple[PropertyOutcome, ...]  # in the order of files, tests, kernels
