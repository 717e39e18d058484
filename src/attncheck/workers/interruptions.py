"""SIGINT and SIGTERM while units run: counted, and heard at once by a loop that waits."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruptions:
    """Within ``with``, an interrupt raises nothing: it is counted, and makes ``fileno`` readable.

    SIGTERM counts once, however often it comes: whoever sends it sends SIGKILL next. A signal that
    whoever started us has us ignore stays ignored. In another thread than the main one, where
    Python hears no signals, nothing is counted.
    """

    def __init__(self) -> None:
        self.count = 0  # how often
        self._terminated = self._unheard = False
        self._before: dict[int, Any] = {}
        # A pipe, because a loop that waits on descriptors does not wake up for a flag.
        self._read, self._write = os.pipe()

    def __enter__(self) -> Self:
        os.set_blocking(self._read, False)
        # A signal handler must not wait where the pipe is full.
        os.set_blocking(self._write, False)
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                before = signal.getsignal(number)
                if before not in (signal.SIG_IGN, None):  # None: a handler that is not Python's
                    self._before[number] = before
                    signal.signal(number, self._arrived)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        """Readable since the last interrupt, until ``heard``."""
        return self._read

    def pending(self) -> bool:
        """Return whether there was one since ``heard``."""
        return self._unheard

    def heard(self) -> None:
        """Waiting goes on until the next one."""
        self._unheard = False
        with suppress(BlockingIOError):
            while os.read(self._read, 64):
                pass

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGTERM:
            if self._terminated:
                return
            self._terminated = True
        self.count += 1
        self._unheard = True
        with suppress(BlockingIOError):
            os.write(self._write, b"!")
