"""Hosts of kernels: the process that a kernel runs in is one of its own, or this one.

A user's file is loaded and called in another process, so that it cannot end the judge, change it,
or report in its name. attncheck's own kernels, which are as trusted as the judge, are called in
this process, which is quicker. A gate isolates them too: it asks a GPU thousands of questions, and
a kernel that loses the GPU would invalidate all later answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.core.errors import UsageError
from attncheck.subjects.capabilities.named_kernels import BUILTIN
from attncheck.subjects.load import Entry, load_kernel
from attncheck.subjects.terms import Terms, subject_on_terms
from attncheck.verify.executor import Executor, InProcess
from attncheck.verify.isolated import (
    Deadlines,
    IsolatedExecutor,
    IsolatedKernel,
    RemoteSubject,
    load_mods,
)
from attncheck.workers.process import Died, Worker
from attncheck.workers.transport import Frame

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attncheck.subjects.capabilities.subject import Subject


class LocalKernel:
    """A kernel in this process, where a debugger can stop in it, and where it may do damage."""

    def __init__(self, kernel: str, convention: str, executor: Executor | None) -> None:
        self._candidate, self.subject = load_kernel(kernel, convention or None)
        self.executor: Executor = executor or InProcess()

    def entry(self) -> Entry:
        """Return the facts about the kernel before any trial."""
        return self._candidate.facts()

    def close(self) -> None:
        """Do nothing: there is no process to end."""


KeepingExecutor = InProcess | IsolatedExecutor
"""An executor that keeps calls, so that those of several kernels can take turns."""

KernelHost = LocalKernel | IsolatedKernel
"""A kernel, how to call it, and the process to ``close``; its ``subject`` may be replaced."""


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
    """Load a kernel and return its host, which the caller must ``close``.

    Args:
        kernel: As ``subjects.load.load_subject`` takes it.
        convention: Name of a calling convention; empty for the first that fits.
        isolated: Whether it has a process of its own; by default all but attncheck's own have.
        deadlines: Time limits of that process.
        worker: A process started for it ahead of time; it is ended if it is not needed.
        here: The executor of a kernel in this process; by default a new ``InProcess``.
        mods: As in ``IsolatedKernel``.

    Raises:
        UsageError: if there is no such kernel.
        HostError: if it cannot be loaded for another reason; ``Died`` if its process crashed.
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
    return LocalKernel(kernel, convention, here)


def on_terms(subject: Subject, terms: Terms) -> Subject:
    """Return a plain function on other terms, in its process or in this one."""
    if isinstance(subject, RemoteSubject):
        subject.hold(terms)
        return subject
    return subject_on_terms(subject, terms)


def try_mods(mods: Mapping[str, str], worker: Worker, *, device: str) -> None:
    """Load mods in a process of its own, which is ended, before they are loaded in this one.

    Exceptions and exits in it are ignored: loading the mods here will report them better.

    Args:
        mods: The ``mask``, the ``score``, or all mods of a ``file``.
        worker: The process.
        device: ``cpu`` or ``cuda``.

    Raises:
        UsageError: if that process is killed, or does not answer.
        HostError: if the process cannot be started.
    """
    limits = Deadlines()
    try:
        worker.exchange(
            Frame(kind="start", words={}), seconds=limits.start, most=0, what="whether it is there"
        )
        load_mods(worker, mods, device, limits.load)
    except Died as error:
        if worker.ended is None or worker.ended < 0:  # It was killed by a signal.
            names = " and ".join(map(repr, mods.values()))
            raise UsageError(f"{names}: as it was loaded, {error}") from None
    except UsageError:
        pass
    finally:
        worker.kill(limits.close)


def executor_of(subject: Subject) -> KeepingExecutor:
    """Return the executor of ``subject`` in its own process, or else in this one."""
    return subject.executor if isinstance(subject, RemoteSubject) else InProcess()


def end_process_of(subject: Subject) -> bool:
    """End the process of ``subject``, so that its next call is the first of a new one.

    Return False for a kernel in this process, which is left alone.
    """
    if not isinstance(subject, RemoteSubject):
        return False
    subject.host.end()
    return True
