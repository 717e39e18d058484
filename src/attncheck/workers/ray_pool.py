"""Workers on a cluster: Ray actors, one for each GPU, or each core without.

The journal stays here, on the driver; a node that is lost takes what it was doing with it and
nothing else. Needs Ray: ``pip install 'attncheck[ray]'``.
"""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attncheck.core.errors import UsageError
from attncheck.core.sanitize_text import one_line
from attncheck.workers.interruptions import Interruptions
from attncheck.workers.orphans import Guard
from attncheck.workers.pool import RunEnd, RunEvent, RunRules, Schedule, dispatch, given_up
from attncheck.workers.worker_pool import (
    NAME,
    Limits,
    WorkerError,
    WorkerNews,
    WorkerReply,
    WorkerSetup,
    do_unit,
    from_bytes,
    make_work,
    to_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attncheck.workers.journal import Journal
    from attncheck.workers.pool import Option
    from attncheck.workers.units import Done, Unit
    from attncheck.workers.worker_pool import Work

__all__ = ["RayPool", "run_on_cluster"]

_MOST_FAILED_STARTS = 3
_POLL = 0.1  # seconds: Ray cannot wait for our interrupts
_SILENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent to anybody
    "RAY_DEDUP_LOGS": "0",
}


def run_on_cluster(  # noqa: PLR0913  # as pool.run
    units: Sequence[Unit],
    *,
    work: str,
    options: Mapping[str, Option],
    journal: Journal,
    address: str,
    device: str = "cpu",
    most: int | None = None,
    seconds: float | None = None,
    stop: Callable[[Done], bool] = lambda _: False,
    told: Callable[[RunEvent], None] = lambda _: None,
    priority: Callable[[Unit], tuple[Any, ...]] = lambda _: (),
    mine: Callable[[Unit], bool] = lambda _: True,
    lost: Callable[[Unit, str], Done] = given_up,
    limits: Limits | None = None,
) -> RunEnd:
    """As ``pool.run``, on the nodes of a Ray cluster.

    Nodes may come and go: lanes that are lost are started again where there is room, and as many as
    there is room for work. Each node must find the same attncheck and kernels.

    Args:
        units: See ``pool.run``; and so for all that is not said here.
        work: See there.
        options: See there.
        journal: See there.
        address: Of the cluster, ``auto`` for the one that this machine is a node of; ``local`` for
            one that ends with this run.
        device: ``cuda``: each lane has a GPU of its own; ``cpu``: a core.
        most: Lanes; as many as the cluster has GPUs or cores, unless told.
        seconds: See there.
        stop: See there.
        told: See there.
        priority: See there.
        mine: See there.
        lost: See there.
        limits: See there.

    Raises:
        UsageError: where Ray is not installed, or there is no cluster.
        JournalError: where the journal cannot be written.
        LaneError: where no lane can be started.
    """
    limits = limits or Limits()
    ray = _ray()
    schedule = Schedule(journal, priority=priority, mine=mine)
    rules = RunRules(seconds=seconds, stop=stop, told=told, lost=lost, limits=limits)
    ours = _join(ray, address)
    try:
        with Interruptions() as interruptions:
            hello = WorkerSetup(work=work, options=dict(options))
            crew = RayPool(ray, hello, device=device, most=most, limits=limits)
            try:
                return dispatch(
                    units, schedule, crew, journal=journal, rules=rules, interruptions=interruptions
                )
            finally:
                crew.close()
    finally:
        if ours:
            ray.shutdown()


def _ray() -> Any:
    os.environ.update({name: value for name, value in _SILENT.items() if name not in os.environ})
    try:
        import ray
    except ImportError:
        raise UsageError(
            "a cluster needs Ray, which is not installed: pip install 'attncheck[ray]'."
        ) from None
    return ray


def _join(ray: Any, address: str) -> bool:
    """Whether it was we who joined the cluster, and so leave it."""
    if ray.is_initialized():
        return False
    ours = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **ours)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(f"no Ray cluster at {address!r}: {one_line(str(error))}.") from None
    return True


class _Actor:
    """What lives on a node: a Work, which is made once. Messages are a lane's."""

    def __init__(self) -> None:
        self._work: Work | None = None
        # What the Work starts ends with this process, which may be killed.
        name = os.environ[NAME] = f"{secrets.token_hex(8)}."
        self._guard = Guard(NAME, name)

    def begin(self, raw: bytes) -> bytes:
        """Makes the Work."""
        self._work, said = make_work(from_bytes(raw, WorkerSetup))
        return to_bytes(said)

    def do(self, raw: bytes) -> bytes:
        """Does a unit."""
        assert self._work is not None, "it began"
        return to_bytes(do_unit(self._work, raw))

    def close(self) -> None:
        """Ends what the Work has started."""
        if self._work is not None:
            self._work.close()


@dataclass(slots=True, kw_only=True)
class _Lane:
    """One actor, and what it is at; None where it can be given a unit."""

    actor: Any
    at: Any
    began: float = field(default_factory=time.monotonic)
    ready: bool = False
    used: bool = False


class RayPool:
    """A ``Crew`` of Ray actors; see there for what its methods do.

    Ray restarts none of them: an actor that it restarted would do its unit again beside others.
    """

    def __init__(
        self, ray: Any, hello: WorkerSetup, *, device: str, most: int | None, limits: Limits
    ):
        """None is started; see ``run``."""
        self._ray, self._hello, self._most, self._limits = ray, to_bytes(hello), most, limits
        self._resource = "GPU" if device == "cuda" else "CPU"
        needs = {"num_gpus": 1, "num_cpus": 1} if device == "cuda" else {"num_cpus": 1}
        self._kind = ray.remote(max_restarts=0, max_task_retries=0, **needs)(_Actor)
        self._lanes: dict[int, _Lane] = {}
        self._count = self._failed = 0

    def staff(self, wanted: int, *, fresh: int) -> None:
        """See ``Crew``; no more than there is room for now: nodes come and go."""
        starting = [number for number, lane in self._lanes.items() if not lane.ready]
        unused = sum(not lane.used for lane in self._lanes.values())
        if len(self._lanes) >= wanted and unused >= fresh and not starting:
            return
        room = int(self._ray.cluster_resources().get(self._resource, 0))
        room = room if self._most is None else min(room, self._most)
        while starting and len(self._lanes) > room:
            self.drop(starting.pop())
            unused -= 1
        while len(self._lanes) < room and (len(self._lanes) < wanted or unused < fresh):
            actor = self._kind.remote()
            self._count += 1
            unused += 1
            self._lanes[self._count] = _Lane(actor=actor, at=actor.begin.remote(self._hello))

    def ready(self) -> list[int]:
        """See ``Crew``."""
        free = [n for n, lane in self._lanes.items() if lane.at is None]
        return sorted(free, key=lambda n: (self._lanes[n].used, n))

    def used(self, lane: int) -> bool:
        """See ``Crew``."""
        return lane in self._lanes and self._lanes[lane].used

    def give(self, lane: int, unit: Unit) -> None:
        """See ``Crew``."""
        one = self._lanes[lane]
        one.used, one.at = True, one.actor.do.remote(to_bytes(unit))

    def drop(self, lane: int) -> None:
        """See ``Crew``."""
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._lanes.pop(lane).actor)

    def news(self, seconds: float, interruptions: Interruptions) -> list[WorkerNews]:
        """See ``Crew``."""
        until = time.monotonic() + seconds
        heard: list[Any] = []
        while not heard and not interruptions.pending() and time.monotonic() < until:
            waited = {lane.at: n for n, lane in self._lanes.items() if lane.at is not None}
            if not waited:
                time.sleep(_POLL)
                continue
            heard, _ = self._ray.wait(list(waited), num_returns=len(waited), timeout=_POLL)
        interruptions.heard()
        news = [self._hear(waited[one]) for one in heard]
        self._check_starts()
        return [one for one in news if one is not None]

    def close(self) -> None:
        """End all: those that do nothing may end what they have started first."""
        closing = [lane.actor.close.remote() for lane in self._lanes.values() if lane.at is None]
        if closing:
            with suppress(self._ray.exceptions.RayError):
                self._ray.wait(closing, num_returns=len(closing), timeout=self._limits.close)
        for number in list(self._lanes):
            self.drop(number)

    def _hear(self, number: int) -> WorkerNews | None:
        lane = self._lanes[number]
        try:
            said = from_bytes(self._ray.get(lane.at), WorkerReply)
        except self._ray.exceptions.RayError as error:
            said = WorkerReply(raised=f"its actor was lost: {type(error).__name__}")
        lane.at = None
        if not said.raised:
            if lane.ready:
                return WorkerNews(lane=number, done=said.done)
            lane.ready, self._failed = True, 0
            return None
        if said.usage and not lane.ready:
            raise UsageError(said.raised)
        self.drop(number)
        if lane.ready:
            return WorkerNews(lane=number, lost=said.raised)
        self._fail(said.raised)
        return None

    def _check_starts(self) -> None:
        """Lanes for which there is no room any more are no fault while others work."""
        now = time.monotonic()
        for number, lane in list(self._lanes.items()):
            if not lane.ready and now - lane.began > self._limits.start:
                self.drop(number)
                if not any(other.ready for other in self._lanes.values()):
                    self._fail(f"one is not ready within {self._limits.start:g} s")

    def _fail(self, why: str) -> None:
        self._failed += 1
        if self._failed >= _MOST_FAILED_STARTS:
            raise WorkerError(f"the actors that do the work cannot be started: {why}.")
