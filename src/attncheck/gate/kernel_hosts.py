"""The kernel that a worker asks: one at a time, in a process of its own or in this one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from attncheck.core.errors import AttncheckError, UsageError
from attncheck.subjects.load import load_subject
from attncheck.verify.executor import InProcess
from attncheck.verify.isolated import IsolatedKernel
from attncheck.verify.remote_kernel import Deadlines

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.gate.choices import Choices
    from attncheck.subjects.capabilities.subject import Subject
    from attncheck.verify.executor import Executor
    from attncheck.workers.units import Unit

__all__ = ["KernelHost", "KernelHosts", "MissingKernelError"]


class KernelHost(Protocol):
    """A kernel, and how to call it."""

    @property
    def subject(self) -> Subject:
        """Return the kernel."""
        ...

    @property
    def executor(self) -> Executor:
        """Return what calls it."""
        ...

    def fresh(self) -> None:
        """Let its process end, where it has one of its own."""

    def close(self) -> None:
        """End its process for good."""


class _LocalKernel:
    """A kernel in this very process: a debugger stops in it, and what it breaks is ours."""

    def __init__(self, kernel: str, convention: str, executor: Executor) -> None:
        self.subject: Subject = load_subject(kernel, convention or None)
        self.executor = executor

    def fresh(self) -> None:
        """Do nothing: there is no other process."""

    def close(self) -> None:
        """Do nothing: there is no process to end."""


class MissingKernelError(AttncheckError):
    """The kernel of another commit that is not there."""


class KernelHosts:
    """One kernel of each commit at a time: its process ends when another kernel is asked for.

    Args:
        choices: Whether kernels have processes of their own, and how long a call may take.
        here: Makes what calls kernels that have none.
    """

    def __init__(self, choices: Choices, here: Callable[[], Executor] = InProcess) -> None:
        self._choices = choices
        self._executor = here
        self._hosts: dict[str, tuple[tuple[str, str, str], KernelHost]] = {}

    def of(self, unit: Unit) -> KernelHost:
        """Return the host of a unit's kernel.

        Raises:
            MissingKernelError: where another commit has no such kernel.
            UsageError: where there is no such kernel here, or that commit's is not the one that is
                found there.
            HostError: where its process cannot be had.
        """
        key = (unit.kernel, unit.convention, unit.device)
        known, host = self._hosts.get(unit.commit, (None, None))
        if host is not None and key == known:
            return host
        # Ended before the next begins: two kernels need not fit the GPU's memory together.
        self.end(unit.commit)
        host = self._start_other(unit) if unit.commit else self._start(unit)
        self._hosts[unit.commit] = key, host
        return host

    def end(self, commit: str) -> None:
        """End the process of a commit's kernel, where there is one."""
        _, host = self._hosts.pop(commit, (None, None))
        if host is not None:
            host.close()

    def close(self) -> None:
        """End the processes that there are."""
        for commit in tuple(self._hosts):
            self.end(commit)

    def _start(self, unit: Unit) -> KernelHost:
        if not self._choices.isolated:
            return _LocalKernel(unit.kernel, unit.convention, self._executor())
        return IsolatedKernel(unit.kernel, **self._host_options(unit))

    def _start_other(self, unit: Unit) -> KernelHost:
        """Start the kernel of another commit; in a process, since two of one name share none."""
        tree = self._choices.tree
        if tree is None or tree.commit != unit.commit:
            raise MissingKernelError(f"commit {unit.commit} is not part of this run.")
        side = tree.kernel(unit.kernel)
        if side.missing:
            raise MissingKernelError(side.missing)
        try:
            host = IsolatedKernel(
                side.kernel, folder=side.folder, paths=side.paths, **self._host_options(unit)
            )
        except UsageError as error:
            raise MissingKernelError(f"{tree.ref}: {error}") from None
        # Else today's files would be compared with themselves, and nothing would seem to change.
        if strayed := tree.strayed(host.files()):
            host.close()
            raise UsageError(f"--against {tree.ref}: {strayed}.")
        return host

    def _host_options(self, unit: Unit) -> dict[str, Any]:
        call = self._choices.timeout
        # A first call compiles: it may take the usual time even where later calls must be short.
        limits = Deadlines(call=call, compile=max(call, Deadlines().compile)) if call else None
        return {"convention": unit.convention, "device": unit.device, "deadlines": limits}
