"""Units to workers, results to the journal: the loop of a run.

```python
with Journal.open(path, header, resume=True) as journal:
    end = run_units(units, work="attncheck.gate.gate_worker:work", options={...}, journal=journal,
                    workers=[WorkerPlace(gpu="0"), WorkerPlace(gpu="1")])
```
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from attncheck.workers.interruptions import Interruptions
from attncheck.workers.journal import MOST_LOST, Journal
from attncheck.workers.reaper import Guard, new_mark
from attncheck.workers.units import Done, Unit
from attncheck.workers.worker_pool import (
    Cluster,
    Limits,
    LocalPool,
    WorkerNews,
    WorkerPlace,
    WorkerPool,
    WorkerSetup,
)


class Schedule:
    """The work of a run that is known and waits; it does none, and starts no process.

    A unit that the journal has a result of is not done again; what follows from it is queued. One
    that was lost once waits until nothing else is left and is done while nothing else is, so that
    what brings a process or a machine down is told from its neighbours. One that was lost
    ``MOST_LOST`` times is ``hopeless``.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        priority: Callable[[Unit], tuple[Any, ...]],
        mine: Callable[[Unit], bool],
    ) -> None:
        """Nothing waits.

        Args:
            priority: Least first; equal ones in the order in which they became known.
            mine: Whether this run does a unit: another shard's is left out.
        """
        self._journal, self._priority, self._mine = journal, priority, mine
        self._seen: set[str] = set()
        self._count = itertools.count()
        self._waiting: list[tuple[tuple[Any, ...], int, Unit]] = []
        self._suspects: list[tuple[tuple[Any, ...], int, Unit]] = []
        self.known = self.elsewhere = 0  # units that are another shard's
        self.hopeless: list[Unit] = []  # units to be given up

    def __len__(self) -> int:
        """Return how many units wait."""
        return len(self._waiting) + len(self._suspects)

    def add(self, units: Iterable[Unit]) -> list[tuple[Unit, Done]]:
        """Queue those that are new, and what follows from those that are done.

        Returns:
            Those of which the journal has a result, with it.
        """
        # Reversed, because pop takes from the end and the order is to stay.
        done, todo = [], list(units)[::-1]
        while todo:
            unit = todo.pop()
            if unit.id in self._seen:
                continue
            self._seen.add(unit.id)
            result = self._journal.results.get(unit.id)
            if result is not None:
                self.known += 1
                done.append((unit, result))
                todo += result.units[::-1]
            elif self._mine(unit):
                self.known += 1
                self.queue(unit)
            else:
                self.elsewhere += 1
        return done

    def peek(self, running: int) -> Unit | None:
        """The unit that is next where so many are running; None where none may be begun now."""
        if self._waiting:
            return self._waiting[0][-1]
        return self._suspects[0][-1] if self._suspects and not running else None

    def take(self) -> Unit:
        """The unit that ``peek`` showed: it waits no longer."""
        return heapq.heappop(self._waiting or self._suspects)[-1]

    def queue(self, unit: Unit) -> None:
        """Have ``unit`` wait for its turn, which comes late where it was begun and lost."""
        lost = self._journal.lost(unit)
        if lost >= MOST_LOST:
            self.hopeless.append(unit)
            return
        if lost:
            # In processes of its own: nothing before it can be what brings it down again.
            unit = msgspec.structs.replace(unit, alone=True)
        queue = self._suspects if lost else self._waiting
        # The count decides between equals: heaps compare, and units have no order.
        heapq.heappush(queue, (self._priority(unit), next(self._count), unit))


Why = Literal["", "interrupted", "time is up", "stopped early"]

_MANY = 1 << 16  # workers: as many as there may be
_LONGEST_WAIT = 0.5  # seconds between two looks at the clocks


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """Something happened; of ``done``, the journal has it on the disk."""

    kind: Literal["recalled", "begun", "done"]  # ``recalled``: the journal had its result
    unit: Unit  # of which unit
    done: Done | None  # its result; None of one that begins
    finished: int  # units that have a result
    known: int  # all units that this run has heard of: more may follow
    running: int  # units that workers are doing
    # Seconds that the known rest will take at the pace so far; None before a first result.
    left: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """The end of a run."""

    why: Why  # Why before everything was done; empty where everything is. It can be resumed.
    at_once: bool  # whether running units were ended too: by a second interrupt, or after the grace
    finished: int  # units that have a result
    left: int  # known units that have none
    elsewhere: int  # units of other shards


def _lost_result(unit: Unit, reason: str) -> Done:
    """Return what comes of a unit that was lost too often."""
    return Done(unit=unit.id, harness=f"{unit.kind} of {unit.kernel}: {reason}")


@dataclass(slots=True, kw_only=True)
class _Run:
    """The state of ``run_units``; see there."""

    journal: Journal
    schedule: Schedule
    pool: WorkerPool[Any]
    limits: Limits
    seconds: float | None
    stop: Callable[[Done], bool]
    on_event: Callable[[RunEvent], None]
    began: float = field(default_factory=time.monotonic)
    running: dict[int, tuple[Unit, float]] = field(default_factory=dict)
    now_done: int = 0
    finished: int = 0
    why: Why = ""
    at_once: bool = False
    making_room: bool = False

    def loop(self, units: Sequence[Unit], interruptions: Interruptions) -> RunEnd:
        """Do ``units`` and what follows from them; the caller closes the pool."""
        self.journal.queued(units)
        self.add(units)
        while not self.at_once:
            self.give_up()
            self.assign()
            waiting = len(self.schedule) or self.schedule.hopeless
            if not self.running and (self.why or not waiting):
                break
            for news in self.pool.news(_LONGEST_WAIT, interruptions):
                self.hear(news)
            self.check_clocks(interruptions)
        for worker in self.running:
            self.pool.drop(worker)
        # We ended them: that is not to count as their having been lost.
        self.journal.abandoned(unit.id for unit, _ in self.running.values())
        left = self.schedule.known - self.finished
        end = RunEnd(
            # An interrupt after the last result has cut nothing short.
            why=self.why if left else "",
            at_once=self.at_once,
            finished=self.finished,
            left=left,
            elsewhere=self.schedule.elsewhere,
        )
        self.journal.end(end.why)
        return end

    def add(self, units: Sequence[Unit]) -> None:
        for unit, done in self.schedule.add(units):
            self.finished += 1
            self.tell("recalled", unit, done)

    def give_up(self) -> None:
        while self.schedule.hopeless and not self.why:
            unit = self.schedule.hopeless.pop(0)
            times = self.journal.lost(unit)
            reason = f"its process was lost {times} times before it was done"
            self.settle(unit, _lost_result(unit, reason), quarantined=True)

    def assign(self) -> None:
        if self.why:
            return
        wanted = len(self.schedule) + len(self.running)
        # What describes a kernel is followed by more than there are workers, which start meanwhile.
        nearest = [self.schedule.peek(0), *(unit for unit, _ in self.running.values())]
        if any(unit is not None and unit.kind == "describe" for unit in nearest):
            wanted = _MANY
        self.pool.staff(wanted, fresh=int(self.making_room))
        for worker in self.pool.ready():
            unit = self.schedule.peek(len(self.running))
            if unit is None or (unit.alone and not self.is_fresh(worker)):
                return
            self.schedule.take()
            # Written first: should it bring this process down too, the journal names the suspect.
            self.journal.begun(unit)
            self.running[worker] = (unit, time.monotonic())
            self.pool.give(worker, unit)
            self.tell("begun", unit, None)

    def is_fresh(self, worker: int) -> bool:
        """Return whether a unit that is to be alone can have it; if not, make room for another."""
        if not self.pool.used(worker):
            self.making_room = False
            return True
        if not self.making_room:
            self.making_room = True
            self.pool.drop(worker)
        return False

    def hear(self, news: WorkerNews) -> None:
        unit, _ = self.running.pop(news.worker, (None, 0.0))
        # Of a worker that had nothing to do nothing is lost.
        if unit is None:
            return
        done = news.done
        if done is None or done.unit != unit.id:
            self.lose(unit, news.lost or f"its process gave the result of {done!r}")
        elif "usage" in done.facts:
            # What cannot be asked ends the run, and is asked again when it is mended: no result.
            self.journal.abandoned([unit.id])
            self.stop(done)
            self.why = self.why or "stopped early"
        else:
            attempts = max(done.attempts, self.journal.lost(unit))
            self.settle(unit, msgspec.structs.replace(done, attempts=attempts))

    def lose(self, unit: Unit, reason: str) -> None:
        times = self.journal.lost(unit)
        if times < MOST_LOST:
            self.schedule.queue(unit)
        else:
            done = _lost_result(unit, f"{reason}, {times} times")
            self.settle(unit, msgspec.structs.replace(done, attempts=times), quarantined=True)

    def settle(self, unit: Unit, done: Done, *, quarantined: bool = False) -> None:
        """Write the result to the disk; only then the rest hears of it."""
        self.journal.done(done, quarantined=quarantined)
        self.finished += 1
        self.now_done += 1
        self.add(done.units)
        self.tell("done", unit, done)
        if self.stop(done) and not self.why:
            self.why = "stopped early"

    def tell(
        self, kind: Literal["recalled", "begun", "done"], unit: Unit, done: Done | None
    ) -> None:
        seconds = time.monotonic() - self.began
        rest = self.schedule.known - self.finished
        self.on_event(
            RunEvent(
                kind=kind,
                unit=unit,
                done=done,
                finished=self.finished,
                known=self.schedule.known,
                running=len(self.running),
                left=seconds / self.now_done * rest if self.now_done else None,
            )
        )

    def check_clocks(self, interruptions: Interruptions) -> None:
        now, limits = time.monotonic(), self.limits
        until = self.began + (float("inf") if self.seconds is None else self.seconds)
        if interruptions.count:
            self.why = "interrupted"
        elif now >= until and not self.why:
            self.why = "time is up"
        if interruptions.count > 1 or (self.why and now >= until + limits.grace):
            self.at_once = True
            return
        for worker, (unit, begun) in list(self.running.items()):
            if now - begun > limits.unit:
                del self.running[worker]
                self.pool.drop(worker)
                self.lose(unit, f"its process did not come back within {limits.unit:g} s")


def run_units(  # noqa: PLR0913  # one run, said once
    units: Sequence[Unit],
    *,
    work: str,
    options: Mapping[str, Any],
    journal: Journal,
    workers: Sequence[WorkerPlace] | Cluster,
    seconds: float | None = None,
    stop: Callable[[Done], bool] = lambda _: False,
    on_event: Callable[[RunEvent], None] = lambda _: None,
    priority: Callable[[Unit], tuple[Any, ...]] = lambda _: (),
    mine: Callable[[Unit], bool] = lambda _: True,
    limits: Limits | None = None,
) -> RunEnd:
    """Do ``units`` and what follows from them, each once; what the journal has is not done again.

    A result is in the journal, on the disk, before ``on_event`` hears of it. A worker that dies, or
    whose Work raises, is replaced; its unit is done once more when nothing else is, in a new
    worker, and given up when that is lost too. Interrupts: the first ends it when the running units
    are done, the second at once; SIGTERM is as the first. No process is left when it returns or
    raises, nor when this process is killed.

    Args:
        units: What is known from the outset; ``Done.units`` follow.
        work: Factory of the workers' Work, ``module:function``, called with ``options`` by name.
        options: See there.
        journal: Open for writing.
        workers: Where each process of this machine works; they are started when there is something
            to do. Or a cluster, each node of which must find the same attncheck and kernels.
        seconds: No unit is begun after so long; running ones have ``limits.grace`` more.
        stop: Whether a result ends the run, as the first interrupt does. Not asked of results that
            the journal had.
        on_event: Hears of everything, in this thread.
        priority: Of a unit; least first.
        mine: Whether this run does a unit, or another shard.

    Returns:
        How it ended; the journal says so too, and is left open.

    Raises:
        JournalError: where the journal cannot be written. What ``on_event`` heard of is safe.
        UsageError: where the factory raises one; where there is no such cluster, or no Ray.
        WorkerError: where no worker can be started.
    """
    limits = limits or Limits()
    setup = WorkerSetup(work=work, options=dict(options))
    with contextlib.ExitStack() as stack:
        # Left last, so that an interrupt while workers are ended does not leave some alive.
        interruptions = stack.enter_context(Interruptions())
        run = _Run(
            journal=journal,
            schedule=Schedule(journal, priority=priority, mine=mine),
            pool=stack.enter_context(_pool(workers, setup, limits)),
            limits=limits,
            seconds=seconds,
            stop=stop,
            on_event=on_event,
        )
        return run.loop(units, interruptions)


@contextlib.contextmanager
def _pool(
    workers: Sequence[WorkerPlace] | Cluster, setup: WorkerSetup, limits: Limits
) -> Iterator[WorkerPool[Any]]:
    """Within, workers of a run; none of their processes outlives it."""
    if isinstance(workers, Cluster):
        from attncheck.workers.ray_pool import RayPool, joined_cluster

        with (
            joined_cluster(workers) as ray,
            contextlib.closing(RayPool(ray, workers, setup, limits)) as actors,
        ):
            yield actors
        return
    mark = new_mark()
    # The guard is another process, and does its work also where this one is killed.
    with Guard(mark), contextlib.closing(LocalPool(workers, setup, mark, limits)) as processes:
        yield processes
