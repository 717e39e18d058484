"""A worker: a child process that is started, spoken to, and killed with all that it started.

Kernels that may crash and units of a run are done in processes of this one kind: one transport
(``transport``), one way to start and to die. What the worker does is the server that it makes,
``module:function``, in ``worker_main``.
"""

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
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from attncheck.core.errors import HostError
from attncheck.core.sanitize_text import one_line
from attncheck.workers.reaper import MARK, kill_family, new_mark
from attncheck.workers.transport import KEY, BrokenFrame, Closed, Frame, Receiver, Sender

KERNEL_SERVER = "attncheck.verify.kernel_server:KernelServer"
"""Server of a worker that runs somebody's kernel; named here, where starting one imports little."""

KEPT = 1 << 16  # bytes that are kept of what a process prints, the last ones

_CHUNK = 1 << 16
# How glibc's words on a broken heap begin.
_HEAP = ("malloc", "realloc", "free()", "munmap_chunk", "corrupted", "double free")
_DUMP = b"Fatal Python error: "  # how faulthandler begins
_PIPE = 1 << 20  # bytes that a pipe may hold
_PERIOD = 0.1  # seconds between two looks at whether a silent process is still there
_PAUSE = 0.02  # seconds between two looks at whether one that is to end has ended
_LAST_LINES = 3  # of standard error, which a message ends with
_LONGEST_LINE = 300  # characters
_OURS = f"{Path(__file__).parents[1]}{os.sep}"

# The worker finds modules where this process does, and not in the folder that it is in.
_CODE = "import sys; sys.path[:] = {path!r}; from attncheck.workers.worker_main import run; run()"


class Died(HostError):
    """A worker died, was killed at its deadline, or had no memory left.

    Attributes:
        kind: ``crash``, ``timeout`` or ``oom``.
        trace: The last of what it printed to standard error.
    """

    def __init__(self, kind: str, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.kind, self.trace = kind, trace


class _Ended(Exception):
    """The process is no more."""


class _Late(Exception):
    """It was not ready until the deadline."""


class Tail:
    """The last of what somebody prints."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def add(self, part: bytes) -> None:
        """Keep ``part``, and forget what is too much."""
        self._kept += part
        del self._kept[:-KEPT]

    @property
    def text(self) -> str:
        """The kept part, as it came."""
        return self._kept.decode(errors="replace")

    def lines(self, count: int) -> str:
        """Return its last ``count`` lines that say something, harmless and in one."""
        lines = [line for line in map(one_line, self.text.splitlines()) if line]
        return " | ".join(line[-_LONGEST_LINE:] for line in lines[-count:])


class _Echo:
    """The first of what a process prints, shown on standard error: whole lines, made harmless.

    A line that is the one before it is shown once, and in the end how often it came.
    """

    def __init__(self) -> None:
        self._line, self._left = b"", KEPT
        self._last, self._again = "", 0  # the line that was shown last, and how often it came since

    def add(self, part: bytes) -> None:
        """Show the lines that end in ``part``; of no bytes the one that has not ended."""
        over, part = len(part) > self._left, part[: self._left]
        self._left -= len(part)
        *lines, self._line = (self._line + part or self._line + b"\n").split(b"\n")
        if any(line.startswith(_DUMP) for line in lines):  # a message tells its end
            self._left, lines = 0, []
        texts = [one_line(line.decode(errors="replace")) for line in lines]
        texts += ["… what else the kernel prints is not shown"] if over and part else []
        shown = "".join(self._shown(text) for text in texts if text)
        shown += "" if part else self._shown("")
        with suppress(AttributeError, OSError, ValueError):  # nobody reads it
            sys.stderr.write(shown)
            sys.stderr.flush()

    def _shown(self, text: str) -> str:
        """Return ``text`` as lines, after how often the one before it came again."""
        if text == self._last:
            self._again += 1
            return ""
        before = f"{self._last} ({self._again} times more)\n" if self._again else ""
        self._last, self._again = text, 0
        return f"{before}{text}\n" if text else before


class Worker:
    """A child process in a session of its own, with a pipe to it and one from it.

    Nothing reads what it prints but ``receive``, ``send`` and ``take_in``, which is where its owner
    spends its time; a child that prints while nobody asks it anything waits until somebody does.

    Args:
        server: What it makes and asks for answers, ``module:function``.
        environment: What is another there than here.
        folder: Its working directory; empty for this one's.
        paths: Where it and what it starts look for modules first.
        mark: By which it and what it starts are known; a new one by default.
        grace: Seconds that it has to end by itself when nobody writes to it any more.
        echo: ``echoes``.

    Attributes:
        replies: Descriptor that answers come from; non-blocking.
        stdout, stderr: What it prints.
        echoes: Whether the first of that is shown on standard error.
    """

    def __init__(
        self,
        server: str,
        *,
        environment: Mapping[str, str] | None = None,
        folder: str = "",
        paths: tuple[str, ...] = (),
        mark: str = "",
        grace: float = 0.0,
        echo: bool = False,
    ) -> None:
        self._mark = mark or new_mark()
        its_requests, self._requests = os.pipe()
        self.replies, its_replies = os.pipe()
        self._owned = [self._requests, self.replies]
        surroundings = {**os.environ, **(environment or {}), MARK: self._mark}
        if paths:
            places = (*paths, os.environ.get("PYTHONPATH", ""))
            surroundings["PYTHONPATH"] = os.pathsep.join(filter(None, places))
        self._oom_kills = oom_kills()
        try:
            self._process = subprocess.Popen(  # noqa: S603  # this Python, our own code
                _command(server, paths, its_requests, its_replies, grace),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd=folder or None,
                env=surroundings,
                pass_fds=(its_requests, its_replies),
                start_new_session=True,  # the terminal's Ctrl-C is ours to hear
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
        self.echoes = echo
        self._echoes = {each: _Echo() for each in self._printed if echo}
        for descriptor in (self._requests, self.replies, *self._printed):
            os.set_blocking(descriptor, False)
        # Who forgets a worker does not mean it to live on.
        self._forgotten = weakref.finalize(self, _end_forgotten, self._process, self._mark)
        key = secrets.token_bytes(KEY)
        os.write(self._requests, key)
        self._deadline = 0.0
        self._fate: Died | None = None
        self._sender, self._receiver = Sender(self._requests, key), Receiver(self.replies, key)

    def exchange(self, frame: Frame | None, *, seconds: float, most: int, what: str) -> Frame:
        """Return the answer to ``frame``; without one, to what was sent.

        Args:
            seconds: Until it is late.
            most: Bytes beside JSON that an answer may have.
            what: That is asked, for the message of one that is late.

        Raises:
            Died: when there is no answer, also where ``send`` raised it; the worker is killed.
        """
        if self._fate is not None:
            raise self._fate
        self._deadline = time.monotonic() + seconds
        try:
            if frame is not None:
                self._sender.send(frame, lambda: self._wait(writing=True))
            return self._receiver.receive(most=most, ready=lambda: self._wait(writing=False))
        except BaseException as error:  # noqa: BLE001  # sorted there
            self._fail(error, seconds, what)

    def send(self, frame: Frame, *, seconds: float) -> None:
        """Send a request, of which the answer is received later; raises Died."""
        self._deadline = time.monotonic() + seconds
        try:
            self._sender.send(frame, lambda: self._wait(writing=True))
        except BaseException as error:  # noqa: BLE001  # sorted there
            self._fail(error, seconds, "a request")

    def receive(self, *, seconds: float, most: int) -> Frame:
        """Receive the answer to what was sent; raises Died, also where ``send`` did."""
        return self.exchange(None, seconds=seconds, most=most, what="with a result")

    def _fail(self, error: BaseException, seconds: float, what: str) -> NoReturn:
        kind = "crash"
        if isinstance(error, _Late):
            kind, message = "timeout", f"it did not answer {what} in {seconds:g} s"
        elif isinstance(error, _Ended | Closed):
            kind, message = self._cause_of_death(self.await_end(5.0))
        elif isinstance(error, BrokenFrame):
            message = f"what its process sent is no answer: {str(error).rstrip('.')}"
        else:  # an interrupt, between two frames or within one
            self.kill(5.0)
            raise error
        self.kill(5.0)
        trace = "\n".join(map(one_line, self.stderr.text.splitlines()))
        last = self._last_words()
        whole = f"{message}; it said: {last}" if last else f"{message}."
        self._fate = Died(kind, whole, trace)
        raise self._fate from None

    def _cause_of_death(self, code: int | None) -> tuple[str, str]:
        """Kind and message of an end that nobody here asked for."""
        if code is None:
            return "crash", "its process closed its pipe and went on"
        if code >= 0:
            return "crash", f"its process ended with exit code {code} before it answered"
        name = _signal_name(-code)
        if -code == signal.SIGKILL and oom_kills() > self._oom_kills:
            return "oom", "its process was killed because the machine had no memory left"
        if "bad_alloc" in self.stderr.text[-4096:]:
            return "oom", f"its process died of {name}: it had no memory left"
        broken = self._before_dump().startswith(_HEAP)
        heap = ": its heap is broken, as by a write past its tensors" if broken else ""
        return "crash", f"its process died of {name} before it answered{heap}"

    def _before_dump(self) -> str:
        """The line of its standard error before faulthandler's; the last one where it has none."""
        before = self.stderr.text.rpartition(_DUMP.decode())[0] or self.stderr.text
        return (before.splitlines() or [""])[-1]

    def _last_words(self) -> str:
        """The last lines of its standard error; of faulthandler's the place."""
        _, fatal, dump = self.stderr.text.rpartition(_DUMP.decode())
        if not fatal:
            return self.stderr.lines(_LAST_LINES)
        what = one_line(dump.partition("\n")[0])
        last = self._before_dump()
        if last.startswith(_HEAP):
            what = f"{one_line(last)[:_LONGEST_LINE]}, {what}"
        # Other threads, such as the one that listens to us, are dumped before it.
        at_fault = dump.rpartition("Current thread ")[2]
        lines = [one_line(line) for line in at_fault.splitlines()]
        ours = (_OURS, '"<string>"')  # what a kernel broke may be noticed there
        places = [each for each in lines if each.startswith("File ")]
        places = [each for each in places if not any(one in each for one in ours)]
        return ", ".join([what, *places[:1]])

    def _wait(self, *, writing: bool) -> None:
        """Return when the pipe is ready; all the while take in what the process prints."""
        descriptor = self._requests if writing else self.replies
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT if writing else select.POLLIN)
        for printed in self._printed:
            poll.register(printed, select.POLLIN)
        while True:
            gone = self.ended is not None
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise _Late
            ready = dict(poll.poll(0 if gone else 1000 * min(left, _PERIOD)))
            for printed in ready.keys() & self._printed.keys():
                if self._read_printed(printed) == b"":
                    poll.unregister(printed)
            if descriptor in ready:
                return
            if gone:
                raise _Ended

    @property
    def failed(self) -> bool:
        """True once ``send`` or ``receive`` raised Died, which the next one raises too."""
        return self._fate is not None

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors to wait for where there are many workers: of answers and of prints."""
        return (self.replies, *self._printed)

    def take_in(self, ready: Collection[int]) -> bool:
        """Take in what is printed on those of ``descriptors`` that are ready.

        Returns:
            Whether an answer, or the end of the process, is there to ``receive``.
        """
        for printed in set(ready) & self._printed.keys():
            if self._read_printed(printed) == b"":
                del self._printed[printed]  # at its end, which would be ready for ever
        return self.replies in ready or self.ended is not None

    @property
    def ended(self) -> int | None:
        """Its exit code, or minus the signal that it died of; None while it runs."""
        if self._process.returncode is not None:
            return self._process.returncode
        # It stays a zombie until its family is gone: else its number could be another's.
        state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if state is None:
            return None
        return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status

    def await_end(self, seconds: float) -> int | None:
        """Return ``ended`` after at most so many seconds; takes in what is printed until then."""
        deadline = time.monotonic() + seconds
        while self.ended is None and time.monotonic() < deadline:
            ready, _, _ = select.select(list(self._printed), [], [], _PAUSE)
            parts = [self._read_printed(printed) for printed in ready]
            if not any(parts):
                time.sleep(_PAUSE)  # at their end: there is nothing to wait for
        return self.ended

    def kill(self, seconds: float) -> None:
        """Kill it with all that it started; what it printed stays.

        Args:
            seconds: For how long to wait for the end of what a driver does not let go of.
        """
        if not self._owned:
            return
        kill_family(self._mark, self.pid)
        for printed in self._printed:
            left = _PIPE  # no more: whoever is not killed may write on
            while left > 0 and (part := self._read_printed(printed)):
                left -= len(part)
        for each in self._echoes.values():
            each.add(b"")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._forgotten.detach()
        self._release()

    def stop(self) -> None:
        """Write to it no more: it ends by itself, if it can."""
        if self._requests in self._owned:
            os.close(self._requests)
            self._owned.remove(self._requests)

    def end(self, seconds: float) -> None:
        """Let it end by itself for so long; then ``kill``."""
        self.stop()
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

    def _read_printed(self, printed: int) -> bytes | None:
        """Read what is there of it now: None for nothing, and no bytes at its end."""
        try:
            part = os.read(printed, _CHUNK)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        self._printed[printed].add(part)
        if part and printed in self._echoes:
            self._echoes[printed].add(part)
        return part


def _command(
    server: str, paths: tuple[str, ...], requests: int, replies: int, grace: float
) -> list[str]:
    # Linux ends a process with the thread that started it, which may end before this process does.
    bound = threading.current_thread() is threading.main_thread()
    code = _CODE.format(path=[*paths, *(entry for entry in sys.path if isinstance(entry, str))])
    numbers = (requests, replies, os.getpid(), int(bound))
    return [sys.executable, "-c", code, *map(str, numbers), server, str(grace)]


def _end_forgotten(process: subprocess.Popen[bytes], mark: str) -> None:
    kill_family(mark, process.pid)
    process.wait()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def oom_kills() -> int:
    """Return how many processes the machine has killed for want of memory; 0 where nobody counts.

    As far as this process can see: of the host, and of its control group (version 2).
    """
    try:
        group = Path("/proc/self/cgroup").read_text().strip().splitlines()[-1]
        events = group.rpartition(":")[2].lstrip("/")
    except (OSError, IndexError):
        events = ""
    counted = 0
    for place in (Path("/proc/vmstat"), Path("/sys/fs/cgroup") / events / "memory.events"):
        with suppress(OSError, ValueError):
            words = (line.split() for line in place.read_text().splitlines())
            counted += sum(int(w[1]) for w in words if len(w) == 2 and w[0] == "oom_kill")
    return counted
