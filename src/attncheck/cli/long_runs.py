"""Progress of long runs, and the journal from which the same command resumes."""

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

from attncheck.cli.standard_output import interrupts
from attncheck.core.errors import parse_seconds
from attncheck.core.sanitize_text import one_line
from attncheck.reporting.exit_codes import INTERRUPTED
from attncheck.workers.journal import Journal
from attncheck.workers.journal_format import JournalContent, JournalError, read_journal
from attncheck.workers.pool import RunEnd, RunEvent, run_units
from attncheck.workers.units import Unit
from attncheck.workers.worker_pool import WorkerPlace

if TYPE_CHECKING:
    from attncheck.verify.kernel_hosts import KernelHost


T = TypeVar("T")

TRIALS = "finding out what the kernel supports,"
"""Unit of the progress of trials that find out which problems a function takes."""

_SECONDS_BETWEEN_LINES = 10.0  # between lines of progress where there is no terminal


class RunCounter(Protocol):
    """Counts of a run's progress."""

    def hear(self, event: RunEvent) -> list[str]:
        """Count ``event``; return a line for each new result to report."""

    def line(self, event: RunEvent) -> str:
        """Return the progress of the run in a line."""


@contextmanager
def progress(unit: str, total: int, *, quiet: bool) -> Iterator[Callable[..., None]]:
    """Yield ``advance(what, show)``, to be called once for each of ``total`` pieces of work.

    Progress reads ``question 35 of 68`` where ``unit`` is ``question``.

    With ``done=False`` it only shows the current work and counts nothing. Everything goes to
    standard error, so that standard output has only the report. Output of ``show`` goes above the
    bar. Each call raises KeyboardInterrupt if an interrupt was swallowed before.
    """
    start, count = time.monotonic(), 0
    with _meter(quiet=quiet, unit=unit) as (update, _, bar):

        def advance(
            what: str, show: Callable[[], None] | None = None, *, done: bool = True
        ) -> None:
            nonlocal count
            interrupts.check()
            if not done:
                update(count, total, what, f"{unit} {count} of {total} ({what})")
                return
            count += 1
            if show is not None:
                # Both may go to one terminal: remove the bar, and draw it again below.
                if bar is not None:
                    bar.stop()
                show()
                if bar is not None:
                    bar.start()
            known = max(count, total)  # ``total`` may be an estimate
            left = (time.monotonic() - start) / count * (known - count)
            share = f"{unit} {count} of {known}"
            update(count, known, what, f"{share}, {time_left(left)} ({what})")

        yield advance


BY_HAND = "interrupted"


def collect(
    make: Callable[[Callable[[str], None]], Iterator[T]],
    *,
    total: int,
    what: Callable[[T], str],
    show: Callable[[T], None] | None,
    quiet: bool,
    max_time: str | None,
) -> tuple[list[T], str]:
    """Return the results that ``make(stage)`` yields, and why the run stopped early, if it did.

    Args:
        make: Yields the results; it calls ``stage`` with a description of the current work.
        total: Number of results.
        what: Returns the name of a result beside the bar.
        show: Shows a result as soon as it is measured.
        max_time: --max-time as typed.
    """
    reason, results = "", []
    try:
        with (
            progress("cell", total, quiet=quiet) as advance,
            _time_limit(parse_seconds(max_time, "--max-time")) as is_up,
        ):
            for one in make(partial(advance, done=False)):
                if is_up():  # the interrupted call may look like a failure of the kernel
                    raise _TimeIsUp  # noqa: TRY301  # as by the signal
                results.append(one)
                advance(what(one), partial(show, one) if show else None)
    except _TimeIsUp:
        if len(results) < total:
            reason = f"stopped by --max-time {max_time}"
    except BaseException as error:
        # An interrupt may have become another error.
        if not results or not (interrupts.raised or isinstance(error, KeyboardInterrupt)):
            raise
        interrupts.take()
        reason = BY_HAND
    return results, f"{reason} after {len(results)} of {total} cells" if reason else ""


class _TimeIsUp(BaseException):
    """The time is up; no Exception, so that no ``except Exception`` catches it."""


@contextmanager
def _time_limit(seconds: float | None) -> Iterator[Callable[[], bool]]:
    """Raise ``_TimeIsUp`` in the block after ``seconds``; yield a test whether it was raised."""
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


def restrict_to_claims(
    hosts: Mapping[str, KernelHost],
    device: str,
    *,
    quiet: bool,
    **options: Any,
) -> dict[str, tuple[str, ...]]:
    """Restrict plain functions to the problems that they support; return lines on it by kernel.

    Args:
        options: Typed choices, which are asked in any case (``Claims.terms``).
    """
    lines = {}
    for kernel, host in hosts.items():
        if not host.subject.conventions:
            continue
        # Imported late, since all trials come with it.
        from attncheck.verify.claims import CLAIM_TRIALS, hold_to_claims

        with progress(TRIALS, CLAIM_TRIALS, quiet=quiet) as advance:
            claims = hold_to_claims(host, kernel=kernel, device=device, advance=advance, **options)
        if claims is not None and (claim_lines := tuple(claims.lines())):
            lines[host.subject.name] = claim_lines
    return lines


def time_left(seconds: float) -> str:
    """Return ``about 35 s left``."""
    text = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return f"about {text} left"


Update = Callable[[int, int, str, str], None]
"""Shows progress: finished and known units, the text beside the bar, and the line without one."""


@contextmanager
def _meter(*, quiet: bool, unit: str = "") -> Iterator[tuple[Update, Callable[[str], None], Any]]:
    """Yield a function that updates the progress, one that shows a line, and the bar if any.

    The bar has a count and an estimate of the time left only if it counts a ``unit``.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if quiet:
        yield lambda *_: None, lambda _: None, None
    elif console.is_terminal:
        from rich import progress as rich

        counts = (
            rich.TextColumn(unit),
            rich.MofNCompleteColumn(separator=" of "),
            rich.TimeRemainingColumn(),
        )
        columns = (
            rich.BarColumn(),
            *(counts if unit else ()),
            rich.TextColumn("{task.description}"),
        )
        with rich.Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("starting", total=None)

            def draw(finished: int, known: int, what: str, _: str) -> None:
                description = what.replace("[", "\\[")  # [ in a kernel's name is no markup
                bar.update(task, total=known, completed=finished, description=description)

            yield draw, lambda text: bar.console.print(text, markup=False, highlight=False), bar
    else:
        last = time.monotonic()

        def update(*counts_and_words: Any) -> None:
            nonlocal last
            if time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                _say(counts_and_words[-1])

        yield update, _say, None


def _say(text: str) -> None:
    with suppress(OSError):  # an unread standard error does not end the run
        click.echo(text, err=True)


JOURNAL = "results.jsonl"

# Most workers without --jobs: on a CPU, and on a GPU with enough memory.
_MOST_WORKERS, _MOST_OF_A_GPU = 4, 16
# Bytes of a GPU for a worker and its kernel's process: 4.9 GiB, so that 80 GB are enough for 16.
_GPU_MEMORY = 49 * 2**30 // 10


def started_now() -> str:
    """Return the current time in UTC, as a journal's header has it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def usable_cores() -> int:
    """Return the number of cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def worker_places(jobs: int | None, device: str) -> list[WorkerPlace]:
    """Return the places of workers: each GPU in turn, or the CPU with one thread each."""
    cores = usable_cores()
    if device == "cpu":
        return [WorkerPlace(threads=1)] * (jobs or min(cores, _MOST_WORKERS))
    # GPUs that this process may use, by their names in CUDA_VISIBLE_DEVICES.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    import torch

    gpus = [name.strip() for name in visible if name.strip()]
    gpus = gpus or [str(number) for number in range(max(1, torch.cuda.device_count()))]
    # A worker mostly waits for a compiler on a core, so a GPU has time for many workers.
    if jobs is None:
        memory = torch.cuda.get_device_properties(0).total_memory
        per_gpu = max(_MOST_WORKERS, min(_MOST_OF_A_GPU, memory // _GPU_MEMORY))
        jobs = max(1, min(cores, per_gpu * len(gpus)))
    return [WorkerPlace(gpu=gpus[number % len(gpus)], threads=1) for number in range(jobs)]


def existing_journal(directory: str, *, fresh: bool) -> JournalContent | None:
    """Return the journal of a folder; None if there is none or ``fresh`` is set."""
    path = Path(directory) / JOURNAL
    if fresh or not path.exists():
        return None
    try:
        return read_journal(path)
    except JournalError:  # opening it later reports the error
        return None


def resumable(
    directory: str,
    head: Mapping[str, Any],
    changed: Callable[[JournalContent, set[str]], str | None],
    *,
    fresh: bool,
) -> tuple[JournalContent | None, bool]:
    """Return the journal of a folder, and whether this run resumes it; print which.

    A journal of a finished run is not resumed, nor one whose sources have changed.

    Args:
        head: Header of this run's journal.
        changed: Takes a journal and the keys of ``head`` that differ; returns the change since then
            in words, "" for none, or None for another run, which opening the journal refuses.
    """
    before, path = existing_journal(directory, fresh=fresh), Path(directory) / JOURNAL
    if before is None or not before.unfinished:
        return before, before is None and not fresh
    differs = {key for key in {*before.head, *head} if before.head.get(key) != head.get(key)}
    change = changed(before, differs)
    if change:
        click.echo(f"attncheck: {one_line(change)} since {path}: all is asked anew.", err=True)
    elif change is not None:
        share = f"{len(before.results)} of {len(before.results) + len(before.unfinished)}"
        click.echo(f"attncheck: goes on with {path}, {share} done (--fresh begins anew).", err=True)
    return before, not change


def run_with_journal(  # all arguments of one run
    units: Sequence[Unit],
    head: Mapping[str, Any],
    counter: RunCounter,
    *,
    directory: str,
    resume: bool,
    quiet: bool,
    verbose: bool,
    check: Callable[[], None] = lambda: None,
    **run_options: Any,
) -> tuple[RunEnd, JournalContent]:
    """Run ``units``; return how the run ended, and the content of the journal.

    Args:
        units: The units of work; those with a result in the journal are not repeated.
        counter: Counts the events; ``verbose`` shows its lines.
        check: Raises UsageError if nothing can be run; called after the journal was opened and is
            known to be this run's.

    Raises:
        JournalError: if the journal holds another, unfinished run.
    """
    # Open the journal before slow checks, since it may belong to another run.
    with Journal.open(Path(directory) / JOURNAL, head, resume=resume) as journal:
        check()
        with _meter(quiet=quiet) as (update, say, _):

            def on_event(event: RunEvent) -> None:
                for text in counter.hear(event):
                    if verbose:
                        say(text)
                line = counter.line(event)
                update(event.finished, event.known, line, line)

            end = run_units(units, journal=journal, on_event=on_event, **run_options)
    return end, journal.content


def print_run_end(end: RunEnd, code: int) -> int:
    """Print where a run stopped; return ``code``, or 130 if it was interrupted."""
    if end.why:
        share = f"{end.finished} of {end.finished + end.remaining}"
        click.echo(f"attncheck: {end.why} at {share}: the same command goes on.", err=True)
    return INTERRUPTED if end.why == "interrupted" else code
