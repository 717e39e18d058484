"""Worker processes on this machine, each of which does one unit at a time.

It hears and answers on a socket that nobody else knows, so that what it prints is nothing but
print. It ends with the process that started it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from attncheck.core import json_numbers
from attncheck.core.errors import AttncheckError, UsageError
from attncheck.core.sanitize_text import one_line
from attncheck.workers.orphans import end
from attncheck.workers.units import Done, Unit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attncheck.workers.interruptions import Interruptions

__all__ = [
    "LARGEST",
    "NAME",
    "Limits",
    "ProcessPool",
    "Work",
    "WorkerError",
    "WorkerNews",
    "WorkerPlace",
    "WorkerPool",
    "WorkerReply",
    "WorkerSetup",
    "do_unit",
    "from_bytes",
    "main",
    "make_work",
    "to_bytes",
]


class Work(Protocol):
    """What a lane's process makes once, by the factory ``module:function`` of a run."""

    def do(self, unit: Unit) -> Done:
        """What comes of ``unit``. Raising costs a new process, and twice makes a harness error."""

    def close(self) -> None:
        """Ends what it has started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds that things may take.

    Attributes:
        unit: One unit, from being sent to its result, before its lane is taken for hung. Far above
            every deadline within.
        start: A lane, until it can do a unit.
        grace: Running units, where the time of a run is up.
        close: A lane, to end what it has started.
    """

    unit: float = 3600.0
    start: float = 600.0
    grace: float = 60.0
    close: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNews:
    """Something of a lane.

    Attributes:
        lane: Which.
        done: The result of the unit that it did.
        lost: Why it is gone, with the unit that it did; its place is free.
    """

    lane: int
    done: Done | None = None
    lost: str = ""


class WorkerPool(Protocol):
    """The lanes of a run, by number."""

    def staff(self, wanted: int, *, fresh: int) -> None:
        """Start lanes, up to the most that there may be.

        Args:
            wanted: How many there are to be, those that are being started counted.
            fresh: How many of them at least that have been given no unit.
        """

    def ready(self) -> Sequence[int]:
        """Lanes that can be given a unit now; those that have done none first."""

    def used(self, lane: int) -> bool:
        """Whether it has been given a unit."""

    def give(self, lane: int, unit: Unit) -> None:
        """It is to do ``unit``."""

    def drop(self, lane: int) -> None:
        """End it now, with all processes that it has started."""

    def news(self, seconds: float, interruptions: Interruptions) -> Sequence[WorkerNews]:
        """What happened; waits so long for something, or for an interrupt.

        Raises:
            AttncheckError: where lanes cannot be started.
        """


M = TypeVar("M", bound=msgspec.Struct)

LARGEST = 2**27
"""Bytes of the largest message."""

NAME = "ATTNCHECK_LANE"
"""The environment variable by which a lane and all processes that it starts are known."""

_PR_SET_PDEATHSIG = 1
_LONGEST_REASON = 500


class WorkerSetup(msgspec.Struct, kw_only=True):
    """The first message to a lane.

    Attributes:
        work: Its factory, ``module:function``.
        options: Of that.
    """

    work: str
    options: dict[str, Any]


class WorkerReply(msgspec.Struct, kw_only=True):
    """A message from a lane: it is ready, has done a unit, or ends since something was raised.

    Attributes:
        done: The result of the unit.
        raised: What was raised, in one line.
        usage: Whether that was a UsageError.
    """

    done: Done | None = None
    raised: str = ""
    usage: bool = False


def make_work(hello: WorkerSetup) -> tuple[Work | None, WorkerReply]:
    """The Work that a lane is told to make, and its answer; None where that says why not."""
    try:
        return _factory(hello.work)(**hello.options), WorkerReply()
    except Exception as error:  # noqa: BLE001  # the other side says it
        return None, WorkerReply(raised=_reason(error), usage=isinstance(error, UsageError))


def do_unit(work: Work, raw: bytes) -> WorkerReply:
    """The answer to the message that is a unit."""
    try:
        return WorkerReply(done=work.do(from_bytes(raw, Unit)))
    except BaseException as error:  # noqa: BLE001  # a new lane tries once more, and says it
        return WorkerReply(raised=_reason(error))


def to_bytes(message: msgspec.Struct) -> bytes:
    """A message, for ``from_bytes`` of its type."""
    try:
        return msgspec.msgpack.encode(message)
    except UnicodeEncodeError:  # a lone surrogate in a foreign text
        return msgspec.msgpack.encode(json_numbers.to_plain_data(message))


def from_bytes(raw: bytes, kind: type[M]) -> M:
    """The message that ``to_bytes`` has made.

    Raises:
        msgspec.MsgspecError: for anything else.
    """
    return msgspec.msgpack.decode(raw, type=kind)


def main(descriptor: int, parent: int) -> None:
    """The life of a lane.

    Args:
        descriptor: Of the socket.
        parent: Process that started it.
    """
    _die_with(parent)
    with Connection(descriptor) as socket:
        work, first = make_work(from_bytes(socket.recv_bytes(LARGEST), WorkerSetup))
        socket.send_bytes(to_bytes(first))
        if work is None:
            return
        try:
            while raw := _next(socket):
                answer = do_unit(work, raw)
                socket.send_bytes(to_bytes(answer))
                if answer.raised:
                    return
        finally:
            work.close()


def _factory(work: str) -> Callable[..., Work]:
    module, _, function = work.partition(":")
    try:
        factory: Callable[..., Work] = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"no work {work!r}: {_reason(error)}.") from error
    return factory


def _reason(error: BaseException) -> str:
    """What was raised, in one line."""
    text = one_line(str(error))
    kind = type(error).__name__
    said = text if isinstance(error, AttncheckError) else f"{kind}: {text}" if text else kind
    return said if len(said) <= _LONGEST_REASON else f"{said[:_LONGEST_REASON]}…"


def _next(socket: Connection) -> bytes:
    """The next message; empty where there is none, since the other side has closed."""
    try:
        return socket.recv_bytes(LARGEST)
    except (EOFError, ConnectionError):
        return b""


def _die_with(parent: int) -> None:
    """SIGKILL as soon as the process ``parent`` is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)


_MOST_FAILED_STARTS = 3
_LAST_WORDS = 2000  # bytes of what a lane that died has printed

# Not -m: the lane finds modules where this process does, and not in the folder that it is in.
_CODE = (
    "import sys; sys.path[:] = {path!r}; from attncheck.workers.worker_pool import main; "
    "main({descriptor}, {parent})"
)


class WorkerError(AttncheckError):
    """No lane can be started; the command line exits with 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
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


class ProcessPool:
    """A ``dispatch.Crew`` of processes here; see there for what its methods do."""

    def __init__(
        self, lanes: Sequence[WorkerPlace], hello: WorkerSetup, name: str, limits: Limits
    ) -> None:
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

    def news(self, seconds: float, interruptions: Interruptions) -> list[WorkerNews]:
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
            raise WorkerError(f"no process can be started: {error.strerror}.") from None
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

    def _hear(self, number: int) -> WorkerNews | None:
        lane = self._lanes[number]
        try:
            answered = from_bytes(lane.socket.recv_bytes(LARGEST), WorkerReply)
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
        return WorkerNews(lane=number, done=answered.done)

    def _gone(self, number: int, why: str) -> WorkerNews | None:
        ready = self._lanes[number].ready
        self.drop(number)
        if ready:
            return WorkerNews(lane=number, lost=why)
        self._fail(why)
        return None

    def _fail(self, why: str) -> None:
        """A lane was lost before it could do anything."""
        self._failed += 1
        if self._failed >= _MOST_FAILED_STARTS:
            raise WorkerError(f"the processes that do the work cannot be started: {why}.")

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
