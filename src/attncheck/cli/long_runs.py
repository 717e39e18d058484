"""Progress of long runs, and the journal from which the same command goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from attncheck.core.errors import parse_seconds
from attncheck.core.sanitize_text import one_line
from attncheck.reporting.exit_codes import INTERRUPTED

if TYPE_CHECKING:
    from attncheck.cli.standard_output import Interrupts
    from attncheck.verify.kernel_hosts import KernelHost
    from attncheck.workers.journal_format import JournalContent
    from attncheck.workers.pool import RunEnd, RunEvent
    from attncheck.workers.units import Unit
    from attncheck.workers.worker_pool import WorkerPlace


T = TypeVar("T")

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
            known = max(count, total)  # ``total`` may be no more than about right
            left = (time.monotonic() - start) / count * (known - count)
            update(count, known, what, f"{count}/{known} cells, {time_left(left)} ({what})")

        yield advance


BY_HAND = "interrupted"


def collect(
    make: Callable[[Callable[[str], None]], Iterator[T]],
    *,
    total: int,
    what: Callable[[T], str],
    show: Callable[[T], None] | None,
    interrupts: Interrupts,
    quiet: bool,
    max_time: str | None,
) -> tuple[list[T], str]:
    """Return what ``make(stage)`` yields, and why the run was stopped before all of it was there.

    Args:
        make: Makes one thing after the other; ``stage`` is called with what is done next.
        total: How many there will be.
        what: What one of them is called beside the bar.
        show: Shows one as soon as it is there.
        max_time: As typed.
    """
    stopped, things = "", []
    try:
        with (
            progress(total, quiet=quiet, check=interrupts.check) as advance,
            _time_limit(parse_seconds(max_time, "--max-time")) as is_up,
        ):
            for one in make(partial(advance, done=False)):
                if is_up():  # what it ended may have become a failure of the kernel's
                    raise _TimeIsUp  # noqa: TRY301  # as where it came
                things.append(one)
                advance(what(one), partial(show, one) if show else None)
    except _TimeIsUp:
        if len(things) < total:
            stopped = f"stopped by --max-time {max_time}"
    except BaseException as error:
        # What an interrupt became may be another error.
        if not things or not (interrupts.raised or isinstance(error, KeyboardInterrupt)):
            raise
        interrupts.take()
        stopped = BY_HAND
    return things, f"{stopped} after {len(things)} of {total} cells" if stopped else ""


class _TimeIsUp(BaseException):
    """As an interrupt is: nobody's ``except Exception`` is to hold it."""


@contextmanager
def _time_limit(seconds: float | None) -> Iterator[Callable[[], bool]]:
    """Within, ``_TimeIsUp`` is raised after so many seconds; yields whether it was."""
    up = False

    def ring(*_: object) -> None:
        nonlocal up
        up = True
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds or 0.0)
    try:
        yield lambda: up
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def claimed(
    hosts: Mapping[str, KernelHost],
    device: str,
    *,
    quiet: bool,
    check: Callable[[], None],
    **options: Any,
) -> dict[str, tuple[str, ...]]:
    """Hold plain functions to what they take; lines on it by kernel.

    Args:
        options: What was typed, and is asked all the same (``Claims.terms``).
    """
    lines = {}
    for kernel, host in hosts.items():
        if not host.subject.conventions:
            continue
        # Not before: all trials come with it.
        from attncheck.verify.claims import CLAIM_TRIALS, hold_to_claims

        with progress(CLAIM_TRIALS, quiet=quiet, check=check) as advance:
            claims = hold_to_claims(host, kernel=kernel, device=device, advance=advance, **options)
        if claims is not None and (claim_lines := tuple(claims.lines())):
            lines[host.subject.name] = claim_lines
    return lines


@contextmanager
def run_progress(
    counter: RunCounter, *, quiet: bool, verbose: bool
) -> Iterator[Callable[[RunEvent], None]]:
    """Yield what hears of every event of a run; with ``verbose`` all that is new is shown."""
    with _shown(quiet=quiet, estimates=False) as (update, say, _):

        def on_event(event: RunEvent) -> None:
            for text in counter.hear(event):
                if verbose:
                    say(text)
            line = counter.line(event)
            update(event.finished, event.known, line, line)

        yield on_event


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
            description = what.replace("[", "\\[")  # a kernel's name is no markup
            bar.update(task, total=known, completed=finished, description=description)

        yield update, lambda text: bar.console.print(text, markup=False, highlight=False), bar


def _say(text: str) -> None:
    with suppress(OSError):  # nobody follows: no reason to end the run
        click.echo(text, err=True)


JOURNAL = "results.jsonl"

# Workers that are started unless somebody asks for more: of a CPU, and of a GPU that has memory.
_MOST_WORKERS, _MOST_OF_A_GPU = 4, 16
_GPU_MEMORY = 5 << 30  # bytes for a worker and its kernel's process


def started_now() -> str:
    """Now, UTC, as a journal says when its run began."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def usable_cores() -> int:
    """Return on how many cores this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def worker_places(jobs: int | None, device: str) -> list[WorkerPlace]:
    """Return the devices of the units: each GPU in turn, or the CPU with a thread each."""
    from attncheck.workers.worker_pool import WorkerPlace

    cores = usable_cores()
    if device == "cpu":
        return [WorkerPlace(threads=1)] * (jobs or min(cores, _MOST_WORKERS))
    # Those that this process may use, by the names that CUDA_VISIBLE_DEVICES takes.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    import torch

    gpus = [name.strip() for name in visible if name.strip()]
    gpus = gpus or [str(number) for number in range(max(1, torch.cuda.device_count()))]
    # Most of a worker's time a compiler works, on a core: the GPU has time for many.
    if jobs is None:
        memory = torch.cuda.get_device_properties(0).total_memory
        of_each = max(_MOST_WORKERS, min(_MOST_OF_A_GPU, memory // _GPU_MEMORY))
        jobs = max(1, min(cores, of_each * len(gpus)))
    return [WorkerPlace(gpu=gpus[number % len(gpus)], threads=1) for number in range(jobs)]


def existing_journal(directory: str, *, fresh: bool) -> JournalContent | None:
    """Read the journal of a folder; None where there is none, or it is to be forgotten."""
    from attncheck.workers.journal_format import JournalError, read_journal

    path = Path(directory) / JOURNAL
    if fresh or not path.exists():
        return None
    try:
        return read_journal(path)
    except JournalError:  # who opens it says what is wrong with it
        return None


def resumable(
    directory: str,
    head: Mapping[str, Any],
    changed: Callable[[JournalContent, set[str]], str | None],
    *,
    fresh: bool,
) -> tuple[JournalContent | None, bool]:
    """Return the journal of a folder, and whether it is gone on with; that is said.

    That of a finished run is forgotten, and one in which something else was asked.

    Args:
        head: What the journal of this run begins with.
        changed: (journal, keys of ``head`` that differ) → what has changed since then, in words;
            None where it is another run altogether, which whoever opens the journal says.
    """
    before, path = existing_journal(directory, fresh=fresh), Path(directory) / JOURNAL
    if before is None or not before.unfinished:
        return before, before is None and not fresh
    differs = {key for key in {*before.head, *head} if before.head.get(key) != head.get(key)}
    what = changed(before, differs)
    if what:
        click.echo(f"attncheck: {one_line(what)} since {path}: all is asked anew.", err=True)
    elif what is not None:
        done = f"{len(before.results)} of {len(before.results) + len(before.unfinished)}"
        click.echo(f"attncheck: goes on with {path}, {done} done (--fresh begins anew).", err=True)
    return before, not what


def run_with_journal(  # one run, said once
    units: Sequence[Unit],
    head: Mapping[str, Any],
    counter: RunCounter,
    *,
    directory: str,
    resume: bool,
    quiet: bool,
    verbose: bool,
    check: Callable[[], None] = lambda: None,
    **how: Any,
) -> tuple[RunEnd, JournalContent]:
    """Do ``units``; return how that ended, and what the journal says then.

    Args:
        units: What is to be done; what the journal has is not done again.
        check: Raises UsageError where nothing can be done; called once it is known that the journal
            is this run's.

    Raises:
        JournalError: where the journal holds another run that is not finished.
    """
    from attncheck.workers.journal import Journal
    from attncheck.workers.pool import run_units

    # The journal is opened before anything is checked that takes long: it may be another run's.
    with Journal.open(Path(directory) / JOURNAL, head, resume=resume) as journal:
        check()
        with run_progress(counter, quiet=quiet, verbose=verbose) as on_event:
            end = run_units(units, journal=journal, on_event=on_event, **how)
        journal.end(end.why)
    return end, journal.content


def say_how_it_ended(end: RunEnd, code: int) -> int:
    """Say where a run stopped; return ``code``, or 130 where it was interrupted."""
    if end.why:
        done = f"{end.finished} of {end.finished + end.left}"
        click.echo(f"attncheck: {end.why} at {done}: the same command goes on.", err=True)
    return INTERRUPTED if end.why == "interrupted" else code
