"""Units to workers, results to the journal: the loop of a run.

A *lane* is a process that does one unit at a time. ``pool`` has them on this machine, ``cluster``
on several.

```python
with Journal.open(path, header, resume=True) as journal:
    ended = run(units, work="attncheck.gate.gate_worker:work", options={...}, journal=journal,
                lanes=[Lane(gpu="0"), Lane(gpu="1")])
```
"""

from __future__ import annotations

import heapq
import itertools
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from attncheck.workers.interruptions import Interruptions
from attncheck.workers.journal import MOST_LOST
from attncheck.workers.orphans import Guard
from attncheck.workers.units import Done
from attncheck.workers.worker_pool import (
    NAME,
    Limits,
    ProcessPool,
    Work,
    WorkerError,
    WorkerPlace,
    WorkerSetup,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from attncheck.workers.journal import Journal
    from attncheck.workers.units import Unit
    from attncheck.workers.worker_pool import WorkerNews, WorkerPool

__all__ = [
    "Limits",
    "Option",
    "RunEnd",
    "RunEvent",
    "RunRules",
    "Schedule",
    "Why",
    "Work",
    "WorkerError",
    "WorkerPlace",
    "dispatch",
    "given_up",
    "run_units",
]


class Schedule:
    """The work of a run that is known and waits; it does none, and starts no process.

    A unit that the journal has a result of is not done again; what follows from it is queued. One
    that was lost once waits until nothing else is left and is done while nothing else is, so that
    what brings a process or a machine down is told from its neighbours. One that was lost
    ``MOST_LOST`` times is ``hopeless``.

    Attributes:
        known: Units of this run, done or not.
        elsewhere: Units that are another shard's.
        hopeless: Units to be given up.
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
            journal: What is done, and what was lost.
            priority: Least first; equal ones in the order in which they became known.
            mine: Whether this run does a unit: another shard's is left out.
        """
        self._journal, self._priority, self._mine = journal, priority, mine
        self._seen: set[str] = set()
        self._count = itertools.count()
        self._waiting: list[tuple[tuple[Any, ...], int, Unit]] = []
        self._suspects: list[tuple[tuple[Any, ...], int, Unit]] = []
        self.known = self.elsewhere = 0
        self.hopeless: list[Unit] = []

    def __len__(self) -> int:
        """How many units wait."""
        return len(self._waiting) + len(self._suspects)

    def add(self, units: Iterable[Unit]) -> list[tuple[Unit, Done]]:
        """Queue those that are new, and what follows from those that are done.

        Returns:
            Those of which the journal has a result, with it.
        """
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
                self._queue(unit)
            else:
                self.elsewhere += 1
        return done

    def again(self, unit: Unit) -> None:
        """``unit`` was begun and lost."""
        self._queue(unit)

    def peek(self, running: int) -> Unit | None:
        """The unit that is next where so many are running; None where none may be begun now."""
        if self._waiting:
            return self._waiting[0][-1]
        return self._suspects[0][-1] if self._suspects and not running else None

    def take(self) -> Unit:
        """The unit that ``peek`` showed: it waits no longer."""
        return heapq.heappop(self._waiting or self._suspects)[-1]

    def _queue(self, unit: Unit) -> None:
        lost = self._journal.lost(unit)
        if lost >= MOST_LOST:
            self.hopeless.append(unit)
            return
        if lost:
            unit = msgspec.structs.replace(unit, alone=True)
        queue = self._suspects if lost else self._waiting
        # The count decides between equals: heaps compare, and units have no order.
        heapq.heappush(queue, (self._priority(unit), next(self._count), unit))


Why = Literal["", "interrupted", "time is up", "stopped early"]

_LONGEST_WAIT = 0.5  # seconds between two looks at the clocks


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """Something happened; of ``done``, the journal has it on the disk.

    Attributes:
        kind: ``recalled``: the journal had its result.
        unit: Of which unit.
        done: Its result; None of one that begins.
        finished: Units that have a result.
        known: All units that this run has heard of: more may follow.
        running: Units that lanes are doing.
        seconds: Since the run began.
        left: Seconds that the known rest will take at the pace so far; None before a first result.
    """

    kind: Literal["recalled", "begun", "done"]
    unit: Unit
    done: Done | None
    finished: int
    known: int
    running: int
    seconds: float
    left: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run ended.

    Attributes:
        why: Why before everything was done; empty where everything is. It can be resumed.
        at_once: Whether running units were ended too: by a second interrupt, or after the grace.
        finished: Units that have a result.
        left: Known units that have none.
        elsewhere: Units of other shards.
        seconds: That it took.
    """

    why: Why
    at_once: bool
    finished: int
    left: int
    elsewhere: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRules:
    """When a run ends, and who hears of it; see ``pool.run``."""

    seconds: float | None
    stop: Callable[[Done], bool]
    told: Callable[[RunEvent], None]
    lost: Callable[[Unit, str], Done]
    limits: Limits


def given_up(unit: Unit, reason: str) -> Done:
    """What comes of a unit that was lost too often, unless the caller says otherwise."""
    return Done(unit=unit.id, harness=f"{unit.kind} of {unit.kernel}: {reason}")


@dataclass(slots=True)
class _Run:
    """The state of ``dispatch``."""

    journal: Journal
    schedule: Schedule
    crew: WorkerPool
    rules: RunRules
    began: float = field(default_factory=time.monotonic)
    running: dict[int, tuple[Unit, float]] = field(default_factory=dict)
    now_done: int = 0
    finished: int = 0
    why: Why = ""
    at_once: bool = False
    making_room: bool = False

    def add(self, units: Sequence[Unit]) -> None:
        for unit, done in self.schedule.add(units):
            self.finished += 1
            self.tell("recalled", unit, done)

    def give_up(self) -> None:
        while self.schedule.hopeless and not self.why:
            unit = self.schedule.hopeless.pop(0)
            times = self.journal.lost(unit)
            reason = f"its process was lost {times} times before it was done"
            self.settle(unit, self.rules.lost(unit, reason), quarantined=True)

    def assign(self) -> None:
        if self.why:
            return
        self.crew.staff(len(self.schedule) + len(self.running), fresh=int(self.making_room))
        for lane in self.crew.ready():
            unit = self.schedule.peek(len(self.running))
            if unit is None or (unit.alone and not self.is_fresh(lane)):
                return
            self.schedule.take()
            self.journal.begun(unit)
            self.running[lane] = (unit, time.monotonic())
            self.crew.give(lane, unit)
            self.tell("begun", unit, None)

    def is_fresh(self, lane: int) -> bool:
        """Whether a unit that is to be alone can have this lane; if not, it makes room for one."""
        if not self.crew.used(lane):
            self.making_room = False
            return True
        if not self.making_room:
            self.making_room = True
            self.crew.drop(lane)
        return False

    def hear(self, news: WorkerNews) -> None:
        unit, _ = self.running.pop(news.lane, (None, 0.0))
        if unit is None:
            return
        if news.done is not None and news.done.unit == unit.id:
            if "usage" in news.done.facts:
                self.refuse(unit, news.done)
                return
            attempts = max(news.done.attempts, self.journal.lost(unit))
            self.settle(unit, msgspec.structs.replace(news.done, attempts=attempts))
        else:
            self.lose(unit, news.lost or f"its process gave the result of {news.done!r}")

    def refuse(self, unit: Unit, done: Done) -> None:
        """What cannot be asked ends the run, and is asked again when it is mended: no result."""
        self.journal.abandoned([unit.id])
        self.rules.stop(done)
        self.why = self.why or "stopped early"

    def lose(self, unit: Unit, reason: str) -> None:
        times = self.journal.lost(unit)
        if times < MOST_LOST:
            self.schedule.again(unit)
        else:
            done = self.rules.lost(unit, f"{reason}, {times} times")
            self.settle(unit, msgspec.structs.replace(done, attempts=times), quarantined=True)

    def settle(self, unit: Unit, done: Done, *, quarantined: bool = False) -> None:
        """The result is on the disk; then the rest hears of it."""
        self.journal.done(done, quarantined=quarantined)
        self.finished += 1
        self.now_done += 1
        self.add(done.units)
        self.tell("done", unit, done)
        if self.rules.stop(done) and not self.why:
            self.why = "stopped early"

    def tell(
        self, kind: Literal["recalled", "begun", "done"], unit: Unit, done: Done | None
    ) -> None:
        seconds = time.monotonic() - self.began
        rest = self.schedule.known - self.finished
        self.rules.told(
            RunEvent(
                kind=kind,
                unit=unit,
                done=done,
                finished=self.finished,
                known=self.schedule.known,
                running=len(self.running),
                seconds=seconds,
                left=seconds / self.now_done * rest if self.now_done else None,
            )
        )

    def check_clocks(self, interruptions: Interruptions) -> None:
        now, limits = time.monotonic(), self.rules.limits
        until = self.began + (float("inf") if self.rules.seconds is None else self.rules.seconds)
        if interruptions.count:
            self.why = "interrupted"
        elif now >= until and not self.why:
            self.why = "time is up"
        if interruptions.count > 1 or (self.why and now >= until + limits.grace):
            self.at_once = True
            return
        for lane, (unit, begun) in list(self.running.items()):
            if now - begun > limits.unit:
                del self.running[lane]
                self.crew.drop(lane)
                self.lose(unit, f"its process did not come back within {limits.unit:g} s")

    def ended(self) -> RunEnd:
        left = self.schedule.known - self.finished
        return RunEnd(
            why=self.why if left else "",
            at_once=self.at_once,
            finished=self.finished,
            left=left,
            elsewhere=self.schedule.elsewhere,
            seconds=time.monotonic() - self.began,
        )


def dispatch(
    units: Sequence[Unit],
    schedule: Schedule,
    crew: WorkerPool,
    *,
    journal: Journal,
    rules: RunRules,
    interruptions: Interruptions,
) -> RunEnd:
    """Does ``units`` and what follows from them; the caller closes the crew.

    Raises:
        AttncheckError: where the journal cannot be written, or no lane can be started.
    """
    run = _Run(journal, schedule, crew, rules)
    journal.queued(units)
    run.add(units)
    while not run.at_once:
        run.give_up()
        run.assign()
        if not run.running and (run.why or not (len(schedule) or schedule.hopeless)):
            break
        for news in crew.news(_LONGEST_WAIT, interruptions):
            run.hear(news)
        run.check_clocks(interruptions)
    for lane in run.running:
        crew.drop(lane)
    journal.abandoned(unit.id for unit, _ in run.running.values())
    ended = run.ended()
    journal.end(ended.why)
    return ended


Option = str | int | float | bool


def run_units(  # noqa: PLR0913  # one run, said once
    units: Sequence[Unit],
    *,
    work: str,
    options: Mapping[str, Option],
    journal: Journal,
    lanes: Sequence[WorkerPlace],
    seconds: float | None = None,
    stop: Callable[[Done], bool] = lambda _: False,
    told: Callable[[RunEvent], None] = lambda _: None,
    priority: Callable[[Unit], tuple[Any, ...]] = lambda _: (),
    mine: Callable[[Unit], bool] = lambda _: True,
    lost: Callable[[Unit, str], Done] = given_up,
    limits: Limits | None = None,
) -> RunEnd:
    """Does ``units`` and what follows from them, each once; what the journal has is not done again.

    A result is in the journal, on the disk, before ``told`` hears of it. A lane that dies, or whose
    Work raises, is replaced; its unit is done once more when nothing else is, in a new lane, and
    given up when that is lost too. Interrupts: the first ends it when the running units are done,
    the second at once; SIGTERM is as the first. No process is left when it returns or raises, nor
    when this process is killed.

    Args:
        units: What is known from the outset; ``Done.units`` follow.
        work: Factory of the lanes' Work, ``module:function``, called with ``options`` by name.
        options: See there.
        journal: Open for writing.
        lanes: One process each, at most; they are started when there is something to do.
        seconds: No unit is begun after so long; running ones have ``limits.grace`` more.
        stop: Whether a result ends the run, as the first interrupt does. Not asked of results that
            the journal had.
        told: Hears of everything, in this thread.
        priority: Of a unit; least first.
        mine: Whether this run does a unit, or another shard.
        lost: The result of a unit that is given up, from the reason; unless told, a harness error.
        limits: Of time.

    Returns:
        How it ended; the journal says so too, and is left open.

    Raises:
        JournalError: where the journal cannot be written. What ``told`` heard of is safe.
        UsageError: where the factory raises one.
        LaneError: where no lane can be started.
    """
    limits = limits or Limits()
    schedule = Schedule(journal, priority=priority, mine=mine)
    rules = RunRules(seconds=seconds, stop=stop, told=told, lost=lost, limits=limits)
    name = secrets.token_hex(8)
    with Interruptions() as interruptions, Guard(NAME, name):
        crew = ProcessPool(lanes, WorkerSetup(work=work, options=dict(options)), name, limits)
        try:
            return dispatch(
                units,
                schedule,
                crew,
                journal=journal,
                rules=rules,
                interruptions=interruptions,
            )
        finally:
            crew.close()
