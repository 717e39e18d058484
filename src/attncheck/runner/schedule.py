"""Which unit is next: by priority, each once, and those that were lost before at last and alone."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, Any

import msgspec

from attncheck.runner.journal import MOST_LOST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from attncheck.runner.journal import Journal
    from attncheck.runner.unit import Done, Unit

__all__ = ["Schedule"]


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
