"""The process of one kernel: loads it, answers questions about it, and calls it.

``main`` is what ``connection`` starts. It speaks by frames on two descriptors of its own, which no
process that the kernel starts inherits; what the kernel prints goes where nobody parses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import os
import queue
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from attncheck.workers.transport import KEY, BrokenFrame, Frame, Receiver, Sender

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["main"]

_HIGH = 200  # descriptors from here on: nobody guesses them, nor closes them by counting up
_SAID = 1000  # characters of a message
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> None:
    """Serve the process whose number and descriptors the command line says, until it is gone."""
    requests, replies, host, bound = map(int, sys.argv[1:5])
    del sys.argv[1:]
    _bind(host, dies_with_it=bool(bound))
    requests, replies = _moved(requests), _moved(replies)
    key = _read_key(requests)
    faulthandler.enable()
    waiting: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    receiver = Receiver(requests, key)
    threading.Thread(target=_listen, args=(receiver, waiting.put), daemon=True).start()
    from attncheck.verify.kernel_server import (
        Kernel,  # imports torch: whoever waits may be gone by then
    )

    _serve(waiting, Sender(replies, key), Kernel())


def _serve(waiting: queue.SimpleQueue[Frame], sender: Sender, kernel: Any) -> None:
    while True:
        answer = kernel.answer(waiting.get())
        try:
            sender.send(answer)
        except (BrokenFrame, TypeError, ValueError) as error:  # of its size, or words that are none
            said = f"what it answers is no frame: {error}"[:_SAID]
            words = {"kind": "error", "message": said, "trace": ""}
            sender.send(Frame(kind="failed", words=words))


def _listen(receiver: Receiver, put: Callable[[Frame], None]) -> None:
    """Hand on what is asked; when nobody can ask any more, end with all that is in this group."""
    kill, number = os.killpg, signal.SIGKILL
    try:
        while True:
            put(receiver.receive(most=0))
    finally:
        kill(0, number)


def _bind(host: int, *, dies_with_it: bool) -> None:
    """End with ``host``, also while nothing of Python's runs; and adopt what daemons leave."""
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if dies_with_it:
        library.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != host:  # it died before that
        os._exit(1)


def _moved(descriptor: int) -> int:
    """The same, high up, and closed in whatever this process starts or forks into."""
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    os.close(descriptor)
    os.register_at_fork(after_in_child=lambda: _close(high))
    return high


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _read_key(descriptor: int) -> bytes:
    key = b""
    while len(key) < KEY:
        part = os.read(descriptor, KEY - len(key))
        if not part:
            os._exit(1)
        key += part
    return key
