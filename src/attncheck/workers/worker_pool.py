"""Workers that do one unit at a time: what is sent to them, and those of this machine.

``ray_pool`` has those of a cluster. Both have the same life: a worker makes its ``Work`` once, does
one unit after the other, and is replaced by another when it is lost.
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

from attncheck.core import json_numbers
from attncheck.core.errors import AttncheckError, UsageError
from attncheck.core.sanitize_text import one_line
from attncheck.workers.interruptions import Interruptions
from attncheck.workers.process import Died, Worker
from attncheck.workers.transport import Frame
from attncheck.workers.units import Done, Unit

M = TypeVar("M", bound=msgspec.Struct)

_LARGEST = 1 << 27  # bytes of one message
_LONGEST_REASON = 500  # characters
_MOST_FAILED_STARTS = 3
_SEND = 60.0  # seconds until a worker that does not read is lost


class WorkerError(AttncheckError):
    """No worker can be started; the command line exits with 3."""


class Work(Protocol):
    """The object that a worker makes once, by the factory ``module:function`` of a run."""

    def do(self, unit: Unit) -> Done:
        """Do ``unit``. Raising costs a new process, and twice makes a harness error."""

    def close(self) -> None:
        """End what it has started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds that things may take."""

    # One unit, from being sent to its result, before its worker is taken for hung. Far above
    # every deadline within.
    unit: float = 3600.0
    start: float = 600.0  # a worker, until it can do a unit
    grace: float = 60.0  # running units, where the time of a run is up
    close: float = 10.0  # a worker, to end what it has started


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """The place of one worker on this machine."""

    gpu: str = ""  # what CUDA_VISIBLE_DEVICES is there; empty to leave it as it is here
    threads: int = 0  # what OMP_NUM_THREADS is there; 0 to leave it as it is here

    def environment(self) -> dict[str, str]:
        """Return what is another there than here."""
        threads = str(self.threads) if self.threads else ""
        named = {"CUDA_VISIBLE_DEVICES": self.gpu, "OMP_NUM_THREADS": threads}
        return {name: value for name, value in named.items() if value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A Ray cluster whose nodes do the work, in place of this machine."""

    # ``auto`` for the one that this machine is a node of; ``local`` for one that ends with the
    # run.
    address: str
    device: str = "cpu"  # ``cuda``: each worker has a GPU of its own; ``cpu``: a core
    most: int | None = None  # workers; None for as many as the cluster has GPUs or cores


class WorkerSetup(msgspec.Struct, kw_only=True):
    """The first message to a worker."""

    work: str  # factory of its Work, ``module:function``
    options: dict[str, Any]


class WorkerReply(msgspec.Struct, kw_only=True):
    """A message from a worker: it is ready, has done a unit, or something was raised."""

    done: Done | None = None  # the result of the unit
    raised: str = ""  # what was raised, in one line
    usage: bool = False  # whether that was a UsageError


def to_bytes(message: msgspec.Struct) -> bytes:
    """Return a message for ``from_bytes`` of its type."""
    try:
        return msgspec.msgpack.encode(message)
    except UnicodeEncodeError:  # a lone surrogate in a foreign text
        return msgspec.msgpack.encode(json_numbers.to_plain_data(message))


def from_bytes(raw: bytes | bytearray, kind: type[M]) -> M:
    """Return the message that ``to_bytes`` has made; raises MsgspecError for anything else."""
    return msgspec.msgpack.decode(raw, type=kind)


def _reason(error: BaseException) -> str:
    """Return what was raised, in one line."""
    text = one_line(str(error))
    kind = type(error).__name__
    whole = text if isinstance(error, AttncheckError) else f"{kind}: {text}" if text else kind
    return whole if len(whole) <= _LONGEST_REASON else f"{whole[:_LONGEST_REASON]}…"


class UnitServer:
    """The server of a worker that makes its Work, then does one unit after the other."""

    def __init__(self) -> None:
        self._work: Work | None = None

    def answer(self, request: Frame) -> Frame:
        """Return the reply to a setup or a unit."""
        if self._work is None:
            reply = self._make_work(from_bytes(request.data, WorkerSetup))
        else:
            try:
                reply = WorkerReply(done=self._work.do(from_bytes(request.data, Unit)))
            except BaseException as error:  # noqa: BLE001  # a new worker tries once more, and says it
                reply = WorkerReply(raised=_reason(error))
        return Frame(kind="reply", words={}, data=to_bytes(reply))

    def _make_work(self, setup: WorkerSetup) -> WorkerReply:
        module, _, function = setup.work.partition(":")
        try:
            factory: Callable[..., Work] = getattr(import_module(module), function)
        except (ImportError, AttributeError, ValueError) as error:
            # The caller misspelt it: a further process would fail alike.
            reason = f"no work {setup.work!r}: {_reason(error)}."
            return WorkerReply(raised=reason, usage=True)
        try:
            self._work = factory(**setup.options)
        except Exception as error:  # noqa: BLE001  # the other side says it
            return WorkerReply(raised=_reason(error), usage=isinstance(error, UsageError))
        return WorkerReply()

    def close(self) -> None:
        """End what the Work has started."""
        if self._work is not None:
            self._work.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNews:
    """Something of a worker."""

    worker: int  # which
    done: Done | None = None  # the result of the unit that it did
    lost: str = ""  # why it is gone, with the unit that it did; its place is free


H = TypeVar("H")


@dataclass(slots=True, kw_only=True)
class Member(Generic[H]):
    """One worker that lives: how to reach it, and what it is at."""

    handle: H
    busy: Any = None  # what answers when it has started or has done its unit; None when it is free
    began: float = field(default_factory=time.monotonic)
    ready: bool = False
    used: bool = False


class WorkerPool(ABC, Generic[H]):
    """The workers of a run, by number."""

    def __init__(self, setup: WorkerSetup, limits: Limits) -> None:
        """None is started."""
        self._setup, self._limits = to_bytes(setup), limits
        self._members: dict[int, Member[H]] = {}
        self._failed = 0

    @abstractmethod
    def staff(self, wanted: int, *, fresh: int) -> None:
        """Start workers, up to the most that there may be.

        Args:
            wanted: How many there are to be, those that are being started counted.
            fresh: How many of them at least that have been given no unit.
        """

    @abstractmethod
    def give(self, worker: int, unit: Unit) -> None:
        """Have it do ``unit``."""

    @abstractmethod
    def drop(self, worker: int) -> None:
        """Kill it now, with all processes that it has started."""

    @abstractmethod
    def news(self, seconds: float, interruptions: Interruptions) -> Sequence[WorkerNews]:
        """Return what happened; waits so long for something, or for an interrupt.

        Raises:
            UsageError: where the factory of the Work raised one.
            WorkerError: where workers cannot be started.
        """

    @abstractmethod
    def close(self) -> None:
        """End all: those that do nothing may end what they have started first."""

    def ready(self) -> list[int]:
        """Return workers that can be given a unit now; those that have done none first."""
        free = [n for n, member in self._members.items() if member.ready and member.busy is None]
        # A unit that is to be alone needs one that has done nothing.
        return sorted(free, key=lambda n: (self._members[n].used, n))

    def used(self, worker: int) -> bool:
        """Return whether it has been given a unit."""
        return worker in self._members and self._members[worker].used

    def _unused(self) -> int:
        return sum(not member.used for member in self._members.values())

    def _hear(self, number: int, reply: WorkerReply) -> WorkerNews | None:
        """Return the news in a reply; drop a worker that raised."""
        member = self._members[number]
        if reply.raised:
            # Whatever was raised may have left that process in any state.
            self.drop(number)
            if member.ready:
                return WorkerNews(worker=number, lost=reply.raised)
            if reply.usage:
                raise UsageError(reply.raised)
            self._fail(reply.raised)
            return None
        member.busy = None
        if member.ready:
            return WorkerNews(worker=number, done=reply.done)
        # Processes can be started, then: those that could not were chance.
        member.ready, self._failed = True, 0
        return None

    def _late_starts(self) -> list[int]:
        now = time.monotonic()
        return [
            number
            for number, member in self._members.items()
            if not member.ready and now - member.began > self._limits.start
        ]

    def _fail(self, why: str) -> None:
        """Count a worker that was lost before it could do anything."""
        self._failed += 1
        if self._failed >= _MOST_FAILED_STARTS:
            raise WorkerError(f"the processes that do the work cannot be started: {why}.")


class LocalPool(WorkerPool[Worker]):
    """Workers that are processes of this machine, spawned, never forked.

    Args:
        places: Where each works: one process each, at most.
        mark: With which their own marks begin.
    """

    def __init__(
        self, places: Sequence[WorkerPlace], setup: WorkerSetup, mark: str, limits: Limits
    ) -> None:
        super().__init__(setup, limits)
        self._places, self._mark, self._started = list(places), mark, 0

    def staff(self, wanted: int, *, fresh: int) -> None:
        """See ``WorkerPool``; at most one for each place."""
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
        with suppress(Died):  # it is killed, which is heard when it is waited for
            worker.send(Frame(kind="unit", words={}, data=message), seconds=_SEND)

    def drop(self, worker: int) -> None:
        """See ``WorkerPool``."""
        self._members.pop(worker).handle.kill(self._limits.close)

    def news(self, seconds: float, interruptions: Interruptions) -> list[WorkerNews]:
        """See ``WorkerPool``."""
        ready = self._ready_descriptors(seconds, interruptions)
        interruptions.heard()
        news = []
        for number, member in list(self._members.items()):
            if member.handle.failed or member.handle.take_in(ready):
                news.append(self._hear(number, self._reply(member.handle)))
        for number in self._late_starts():
            self.drop(number)
            self._fail(f"it is not ready within {self._limits.start:g} s")
        return [one for one in news if one is not None]

    def _ready_descriptors(self, seconds: float, interruptions: Interruptions) -> set[int]:
        workers = [member.handle for member in self._members.values()]
        # One that died while it was written to makes no descriptor ready.
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
            return from_bytes(frame.data, WorkerReply)
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
        # Waited for only now that all have been told, so that they end side by side.
        until = time.monotonic() + self._limits.close
        for number, member in list(self._members.items()):
            member.handle.await_end(max(0.0, until - time.monotonic()))
            self.drop(number)
