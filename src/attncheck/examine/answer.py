"""One kernel, one Case, one Record: whatever the question is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from attncheck.examine.check import compare
from attncheck.examine.checks import CHECKS, checked
from attncheck.examine.concerned import unconcerned
from attncheck.examine.evidence import Evidence
from attncheck.examine.executor import InProcess
from attncheck.examine.probe import probe
from attncheck.examine.questions import check_question
from attncheck.examine.recorded import asked
from attncheck.examine.relate import related
from attncheck.probes import PROBES
from attncheck.relations import RELATIONS

if TYPE_CHECKING:
    from attncheck.examine.executor import Executor
    from attncheck.problem import Case
    from attncheck.record import Record
    from attncheck.subjects.contract import Subject

__all__ = ["answered"]


def answered(
    subject: Subject,
    case: Case,
    *,
    device: str,
    variant: str = "",
    environment: str = "",
    executor: Executor | None = None,
    brief: bool = False,
) -> Record:
    """Ask ``case`` of ``subject``.

    Args:
        subject: The kernel.
        case: Its question is ``compare``, a relation, a probe or a check.
        device: ``cpu`` or ``cuda``.
        variant: A name for the question in a report.
        environment: Fingerprint of this process.
        executor: How to call the kernel; in this process by default.
        brief: Whether the verdict alone is asked for, as of ``check.compare``: half the time.

    Never raises for what the kernel does; see ``check.compare``.

    Raises:
        UsageError: for a question that there is not, or that cannot be asked of the Problem.
    """
    check_question(case.question)
    said = {"variant": variant, "environment": environment}
    executor = executor or InProcess()
    if not executor.concerns(subject, case.problem):
        record = asked(subject, case, device, variant, environment)
        reason = unconcerned(subject, case.problem, executor)
        return replace(record, status="unsupported", reason=reason)
    if case.question in RELATIONS:
        return related(subject, case, device=device, executor=executor, **said)
    if case.question in CHECKS:
        return checked(subject, case, device=device, executor=executor, **said)
    evidence = Evidence(case, device)
    if case.question in PROBES:
        return probe(subject, evidence, executor=executor, brief=brief, **said)
    return compare(subject, evidence, executor=executor, timed=False, brief=brief, **said)
