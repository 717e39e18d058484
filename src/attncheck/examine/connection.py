"""A kernel's process, asked and answered; a new one takes the place of one that died."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from attncheck.errors import AttncheckError, UsageError
from attncheck.examine import memory_killer
from attncheck.examine.frames import KEY, BrokenFrame, Closed, Frame, Receiver, Sender
from attncheck.examine.process import Ended, Late, Process
from attncheck.inert import one_line

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Connection", "Deadlines", "Died", "HostError"]

_MOST_CASES = 500  # then a process is replaced: what a kernel leaves behind adds up
_MOST_GROWTH = 4 << 30  # bytes of memory that a process may hold beyond what it held at first
_CODE = "import sys; sys.path[:] = {path!r}; from attncheck.examine.worker import main; main()"
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
        self._kills = memory_killer.kills()
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
        if -code == signal.SIGKILL and memory_killer.kills() > self._kills:
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
