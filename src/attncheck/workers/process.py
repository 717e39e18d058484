"""A worker: a child process that answers requests, and is killed with all of its descendants.

Both kernels that may crash and units of a run are executed in such processes, which communicate by
``transport``. A worker runs ``worker_main``, which makes a server, ``module:function``, that
answers the requests.
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
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from attncheck.core.errors import HostError
from attncheck.core.sanitize_text import one_line
from attncheck.core.source_files import is_of_kernel
from attncheck.workers.reaper import MARK, kill_family, new_mark
from attncheck.workers.transport import KEY, BrokenFrame, Closed, Frame, Receiver, Sender

KERNEL_SERVER = "attncheck.verify.kernel_server:KernelServer"
"""Server of a worker that runs a user's kernel; named here to spare its import."""

KEPT = 1 << 16  # Bytes of a process's output that are kept; the last ones.

_CHUNK = 1 << 16  # Bytes that are read at a time.
# Beginnings of glibc's messages about a corrupted heap.
_HEAP = ("malloc", "realloc", "free()", "munmap_chunk", "corrupted", "double free")
_DUMP = b"Fatal Python error: "  # Beginning of faulthandler's output.
_PIPE = 1 << 20  # Bytes that a pipe can hold at most.
_PERIOD = 0.1  # Seconds between two checks whether a silent process is alive.
_PAUSE = 0.02  # Seconds between two checks whether a process that should end has ended.
_LAST_LINES = 3  # Lines of standard error that are quoted in a message.
_HELD_LINES = 20  # Lines that a HeldOutput shows at most.
_LONGEST_LINE = 300  # Characters of a quoted line.
_OURS = f"{Path(__file__).parents[1]}{os.sep}"  # Folder of attncheck's modules.

# The worker uses this process's sys.path, without its own working directory.
_CODE = "import sys; sys.path[:] = {path!r}; from attncheck.workers.worker_main import run; run()"


class Died(HostError):
    """A worker died, was killed at its deadline, or ran out of memory.

    Attributes:
        kind: ``crash``, ``timeout`` or ``oom``.
        trace: The end of its standard error.
    """

    def __init__(self, kind: str, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.kind, self.trace = kind, trace


class _Ended(Exception):
    """The process has ended."""


class _Late(Exception):
    """The deadline has passed."""


class Tail:
    """The last ``KEPT`` bytes of an output stream."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def add(self, part: bytes) -> None:
        """Append ``part``, and drop the oldest bytes beyond the limit."""
        self._kept += part
        del self._kept[:-KEPT]

    @property
    def text(self) -> str:
        """The kept output, decoded."""
        return self._kept.decode(errors="replace")

    def lines(self, count: int) -> str:
        """Return the last ``count`` nonempty lines, sanitized and joined into one."""
        lines = [line for line in map(one_line, self.text.splitlines()) if line]
        return " | ".join(line[-_LONGEST_LINE:] for line in lines[-count:])


class HeldOutput:
    """The last lines that processes printed, held until it is known whether they are wanted.

    Args:
        kernel: Who printed them.
        verb: What precedes ``-v``, with which all lines are shown.
    """

    def __init__(self, kernel: str = "the kernel", verb: str = "") -> None:
        self._kernel, self._verb = one_line(kernel), verb
        self._size, self._count = 0, 0  # Bytes and lines, with repetitions.
        self._last: deque[str] = deque(maxlen=_HELD_LINES)

    def add(self, size: int, count: int, output: str) -> None:
        """Hold ``output``, which stands for ``count`` printed lines in ``size`` bytes."""
        self._size, self._count = self._size + size, self._count + count
        self._last.extend(output.splitlines())

    def show(self, *, passed: bool) -> None:
        """Show the last lines on standard error and forget them; of a pass only their number."""
        lines = list(self._last)
        count = f"{self._kernel} printed {self._count:,} lines in all its calls"
        shown = "them" if self._size <= KEPT else f"the first {KEPT >> 10} KiB of them"
        hint = f"{self._verb}-v shows {shown}"
        self._last.clear()
        if passed and lines[1:]:
            lines = [f"attncheck: {count}: {hint}."]
        elif self._count > len(lines) == _HELD_LINES:
            lines.insert(0, f"attncheck: {count} ({hint}), and last:")
        _show("".join(f"{line}\n" for line in lines))


class _Echo:
    """Copies a process's output, as sanitized whole lines, to standard error or a HeldOutput.

    Repetitions of a line are not shown, only counted. Standard error gets only the beginning.
    """

    def __init__(self, held: HeldOutput | None) -> None:
        self._held = held
        self._line, self._left = b"", sys.maxsize if held else KEPT
        self._last, self._repeats = "", 0  # The last line shown, and its repetitions since.

    def add(self, part: bytes) -> None:
        """Show the lines that end in ``part``; an empty ``part`` ends the last line."""
        is_cut, part = len(part) > self._left, part[: self._left]
        self._left -= len(part)
        *lines, rest = (self._line + (part or b"\n")).split(b"\n")
        self._line = rest[-KEPT:]
        dumps = [i for i, line in enumerate(lines) if line.startswith(_DUMP)]
        if dumps:  # the error message will quote it
            # Also the beginning of a line of it, whose rest is in the next part.
            self._line, self._left, lines = b"", 0, lines[: dumps[0]]
        texts = [one_line(line.decode(errors="replace")) for line in lines]
        texts += ["… what else the kernel prints is not shown"] if is_cut and part else []
        output = "".join(self._lines_to_show(text) for text in texts if text)
        output += "" if part else self._lines_to_show("")
        if self._held is None:
            _show(output)
        else:
            self._held.add(len(part), sum(map(bool, texts)), output)

    def _lines_to_show(self, text: str) -> str:
        """Return ``text`` as a line, preceded by a line with its predecessor's repetitions."""
        if text == self._last:
            self._repeats += 1
            return ""
        before = f"{self._last} ({self._repeats} times more)\n" if self._repeats else ""
        self._last, self._repeats = text, 0
        return f"{before}{text}\n" if text else before


def _show(output: str) -> None:
    with suppress(AttributeError, OSError, ValueError):  # nobody reads it
        sys.stderr.write(output)
        sys.stderr.flush()


class Worker:
    """A child process in a session of its own, with a pipe in each direction.

    Its output is read only within ``receive``, ``send`` and ``take_in``; a child that fills its
    output pipe between requests blocks until the next request.

    Args:
        server: The server that answers requests, ``module:function``.
        environment: Environment variables that are set besides those of this process.
        folder: Working directory; empty for that of this process.
        paths: Folders that precede the module search path of the child and its descendants.
        mark: Mark in the environment of the child and its descendants; a new one by default.
        grace: Seconds in which the child may end by itself after its request pipe is closed.
        echo: Whether the beginning of its output is shown on standard error; or what holds its
            output, to be shown later.

    Attributes:
        replies: Non-blocking descriptor of the pipe with answers.
        stdout, stderr: The end of its output.
        echoes: See ``echo``.
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
        echo: bool | HeldOutput = False,
    ) -> None:
        self._mark = mark or new_mark()
        its_requests, self._requests = os.pipe()
        self.replies, its_replies = os.pipe()
        self._owned = [self._requests, self.replies]
        child_environment = {**os.environ, **(environment or {}), MARK: self._mark}
        if paths:
            places = (*paths, os.environ.get("PYTHONPATH", ""))
            child_environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
        self._oom_kills = oom_kills()
        try:
            self._process = subprocess.Popen(  # noqa: S603  # this Python, our own code
                _command(server, paths, its_requests, its_replies, grace),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd=folder or None,
                env=child_environment,
                pass_fds=(its_requests, its_replies),
                start_new_session=True,  # a Ctrl-C in the terminal must not reach it
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
        held = echo if isinstance(echo, HeldOutput) else None
        self._echoes = {each: _Echo(held) for each in self._printed if echo}
        for descriptor in (self._requests, self.replies, *self._printed):
            os.set_blocking(descriptor, False)
        # A worker that is garbage collected is killed.
        self._forgotten = weakref.finalize(self, _end_forgotten, self._process, self._mark)
        key = secrets.token_bytes(KEY)
        os.write(self._requests, key)
        self._deadline = 0.0
        self._fate: Died | None = None
        self._sender, self._receiver = Sender(self._requests, key), Receiver(self.replies, key)

    def exchange(self, frame: Frame | None, *, seconds: float, most: int, what: str) -> Frame:
        """Send ``frame``, if it is not None, and return the answer to the last request.

        Args:
            seconds: Time limit.
            most: Largest number of bytes besides JSON in the answer.
            what: The request, for the message of a timeout.

        Raises:
            Died: if there is no answer, or ``send`` has raised it before; the worker is killed.
        """
        if self._fate is not None:
            raise self._fate
        self._deadline = time.monotonic() + seconds
        try:
            if frame is not None:
                self._sender.send(frame, lambda: self._wait(writing=True))
            return self._receiver.receive(most=most, ready=lambda: self._wait(writing=False))
        except BaseException as error:  # noqa: BLE001  # sorted by ``_fail``
            self._fail(error, seconds, what)

    def send(self, frame: Frame, *, seconds: float) -> None:
        """Send a request, to be answered by a later ``receive``; raise Died if that fails."""
        self._deadline = time.monotonic() + seconds
        try:
            self._sender.send(frame, lambda: self._wait(writing=True))
        except BaseException as error:  # noqa: BLE001  # sorted by ``_fail``
            self._fail(error, seconds, "a request")

    def receive(self, *, seconds: float, most: int) -> Frame:
        """Return the answer to the request sent; raise Died if there is none, or ``send`` did."""
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
        full_message = f"{message}; it said: {last}" if last else f"{message}."
        self._fate = Died(kind, full_message, trace)
        raise self._fate from None

    def _cause_of_death(self, code: int | None) -> tuple[str, str]:
        """Return the kind and the message of an unexpected end of the process."""
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
        """Return the line of standard error before faulthandler's output, or else the last one."""
        before = self.stderr.text.rpartition(_DUMP.decode())[0] or self.stderr.text
        return (before.splitlines() or [""])[-1]

    def _last_words(self) -> str:
        """Return the last lines of standard error, or the error and place from faulthandler."""
        _, fatal, dump = self.stderr.text.rpartition(_DUMP.decode())
        if not fatal:
            return self.stderr.lines(_LAST_LINES)
        what = one_line(dump.partition("\n")[0])
        last = self._before_dump()
        if last.startswith(_HEAP):
            what = f"{one_line(last)[:_LONGEST_LINE]}, {what}"
        # Other threads, such as the one that listens for requests, are dumped before it.
        at_fault = dump.rpartition("Current thread ")[2]
        lines = [one_line(line) for line in at_fault.splitlines()]
        ours = (_OURS, '"<string>"')  # Our frames, where damage by a kernel may show up.
        places = [each for each in lines if each.startswith("File ")]
        places = [each for each in places if not any(one in each for one in ours)]
        own = [each for each in places if is_of_kernel(each.partition('"')[2].partition('"')[0])]
        return ", ".join([what, *(own or places)[:1]])

    def _wait(self, *, writing: bool) -> None:
        """Wait until the pipe is ready, while reading the process's output."""
        descriptor = self._requests if writing else self.replies
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT if writing else select.POLLIN)
        for printed in self._printed:
            poll.register(printed, select.POLLIN)
        while True:
            has_ended = self.ended is not None
            seconds_left = self._deadline - time.monotonic()
            if seconds_left <= 0:
                raise _Late
            ready = dict(poll.poll(0 if has_ended else 1000 * min(seconds_left, _PERIOD)))
            for printed in ready.keys() & self._printed.keys():
                if self._read_printed(printed) == b"":
                    poll.unregister(printed)
            if descriptor in ready:
                return
            if has_ended:
                raise _Ended

    @property
    def failed(self) -> bool:
        """Whether ``send`` or ``receive`` raised Died, which further calls raise again."""
        return self._fate is not None

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors of answers and output, to wait for many workers at once."""
        return (self.replies, *self._printed)

    def take_in(self, ready: Collection[int]) -> bool:
        """Read the output from those of ``descriptors`` that are ``ready``.

        Returns:
            Whether ``receive`` has an answer, or the end of the process, to report.
        """
        for printed in set(ready) & self._printed.keys():
            if self._read_printed(printed) == b"":
                del self._printed[printed]  # at its end a descriptor is always ready
        return self.replies in ready or self.ended is not None

    @property
    def ended(self) -> int | None:
        """Exit code, or minus the number of the fatal signal; None while it runs."""
        if self._process.returncode is not None:
            return self._process.returncode
        # WNOWAIT keeps it a zombie until its descendants are killed, so that its pid is not reused.
        state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if state is None:
            return None
        return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status

    def await_end(self, seconds: float) -> int | None:
        """Wait up to ``seconds`` for the end while reading output, and return ``ended``."""
        deadline = time.monotonic() + seconds
        while self.ended is None and time.monotonic() < deadline:
            ready, _, _ = select.select(list(self._printed), [], [], _PAUSE)
            parts = [self._read_printed(printed) for printed in ready]
            if not any(parts):
                time.sleep(_PAUSE)  # output is closed, so that select does not wait
        return self.ended

    def kill(self, seconds: float) -> None:
        """Kill the process and its descendants; its output stays available.

        Args:
            seconds: How long to wait for a process that a driver keeps from ending.
        """
        if not self._owned:
            return
        kill_family(self._mark, self.pid)
        for printed in self._printed:
            bytes_left = _PIPE  # a limit, since a survivor may go on writing
            while bytes_left > 0 and (part := self._read_printed(printed)):
                bytes_left -= len(part)
        for each in self._echoes.values():
            each.add(b"")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._forgotten.detach()
        self._release()

    def stop(self) -> None:
        """Close the request pipe, which asks the worker to end."""
        if self._requests in self._owned:
            os.close(self._requests)
            self._owned.remove(self._requests)

    def end(self, seconds: float) -> None:
        """Ask the worker to end, and kill it after ``seconds``."""
        self.stop()
        self.await_end(seconds)
        self.kill(seconds)

    @property
    def memory(self) -> int:
        """Bytes of memory that it holds; 0 if unknown."""
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
        """Read available output; None if there is none now, ``b""`` at its end."""
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
    # Linux binds PR_SET_PDEATHSIG to the thread that starts the child, which may end early.
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
    """Return how many processes were killed for lack of memory; 0 if unknown.

    Counts those of the host and of this process's control group (version 2).
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
