"""A kernel and the process that it runs in: one of its own, or this one.

Somebody's file is loaded and called in another process, so that nothing it does there can end the
judge, change it, or speak in its name. attncheck's own kernels are called here, which is quicker:
they are as trusted as the judge. A gate isolates those too, since it asks thousands of questions
of a GPU, and a kernel that loses it would take every later answer along.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from attncheck.core.errors import UsageError
from attncheck.subjects.capabilities.named_kernels import BUILTIN
from attncheck.subjects.load import Entry, load_kernel
from attncheck.subjects.terms import Terms, subject_on_terms
from attncheck.verify.executor import Executor, InProcess, KeepingExecutor
from attncheck.verify.isolated import IsolatedKernel
from attncheck.verify.remote_kernel import Deadlines, RemoteSubject, load_mods
from attncheck.workers.process import Died, Worker
from attncheck.workers.transport import Frame

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attncheck.subjects.capabilities.subject import Subject


class KernelHost(Protocol):
    """A kernel, and how to call it."""

    subject: Subject  # the kernel; who settles on which terms it is asked replaces it

    @property
    def executor(self) -> Executor:
        """Return what calls it."""
        ...

    def entry(self) -> Entry:
        """Return what is known of the kernel before it is tried."""
        ...

    def close(self) -> None:
        """End its process, where it has one of its own."""


class _LocalKernel:
    """A kernel in this very process: a debugger stops in it, and what it breaks is ours."""

    def __init__(self, kernel: str, convention: str, executor: Executor | None) -> None:
        self._candidate, self.subject = load_kernel(kernel, convention or None)
        self.executor = executor or InProcess()

    def entry(self) -> Entry:
        """Return what is known of the kernel before it is tried."""
        return self._candidate.facts()

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
    mods: Mapping[str, str] | None = None,
) -> KernelHost:
    """Return the host of a kernel, which is loaded; ``close`` it in the end.

    Args:
        kernel: As ``subjects.load.load_subject`` takes it.
        convention: A name of a calling convention; empty for the first that fits.
        isolated: Whether it has a process of its own; by default all but attncheck's own have.
        deadlines: How long that may take.
        worker: A process that was started for it ahead of time; it is ended where it is not needed.
        here: Calls a kernel of this process; a new ``InProcess`` by default.
        mods: As of ``IsolatedKernel``.

    Raises:
        UsageError: where there is no such kernel.
        HostError: where it cannot be loaded for another reason: ``Died`` where its process crashed.
    """
    if kernel not in BUILTIN if isolated is None else isolated:
        return IsolatedKernel(
            kernel,
            convention=convention,
            device=device,
            deadlines=deadlines,
            worker=worker,
            mods=mods,
        )
    if worker is not None:
        worker.kill(Deadlines().close)
    return _LocalKernel(kernel, convention, here)


def on_terms(subject: Subject, terms: Terms) -> Subject:
    """Return a plain function on other terms, in its process or in this one."""
    if isinstance(subject, RemoteSubject):
        subject.hold(terms)
        return subject
    return subject_on_terms(subject, terms)


def try_mods(mods: Mapping[str, str], worker: Worker, *, device: str) -> None:
    """Load mods in a process of its own, which ends then, before they are loaded in this one.

    What they raise, and that they exit, is said better by who loads them: that is no end of it.

    Args:
        mods: The ``mask``, the ``score``, or all of a ``file``.
        worker: The process.
        device: ``cpu`` or ``cuda``.

    Raises:
        UsageError: where that process is killed, or does not answer.
        HostError: where the process cannot be had.
    """
    limits = Deadlines()
    try:
        worker.exchange(
            Frame(kind="start", words={}), seconds=limits.start, most=0, what="whether it is there"
        )
        load_mods(worker, mods, device, limits.load)
    except Died as error:
        if worker.ended is None or worker.ended < 0:  # it was killed, or killed itself
            named = " and ".join(map(repr, mods.values()))
            raise UsageError(f"{named}: as it was loaded, {error}") from None
    except UsageError:
        pass
    finally:
        worker.kill(limits.close)


def executor_of(subject: Subject) -> KeepingExecutor:
    """Return what calls ``subject`` where it is: in its process, or in this one."""
    return subject.executor if isinstance(subject, RemoteSubject) else InProcess()
