"""How far ``attncheck faults`` is."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from attncheck.cli.run_progress import run_progress, time_left
from attncheck.core.sanitize_text import one_line, shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attncheck.workers.pool import RunEvent

__all__ = ["faults_progress"]


class _Count:
    """What has been heard so far."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()

    def hear(self, event: RunEvent) -> list[str]:
        """Counts; what is new, in a line."""
        if event.done is None:
            return []
        score = event.done.facts.get("score") or {"outcome": "harness"}
        self.outcomes[_outcome(score)] += 1
        return [_told(event.unit.kernel, score)] if event.kind == "done" else []

    def line(self, event: RunEvent) -> str:
        """``faults 12/95, 11 caught, 1 missed, about 35 s left``."""
        said = [f"faults {event.finished}/{event.known}"]
        said += [f"{count} {outcome}" for outcome, count in self.outcomes.items()]
        said += [time_left(event.left)] if event.left is not None else []
        return ", ".join(said)


@contextmanager
def faults_progress(*, quiet: bool, verbose: bool) -> Iterator[Callable[[RunEvent], None]]:
    """Yields what hears of every event; with ``verbose`` each score is shown, in a line."""
    count = _Count()
    with run_progress(count.hear, count.line, quiet=quiet, verbose=verbose) as told:
        yield told


def _outcome(score: dict[str, Any]) -> str:
    """Of a gate's score, or of somebody's own tests."""
    return str(score.get("outcome") or score["status"])


def _told(kernel: str, score: dict[str, Any]) -> str:
    first = (score.get("caught") or {}).get("first") or {}
    by = f" by {first['stage']} {first['question']}" if first else ""
    counts = f" after {score['problems']} problems, {score['seconds']:.1f} s" if first else ""
    reason = f": {score['reason']}" if score.get("reason") else ""
    return shortened(one_line(f"{kernel}: {_outcome(score)}{by}{counts}{reason}"))
