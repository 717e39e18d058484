"""Kill a worker with all that it started, however far that has wandered from it.

Every worker carries a mark in its environment, which begins with the mark of whoever started it and
which its own children inherit. A process group does not do: what a kernel starts may be a daemon
with a session of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

TYPE_CHECKING = False  # this file is a program too, which starts with every run: it imports little
if TYPE_CHECKING:
    from typing import Self

MARK = "ATTNCHECK_WORKER"
"""The environment variable by which a worker and all processes that it starts are known."""

_ROUNDS, _PAUSE = 100, 0.02  # looks for what is left, and seconds between them: two in all


def new_mark() -> str:
    """Return a mark that no other process has, below that of this process."""
    # A dot ends each part, so that no mark is the beginning of a stranger's.
    return f"{os.environ.get(MARK, '')}{os.urandom(8).hex()}."


def kill_family(mark: str, pid: int = 0) -> None:
    """Send SIGKILL to all processes whose mark begins with ``mark``, and to all below ``pid``.

    Not to this one. Returns when none is left; after two seconds where one cannot be killed.

    Args:
        mark: Of the worker or the run.
        pid: The process whose session and descendants go with it; 0 for none.
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
        # One that is about to end has no environment any more, and is there for a while.
        killed |= family
        if all(_parent_and_session(each) is None for each in killed):
            return
        time.sleep(_PAUSE)


def _family(mark: str, pid: int) -> set[int]:
    """Processes alive that carry ``mark``, are of the session of ``pid``, or descend from either.

    A daemon has left the tree and the session; its environment it keeps, unless it went to the
    length of giving itself another, which only the tree can tell, as long as its parent lives.
    """
    parents: dict[int, int] = {}
    family = set()
    with suppress(OSError):  # no Linux: the process group has to do
        for name in os.listdir("/proc"):  # noqa: PTH208  # pathlib is a heavy import
            about = _parent_and_session(int(name)) if name.isdigit() else None
            if about is None:
                continue
            each = int(name)
            parents[each], session = about
            if (pid and pid in {each, session}) or _carries(each, mark):
                family.add(each)
    while more := {each for each, parent in parents.items() if parent in family} - family:
        family |= more
    return family - {os.getpid()}


def _parent_and_session(pid: int) -> tuple[int, int] | None:
    """None of a process that is dead."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            # After the name, which is anything, in brackets: state, parent, group, session.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if len(fields) < 4 or fields[0] in {b"Z", b"X"}:
        return None
    return int(fields[1]), int(fields[3])


def _carries(pid: int, mark: str) -> bool:
    entry = f"{MARK}={mark}".encode()
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
            environment = file.read()
    except OSError:
        return False
    return environment.startswith(entry) or b"\0" + entry in environment


class Guard:
    """A small process that does ``kill_family(mark)`` when this one is gone, however it went."""

    def __init__(self, mark: str) -> None:
        """It begins to wait."""
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
        """Kill them all now."""
        assert self._process.stdin is not None, "it was asked for"
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


if __name__ == "__main__":  # of a Guard
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdin.buffer.read()
    kill_family(sys.argv[1])
