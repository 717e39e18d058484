"""The main program of a worker: make a server, and answer requests with it.

``process.Worker`` starts ``run``. Frames are exchanged on two descriptors of their own, which child
processes do not inherit, so that output printed by foreign code cannot be taken for an answer.
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

_HIGH = 200  # Smallest descriptor to use: code that closes low descriptors does not hit these.
_LONGEST = 1000  # Characters of an error message.
_LARGEST = 1 << 27  # Bytes besides JSON of the largest request.
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Server(Protocol):
    """The object in a worker that answers requests."""

    def answer(self, request: Frame) -> Frame:
        """Return the answer to ``request``; exceptions must be turned into answers."""

    def close(self) -> None:
        """End all that it has started, since there are no more requests."""


def main() -> None:
    """Serve the process given by pid and descriptors on the command line, until it ends."""
    requests, replies, host, bound = map(int, sys.argv[1:5])
    module, _, function = sys.argv[5].partition(":")
    grace = float(sys.argv[6])
    del sys.argv[1:]
    _bind(host, dies_with_host=bool(bound))
    requests, replies = _move_descriptor(requests), _move_descriptor(replies)
    key = _read_key(requests)
    faulthandler.enable()
    # Line buffering, so that output is not lost when the process is killed.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    waiting: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
    listener = threading.Thread(
        target=_listen, args=(Receiver(requests, key), waiting, grace), daemon=True
    )
    listener.start()
    # The import may take long; meanwhile the listener notices if the other process ends.
    with no_garbage_collection():
        imported = import_module(module)
    server: Server = getattr(imported, function)()
    serve(waiting, Sender(replies, key), server)


def run() -> NoReturn:
    """Run ``main`` and end this process."""
    main()
    end_process(0)


def serve(waiting: queue.SimpleQueue[Frame | None], sender: Sender, server: Server) -> None:
    """Answer the requests in ``waiting``, until one is None or answers are not read any more."""
    own_pid = os.getpid()
    while (request := waiting.get()) is not None:
        answer = server.answer(request)
        if os.getpid() != own_pid:  # a process that a kernel has forked must not answer
            os._exit(0)
        try:
            sender.send(answer)
        except Closed:
            break
        except (BrokenFrame, TypeError, ValueError) as error:  # it is too large, or no JSON
            message = f"what it answers is no frame: {error}"[:_LONGEST]
            words = {"kind": "error", "message": message, "trace": ""}
            try:
                sender.send(Frame(kind="failed", words=words))
            except (TypeError, ValueError):  # a kernel has broken the json module
                os._exit(1)
    server.close()


def _listen(receiver: Receiver, waiting: queue.SimpleQueue[Frame | None], grace: float) -> None:
    """Queue requests; when the pipe is closed, kill this process group, after ``grace`` seconds."""
    # Bound early, since a kernel might replace these functions.
    kill, number, sleep = os.killpg, signal.SIGKILL, time.sleep
    try:
        while True:
            waiting.put(receiver.receive(most=_LARGEST))
    finally:
        waiting.put(None)
        if grace:
            sleep(grace)
        kill(0, number)


def _bind(host: int, *, dies_with_host: bool) -> None:
    """Let Linux end this process with ``host``, and adopt orphans of its children."""
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if dies_with_host:
        library.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != host:  # the host had already ended
        os._exit(1)


def _move_descriptor(descriptor: int) -> int:
    """Move a descriptor to a high number, and let child processes and forks close it."""
    is_limited = resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= _HIGH
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 0 if is_limited else _HIGH)
    os.close(descriptor)
    os.register_at_fork(after_in_child=lambda: _close(moved))
    return moved


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
