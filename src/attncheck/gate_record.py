"""What a gate found: one run of ``attncheck gate``, as data."""

from __future__ import annotations

from typing import Literal

import msgspec

from attncheck.record import Environment, Record  # noqa: TC001  # msgspec reads the annotations

__all__ = ["SCHEMA", "STAGES", "Answer", "Change", "GateReport", "Stage", "Standing"]

SCHEMA = 1

Stage = Literal["contract", "probes", "bounds", "properties", "memory", "determinism", "baseline"]
"""What is asked, in this order."""

STAGES: tuple[Stage, ...] = Stage.__args__  # type: ignore[attr-defined]  # a Literal has them

Standing = Literal["identical", "within rounding", "better", "worse", "new", "gone"]
"""A case beside its baseline: the same bits; others, and no less accurate than rounding explains;
more accurate; less; a case that the baseline does not have; one that was not asked now."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One question to one kernel, answered.

    Attributes:
        unit: Id of the piece of work that it is the result of.
        stage: Which part of the gate asked.
        record: The answer.
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
    smallest_of: str = ""
    failure: str = ""


class Change(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One case of one kernel beside its baseline.

    Attributes:
        kernel: The kernel.
        case_id: The Case.
        standing: See ``Standing``.
        reason: Why, in one line: by what numbers.
        before, after: RMSE of out; None where it was not measured.
    """

    kernel: str
    case_id: str
    standing: Standing
    reason: str = ""
    before: float | None = None
    after: float | None = None


class GateReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a gate found.

    Attributes:
        schema: Version of this layout.
        command: The command line that made it, without paths.
        tier: ``smoke``, ``pr`` or ``nightly``.
        started: When, UTC, as ``2026-11-22T17:30:00Z``.
        seconds: From then to the end, of all parts of a run that was resumed.
        shard: ``2/4``; empty where there is one.
        environments: By short id.
        kernels: Name of each kernel → its one-line summary.
        absent: Kernels that can run nothing here → why.
        stages: Those that were asked for, in order.
        planned: Questions of each stage that there are.
        unfinished: Of these, not answered: an interrupt, a time limit, or a stop at a failure.
        unfinished_because: Why; empty where none is.
        harness: What went wrong that is no kernel's fault, a line each.
        baseline: The file or commit that the kernels are beside; empty for none.
        changes: Cases beside it.
        answers: In the order of stages, kernels, cases.
    """

    schema: int = SCHEMA
    command: str
    tier: str
    started: str
    seconds: float
    shard: str = ""
    environments: dict[str, Environment]
    kernels: dict[str, str]
    absent: dict[str, str] = {}
    stages: tuple[Stage, ...] = STAGES
    planned: dict[Stage, int] = {}
    unfinished: int = 0
    unfinished_because: str = ""
    harness: tuple[str, ...] = ()
    baseline: str = ""
    changes: tuple[Change, ...] = ()
    answers: tuple[Answer, ...] = ()
