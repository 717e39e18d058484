"""Confirms and explains the death of a kernel's process."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from attncheck.core.judgement import Judgement
from attncheck.core.strided_alloc import others_hold_memory
from attncheck.inputs.problem import Case, Problem
from attncheck.records.record import FAILED_STATUSES, Record, Status
from attncheck.subjects.capabilities.subject import Subject
from attncheck.verify.call_checks import judge_call
from attncheck.verify.executor import Failure
from attncheck.verify.isolated import RemoteSubject
from attncheck.verify.kernel_messages import RemoteError
from attncheck.verify.run_case import blank_record
from attncheck.workers.process import Died

DEATHS: frozenset[Status] = frozenset({"crash", "timeout", "oom"})
"""Statuses of a kernel whose process died, hung or ran out of memory."""

MOST_DEATHS = 2
"""Deaths after which a kernel is asked no more, because each costs another process."""

_SIGNALS = ("SIGABRT", "SIGSEGV", "SIGBUS")  # Signals that end a process with a broken heap.
_MOST_GUARDED = 64  # Problems that are run between guard bands to find a wild write.


def confirm_death(
    subject: Subject, ask: Callable[[], Record], *, slow: bool = False
) -> tuple[Record, int]:
    """Return the Record of ``ask``, asked once more if the process died, and the number of calls.

    Only kernels in a process of their own can be asked again. One that ran out of memory on a GPU
    much of which other processes hold is judged by its second answer.

    Args:
        slow: Whether to confirm a timeout too, which takes as long again.
    """
    first = ask()
    is_death = first.status in DEATHS and (slow or first.status != "timeout")
    if not is_death or not isinstance(subject, RemoteSubject):
        return first, 1
    problems, device = tuple(subject.host.problems), subject.host.device
    # In a new process, because an earlier call may have corrupted the first one.
    subject.host.end()
    crowded = first.status == "oom" and others_hold_memory(device)
    if culprit := _find_wild_write(first, subject, problems):
        return culprit, 2
    second = ask()
    if second.status == first.status:
        return second, 2
    outcome = f"asked once more, alone in a new process: {_describe_outcome(second)}"
    # It fails in both, though differently: that is not flaky.
    if second.status in FAILED_STATUSES:
        return replace(first, reason=f"{first.reason}; {outcome}"), 2
    if crowded:  # By other processes, as the kernel's own had ended.
        return replace(second, reason=second.reason or f"oom: {first.reason}; {outcome}"), 2
    return replace(first, status="flaky", reason=f"{first.status}: {first.reason}; {outcome}"), 2


def _find_wild_write(
    record: Record, subject: RemoteSubject, problems: tuple[Problem, ...]
) -> Record | None:
    """Return the Record of a crash as the failure of a call that wrote past its tensors.

    None if guard bands show no such call. A corrupted heap often ends the process in a later call,
    so the problems that the process ran before are run again between guard bands.

    Args:
        problems: Problems that its process had been asked, in order.
    """
    # On a GPU there is no heap to corrupt, and other signals and exits do not suggest it.
    if subject.host.device != "cpu" or not any(each in record.reason for each in _SIGNALS):
        return None
    subject.executor.expect(subject, None)  # A call ahead would have no guard bands.
    own_problem = Case.from_json(record.case).problem
    for problem in dict.fromkeys((own_problem, *problems[:_MOST_GUARDED])):
        case = Case(problem=problem, question="guards")
        judgement = judge_call(subject, case, subject.executor, device="cpu")
        if isinstance(judgement, Failure) and judgement.kind == "crash":
            return None  # Another cause, or memory that torch did not allocate.
        if isinstance(judgement, Judgement) and judgement.rule == "memory":
            earlier = "" if problem == own_problem else f"; it was asked {problem}"
            reason = f"{judgement.reason}{earlier}; without guard bands {record.reason}"
            judgement = replace(judgement, reason=reason)
            return replace(record, status="fail", judgement=judgement, reason="")
    return None


def _describe_outcome(record: Record) -> str:
    reason = record.reason or (record.judgement.reason if record.judgement else "")
    return f"{record.status} ({reason})" if reason else record.status


def death_record(
    error: Died | RemoteError,
    case: Case,
    *,
    kernel: str,
    variant: str = "",
    environment: str = "",
    loading: bool = True,
) -> Record:
    """Return the Record of a kernel whose process died or failed before a call.

    Args:
        case: The Case that was to be run.
        kernel: What the user typed, because the kernel's name is not known.
        loading: Whether it died while the kernel was loaded, which the reason then mentions.
    """
    statuses: dict[str, Status] = {"oom": "oom", "timeout": "timeout", "error": "error"}
    return blank_record(
        case,
        kernel=kernel,
        status=statuses.get(error.kind, "crash"),
        variant=variant,
        reason=f"as it was loaded, {error}" if loading else str(error),
        environment=environment,
    )
