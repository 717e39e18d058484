"""Units to lanes, results to the journal: the loop of a run.

A *lane* is a process that does one unit at a time. ``pool`` has them on this machine, ``cluster``
on several.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

from attncheck.runner.journal import MOST_LOST
from attncheck.runner.unit import Done

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attncheck.runner.crew import Crew, Limits, News
    from attncheck.runner.interruptions import Interruptions
    from attncheck.runner.journal import Journal
    from attncheck.runner.schedule import Schedule
    from attncheck.runner.unit import Unit

__all__ = ["Ended", "Event", "Rules", "Why", "dispatch", "given_up"]

Why = Literal["", "interrupted", "time is up", "stopped early"]

_LONGEST_WAIT = 0.5  # seconds between two looks at the clocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
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
class Ended:
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
class Rules:
    """When a run ends, and who hears of it; see ``pool.run``."""

    seconds: float | None
    stop: Callable[[Done], bool]
    told: Callable[[Event], None]
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
    crew: Crew
    rules: Rules
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

    def hear(self, news: News) -> None:
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
            Event(
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

    def ended(self) -> Ended:
        left = self.schedule.known - self.finished
        return Ended(
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
    crew: Crew,
    *,
    journal: Journal,
    rules: Rules,
    interruptions: Interruptions,
) -> Ended:
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
