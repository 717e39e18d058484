"""A child process: started, listened to, and killed with all that it started."""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from attncheck.core.errors import AttncheckError, UsageError
from attncheck.core.sanitize_text import one_line
from attncheck.workers.transport import KEY, BrokenFrame, Closed, Frame, Receiver, Sender

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "Connection",
    "Deadlines",
    "Died",
    "Ended",
    "HostError",
    "Late",
    "Process",
    "Tail",
    "oom_kills",
]


_HOSTS = Path("/proc/vmstat")
_GROUPS = Path("/sys/fs/cgroup")


def oom_kills() -> int:
    """How many processes it has killed so, as far as this one can see; 0 where nobody counts."""
    places = (_HOSTS, _events())
    return sum(_counted(place) for place in places)


def _events() -> Path:
    """What the control group of this process counts (version 2)."""
    try:
        group = Path("/proc/self/cgroup").read_text().strip().splitlines()[-1]
    except (OSError, IndexError):
        return _GROUPS / "memory.events"
    return _GROUPS / group.rpartition(":")[2].lstrip("/") / "memory.events"


def _counted(place: Path) -> int:
    try:
        words = (line.split() for line in place.read_text().splitlines())
        return sum(int(line[1]) for line in words if len(line) == 2 and line[0] == "oom_kill")
    except (OSError, ValueError):
        return 0


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


_MOST_CASES = 500  # then a process is replaced: what a kernel leaves behind adds up
_MOST_GROWTH = 4 << 30  # bytes of memory that a process may hold beyond what it held at first
_CODE = (
    "import sys; sys.path[:] = {path!r}; from attncheck.workers.kernel_worker import main; main()"
)
_SAID = 3  # lines of standard error that a message ends with


class HostError(AttncheckError):
    """A kernel's process cannot be had, or does not answer as ours does."""


class Died(HostError):
    """A kernel's process died, was killed at its deadline, or had no memory left.

    Attributes:
        kind: ``crash``, ``timeout`` or ``oom``.
        trace: The last of what it printed to standard error.
    """

    def __init__(self, kind: str, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.kind, self.trace = kind, trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds that a kernel's process may take.

    Attributes:
        start: To start Python and import torch, before anything of the kernel's runs.
        load: To import the kernel.
        call: To answer one question: to draw the inputs and call the kernel.
        imports: So many more the first time in a process: torch imports half of itself then.
        compile: To do the same for the first time with these shapes and mods on a GPU.
        close: To end by itself.
    """

    start: float = 120.0
    load: float = 120.0
    call: float = 60.0
    imports: float = 30.0
    compile: float = 180.0
    close: float = 5.0


class Connection:
    """Frames to and from one kernel in a process of its own.

    Args:
        kernel: As ``subjects.load.load`` takes it.
        convention: A name of a calling convention; empty for the first that fits.
        device: ``cpu`` or ``cuda``.
        gpu: What the process sees of the GPUs (``CUDA_VISIBLE_DEVICES``); empty for what this one
            sees.
        deadlines: How long it may take.
        folder: Its working directory, which references to files are relative to; empty for this
            one's.
        paths: Where it and what it starts look for modules first.

    Attributes:
        described: What the process says of the kernel.
        started: Processes so far.

    Raises:
        UsageError: where there is no such kernel.
        HostError: where it cannot be loaded for another reason.
    """

    def __init__(
        self,
        kernel: str,
        *,
        convention: str,
        device: str,
        gpu: str,
        deadlines: Deadlines,
        folder: str,
        paths: tuple[str, ...] = (),
    ) -> None:
        self.device, self.deadlines = device, deadlines
        self._words = {"kernel": kernel, "convention": convention, "device": device}
        self._gpu, self._folder, self._paths = gpu, folder, paths
        self._process: Process | None = None
        self.started, self._cases, self._at_first = 0, 0, 0
        self._deadline = 0.0
        self.described = self._start()

    @property
    def pid(self) -> int | None:
        """The number of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    def ask(self, kind: str, words: dict[str, Any], *, seconds: float, most: int = 0) -> Frame:
        """The answer to a question.

        Args:
            kind: Of the question.
            words: Its JSON.
            seconds: Until it is killed.
            most: Bytes beside JSON that an answer may have.

        Raises:
            Died: when there is none. The next question starts another process.
            HostError: when no process can be had, of which the kernel knows nothing.
        """
        if self._process is None:
            try:
                self._start()
            except UsageError as error:
                raise Died("crash", f"loaded once more it said: {error}") from None
        return self._exchange(Frame(kind=kind, words=words), seconds, most)

    @property
    def new(self) -> bool:
        """Whether the next question is the first to call the kernel in its process."""
        return self._process is None or self._cases == 0

    def count_case(self) -> None:
        """One more call was made: see whether its process has done enough."""
        self._cases += 1
        if self._process is None:
            return
        if self._cases >= _MOST_CASES or self._process.memory > self._at_first + _MOST_GROWTH:
            self.end()

    def end(self) -> None:
        """Let the process end; the next question starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.end(self.deadlines.close)

    def kill(self) -> None:
        """The same, at once."""
        process, self._process = self._process, None
        if process is not None:
            process.kill(self.deadlines.close)

    def _start(self) -> dict[str, Any]:
        self._process = process = Process(
            self._command, environment=self._environment(), folder=self._folder
        )
        key = secrets.token_bytes(KEY)
        self._sender = Sender(process.requests, key, self._ready(process, writing=True))
        self._receiver = Receiver(process.replies, key, self._ready(process, writing=False))
        self.started, self._cases = self.started + 1, 0
        self._kills = oom_kills()
        os.write(process.requests, key)
        try:
            self._exchange(Frame(kind="start", words={}), self.deadlines.start, 0)
        except Died as error:  # before anything of the kernel's runs: the machine's fault, or ours
            raise HostError(f"no process of its own can be had: {error}") from None
        self._at_first = process.memory
        answer = self._exchange(self._load(), self.deadlines.load, 0)
        if answer.kind == "described":
            return answer.words
        self.kill()
        message = str(answer.words.get("message"))
        raise (UsageError if answer.kind == "usage" else HostError)(message)

    def _load(self) -> Frame:
        import torch

        return Frame(kind="load", words={**self._words, "threads": torch.get_num_threads()})

    def _environment(self) -> dict[str, str]:
        found = {**os.environ, "CUDA_VISIBLE_DEVICES": self._gpu} if self._gpu else {**os.environ}
        if self._paths:
            places = (*self._paths, os.environ.get("PYTHONPATH", ""))
            found["PYTHONPATH"] = os.pathsep.join(filter(None, places))
        return found

    def _command(self, requests: int, replies: int) -> list[str]:
        # Linux ends a process with the thread that started it, which may end before this one does.
        bound = threading.current_thread() is threading.main_thread()
        numbers = (requests, replies, os.getpid(), int(bound))
        code = _CODE.format(path=[*self._paths, *sys.path])
        return [sys.executable, "-c", code, *map(str, numbers)]

    def _ready(self, process: Process, *, writing: bool) -> Callable[[], None]:
        descriptor = process.requests if writing else process.replies
        return lambda: process.wait(descriptor, self._deadline, writing=writing)

    def _exchange(self, frame: Frame, seconds: float, most: int) -> Frame:
        process = self._process
        assert process is not None
        self._deadline = time.monotonic() + seconds
        try:
            self._sender.send(frame)
            return self._receiver.receive(most=most)
        except Late:
            late = f"it did not answer {_ASKED[frame.kind]} in {seconds:g} s"
            self._died(process, "timeout", late)
        except (Ended, Closed):
            code = process.await_end(self.deadlines.close)
            self._died(process, *self._cause(process, code))
        except BrokenFrame as error:
            self._died(process, "crash", f"what its process sent is no answer: {error}")
        except BaseException:  # an interrupt, between two frames or within one
            self.kill()
            raise

    def _cause(self, process: Process, code: int | None) -> tuple[str, str]:
        """Kind and message of an end that nobody here asked for."""
        if code is None:
            return "crash", "its process closed its pipe and went on"
        if code >= 0:
            return "crash", f"its process ended with exit code {code} before it answered"
        name = _name(-code)
        if -code == signal.SIGKILL and oom_kills() > self._kills:
            return "oom", "its process was killed because the machine had no memory left"
        if "bad_alloc" in process.stderr.text[-4096:]:
            return "oom", f"its process died of {name}: it had no memory left"
        return "crash", f"its process died of {name} before it answered"

    def _died(self, process: Process, kind: str, message: str) -> NoReturn:
        self.kill()
        said = _said(process)
        trace = "\n".join(map(one_line, process.stderr.text.splitlines()))
        raise Died(kind, f"{message}; it said: {said}" if said else f"{message}.", trace) from None


_ASKED = {
    "start": "whether it had started",
    "load": "what the kernel is",
    "ask": "a question about a problem",
    "run": "with outputs",
}


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _said(process: Process) -> str:
    """The last lines of its standard error; of faulthandler's the place."""
    text = process.stderr.text
    _, fatal, dump = text.rpartition("Fatal Python error: ")
    if not fatal:
        return process.stderr.lines(_SAID)
    lines = [one_line(line) for line in dump.splitlines()]
    places = [line for line in lines if line.startswith("File ")]
    return ", ".join([lines[0], *places[:1]])
