"""A process of somebody's code: started, listened to, and ended with all that it started."""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from attncheck.errors import AttncheckError
from attncheck.inert import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Ended", "Late", "Process", "Tail"]

KEPT = 1 << 16
"""Bytes that are kept of what a process prints, the last ones."""

_MARK = "ATTNCHECK_WORKER"  # in the environment of a process and of all that it starts
_CHUNK = 1 << 16
_PIPE = 1 << 20  # bytes that a pipe may hold
_PERIOD = 0.1  # seconds between two looks at whether a silent process is still there
_ROUNDS, _ROUND = 100, 0.02  # how often, and seconds apart, a family is looked for until it is gone


class Ended(AttncheckError):
    """The process is no more."""


class Late(AttncheckError):
    """It was not ready until the deadline."""


class Tail:
    """The last of what somebody prints.

    Attributes:
        forgotten: Bytes that came before.
    """

    def __init__(self) -> None:
        self._kept, self.forgotten = bytearray(), 0

    def add(self, part: bytes) -> None:
        """Keep ``part``, and forget what is too much."""
        self._kept += part
        over = len(self._kept) - KEPT
        if over > 0:
            del self._kept[:over]
            self.forgotten += over

    @property
    def text(self) -> str:
        """What is kept of it, as it came."""
        return self._kept.decode(errors="replace")

    def lines(self, count: int) -> str:
        """Its last ``count`` lines that say something, harmless and in one."""
        said = [line for line in map(one_line, self.text.splitlines()) if line]
        return " | ".join(said[-count:])


class Process:
    """A child process in a session of its own, with a pipe to it and one from it.

    Nothing reads what it prints but ``wait``, which is where its owner spends its time; a child
    that prints while nobody asks it anything waits until somebody does.

    Args:
        command: (numbers of the descriptors to read from and to write to) → what to run.
        environment: Its environment.
        folder: Its working directory.

    Attributes:
        pid: Its number.
        requests: Descriptor that its owner writes to; non-blocking.
        replies: The one that its owner reads from; non-blocking.
        stdout, stderr: What it prints.
    """

    def __init__(
        self,
        command: Callable[[int, int], Sequence[str]],
        *,
        environment: Mapping[str, str],
        folder: str,
    ) -> None:
        self._mark = secrets.token_hex(16)
        its_requests, self.requests = os.pipe()
        self.replies, its_replies = os.pipe()
        self._owned = [self.requests, self.replies]
        try:
            self._process = subprocess.Popen(  # noqa: S603  # this Python
                command(its_requests, its_replies),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd=folder or None,
                env={**environment, _MARK: self._mark},
                pass_fds=(its_requests, its_replies),
                start_new_session=True,
            )
        except BaseException:
            self._release()
            raise
        finally:
            os.close(its_requests)
            os.close(its_replies)
        self.pid = self._process.pid
        self.stdout, self.stderr = Tail(), Tail()
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._printed = {
            self._process.stdout.fileno(): self.stdout,
            self._process.stderr.fileno(): self.stderr,
        }
        for descriptor in (self.requests, self.replies, *self._printed):
            os.set_blocking(descriptor, False)
        self._forgotten = weakref.finalize(self, _end_forgotten, self._process, self._mark)

    def wait(self, descriptor: int, deadline: float, *, writing: bool = False) -> None:
        """Return when ``descriptor`` is ready; all the while take in what the process prints.

        Args:
            descriptor: ``requests`` or ``replies``.
            deadline: By ``time.monotonic``.
            writing: Whether to write to it.

        Raises:
            Ended: when the process is no more and the descriptor not ready.
            Late: when it was not ready until ``deadline``.
        """
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT if writing else select.POLLIN)
        for printed in self._printed:
            poll.register(printed, select.POLLIN)
        while True:
            gone = self.ended is not None
            left = deadline - time.monotonic()
            if left <= 0:
                raise Late("it took too long.")
            ready = dict(poll.poll(0 if gone else 1000 * min(left, _PERIOD)))
            for printed in ready.keys() & self._printed.keys():
                if self._take_in(printed) == b"":
                    poll.unregister(printed)
            if descriptor in ready:
                return
            if gone:
                raise Ended("it is no more.")

    @property
    def ended(self) -> int | None:
        """Its exit code, or minus the signal that it died of; None while it runs."""
        if self._process.returncode is not None:
            return self._process.returncode
        # It stays a zombie until its family is gone: else its number could be another's.
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def await_end(self, seconds: float) -> int | None:
        """``ended``, after at most so many seconds; takes in what is printed until then."""
        deadline = time.monotonic() + seconds
        while self.ended is None and time.monotonic() < deadline:
            ready, _, _ = select.select(list(self._printed), [], [], _ROUND)
            taken = [self._take_in(printed) for printed in ready]
            if not any(taken):
                time.sleep(_ROUND)  # at their end: there is nothing to wait for
        return self.ended

    def kill(self, seconds: float) -> None:
        """Kill it with all that it started; what it printed stays.

        Args:
            seconds: For how long to wait for the end of what a driver does not let go of.
        """
        _end_family(self.pid, self._mark)
        for printed in self._printed:
            left = _PIPE  # no more: whoever is not killed may write on
            while left > 0 and (part := self._take_in(printed)):
                left -= len(part)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._forgotten.detach()
        self._release()

    def end(self, seconds: float) -> None:
        """Let it end by itself, which it does when nobody writes to it any more; then ``kill``."""
        os.close(self.requests)
        self._owned.remove(self.requests)
        self.await_end(seconds)
        self.kill(seconds)

    @property
    def memory(self) -> int:
        """Bytes of memory that it holds; 0 where nobody knows."""
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")

    def _release(self) -> None:
        while self._owned:
            os.close(self._owned.pop())
        process = self.__dict__.get("_process")
        for stream in (process.stdout, process.stderr) if process is not None else ():
            stream.close()

    def _take_in(self, printed: int) -> bytes | None:
        """What is there of it now: None for nothing, and no bytes at its end."""
        try:
            part = os.read(printed, _CHUNK)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        self._printed[printed].add(part)
        return part


def _end_forgotten(process: subprocess.Popen[bytes], mark: str) -> None:
    _end_family(process.pid, mark)
    process.wait()


def _end_family(pid: int, mark: str) -> None:
    """Kill the process, its group, and whoever descends from it or carries its mark."""
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    killed: set[int] = set()
    for _ in range(_ROUNDS):
        found = _family(pid, mark)
        for each in found - killed:
            with suppress(OSError):
                os.kill(each, signal.SIGKILL)
        # One that is about to end has no environment any more, and is there for a while.
        killed |= found
        if all(_about(each) is None for each in killed):
            return
        time.sleep(_ROUND)


def _family(pid: int, mark: str) -> set[int]:
    """Processes alive that descend from ``pid``, are of its session, or carry ``mark``.

    A daemon has left the tree and the session; its environment it keeps, unless it went to the
    length of giving itself another, which only the tree can tell, as long as its parent lives.
    """
    parents: dict[int, int] = {}
    found = set()
    for entry in os.scandir("/proc") if Path("/proc/self/stat").exists() else ():
        if not entry.name.isdigit():
            continue
        each = int(entry.name)
        about = _about(each)
        if about is None:
            continue
        parents[each], session = about
        if pid in {each, session} or _carries(each, mark):
            found.add(each)
    while more := {each for each, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def _about(pid: int) -> tuple[int, int] | None:
    """Parent and session of a process; None of one that is dead."""
    try:
        # After the name, which is anything, in brackets: state, parent, group, session.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    if len(fields) < 4 or fields[0] in {b"Z", b"X"}:
        return None
    return int(fields[1]), int(fields[3])


def _carries(pid: int, mark: str) -> bool:
    try:
        return f"{_MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
