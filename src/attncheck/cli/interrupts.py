"""Ctrl-C: a run ends in one line, which is true of what was written."""

from __future__ import annotations

import signal
import sys
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["Interrupts"]


class Interrupts:
    """What the signal SIGINT does while a verb runs.

    The first one raises KeyboardInterrupt and is remembered, since what comes of that may be
    something else: a half imported module raises an ImportError, or foreign code swallows it.
    A second one ends the process at once.

    Attributes:
        raised: Whether the run was told to end.
        message: What to say then.
    """

    def __init__(self) -> None:
        self.raised = False
        self.message = "interrupted; nothing was written."
        self._listens = self._held = self._waits = False

    def listen(self) -> None:
        """From here on SIGINT is ours, unless whoever started us ignores or handles it."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._arrived)
            self._listens = True

    def stop_listening(self) -> None:
        """Nothing is left to lose: SIGINT ends the process, without a traceback of its exit."""
        if self._listens:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def check(self) -> None:
        """Raises KeyboardInterrupt where one was raised before and did not arrive."""
        if self.raised:
            raise KeyboardInterrupt

    @contextmanager
    def writing(self, directory: str) -> Iterator[None]:
        """Within, files are written to ``directory``: all of them, and then an interrupt counts."""
        self.check()
        self._held = True
        try:
            yield
            self.message = f"interrupted; the report is written, in {directory!r}."
        finally:
            self._held = False
        if self._waits:
            self._raise()

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        del frame
        signal.signal(number, signal.SIG_DFL)
        if self._held:
            self._waits = True
        else:
            self._raise()

    def _raise(self) -> None:
        self.raised = True
        # What is torn down half way complains, in words that would hide ours.
        warnings.simplefilter("ignore")
        sys.unraisablehook = lambda _: None
        raise KeyboardInterrupt
