"""Calls a user's kernel ahead, in further processes, so that it is compiled when it is judged.

The problems become known one by one, and each process is isolated as the judged one is;
``compile_ahead`` is for attncheck's own kernels and a known list of cells.
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
from attncheck.verify.isolated import Deadlines, IsolatedKernel
from attncheck.verify.kernel_messages import run_words
from attncheck.workers.process import KERNEL_SERVER, Worker

_LARGEST_ANSWER = 1 << 28  # Bytes of outputs, which are discarded.


def processes_ahead(kernel: str, device: str) -> int:
    """Return how many processes have room to call a kernel ahead of a check.

    It is 0 except for kernels on a GPU whose name or file mentions Triton, which stores compiled
    kernels in a cache on disk that processes share.
    """
    file, colons, _ = kernel.partition("::")
    text = kernel
    with suppress(OSError, ValueError):  # The name is too long, or contains a null character.
        if colons and Path(file).is_file():  # Reading a pipe would block.
            text = Path(file).read_text(encoding="utf-8", errors="replace")
    return free_places(device) if "triton" in text else 0


class CallsAhead:
    """Processes that call one kernel on the problems to come, to compile it for them.

    The judge starts with the first Problem and they with the last, so that they meet. Their outputs
    are discarded: a process that fails ends, and changes no verdict.

    Args:
        kernel: As ``IsolatedKernel`` takes it.
        convention: Name of a calling convention; empty for the first that fits.
        device: ``cpu`` or ``cuda``.
        processes: Number of processes; 0 to do nothing.
    """

    def __init__(self, kernel: str, *, convention: str, device: str, processes: int) -> None:
        self._kernel, self._convention, self._device = kernel, convention, device
        self._waiting: list[tuple[Terms | None, Problem]] = []
        self._expected: set[Problem] = set()
        self._changed = threading.Condition()
        self._closed = False
        # Started in this thread, because Linux ends a process with the thread that started it.
        self._alive = [Worker(KERNEL_SERVER) for _ in range(processes)]
        self._threads = [
            threading.Thread(target=self._work, args=(worker,), daemon=True)
            for worker in self._alive
        ]
        for thread in self._threads:
            thread.start()

    def expect(self, problems: Iterable[Problem], terms: Terms | None = None) -> None:
        """Replace the waiting Problems by those that will be asked next, in this order.

        Args:
            terms: Terms of a plain function; None for a kernel that declares its capabilities.
        """
        if not self._threads:
            return
        with self._changed:
            self._waiting.clear()
            for problem in problems:
                # Compiled code depends on shapes and mods, not on the numbers.
                structure = problem.replace(seed=0, distribution="normal")
                if structure not in self._expected:
                    self._expected.add(structure)
                    self._waiting.append((terms, structure))
            self._changed.notify_all()

    def close(self) -> None:
        """End every process, and return when all have ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for worker in self._alive:
                # Its thread still reads from it, notices the end and cleans up.
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
        limits, current_terms, kernel = Deadlines(), None, None
        try:
            kernel = IsolatedKernel(
                self._kernel,
                convention=self._convention,
                device=self._device,
                deadlines=limits,
                worker=worker,
            )
            while (job := self._next()) is not None:
                terms, problem = job
                if terms is not None and terms != current_terms:
                    kernel.hold(terms)
                    current_terms = terms
                words = run_words(Origin(case=Case(problem=problem)), PLAIN_CALL)
                kernel.ask("run", words, seconds=limits.compile, most=_LARGEST_ANSWER)
        except AttncheckError:
            pass  # The judged process will report it.
        finally:
            with self._changed:
                self._alive.remove(worker)
            worker.kill(limits.close)
            if kernel is not None:
                kernel.kill()
