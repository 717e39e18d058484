"""Runs of many units of work, with a journal from which the same command goes on."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attncheck.cli.progress import run_progress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attncheck.cli.progress import RunCounter
    from attncheck.workers.journal_format import JournalContent
    from attncheck.workers.pool import RunEnd
    from attncheck.workers.units import Unit
    from attncheck.workers.worker_pool import WorkerPlace

JOURNAL = "results.jsonl"

_INTERRUPTED = 130
_MOST_WORKERS = 4  # that are started unless somebody asks for more


def started_now() -> str:
    """Now, UTC, as a journal says when its run began."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def worker_places(jobs: int | None, device: str) -> list[WorkerPlace]:
    """Return the devices of the units: each GPU in turn, or the CPU with a thread each."""
    from attncheck.workers.worker_pool import WorkerPlace

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if device == "cpu":
        return [WorkerPlace(threads=1)] * (jobs or min(cores, _MOST_WORKERS))
    # Those that this process may use, by the names that CUDA_VISIBLE_DEVICES takes.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    gpus = [name.strip() for name in visible if name.strip()]
    if not gpus:
        import torch

        gpus = [str(number) for number in range(max(1, torch.cuda.device_count()))]
    # A compiler works beside the GPU: several workers of one GPU wait for it at the same time.
    count = jobs or max(1, min(cores // 2, _MOST_WORKERS * len(gpus)))
    return [WorkerPlace(gpu=gpus[number % len(gpus)], threads=1) for number in range(count)]


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


def differing_keys(before: JournalContent, head: Mapping[str, Any]) -> set[str]:
    """Keys under which the head of a journal says something else than ``head``."""
    return {key for key in {*before.head, *head} if before.head.get(key) != head.get(key)}


def say_resumed(before: JournalContent, path: Path) -> None:
    """Say on standard error which journal a run goes on with."""
    done = f"{len(before.results)} of {len(before.results) + len(before.unfinished)}"
    click.echo(f"attncheck: goes on with {path}, {done} done (--fresh begins anew).", err=True)


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
        how: What else ``workers.pool.run_units`` takes.

    Raises:
        JournalError: where the journal holds another run that is not finished.
    """
    from attncheck.workers.journal import Journal
    from attncheck.workers.pool import run_units

    # The journal is opened before anything is checked that takes long: it may be another run's.
    with Journal.open(Path(directory) / JOURNAL, head, resume=resume) as journal:
        check()
        with run_progress(counter, quiet=quiet, verbose=verbose) as told:
            end = run_units(units, journal=journal, told=told, **how)
        journal.end(end.why)
    return end, journal.content


def say_how_it_ended(end: RunEnd, code: int) -> int:
    """Say where a run stopped; return ``code``, or 130 where it was interrupted."""
    if end.why:
        done = f"{end.finished} of {end.finished + end.left}"
        click.echo(f"attncheck: {end.why} at {done}: the same command goes on.", err=True)
    return _INTERRUPTED if end.why == "interrupted" else code
