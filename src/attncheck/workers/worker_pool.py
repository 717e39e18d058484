"""Pools of workers that do one unit at a time: their messages, and a pool on this machine.

``ray_pool`` has the pool on a cluster. In both, a worker makes its ``Work`` once, does one unit
after the other, and is replaced when it is lost.
"""

from __future__ import annotations

import selectors
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from msgspec.msgpack import decode

from attncheck.core import json_numbers
from attncheck.core.errors import AttncheckError, UsageError
from attncheck.core.sanitize_text import one_line
from attncheck.workers.interruptions import Interruptions
from attncheck.workers.process import Died, Worker
from attncheck.workers.transport import Frame
from attncheck.workers.units import Unit, UnitResult

_LARGEST = 1 << 27  # Bytes of the largest message.
_LONGEST_REASON = 500  # Characters of the text of an exception.
_MOST_FAILED_STARTS = 3  # Workers that fail to start in a row before the run ends.
_SEND = 60.0  # Seconds after which a worker that does not read, or stops amid a reply, is lost.


class WorkerError(AttncheckError):
    """No worker can be started; the command line exits with 3."""


class Work(Protocol):
    """The object that does units in a worker, made once by the run's factory."""

    def do(self, unit: Unit) -> UnitResult:
        """Do ``unit``; if this raises, it is repeated in a new process, and then given up."""

    def close(self) -> None:
        """End all processes that it has started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Time limits in seconds."""

    # For one unit, after which its worker counts as hung; far above all deadlines within a unit.
    unit: float = 3600.0
    start: float = 600.0  # For a new worker to become ready for a unit.
    grace: float = 10.0  # For running questions after the time of the run is up.
    close: float = 10.0  # For a worker to end the processes that it has started.


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """The place of one worker on this machine."""

    gpu: str = ""  # The worker's CUDA_VISIBLE_DEVICES; empty to inherit it.
    threads: int = 0  # The worker's OMP_NUM_THREADS; 0 to inherit it.

    def environment(self) -> dict[str, str]:
        """Return the environment variables to set in the worker."""
        threads = str(self.threads) if self.threads else ""
        named = {"CUDA_VISIBLE_DEVICES": self.gpu, "OMP_NUM_THREADS": threads}
        return {name: value for name, value in named.items() if value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A Ray cluster whose nodes do the work, in place of this machine."""

    # ``auto`` for the cluster that this machine is a node of; ``local`` for a cluster that lives
    # as long as the run.
    address: str
    device: str = "cpu"  # With ``cuda`` each worker has a GPU of its own, with ``cpu`` a core.
    most: int | None = None  # Largest number of workers; None for one on each GPU or core.


class WorkerSetup(msgspec.Struct, kw_only=True):
    """The first message to a worker."""

    work: str  # Factory of the Work, ``module:function``.
    options: dict[str, Any]  # Keyword arguments of the factory.


class WorkerReply(msgspec.Struct, kw_only=True):
    """A message from a worker: it is ready, has done a unit, or an exception was raised."""

    done: UnitResult | None = None  # The result of the unit.
    raised: str = ""  # The exception that was raised, in one line; empty for none.
    usage: bool = False  # Whether the exception is a UsageError.


def to_bytes(message: msgspec.Struct) -> bytes:
    """Return ``message`` in MessagePack."""
    try:
        return msgspec.msgpack.encode(message)
    except UnicodeEncodeError:  # a lone surrogate in a foreign text
        return msgspec.msgpack.encode(json_numbers.to_plain_data(message))


def _reason(error: BaseException) -> str:
    """Return an exception in one line, with its type unless it is attncheck's own."""
    text = one_line(str(error))
    kind = type(error).__name__
    line = text if isinstance(error, AttncheckError) else f"{kind}: {text}" if text else kind
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]}…"


class UnitServer:
    """Server of a worker: the first request makes the Work, each further one does a unit."""

    def __init__(self) -> None:
        self._work: Work | None = None

    def answer(self, request: Frame) -> Frame:
        """Return the reply to a setup or a unit."""
        if self._work is None:
            reply = self._make_work(decode(request.data, type=WorkerSetup))
        else:
            try:
                reply = WorkerReply(done=self._work.do(decode(request.data, type=Unit)))
            except BaseException as error:  # noqa: BLE001  # reported, and retried by a new worker
                reply = WorkerReply(raised=_reason(error))
        return Frame(kind="reply", words={}, data=to_bytes(reply))

    def _make_work(self, setup: WorkerSetup) -> WorkerReply:
        module, _, function = setup.work.partition(":")
        try:
            factory: Callable[..., Work] = getattr(import_module(module), function)
        except (ImportError, AttributeError, ValueError) as error:
            # The caller misspelt the factory: other processes would fail too.
            reason = f"no work {setup.work!r}: {_reason(error)}."
            return WorkerReply(raised=reason, usage=True)
        try:
            self._work = factory(**setup.options)
        except Exception as error:  # noqa: BLE001  # reported to the other side
            return WorkerReply(raised=_reason(error), usage=isinstance(error, UsageError))
        return WorkerReply()

    def close(self) -> None:
        """End what the Work has started."""
        if self._work is not None:
            self._work.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNews:
    """A worker has done its unit, or was lost."""

    worker: int
    done: UnitResult | None = None  # The result of the unit.
    lost: str = ""  # Why the worker was lost, together with its unit; its place is free.


H = TypeVar("H")


@dataclass(slots=True, kw_only=True)
class Member(Generic[H]):
    """A living worker, and its state."""

    handle: H
    busy: Any = None  # True, or a pending reply, while it starts or does a unit; None when idle.
    began: float = field(default_factory=time.monotonic)
    ready: bool = False
    used: bool = False


class WorkerPool(ABC, Generic[H]):
    """The workers of a run, by number."""

    def __init__(self, setup: WorkerSetup, limits: Limits) -> None:
        """Create a pool without workers."""
        self._setup, self._limits = to_bytes(setup), limits
        self._members: dict[int, Member[H]] = {}
        self._failed = 0

    @abstractmethod
    def staff(self, wanted: int, *, fresh: int) -> None:
        """Start workers, up to the pool's maximum.

        Args:
            wanted: Number of workers to reach, including those that are starting.
            fresh: Number of unused workers to reach, even if this takes more than ``wanted``.
        """

    @abstractmethod
    def give(self, worker: int, unit: Unit) -> None:
        """Let ``worker`` do ``unit``."""

    @abstractmethod
    def drop(self, worker: int) -> None:
        """Kill ``worker`` now, with all processes that it has started."""

    @abstractmethod
    def news(self, seconds: float, interruptions: Interruptions) -> Sequence[WorkerNews]:
        """Wait up to ``seconds`` for results, losses or an interrupt, and return the news.

        Raises:
            UsageError: if the factory of the Work raised one.
            WorkerError: if workers cannot be started.
        """

    @abstractmethod
    def close(self) -> None:
        """End all workers; idle ones may first end the processes that they have started."""

    def ready(self) -> list[int]:
        """Return the idle workers, unused ones first."""
        free = [n for n, member in self._members.items() if member.ready and member.busy is None]
        # Unused workers come first, for units that need one.
        return sorted(free, key=lambda n: (self._members[n].used, n))

    def used(self, worker: int) -> bool:
        """Return whether ``worker`` has been given a unit."""
        return worker in self._members and self._members[worker].used

    def _unused(self) -> int:
        return sum(not member.used for member in self._members.values())

    def _handle_reply(self, number: int, reply: WorkerReply) -> WorkerNews | None:
        """Process a reply and return its news, if any; drop the worker if it raised."""
        member = self._members[number]
        if reply.raised:
            # After an exception the process may be in any state.
            self.drop(number)
            if member.ready:
                return WorkerNews(worker=number, lost=reply.raised)
            if reply.usage:
                raise UsageError(reply.raised)
            self._count_failed_start(reply.raised)
            return None
        member.busy = None
        if member.ready:
            return WorkerNews(worker=number, done=reply.done)
        # Workers can be started, so that earlier failures were accidental.
        member.ready, self._failed = True, 0
        return None

    def _late_starts(self) -> list[int]:
        now = time.monotonic()
        return [
            number
            for number, member in self._members.items()
            if not member.ready and now - member.began > self._limits.start
        ]

    def _count_failed_start(self, why: str) -> None:
        """Count a worker that was lost before it could do anything."""
        self._failed += 1
        if self._failed >= _MOST_FAILED_STARTS:
            raise WorkerError(f"the processes that do the work cannot be started: {why}.")


class LocalPool(WorkerPool[Worker]):
    """Workers that are processes of this machine, spawned, never forked.

    Args:
        places: Places of workers, with at most one process each.
        mark: Prefix of the workers' marks.
    """

    def __init__(
        self, places: Sequence[WorkerPlace], setup: WorkerSetup, mark: str, limits: Limits
    ) -> None:
        super().__init__(setup, limits)
        self._places, self._mark, self._started = list(places), mark, 0

    def staff(self, wanted: int, *, fresh: int) -> None:
        """See ``WorkerPool``; starts at most one worker for each place."""
        for number, place in enumerate(self._places):
            if len(self._members) >= wanted and self._unused() >= fresh:
                return
            if number not in self._members:
                self._members[number] = Member(handle=self._start(place), busy=True)

    def _start(self, place: WorkerPlace) -> Worker:
        self._started += 1
        try:
            worker = Worker(
                f"{__name__}:UnitServer",
                environment=place.environment(),
                mark=f"{self._mark}{self._started}.",
                grace=self._limits.close,
            )
        except OSError as error:
            raise WorkerError(f"no process can be started: {error.strerror}.") from None
        self._send(worker, self._setup)
        return worker

    def give(self, worker: int, unit: Unit) -> None:
        """See ``WorkerPool``."""
        member = self._members[worker]
        member.used = member.busy = True
        self._send(member.handle, to_bytes(unit))

    def _send(self, worker: Worker, message: bytes) -> None:
        with suppress(Died):  # it is killed, which ``news`` will report
            worker.send(Frame(kind="unit", words={}, data=message), seconds=_SEND)

    def drop(self, worker: int) -> None:
        """See ``WorkerPool``."""
        self._members.pop(worker).handle.kill(self._limits.close)

    def news(self, seconds: float, interruptions: Interruptions) -> list[WorkerNews]:
        """See ``WorkerPool``."""
        ready = self._ready_descriptors(seconds, interruptions)
        interruptions.clear()
        news = []
        for number, member in list(self._members.items()):
            if member.handle.failed or member.handle.take_in(ready):
                news.append(self._handle_reply(number, self._reply(member.handle)))
        for number in self._late_starts():
            self.drop(number)
            self._count_failed_start(f"it is not ready within {self._limits.start:g} s")
        return [one for one in news if one is not None]

    def _ready_descriptors(self, seconds: float, interruptions: Interruptions) -> set[int]:
        workers = [member.handle for member in self._members.values()]
        # A worker that died while it was written to makes no descriptor ready.
        if any(worker.failed for worker in workers):
            return set()
        with selectors.DefaultSelector() as selector:
            selector.register(interruptions.fileno(), selectors.EVENT_READ)
            for worker in workers:
                for descriptor in worker.descriptors:
                    selector.register(descriptor, selectors.EVENT_READ)
            return {key.fd for key, _ in selector.select(seconds)}

    def _reply(self, worker: Worker) -> WorkerReply:
        try:
            frame = worker.receive(seconds=_SEND, most=_LARGEST)
            return decode(frame.data, type=WorkerReply)
        except Died as error:
            return WorkerReply(raised=str(error).removesuffix("."))
        except msgspec.MsgspecError as error:
            return WorkerReply(raised=f"its process sent what is no answer: {one_line(str(error))}")

    def close(self) -> None:
        """See ``WorkerPool``."""
        for number, member in list(self._members.items()):
            if member.busy or not member.ready:
                self.drop(number)
            else:
                member.handle.stop()
        # Only wait once all have been told to stop, so that they end concurrently.
        until = time.monotonic() + self._limits.close
        for number, member in list(self._members.items()):
            member.handle.await_end(max(0.0, until - time.monotonic()))
            self.drop(number)
