"""The lanes of one machine: processes, each with a socket of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import IO, TYPE_CHECKING

import msgspec

from attncheck.errors import AttncheckError, UsageError
from attncheck.inert import one_line
from attncheck.runner.crew import News
from attncheck.runner.lane import LARGEST, NAME, Answered, Hello, from_bytes, to_bytes
from attncheck.runner.orphans import end

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.runner.crew import Limits
    from attncheck.runner.interruptions import Interruptions
    from attncheck.runner.unit import Unit

__all__ = ["Lane", "LaneError", "Processes"]

_MOST_FAILED_STARTS = 3
_LAST_WORDS = 2000  # bytes of what a lane that died has printed

# Not -m: the lane finds modules where this process does, and not in the folder that it is in.
_CODE = (
    "import sys; sys.path[:] = {path!r}; from attncheck.runner.lane import main; "
    "main({descriptor}, {parent})"
)


class LaneError(AttncheckError):
    """No lane can be started; the command line exits with 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Where one lane works.

    Attributes:
        gpu: What CUDA_VISIBLE_DEVICES is there; empty to leave it as it is here.
        threads: What OMP_NUM_THREADS is there; 0 to leave it as it is here.
    """

    gpu: str = ""
    threads: int = 0

    def environment(self) -> dict[str, str]:
        """What is another there than here."""
        environment = {}
        if self.gpu:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpu
        if self.threads:
            environment["OMP_NUM_THREADS"] = str(self.threads)
        return environment


@dataclass(slots=True, kw_only=True)
class _Process:
    """One lane that lives."""

    process: subprocess.Popen[bytes]
    socket: Connection
    printed: IO[bytes]
    name: str
    began: float = field(default_factory=time.monotonic)
    ready: bool = False
    used: bool = False
    busy: bool = False


class Processes:
    """A ``dispatch.Crew`` of processes here; see there for what its methods do."""

    def __init__(self, lanes: Sequence[Lane], hello: Hello, name: str, limits: Limits) -> None:
        """None is started.

        Args:
            lanes: Where each works.
            hello: What each is told first.
            name: By which they and what they start are known.
            limits: Of time.
        """
        self._places, self._hello, self._name, self._limits = list(lanes), hello, name, limits
        self._lanes: dict[int, _Process] = {}
        self._failed = self._started = 0

    def staff(self, wanted: int, *, fresh: int) -> None:
        """See ``Crew``; at most one for each place."""
        unused = sum(not lane.used for lane in self._lanes.values())
        for place in range(len(self._places)):
            if len(self._lanes) >= wanted and unused >= fresh:
                return
            if place not in self._lanes:
                self._lanes[place] = self._start(place)
                unused += 1

    def ready(self) -> list[int]:
        """See ``Crew``."""
        free = [n for n, lane in self._lanes.items() if lane.ready and not lane.busy]
        return sorted(free, key=lambda n: (self._lanes[n].used, n))

    def used(self, lane: int) -> bool:
        """See ``Crew``."""
        return lane in self._lanes and self._lanes[lane].used

    def give(self, lane: int, unit: Unit) -> None:
        """See ``Crew``."""
        one = self._lanes[lane]
        one.used = one.busy = True
        _send(one.socket, unit)

    def drop(self, lane: int) -> None:
        """See ``Crew``; it is killed, with all processes that carry its name."""
        one = self._lanes.pop(lane)
        one.process.kill()
        one.process.wait()
        end(NAME, one.name)
        one.socket.close()
        one.printed.close()

    def news(self, seconds: float, interruptions: Interruptions) -> list[News]:
        """See ``Crew``."""
        sockets = {lane.socket: number for number, lane in self._lanes.items()}
        heard = wait([*sockets, interruptions.fileno()], seconds)
        interruptions.heard()
        news = [self._hear(sockets[one]) for one in heard if isinstance(one, Connection)]
        now = time.monotonic()
        for number, lane in list(self._lanes.items()):
            if not lane.ready and now - lane.began > self._limits.start:
                self._fail(f"it is not ready within {self._limits.start:g} s")
                self.drop(number)
        return [one for one in news if one is not None]

    def close(self) -> None:
        """End all: those that do nothing may end what they have started first."""
        for number, lane in list(self._lanes.items()):
            if lane.busy or not lane.ready:
                self.drop(number)
            else:
                lane.socket.close()  # it hears that
        until = time.monotonic() + self._limits.close
        for number, lane in list(self._lanes.items()):
            with suppress(subprocess.TimeoutExpired):
                lane.process.wait(max(0.0, until - time.monotonic()))
            self.drop(number)

    def _start(self, place: int) -> _Process:
        self._started += 1
        name = f"{self._name}.{self._started}."
        ours, theirs = socket.socketpair()
        printed = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the lane is dropped
        try:
            process = self._launch(theirs.fileno(), printed, self._environment(place, name))
        except OSError as error:
            raise LaneError(f"no process can be started: {error.strerror}.") from None
        theirs.close()
        connection = Connection(ours.detach())
        _send(connection, self._hello)
        return _Process(process=process, socket=connection, printed=printed, name=name)

    def _environment(self, place: int, name: str) -> dict[str, str]:
        return os.environ | self._places[place].environment() | {NAME: name}

    def _launch(
        self, descriptor: int, printed: IO[bytes], environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        """A process whose ``lane.main`` hears on ``descriptor``."""
        path = [entry for entry in sys.path if isinstance(entry, str)]
        code = _CODE.format(path=path, descriptor=descriptor, parent=os.getpid())
        return subprocess.Popen(  # noqa: S603  # our own code
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=[descriptor],
            start_new_session=True,  # the terminal's Ctrl-C is ours to hear
        )

    def _hear(self, number: int) -> News | None:
        lane = self._lanes[number]
        try:
            answered = from_bytes(lane.socket.recv_bytes(LARGEST), Answered)
        except (EOFError, OSError, msgspec.MsgspecError) as error:
            return self._gone(number, self._obituary(lane, error))
        if answered.raised:
            if answered.usage and not lane.ready:
                raise UsageError(answered.raised)
            return self._gone(number, answered.raised)
        if not lane.ready:
            lane.ready, self._failed = True, 0
            return None
        lane.busy = False
        return News(lane=number, done=answered.done)

    def _gone(self, number: int, why: str) -> News | None:
        ready = self._lanes[number].ready
        self.drop(number)
        if ready:
            return News(lane=number, lost=why)
        self._fail(why)
        return None

    def _fail(self, why: str) -> None:
        """A lane was lost before it could do anything."""
        self._failed += 1
        if self._failed >= _MOST_FAILED_STARTS:
            raise LaneError(f"the processes that do the work cannot be started: {why}.")

    def _obituary(self, lane: _Process, error: Exception) -> str:
        """How it died, and the last line that it printed."""
        with suppress(subprocess.TimeoutExpired):
            lane.process.wait(1.0)
        code = lane.process.poll()
        how = (
            f"its process sent what is no answer: {one_line(str(error))}"
            if code is None
            else f"its process died: {_death(code)}"
        )
        size = lane.printed.seek(0, os.SEEK_END)
        lane.printed.seek(max(0, size - _LAST_WORDS))
        words = lane.printed.read().decode(errors="replace").strip().splitlines()
        return f"{how} ({one_line(words[-1])[:300]})" if words and words[-1].strip() else how


def _send(socket_: Connection, message: msgspec.Struct) -> None:
    with suppress(ConnectionError):  # it is gone, which is heard when it is waited for
        socket_.send_bytes(to_bytes(message))


def _death(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
