"""A kernel whose process died: asked once more, and what it died of."""

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
from attncheck.verify.isolated import IsolatedExecutor
from attncheck.verify.kernel_messages import RemoteError
from attncheck.verify.remote_kernel import RemoteSubject
from attncheck.verify.run_case import blank_record
from attncheck.workers.process import Died

DEATHS: frozenset[Status] = frozenset({"crash", "timeout", "oom"})
"""Statuses of a kernel whose process gave no answer."""

MOST_DEATHS = 2
"""Of a kernel's process, after which it is asked no more: each further one costs another."""

_BROKEN = ("SIGABRT", "SIGSEGV", "SIGBUS")  # what a process may die of whose heap is broken
_MOST_ASKED = 64  # problems that are asked between guard bands


def confirm_death(
    subject: Subject, ask: Callable[[], Record], *, slow: bool = False
) -> tuple[Record, int]:
    """Return the Record that ``ask`` gives, and how often it was asked.

    A kernel that dies in this process takes it along: nothing is left to confirm. One that had no
    memory left on a GPU of which others hold much, and answers when it is asked once more, is
    judged by that answer.

    Args:
        slow: Whether a timeout is confirmed too, which takes as long again.
    """
    first = ask()
    died = first.status in DEATHS and (slow or first.status != "timeout")
    if not died or not isinstance(subject, RemoteSubject):
        return first, 1
    problems, device = tuple(subject.connection.problems), subject.connection.device
    # In a new process, since an earlier call may have left the first one broken.
    subject.fresh()
    crowded = first.status == "oom" and others_hold_memory(device)
    if culprit := _with_wild_write(first, subject, problems):
        return culprit, 2
    second = ask()
    if second.status == first.status:
        return second, 2
    again = f"asked once more, alone in a new process: {_describe_outcome(second)}"
    # It fails either way: that it does so differently is no excuse.
    if second.status in FAILED_STATUSES:
        return replace(first, reason=f"{first.reason}; {again}"), 2
    if crowded:  # by others, now that the kernel's own process is gone
        return replace(second, reason=second.reason or f"oom: {first.reason}; {again}"), 2
    return replace(first, status="flaky", reason=f"{first.status}: {first.reason}; {again}"), 2


def _with_wild_write(
    record: Record, subject: RemoteSubject, problems: tuple[Problem, ...]
) -> Record | None:
    """Return the Record of a crash as a failure of the call that wrote past its tensors.

    None where none did, as far as guard bands show. What such a call breaks is the heap, which ends
    the process in whatever comes later: problems are asked that the process had been asked before.

    Args:
        problems: Those that its process had been asked, the first ones first.
    """
    # A GPU has no heap of the host's; and a kernel may leave, or be killed, with all its memory in
    # order.
    if subject.connection.device != "cpu" or not any(each in record.reason for each in _BROKEN):
        return None
    if isinstance(subject.executor, IsolatedExecutor):
        subject.executor.expect(subject, None)  # without guard bands it would break this process
    own = Case.from_json(record.case).problem
    for problem in dict.fromkeys((own, *problems[:_MOST_ASKED])):
        case = Case(problem=problem, question="guards")
        judgement = judge_call(subject, case, subject.executor, device="cpu")
        if isinstance(judgement, Failure) and judgement.kind == "crash":
            return None  # for another reason, or by memory that torch did not allocate
        if isinstance(judgement, Judgement) and judgement.rule == "memory":
            earlier = "" if problem == own else f"; it was asked {problem}"
            reason = f"{judgement.reason}{earlier}; without guard bands {record.reason}"
            judgement = replace(judgement, reason=reason)
            return replace(record, status="fail", judgement=judgement, reason="")
    return None


def _describe_outcome(record: Record) -> str:
    why = record.reason or (record.judgement.reason if record.judgement else "")
    return f"{record.status} ({why})" if why else record.status


def death_record(
    error: Died | RemoteError,
    case: Case,
    *,
    kernel: str,
    variant: str = "",
    environment: str = "",
    loading: bool = True,
) -> Record:
    """Return the Record of a kernel whose process died, or broke, before it could be called.

    Args:
        case: What it was to be asked.
        kernel: What was typed: it died before it could say its name.
        loading: Whether it died as the kernel was loaded, which is said then.
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
