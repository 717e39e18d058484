"""Count SIGINT and SIGTERM while units run, and wake up a loop that waits on descriptors."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruptions:
    """A context in which interrupts are counted instead of raised, and make ``fileno`` readable.

    SIGTERM counts only once, since a sender that is in a hurry sends SIGKILL next. Signals that
    this process was started to ignore stay ignored. Outside of the main thread, where Python
    handles no signals, nothing is counted.
    """

    def __init__(self) -> None:
        self.count = 0  # Number of interrupts.
        self._terminated = self._pending = False
        self._before: dict[int, Any] = {}
        # A pipe, since a loop that waits on descriptors does not wake up for a flag.
        self._read, self._write = os.pipe()

    def __enter__(self) -> Self:
        os.set_blocking(self._read, False)
        # A signal handler must not block if the pipe is full.
        os.set_blocking(self._write, False)
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                before = signal.getsignal(number)
                if before not in (signal.SIG_IGN, None):  # None: a handler that is not Python's
                    self._before[number] = before
                    signal.signal(number, self._handle_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        """Return a descriptor that is readable from an interrupt until ``clear``."""
        return self._read

    def pending(self) -> bool:
        """Return whether there was an interrupt since the last ``clear``."""
        return self._pending

    def clear(self) -> None:
        """Mark interrupts as handled, so that ``fileno`` blocks until the next one."""
        self._pending = False
        with suppress(BlockingIOError):
            while os.read(self._read, 64):
                pass

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGTERM:
            if self._terminated:
                return
            self._terminated = True
        self.count += 1
        self._pending = True
        with suppress(BlockingIOError):
            os.write(self._write, b"!")
