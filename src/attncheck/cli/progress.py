"""How far a long run is: a bar with an ETA on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["progress"]

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
