"""The main loop of a run: give units to workers, and write their results to the journal.

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
from attncheck.workers.journal import MAX_LOSSES, Journal
from attncheck.workers.reaper import Guard, new_mark
from attncheck.workers.units import Unit, UnitResult
from attncheck.workers.worker_pool import (
    Cluster,
    Limits,
    LocalPool,
    WorkerNews,
    WorkerPlace,
    WorkerPool,
    WorkerSetup,
)

# Priority, order of addition, product and unit.
_QueueItem = tuple[tuple[Any, ...], int, str, Unit]


class Schedule:
    """Queues of the units that wait to be done.

    A unit with a result in the journal is not done again, but the units that follow from it are
    queued. A unit whose worker was lost once is done last, and alone, so that a unit that crashes
    processes or the machine is not confused with those beside it. After ``MAX_LOSSES`` losses a
    unit is ``hopeless``. A unit is held back while another one produces what it needs too, as long
    as other units wait.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        priority: Callable[[Unit], tuple[Any, ...]],
        mine: Callable[[Unit], bool],
        product: Callable[[Unit], str],
    ) -> None:
        """Create empty queues.

        Args:
            priority: Sort key of a unit, smallest first; ties are resolved by order of addition.
            mine: Whether a unit belongs to this shard.
            product: Key of what a unit leaves behind for others to use; empty for nothing.
        """
        self._journal, self._priority, self._mine = journal, priority, mine
        self._product = product
        self._seen: set[str] = set()
        self._count = itertools.count()
        self._waiting: list[_QueueItem] = []
        self._suspects: list[_QueueItem] = []
        # Units that wait for a product that a running unit is the first to make.
        self._held_back: list[_QueueItem] = []
        self._products, self._products_in_progress = {""}, set[str]()
        self.known = 0  # Number of units of this shard.
        self.hopeless: list[Unit] = []  # Units to be given up.

    def __len__(self) -> int:
        """Return how many units wait."""
        return len(self._waiting) + len(self._held_back) + len(self._suspects)

    def add(self, units: Iterable[Unit]) -> list[tuple[Unit, UnitResult]]:
        """Queue new units, and the units that follow from those that are done.

        Returns:
            The units that have a result in the journal, each with its result.
        """
        # Reversed, since pop takes units from the end of the list.
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
        return done

    def peek(self, running: int) -> Unit | None:
        """Return the next unit while ``running`` units are running; None if none may be begun."""
        while self._waiting and self._waiting[0][2] in self._products_in_progress:
            heapq.heappush(self._held_back, heapq.heappop(self._waiting))
        # To make a product twice is better than an idle worker.
        queue = self._waiting or self._held_back or (self._suspects if not running else ())
        return queue[0][-1] if queue else None

    def take(self) -> Unit:
        """Remove and return the unit that ``peek`` returned."""
        *_, product, unit = heapq.heappop(self._waiting or self._held_back or self._suspects)
        if product not in self._products:
            self._products_in_progress.add(product)
        return unit

    def end(self, unit: Unit, *, lost: bool) -> None:
        """Release the units that were held back for the product of ``unit``, which has ended.

        If it was lost, the next one of them makes the product.
        """
        product = self._product(unit)
        self._products_in_progress.discard(product)
        if not lost:
            self._products.add(product)
        while self._held_back:
            heapq.heappush(self._waiting, self._held_back.pop())

    def queue(self, unit: Unit) -> None:
        """Add ``unit`` to the queue, or to the suspects if it was lost before."""
        lost = self._journal.losses(unit)
        if lost >= MAX_LOSSES:
            self.hopeless.append(unit)
            return
        if lost:
            # In a new process, so that no earlier unit can be the cause of another loss.
            unit = msgspec.structs.replace(unit, alone=True)
        queue = self._suspects if lost else self._waiting
        # The count resolves ties, since units cannot be compared.
        item = self._priority(unit), next(self._count), self._product(unit), unit
        heapq.heappush(queue, item)


Why = Literal["", "interrupted", "time is up", "stopped early"]

_MANY = 1 << 16  # Requests as many workers as are allowed.
_LONGEST_WAIT = 0.5  # Seconds between two checks of the deadlines.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """A unit was begun, was done, or had a result already; results are in the journal by then."""

    kind: Literal["recalled", "begun", "done"]  # ``recalled``: the journal had its result
    unit: Unit
    done: UnitResult | None  # The result; None for a unit that begins.
    finished: int  # Number of units that have a result.
    known: int  # Number of units known so far; more may follow.
    running: int  # Number of units that workers are doing.
    # Estimated seconds for the known remaining units; None before the first result.
    seconds_left: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """The end of a run."""

    why: Why  # Why the run, which can be resumed, ended early; empty if everything is done.
    at_once: bool  # Whether all running units were aborted: a second interrupt, or no more grace.
    finished: int  # Number of units that have a result.
    remaining: int  # Number of known units that have none.


def _lost_result(unit: Unit, reason: str) -> UnitResult:
    """Return a harness error as the result of a unit that was lost too often."""
    return UnitResult(unit=unit.id, harness=f"{unit.kind} of {unit.kernel}: {reason}")


@dataclass(slots=True, kw_only=True)
class _Run:
    """The state of ``run_units``; see there."""

    journal: Journal
    schedule: Schedule
    pool: WorkerPool[Any]
    limits: Limits
    seconds: float | None
    stop: Callable[[Unit, UnitResult], bool]
    on_event: Callable[[RunEvent], None]
    began: float = field(default_factory=time.monotonic)
    running: dict[int, tuple[Unit, float]] = field(default_factory=dict)
    now_done: int = 0
    finished: int = 0
    why: Why = ""
    at_once: bool = False
    making_room: bool = False

    def loop(self, units: Sequence[Unit], interruptions: Interruptions) -> RunEnd:
        """Do ``units`` and the units that follow; the caller closes the pool."""
        self.journal.write_queued(units)
        self.add(units)
        while not self.at_once:
            self.give_up()
            self.assign()
            waiting = len(self.schedule) or self.schedule.hopeless
            if not self.running and (self.why or not waiting):
                break
            for news in self.pool.news(_LONGEST_WAIT, interruptions):
                self.handle(news)
            self.check_clocks(interruptions)
        self.abort(list(self.running))
        remaining = self.schedule.known - self.finished
        end = RunEnd(
            # After the last result an interrupt has no effect.
            why=self.why if remaining else "",
            at_once=self.at_once,
            finished=self.finished,
            remaining=remaining,
        )
        self.journal.end(end.why)
        return end

    def add(self, units: Sequence[Unit]) -> None:
        for unit, done in self.schedule.add(units):
            self.finished += 1
            self.announce("recalled", unit, done)

    def give_up(self) -> None:
        while self.schedule.hopeless and not self.why:
            unit = self.schedule.hopeless.pop(0)
            times = self.journal.losses(unit)
            reason = f"its process was lost {times} times before it was done"
            self.settle(unit, _lost_result(unit, reason), quarantined=True)

    def assign(self) -> None:
        if self.why:
            return
        wanted = len(self.schedule) + len(self.running)
        # Describing a kernel and drawing its bounds yield many units: start all workers meanwhile.
        nearest = [self.schedule.peek(0), *(unit for unit, _ in self.running.values())]
        if any(unit and (unit.kind == "describe" or unit.draws_stages) for unit in nearest):
            wanted = _MANY
        self.pool.staff(wanted, fresh=int(self.making_room))
        for worker in self.pool.ready():
            unit = self.schedule.peek(len(self.running))
            if unit is None or (unit.alone and not self.is_fresh(worker)):
                return
            self.schedule.take()
            # Written first, so that the journal names the unit even if it crashes this machine.
            self.journal.write_start(unit)
            self.running[worker] = (unit, time.monotonic())
            self.pool.give(worker, unit)
            self.announce("begun", unit, None)

    def is_fresh(self, worker: int) -> bool:
        """Return whether ``worker`` is unused; if not, drop it once to make room for a new one."""
        if not self.pool.used(worker):
            self.making_room = False
            return True
        if not self.making_room:
            self.making_room = True
            self.pool.drop(worker)
        return False

    def handle(self, news: WorkerNews) -> None:
        unit, _ = self.running.pop(news.worker, (None, 0.0))
        # An idle worker was lost, but no unit.
        if unit is None:
            return
        done = news.done
        if done is None or done.unit != unit.id:
            self.handle_loss(unit, news.lost or f"its process gave the result of {done!r}")
            return
        self.schedule.end(unit, lost=False)
        if "usage" in done.facts:
            # A usage error ends the run without a result; the unit is repeated once it is fixed.
            self.journal.write_abandoned([unit.id])
            self.stop(unit, done)
            self.why = self.why or "stopped early"
        else:
            attempts = max(done.attempts, self.journal.losses(unit))
            self.settle(unit, msgspec.structs.replace(done, attempts=attempts))

    def handle_loss(self, unit: Unit, reason: str) -> None:
        self.schedule.end(unit, lost=True)
        times = self.journal.losses(unit)
        if times < MAX_LOSSES:
            self.schedule.queue(unit)
        else:
            done = _lost_result(unit, f"{reason}, {times} times")
            self.settle(unit, msgspec.structs.replace(done, attempts=times), quarantined=True)

    def settle(self, unit: Unit, done: UnitResult, *, quarantined: bool = False) -> None:
        """Write a result to the journal, then queue what follows and announce it."""
        self.journal.write_result(done, quarantined=quarantined)
        self.finished += 1
        self.now_done += 1
        self.add(done.units)
        self.announce("done", unit, done)
        if self.stop(unit, done) and not self.why:
            self.why = "stopped early"

    def announce(
        self, kind: Literal["recalled", "begun", "done"], unit: Unit, done: UnitResult | None
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
                seconds_left=seconds / self.now_done * rest if self.now_done else None,
            )
        )

    def abort(self, workers: Sequence[int]) -> None:
        """Kill ``workers``; their units are left without a result and do not count as lost."""
        units = [self.running.pop(worker)[0] for worker in workers]
        for worker in workers:
            self.pool.drop(worker)
        self.journal.write_abandoned(unit.id for unit in units)

    def check_clocks(self, interruptions: Interruptions) -> None:
        now, limits = time.monotonic(), self.limits
        until = self.began + (float("inf") if self.seconds is None else self.seconds)
        if interruptions.count:
            self.why = "interrupted"
        elif now >= until and not self.why:
            self.why = "time is up"
            # Other units ask many questions, which may take minutes, and are repeated as a whole.
            # Before the first result they go on for the grace: a run resumed with the same limit
            # might otherwise never get further.
            if self.now_done:
                self.abort([w for w, (unit, _) in self.running.items() if unit.kind != "ask"])
        if interruptions.count > 1 or (self.why and now >= until + limits.grace):
            self.at_once = True
            return
        for worker, (unit, begun) in list(self.running.items()):
            if now - begun > limits.unit:
                del self.running[worker]
                self.pool.drop(worker)
                self.handle_loss(unit, f"its process did not come back within {limits.unit:g} s")


def run_units(  # noqa: PLR0913  # all parameters of a run
    units: Sequence[Unit],
    *,
    work: str,
    options: Mapping[str, Any],
    journal: Journal,
    workers: Sequence[WorkerPlace] | Cluster,
    seconds: float | None = None,
    stop: Callable[[Unit, UnitResult], bool] = lambda _, __: False,
    on_event: Callable[[RunEvent], None] = lambda _: None,
    priority: Callable[[Unit], tuple[Any, ...]] = lambda _: (),
    mine: Callable[[Unit], bool] = lambda _: True,
    product: Callable[[Unit], str] = lambda _: "",
    limits: Limits | None = None,
) -> RunEnd:
    """Do ``units`` and the units that follow from them, except those with a result in the journal.

    A result is synced to the journal before ``on_event`` is called. A worker that dies, or whose
    Work raises, is replaced; its unit is repeated at the end, alone in a new worker, and given up
    when that is lost too. The first interrupt, or SIGTERM, ends the run when the running units are
    done, a second interrupt ends it at once. No worker process remains when this function returns
    or raises, or when this process is killed.

    Args:
        units: The units that are known from the outset; ``UnitResult.units`` follow.
        work: Factory of the workers' Work, ``module:function``, called with ``options`` by name.
        options: Keyword arguments of the factory.
        journal: A journal that is open for writing.
        workers: Places of the processes on this machine, which are started on demand; or a
            cluster, each node of which must have the same attncheck and kernels.
        seconds: Time after which no unit is begun; questions that are running have
            ``limits.grace`` more, and other units, which ask many, are aborted at once.
        stop: Whether a unit's new result ends the run like a first interrupt.
        on_event: Called in this thread for every event.
        priority: Sort key of a unit, smallest first.
        mine: Whether a unit belongs to this shard.
        product: Key of what a unit leaves behind for others, such as a compiled kernel; units that
            use it are held back while the first one makes it. Empty for nothing.

    Returns:
        How the run ended, which the journal records too. The journal is left open.

    Raises:
        JournalError: if the journal cannot be written. Announced results are safe.
        UsageError: if the factory raises one, the cluster does not exist, or Ray is missing.
        WorkerError: if no worker can be started.
    """
    limits = limits or Limits()
    setup = WorkerSetup(work=work, options=dict(options))
    with contextlib.ExitStack() as stack:
        # Exited last, so that an interrupt during cleanup does not leave workers alive.
        interruptions = stack.enter_context(Interruptions())
        run = _Run(
            journal=journal,
            schedule=Schedule(journal, priority=priority, mine=mine, product=product),
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
    """Yield the pool of workers of a run, and end all of their processes on exit."""
    if isinstance(workers, Cluster):
        from attncheck.workers.ray_pool import RayPool, joined_cluster

        with (
            joined_cluster(workers) as ray,
            contextlib.closing(RayPool(ray, workers, setup, limits)) as actors,
        ):
            yield actors
        return
    mark = new_mark()
    # The guard is another process, and so works even if this process is killed.
    with Guard(mark), contextlib.closing(LocalPool(workers, setup, mark, limits)) as processes:
        yield processes
