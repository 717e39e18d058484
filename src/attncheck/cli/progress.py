"""Progress of long runs: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

import click

if TYPE_CHECKING:
    from attncheck.workers.pool import RunEvent

_SECONDS_BETWEEN_LINES = 10.0


class RunCounter(Protocol):
    """Totals that a run's progress is counted by."""

    def hear(self, event: RunEvent) -> list[str]:
        """Count ``event``; return what is new, in lines."""

    def line(self, event: RunEvent) -> str:
        """Return how far the run is."""


@contextmanager
def progress(
    total: int, *, quiet: bool, check: Callable[[], None] = lambda: None
) -> Iterator[Callable[..., None]]:
    """Yield ``advance(what, show)``, to be called once for each of ``total`` pieces of work.

    Called with ``done=False`` it says what is being done now, and counts nothing. Everything goes
    to standard error, so that standard output is the report alone. What ``show`` writes, if
    anything, stands above the bar. Each call begins with ``check``, which may raise.
    """
    start, count = time.monotonic(), 0
    with _shown(quiet=quiet, estimates=True) as (update, _, bar):

        def advance(
            what: str, show: Callable[[], None] | None = None, *, done: bool = True
        ) -> None:
            nonlocal count
            check()
            if not done:
                update(count, total, what, f"{count}/{total} cells ({what})")
                return
            count += 1
            if show is not None:
                # Both may be one terminal: the bar goes away, and comes back below.
                if bar is not None:
                    bar.stop()
                show()
                if bar is not None:
                    bar.start()
            left = (time.monotonic() - start) / count * (total - count)
            update(count, total, what, f"{count}/{total} cells, {time_left(left)} ({what})")

        yield advance


@contextmanager
def run_progress(
    counter: RunCounter, *, quiet: bool, verbose: bool
) -> Iterator[Callable[[RunEvent], None]]:
    """Yield what hears of every event of a run; with ``verbose`` all that is new is shown."""
    with _shown(quiet=quiet, estimates=False) as (update, say, _):

        def told(event: RunEvent) -> None:
            for text in counter.hear(event):
                if verbose:
                    say(text)
            line = counter.line(event)
            update(event.finished, event.known, line, line)

        yield told


def time_left(seconds: float) -> str:
    """``about 35 s left``."""
    text = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return f"about {text} left"


Update = Callable[[int, int, str, str], None]
"""Finished, known, what stands beside the bar, and the line elsewhere."""


@contextmanager
def _shown(*, quiet: bool, estimates: bool) -> Iterator[tuple[Update, Callable[[str], None], Any]]:
    """Yield what shows how far a run is, what shows a line of its own, and the bar, if any."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet:
        yield lambda *_: None, lambda _: None, None
    elif console.is_terminal:
        with _bar(console, estimates=estimates) as shown:
            yield shown
    else:
        last = time.monotonic()

        def update(*counts_and_words: Any) -> None:
            nonlocal last
            if time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                _say(counts_and_words[-1])

        yield update, _say, None


@contextmanager
def _bar(console: Any, *, estimates: bool) -> Iterator[tuple[Update, Callable[[str], None], Any]]:
    from rich import progress as rich

    counts = (rich.MofNCompleteColumn(), rich.TimeRemainingColumn()) if estimates else ()
    columns = (rich.BarColumn(), *counts, rich.TextColumn("{task.description}"))
    with rich.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def update(finished: int, known: int, what: str, _: str) -> None:
            said = what.replace("[", "\\[")  # a kernel's name is no markup
            bar.update(task, total=known, completed=finished, description=said)

        yield update, lambda text: bar.console.print(text, markup=False, highlight=False), bar


def _say(text: str) -> None:
    with suppress(OSError):  # nobody follows: no reason to end the run
        click.echo(text, err=True)
