"""A kernel and the process that it runs in: one of its own, or this one.

Somebody's file is loaded and called in another process, so that nothing it does there can end the
judge, change it, or speak in its name. attncheck's own kernels are called here, which is quicker:
they are as trusted as the judge. A gate isolates those too, since it asks thousands of questions
of a GPU, and a kernel that loses it would take every later answer along.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from attncheck.inputs.problem import head_arrangement
from attncheck.records.record import FAILED_STATUSES, Record
from attncheck.subjects.capabilities.named_kernels import BUILTIN
from attncheck.subjects.load import load_subject
from attncheck.verify.executor import InProcess
from attncheck.verify.isolated import IsolatedKernel
from attncheck.verify.remote_kernel import Deadlines, RemoteSubject

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.inputs.problem import Case
    from attncheck.records.record import Status
    from attncheck.subjects.capabilities.subject import Subject
    from attncheck.verify.executor import Executor
    from attncheck.workers.process import Died, Worker

DEATHS: frozenset[Status] = frozenset({"crash", "timeout", "oom"})
"""Statuses of a kernel whose process gave no answer."""


class KernelHost(Protocol):
    """A kernel, and how to call it."""

    subject: Subject
    """The kernel; who settles on which terms it is asked replaces it."""

    @property
    def executor(self) -> Executor:
        """Return what calls it."""
        ...

    def close(self) -> None:
        """End its process, where it has one of its own."""


class _LocalKernel:
    """A kernel in this very process: a debugger stops in it, and what it breaks is ours."""

    def __init__(self, kernel: str, convention: str, executor: Executor | None) -> None:
        self.subject: Subject = load_subject(kernel, convention or None)
        self.executor = executor or InProcess()

    def close(self) -> None:
        """Do nothing: there is no process to end."""


def open_kernel(
    kernel: str,
    *,
    convention: str = "",
    device: str = "cpu",
    isolated: bool | None = None,
    deadlines: Deadlines | None = None,
    worker: Worker | None = None,
    here: Executor | None = None,
) -> KernelHost:
    """Return the host of a kernel, which is loaded; ``close`` it in the end.

    Args:
        kernel: As ``subjects.load.load_subject`` takes it.
        convention: A name of a calling convention; empty for the first that fits.
        device: ``cpu`` or ``cuda``.
        isolated: Whether it has a process of its own; by default all but attncheck's own have.
        deadlines: How long that may take.
        worker: A process that was started for it ahead of time; it is ended where it is not needed.
        here: Calls a kernel of this process; a new ``InProcess`` by default.

    Raises:
        UsageError: where there is no such kernel.
        HostError: where it cannot be loaded for another reason: ``Died`` where its process crashed.
    """
    if kernel not in BUILTIN if isolated is None else isolated:
        return IsolatedKernel(
            kernel, convention=convention, device=device, deadlines=deadlines, worker=worker
        )
    if worker is not None:
        worker.kill(Deadlines().close)
    return _LocalKernel(kernel, convention, here)


def executor_of(subject: Subject) -> Executor:
    """Return what calls ``subject`` where it is: in its process, or in this one."""
    return subject.executor if isinstance(subject, RemoteSubject) else InProcess()


def confirm_death(
    subject: Subject, ask: Callable[[], Record], *, slow: bool = False
) -> tuple[Record, int]:
    """Return the Record that ``ask`` gives, and how often it was asked.

    A kernel that dies in this process takes it along: nothing is left to confirm.

    Args:
        subject: The kernel that is asked.
        ask: Asks it one Case.
        slow: Whether a timeout is confirmed too, which takes as long again.
    """
    first = ask()
    died = first.status in DEATHS and (slow or first.status != "timeout")
    if not died or not isinstance(subject, RemoteSubject):
        return first, 1
    # In a new process, since an earlier call may have left the first one broken.
    subject.fresh()
    second = ask()
    if second.status == first.status:
        return second, 2
    again = f"asked once more, alone in a new process: {_describe_outcome(second)}"
    # It fails either way: that it does so differently is no excuse.
    if second.status in FAILED_STATUSES:
        return replace(first, reason=f"{first.reason}; {again}"), 2
    return replace(first, status="flaky", reason=f"{first.status}: {first.reason}; {again}"), 2


def _describe_outcome(record: Record) -> str:
    why = record.reason or (record.judgement.reason if record.judgement else "")
    return f"{record.status} ({why})" if why else record.status


def death_record(
    error: Died, case: Case, *, kernel: str, variant: str = "", environment: str = ""
) -> Record:
    """Return the Record of a kernel whose process died before it could be called.

    Args:
        error: Of which it died.
        case: What it was to be asked.
        kernel: What was typed: it died before it could say its name.
        variant: Name of the question.
        environment: Fingerprint of this process.
    """
    statuses: dict[str, Status] = {"oom": "oom", "timeout": "timeout"}
    return Record(
        case_id=case.id,
        case=case.to_json(),
        kernel=kernel,
        variant=variant,
        heads=head_arrangement(case.problem),
        status=statuses.get(error.kind, "crash"),
        reason=str(error),
        environment=environment,
    )
