"""The inside of a worker: it makes a server, and gives its answers to what is asked.

``run`` is what ``process.Worker`` starts. It speaks by frames on two descriptors of its own, which
no process that it starts inherits; what somebody's code prints goes where nobody parses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import io
import os
import queue
import resource
import signal
import sys
import threading
import time
from importlib import import_module
from typing import NoReturn, Protocol

from attncheck.core.own_process import end_process, no_garbage_collection
from attncheck.workers.transport import KEY, BrokenFrame, Closed, Frame, Receiver, Sender

_HIGH = 200  # descriptors from here on: nobody guesses them, nor closes them by counting up
_LONGEST = 1000  # characters of a message
_LARGEST = 1 << 27  # bytes beside JSON of one request
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Server(Protocol):
    """The object that a worker makes, and asks for its answers."""

    def answer(self, request: Frame) -> Frame:
        """Return the answer; whatever is raised on the way is one too."""

    def close(self) -> None:
        """End what it has started: nobody asks any more."""


def main() -> None:
    """Serve the process whose number and descriptors the command line says, until it is gone."""
    requests, replies, host, bound = map(int, sys.argv[1:5])
    module, _, function = sys.argv[5].partition(":")
    grace = float(sys.argv[6])
    del sys.argv[1:]
    _bind(host, dies_with_it=bool(bound))
    requests, replies = _moved(requests), _moved(replies)
    key = _read_key(requests)
    faulthandler.enable()
    # A line that a kernel prints is shown though its process is killed after it.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    waiting: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
    listener = threading.Thread(
        target=_listen, args=(Receiver(requests, key), waiting, grace), daemon=True
    )
    listener.start()
    # It may import torch: whoever waits may be gone by then, which the listener hears.
    with no_garbage_collection():
        imported = import_module(module)
    server: Server = getattr(imported, function)()
    serve(waiting, Sender(replies, key), server)


def run() -> NoReturn:
    """Do the same as a process of its own, which ends with it."""
    main()
    end_process(0)


def serve(waiting: queue.SimpleQueue[Frame | None], sender: Sender, server: Server) -> None:
    """Answer what is ``waiting``, until that is None or nobody reads."""
    own = os.getpid()
    while (request := waiting.get()) is not None:
        answer = server.answer(request)
        if os.getpid() != own:  # a fork that a kernel has left: the answer is the worker's to give
            os._exit(0)
        try:
            sender.send(answer)
        except Closed:
            break
        except (BrokenFrame, TypeError, ValueError) as error:  # of its size, or words that are none
            message = f"what it answers is no frame: {error}"[:_LONGEST]
            words = {"kind": "error", "message": message, "trace": ""}
            try:
                sender.send(Frame(kind="failed", words=words))
            except (TypeError, ValueError):  # a kernel has broken what writes JSON
                os._exit(1)
    server.close()


def _listen(receiver: Receiver, waiting: queue.SimpleQueue[Frame | None], grace: float) -> None:
    """Hand on what is asked; when nobody can ask any more, end with all that is in this group."""
    # Bound before any kernel is loaded, which might bind the names to something else.
    kill, number, sleep = os.killpg, signal.SIGKILL, time.sleep
    try:
        while True:
            waiting.put(receiver.receive(most=_LARGEST))
    finally:
        waiting.put(None)
        if grace:
            sleep(grace)
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
    few = resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= _HIGH
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 0 if few else _HIGH)
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
