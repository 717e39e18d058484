"""How far a gate is: on a terminal one line that moves, a line now and then elsewhere."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from statistics import fmean
from typing import TYPE_CHECKING

from attncheck.cli.run_progress import run_progress, time_left
from attncheck.records.record import FAILED_STATUSES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attncheck.records.run_reports import Answer
    from attncheck.workers.pool import RunEvent
    from attncheck.workers.units import Unit

__all__ = ["gate_progress"]

_FEWEST, _LEAST = 10, 0.05  # results, and the share of all, from which the rest is estimated


class _Count:
    """What has been heard so far."""

    def __init__(self) -> None:
        self.failed = 0
        self.stage = "starting"
        self._known: dict[str, str] = {}  # kind of each unit, by its id
        self._over: set[str] = set()
        self._took: dict[str, list[float]] = {}
        self._most = 1

    def hear(self, event: RunEvent) -> list[Answer]:
        """Counts; the failures that are new."""
        self._learn(event)
        if event.unit.commit:  # of another commit nothing fails
            return []
        if event.kind == "begun":
            self.stage = "smaller failures" if event.unit.kind == "shrink" else event.unit.stage
        answers = event.done.answers if event.done else ()
        wrong = [a for a in answers if a.record.status in FAILED_STATUSES and not a.smallest_of]
        self.failed += len(wrong)
        return wrong if event.kind == "done" else []

    def left(self, event: RunEvent) -> float | None:
        """Seconds that the known rest takes, each unit as long as those of its stage have taken.

        Of a stage that has not begun, as long as all have. None as long as too little is done.
        """
        took = [seconds for each in self._took.values() for seconds in each]
        if len(took) < max(_FEWEST, event.known * _LEAST):
            return None
        rest = Counter(kind for id_, kind in self._known.items() if id_ not in self._over)
        if not rest:
            return 0.0
        work = sum(fmean(self._took.get(kind, took)) * count for kind, count in rest.items())
        # Some of those are another shard's, and some nobody has told us of.
        return work / rest.total() * (event.known - event.finished) / self._most

    def _learn(self, event: RunEvent) -> None:
        unit, done = event.unit, event.done
        self._known[unit.id] = _kind(unit)
        self._most = max(self._most, event.running)
        if done is None:
            return
        self._over.add(unit.id)
        for each in done.units:
            self._known.setdefault(each.id, _kind(each))
        if event.kind == "done" and unit.kind != "describe":
            self._took.setdefault(_kind(unit), []).append(done.seconds)

    def line(self, event: RunEvent) -> str:
        """``bounds 120/243, 2 failed, about 35 s left``."""
        said = [f"{self.stage} {event.finished}/{event.known}"]
        said += [f"{self.failed} failed"] if self.failed else []
        left = self.left(event)
        said += [time_left(left)] if left is not None else []
        return ", ".join(said)


def _kind(unit: Unit) -> str:
    """Units of one kind take about as long."""
    return unit.stage if unit.kind == "ask" else f"{unit.kind} {unit.stage}"


@contextmanager
def gate_progress(*, quiet: bool, verbose: bool) -> Iterator[Callable[[RunEvent], None]]:
    """Yields what hears of every event; everything goes to standard error.

    Args:
        quiet: Nothing is shown.
        verbose: Every failure is shown as it is found, in a line.
    """
    count = _Count()

    def hear(event: RunEvent) -> list[str]:
        return [_failure(answer) for answer in count.hear(event)]

    with run_progress(hear, count.line, quiet=quiet, verbose=verbose) as told:
        yield told


def _failure(answer: Answer) -> str:
    from attncheck.core.sanitize_text import one_line, shortened

    record = answer.record
    reason = record.reason or (record.judgement.reason if record.judgement else "")
    question = str(record.case.get("question", ""))
    said = f"{record.kernel} {answer.stage} {question} {record.variant}: {record.status}: {reason}"
    return shortened(one_line(said))
