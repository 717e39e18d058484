"""Workers on a cluster: Ray actors, one for each GPU, or else for each core.

The journal stays on the driver, so that only its running units are lost with a node. Needs Ray:
``pip install 'attncheck[ray]'``.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

from msgspec.msgpack import decode

from attncheck.core.errors import UsageError
from attncheck.core.sanitize_text import one_line
from attncheck.workers import worker_pool
from attncheck.workers.interruptions import Interruptions
from attncheck.workers.reaper import MARK, Guard, new_mark
from attncheck.workers.transport import Frame
from attncheck.workers.units import Unit
from attncheck.workers.worker_pool import Cluster, Limits, WorkerNews, WorkerSetup

_POLL = 0.1  # Seconds between checks for interrupts, since Ray cannot wait for them.
_SILENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # No usage statistics are sent.
    "RAY_DEDUP_LOGS": "0",
}


@contextlib.contextmanager
def joined_cluster(cluster: Cluster) -> Iterator[Any]:
    """Make this process a driver of ``cluster`` within the context, and yield the module ``ray``.

    Raises:
        UsageError: if Ray is not installed, or there is no such cluster.
    """
    os.environ.update({name: value for name, value in _SILENT.items() if name not in os.environ})
    try:
        import ray
    except ImportError:
        raise UsageError(
            "a cluster needs Ray, which is not installed: pip install 'attncheck[ray]'."
        ) from None
    if ray.is_initialized():  # the caller has joined it, and will leave it
        yield ray
        return
    address = cluster.address
    ours = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **ours)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(f"no Ray cluster at {address!r}: {one_line(str(error))}.") from None
    try:
        yield ray
    finally:
        ray.shutdown()


class _Actor:
    """The actor on a node, with the same server as a worker process."""

    def __init__(self) -> None:
        # The guard kills the processes that the Work started if this one is killed.
        mark = os.environ[MARK] = new_mark()
        self._guard, self._server = Guard(mark), worker_pool.UnitServer()

    def answer(self, raw: bytes) -> bytes:
        """Return the reply to a setup, and to each unit after it."""
        return bytes(self._server.answer(Frame(kind="unit", words={}, data=raw)).data)

    def close(self) -> None:
        """End what the Work has started."""
        self._server.close()


class RayPool(worker_pool.WorkerPool[Any]):
    """A pool of Ray actors; ``busy`` is the reference to an actor's pending reply.

    Nodes may come and go: lost workers are replaced as far as there are resources and units. Ray
    itself must not restart actors, which would repeat their units while others run.
    """

    def __init__(self, ray: Any, cluster: Cluster, setup: WorkerSetup, limits: Limits) -> None:
        super().__init__(setup, limits)
        self._ray, self._most, self._count = ray, cluster.most, 0
        self._resource = "GPU" if cluster.device == "cuda" else "CPU"
        needs = {"num_gpus": 1, "num_cpus": 1} if self._resource == "GPU" else {"num_cpus": 1}
        self._kind = ray.remote(max_restarts=0, max_task_retries=0, **needs)(_Actor)

    def staff(self, wanted: int, *, fresh: int) -> None:
        """See ``WorkerPool``; limited by the present resources of the cluster."""
        starting = [number for number, member in self._members.items() if not member.ready]
        if len(self._members) >= wanted and self._unused() >= fresh and not starting:
            return
        room = int(self._ray.cluster_resources().get(self._resource, 0))
        room = room if self._most is None else min(room, self._most)
        while starting and len(self._members) > room:  # a node left: it will not start
            self.drop(starting.pop())
        while len(self._members) < room and (len(self._members) < wanted or self._unused() < fresh):
            actor = self._kind.remote()
            self._count += 1
            reply = actor.answer.remote(self._setup)
            self._members[self._count] = worker_pool.Member(handle=actor, busy=reply)

    def give(self, worker: int, unit: Unit) -> None:
        """See ``WorkerPool``."""
        member = self._members[worker]
        member.used, member.busy = True, member.handle.answer.remote(worker_pool.to_bytes(unit))

    def drop(self, worker: int) -> None:
        """See ``WorkerPool``."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._members.pop(worker).handle)

    def news(self, seconds: float, interruptions: Interruptions) -> list[WorkerNews]:
        """See ``WorkerPool``."""
        until = time.monotonic() + seconds
        replies: list[Any] = []
        while not replies and not interruptions.pending() and time.monotonic() < until:
            waited = {m.busy: n for n, m in self._members.items() if m.busy is not None}
            if not waited:
                time.sleep(_POLL)
                continue
            # All of them, so that every reply that is ready is returned.
            replies, _ = self._ray.wait(list(waited), num_returns=len(waited), timeout=_POLL)
        interruptions.clear()
        news = [self._handle_reply(waited[reply], self._reply(reply)) for reply in replies]
        for number in self._late_starts():
            self.drop(number)
            # While others work, a worker for which there are no resources is no failure.
            if not any(member.ready for member in self._members.values()):
                self._count_failed_start(f"one is not ready within {self._limits.start:g} s")
        return [one for one in news if one is not None]

    def _reply(self, reply: Any) -> worker_pool.WorkerReply:
        try:
            return decode(self._ray.get(reply), type=worker_pool.WorkerReply)
        except self._ray.exceptions.RayError as error:
            return worker_pool.WorkerReply(raised=f"its actor was lost: {type(error).__name__}")

    def close(self) -> None:
        """See ``WorkerPool``."""
        closing = [m.handle.close.remote() for m in self._members.values() if m.busy is None]
        if closing:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.wait(closing, num_returns=len(closing), timeout=self._limits.close)
        for number in list(self._members):
            self.drop(number)
