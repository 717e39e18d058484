"""Progress of long runs: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from attncheck.workers.pool import RunEvent

    Hear = Callable[[RunEvent], Iterable[str]]

    Line = Callable[[RunEvent], str]

__all__ = ["progress", "run_progress", "time_left"]


_SECONDS_BETWEEN_LINES = 10.0

Advance = Callable[[str], None]


@contextmanager
def progress(total: int, *, quiet: bool) -> Iterator[Advance]:
    """Yields ``advance(what)``, to be called once for each of ``total`` pieces of work.

    Everything goes to standard error, so that standard output is the report alone.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if quiet:
        yield lambda _: None
    elif console.is_terminal:
        with _bar(total, console) as advance:
            yield advance
    else:
        yield _lines(total)


@contextmanager
def _bar(total: int, console: Console) -> Iterator[Advance]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=total)

        def advance(what: str) -> None:
            bar.update(task, advance=1, description=what)

        yield advance


def _lines(total: int) -> Advance:
    start = last = time.monotonic()
    count = 0

    def advance(what: str) -> None:
        nonlocal last, count
        count += 1
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            left = (now - start) / count * (total - count)
            with suppress(OSError):  # nobody follows: no reason to end the run
                click.echo(f"{count}/{total} cells, about {left:.0f} s left ({what})", err=True)

    return advance


@contextmanager
def run_progress(
    hear: Hear, line: Line, *, quiet: bool, verbose: bool
) -> Iterator[Callable[[RunEvent], None]]:
    """Yields what hears of every event; everything goes to standard error.

    Args:
        hear: Event → what is to be told of it, in lines.
        line: Event → how far the run is.
        quiet: Nothing is shown.
        verbose: What is to be told is.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if quiet:
        yield lambda _: None
    elif console.is_terminal:
        with _live(console, hear, line, verbose=verbose) as told:
            yield told
    else:
        yield _lines_of_run_progress(hear, line, verbose=verbose)


def time_left(seconds: float) -> str:
    """``about 35 s left``."""
    said = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return f"about {said} left"


@contextmanager
def _live(
    console: Console, hear: Hear, line: Line, *, verbose: bool
) -> Iterator[Callable[[RunEvent], None]]:
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def told(event: RunEvent) -> None:
            for text in hear(event):
                if verbose:
                    bar.console.print(text, markup=False, highlight=False)
            said = line(event).replace("[", "\\[")
            bar.update(task, total=event.known, completed=event.finished, description=said)

        yield told


def _lines_of_run_progress(hear: Hear, line: Line, *, verbose: bool) -> Callable[[RunEvent], None]:
    last = time.monotonic()

    def told(event: RunEvent) -> None:
        nonlocal last
        for text in hear(event):
            if verbose:
                _say(text)
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            _say(line(event))

    return told


def _say(text: str) -> None:
    with suppress(OSError):  # nobody follows: no reason to end the run
        click.echo(text, err=True)
