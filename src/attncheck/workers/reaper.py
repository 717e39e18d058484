"""Kill a worker and all of its descendants, including daemons.

Every worker has a mark in its environment, which begins with the mark of the process that started
it and which its children inherit. A process group is not enough, since a kernel may start a daemon
in a session of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

TYPE_CHECKING = False  # this file is also a program started with every run: it imports little
if TYPE_CHECKING:
    from typing import Self

MARK = "ATTNCHECK_WORKER"
"""The environment variable that marks a worker and all of its descendants."""

_ROUNDS, _PAUSE = 100, 0.02  # Searches for survivors, and seconds between them: 2 s in all.


def new_mark() -> str:
    """Return a new unique mark that begins with the mark of this process."""
    # Each part ends with a dot, so that no mark is a prefix of an unrelated one.
    return f"{os.environ.get(MARK, '')}{os.urandom(8).hex()}."


def kill_family(mark: str, pid: int = 0) -> None:
    """Kill all processes whose mark begins with ``mark``, and the descendants of ``pid``.

    Never kills this process. Returns when none is left, or after two seconds if one survives.

    Args:
        mark: Mark of the worker or the run.
        pid: A process to kill together with its session and descendants; 0 for none.
    """
    if pid:
        with suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
    killed: set[int] = set()
    for _ in range(_ROUNDS):
        family = _family(mark, pid)
        for each in family - killed:
            with suppress(OSError):
                os.kill(each, signal.SIGKILL)
        # A process that is ending has no environment any more, but still exists for a while.
        killed |= family
        if all(_parent_and_session(each) is None for each in killed):
            return
        time.sleep(_PAUSE)


def _family(mark: str, pid: int) -> set[int]:
    """Return living processes with ``mark`` or in the session of ``pid``, and their descendants.

    A daemon has left the process tree and the session, but keeps its environment. A process that
    has replaced its environment is found by the tree, as long as its parent lives.
    """
    parents: dict[int, int] = {}
    family = set()
    with suppress(OSError):  # without /proc only the process group is killed
        for name in os.listdir("/proc"):  # noqa: PTH208  # pathlib is a heavy import
            parent_and_session = _parent_and_session(int(name)) if name.isdigit() else None
            if parent_and_session is None:
                continue
            other = int(name)
            parents[other], session = parent_and_session
            if (pid and pid in {other, session}) or _has_mark(other, mark):
                family.add(other)
    while more := {other for other, parent in parents.items() if parent in family} - family:
        family |= more
    return family - {os.getpid()}


def _parent_and_session(pid: int) -> tuple[int, int] | None:
    """Return a process's parent and session; None if it is dead."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            # After the name in brackets, which is arbitrary: state, parent, group, session.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if len(fields) < 4 or fields[0] in {b"Z", b"X"}:
        return None
    return int(fields[1]), int(fields[3])


def _has_mark(pid: int, mark: str) -> bool:
    entry = f"{MARK}={mark}".encode()
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
            environment = file.read()
    except OSError:
        return False
    return environment.startswith(entry) or b"\0" + entry in environment


class Guard:
    """A small process that calls ``kill_family(mark)`` when this process ends in any way."""

    def __init__(self, mark: str) -> None:
        """Start the process, which waits for this one to end."""
        import subprocess

        self._process = subprocess.Popen(  # noqa: S603  # our own file
            [sys.executable, "-I", "-S", __file__, mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill all marked processes now."""
        assert self._process.stdin is not None, "it was asked for"
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


if __name__ == "__main__":  # the process of a Guard
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdin.buffer.read()
    kill_family(sys.argv[1])
