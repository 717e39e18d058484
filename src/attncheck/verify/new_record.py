"""The Record of a Case before and without outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from attncheck.core.judgement import Judgement
from attncheck.records.record import Record
from attncheck.verify.executor import Execution, Executor, Failure, Origin, out_of_memory
from attncheck.verify.obligations import outputs_digest

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.capabilities.subject import Subject
    from attncheck.core.judgement import Rule
    from attncheck.inputs.problem import Case, Problem
    from attncheck.records.record import Status
    from attncheck.verify.evidence import Evidence

__all__ = ["arrangement", "asked", "recorded", "without_outputs"]

_RULES: dict[str, Rule] = {"contract": "contract", "alias": "alias", "mutation": "mutation"}
_STATUSES: dict[str, Status] = {
    "refused": "unsupported",
    "crash": "crash",
    "timeout": "timeout",
    "oom": "oom",
}


def recorded(
    subject: Subject,
    evidence: Evidence,
    *,
    variant: str,
    environment: str,
    executor: Executor,
    timed: bool,
    answer: Callable[[Record, Execution], Record],
    brief: bool = False,
) -> Record:
    """Run ``subject`` on the Case of ``evidence``; what it gives becomes a Record by ``answer``.

    Args:
        subject: The kernel.
        evidence: The Case with its inputs and truth.
        variant: The plan's name for the question.
        environment: Fingerprint of this process.
        executor: How to call the kernel.
        timed: Whether it is called until its median time is known.
        answer: (Record of what was asked, what the kernel gave) → the Record.
        brief: Whether no yardsticks are needed besides the exact result.

    Never raises for what the kernel does: see ``without_outputs``. A Case whose exact result does
    not fit into memory becomes a Record with status ``error``.
    """
    record = asked(subject, evidence.case, evidence.device, variant, environment)
    refusal = executor.refusal(subject, evidence.case.problem, evidence.device)
    if isinstance(refusal, Failure):
        return without_outputs(record, refusal)
    if refusal:
        return replace(record, status="unsupported", reason=refusal)
    try:
        evidence.establish(yardsticks=not brief)  # before any kernel has run
        result = executor.run(
            subject, evidence.inputs, origin=Origin(case=evidence.case), timed=timed
        )
        if isinstance(result, Failure):
            return without_outputs(record, result)
        return answer(replace(record, digest=outputs_digest(result.outputs)), result)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return replace(record, status="error", reason="out of memory for the exact result")


def without_outputs(record: Record, failure: Failure) -> Record:
    """``record`` of a kernel that gave nothing which could be judged.

    What it raised is an ``error``, what it refused ``unsupported``; a broken contract, outputs in
    the memory of its inputs and inputs written to ``fail`` by the rule of that name; the end of its
    process is the status of that name.
    """
    if failure.kind in _RULES:
        rule = _RULES[failure.kind]
        judgement = Judgement(status="fail", rule=rule, reason=failure.message)
        return replace(record, status="fail", judgement=judgement)
    return replace(record, status=_STATUSES.get(failure.kind, "error"), reason=failure.message)


def asked(subject: Subject, case: Case, device: str, variant: str, environment: str) -> Record:
    """What is known before the kernel is asked."""
    return Record(
        case_id=case.id,
        case=case.to_json(),
        kernel=subject.name,
        variant=variant,
        heads=arrangement(case.problem),
        status="error",  # until it has run
        interpreted=subject.triton and device == "cpu",
        environment=environment,
    )


def arrangement(problem: Problem) -> str:
    """``MHA``, ``GQA`` or ``MQA``; empty of a softmax, which has no heads to share."""
    if problem.operation == "softmax":
        return ""
    if problem.kv_heads == problem.heads:
        return "MHA"
    return "MQA" if problem.kv_heads == 1 else "GQA"
