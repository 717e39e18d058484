"""Processes that call somebody's kernel on what it will be asked, so that it is compiled by then.

What is asked next is known bit by bit, and the process of each is the kernel's own, as the judge's
is; ``compile_ahead`` is for attncheck's own kernels and a list of cells.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from attncheck.core.errors import AttncheckError
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.terms import Terms
from attncheck.verify.call_conditions import PLAIN_CALL
from attncheck.verify.compile_ahead import free_places
from attncheck.verify.executor import Origin
from attncheck.verify.kernel_messages import run_words
from attncheck.verify.remote_kernel import Deadlines, KernelConnection
from attncheck.workers.process import KERNEL_SERVER, Worker

_LARGEST_ANSWER = 1 << 28  # bytes: outputs, which nobody reads


def processes_ahead(kernel: str, device: str) -> int:
    """Return how many processes may call a kernel ahead of a check: as there is room for them.

    None but for Triton kernels on a GPU, as far as the name or the file of ``kernel`` says so:
    Triton keeps what it has compiled where other processes find it.
    """
    file, colons, _ = kernel.partition("::")
    text = kernel
    with suppress(OSError, ValueError):  # a name may be too long, or hold a zero
        if colons and Path(file).is_file():  # a pipe would wait for somebody who writes
            text = Path(file).read_text(encoding="utf-8", errors="replace")
    return free_places(device) if "triton" in text else 0


class CallsAhead:
    """Processes of one kernel, each of which calls it on some of what will be asked.

    The judge begins with the first Problem and these with the last, so that they meet. What they
    give is thrown away: a process that breaks ends, and changes no verdict.

    Args:
        kernel: As ``KernelConnection`` takes it, as are the next two.
        convention: A name of a calling convention; empty for the first that fits.
        device: ``cpu`` or ``cuda``.
        processes: How many; with none nothing is done.
    """

    def __init__(self, kernel: str, *, convention: str, device: str, processes: int) -> None:
        self._kernel, self._convention, self._device = kernel, convention, device
        self._waiting: list[tuple[Terms | None, Problem]] = []
        self._known: set[Problem] = set()
        self._changed = threading.Condition()
        self._closed = False
        # Started here: Linux ends a process with the thread that started it.
        self._alive = [Worker(KERNEL_SERVER) for _ in range(processes)]
        self._threads = [
            threading.Thread(target=self._work, args=(worker,), daemon=True)
            for worker in self._alive
        ]
        for thread in self._threads:
            thread.start()

    def expect(self, problems: Iterable[Problem], terms: Terms | None = None) -> None:
        """Compile for Problems that are asked next, in this order, in place of what still waits.

        Args:
            terms: On which a plain function is asked; None for what a kernel says itself.
        """
        if not self._threads:
            return
        with self._changed:
            self._waiting.clear()
            for problem in problems:
                # Other numbers of the same shapes and mods run what is compiled already.
                structure = problem.replace(seed=0, distribution="normal")
                if structure not in self._known:
                    self._known.add(structure)
                    self._waiting.append((terms, structure))
            self._changed.notify_all()

    def close(self) -> None:
        """End every process; returns when all have ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for worker in self._alive:
                # Its thread reads from it still, and does the rest when it sees this.
                with suppress(ProcessLookupError, ChildProcessError):
                    if worker.ended is None:
                        os.kill(worker.pid, signal.SIGKILL)
        for thread in self._threads:
            thread.join()

    def _next(self) -> tuple[Terms | None, Problem] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting)
            return None if self._closed else self._waiting.pop()

    def _work(self, worker: Worker) -> None:
        limits, held, connection = Deadlines(), None, None
        try:
            connection = KernelConnection(
                self._kernel,
                convention=self._convention,
                device=self._device,
                deadlines=limits,
                worker=worker,
            )
            while (job := self._next()) is not None:
                terms, problem = job
                if terms is not None and terms != held:
                    connection.hold(terms)
                    held = terms
                words = run_words(Origin(case=Case(problem=problem)), PLAIN_CALL)
                connection.ask("run", words, seconds=limits.compile, most=_LARGEST_ANSWER)
        except AttncheckError:
            pass  # the judge's own process says so of the kernel
        finally:
            with self._changed:
                self._alive.remove(worker)
            worker.kill(limits.close)
            if connection is not None:
                connection.kill()
