"""Checks of memory and determinism by name, and the Record of one asked of a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from attncheck.errors import UnknownName
from attncheck.examine.asking import Asking, Check, Unanswered
from attncheck.examine.determinism import ELSEWHERE, NEIGHBOURS, REPEATS, SCHEDULES, STREAMS
from attncheck.examine.executor import Failure, InProcess, out_of_memory
from attncheck.examine.memory import GUARDS, LEAKS, STATE, UNWRITTEN
from attncheck.examine.recorded import asked, without_outputs

if TYPE_CHECKING:
    from attncheck.examine.executor import Executor
    from attncheck.problem import Case
    from attncheck.record import Record
    from attncheck.subjects.contract import Subject

__all__ = ["CHECKS", "Check", "check_named", "checked"]

CHECKS: dict[str, Check] = {
    check.name: check
    for check in (
        GUARDS,
        UNWRITTEN,
        STATE,
        LEAKS,
        REPEATS,
        ELSEWHERE,
        STREAMS,
        NEIGHBOURS,
        SCHEDULES,
    )
}


def check_named(name: str) -> Check:
    """The check called ``name``; raises UnknownName with the valid names."""
    if name not in CHECKS:
        raise UnknownName("check", name, CHECKS)
    return CHECKS[name]


def checked(
    subject: Subject,
    case: Case,
    *,
    device: str,
    variant: str = "",
    environment: str = "",
    executor: Executor | None = None,
) -> Record:
    """Ask ``subject`` a check of memory or determinism; no oracle is asked.

    A pass says in its judgement's ``warnings`` what could not be looked at; of determinism its
    ``reason`` says how often was asked. A check that could look at nothing is ``inconclusive``; one
    that this device cannot be asked, or a kernel that does not promise it, ``unsupported``.

    Args:
        subject: The kernel.
        case: A Case whose question is a name in ``CHECKS``.
        device: ``cpu`` or ``cuda``.
        variant: A name for the question in a report.
        environment: Fingerprint of this process.
        executor: How to call the kernel; in this process by default.

    Never raises for what the kernel does; see ``recorded.without_outputs``.

    Raises:
        UsageError: for a question that is no check, or that cannot be asked of the Problem.
    """
    check = check_named(case.question)
    check.check(case)
    executor = executor or InProcess()
    record = asked(subject, case, device, variant, environment)
    if check.gpu and device == "cpu":
        return replace(record, status="unsupported", reason="a CPU has no streams")
    refusal = executor.refusal(subject, case.problem, device)
    if refusal is not None:
        failure = Failure(kind="refused", message=refusal) if isinstance(refusal, str) else refusal
        return without_outputs(record, failure)
    asking = Asking(subject=subject, case=case, device=device, executor=executor)
    try:
        judgement = check.look(asking)
    except Unanswered as error:
        return without_outputs(record, error.failure)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return replace(record, status="error", reason="out of memory for the check")
    return replace(record, status=judgement.status, judgement=judgement)
