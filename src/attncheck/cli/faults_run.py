"""The run of ``attncheck faults``: its journal and its lanes."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attncheck.cli.faults_progress import faults_progress
from attncheck.cli.gate_asked import JOURNAL, seconds_of, there

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attncheck.cli.faults_options import FaultsAsked
    from attncheck.faults.fault_selection import FaultSelection
    from attncheck.workers.journal_format import JournalContent
    from attncheck.workers.pool import Option, RunEnd
    from attncheck.workers.units import Unit
    from attncheck.workers.worker_pool import WorkerPlace

__all__ = ["exit_code", "header", "ran"]

_INTERRUPTED = 130
_OF_A_RUN = frozenset({"started", "typed"})  # of a journal's header: no part of the plan


def header(
    these: FaultSelection, *, device: str, tier: str, file: Path | None, typed: str
) -> dict[str, Any]:
    """What the journal begins with: what makes two runs the same, and when the first began."""
    from attncheck.faults.fault_selection import source_digest

    return {
        "faults": list(these.names),
        "device": device,
        "tier": tier,
        "file": str(file) if file else "",
        "sources": source_digest(file),
        "started": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "typed": typed,
    }


def ran(  # one run, said once
    asked: FaultsAsked,
    units: Sequence[Unit],
    head: dict[str, Any],
    *,
    work: str,
    options: Mapping[str, Option],
    lanes: Sequence[WorkerPlace],
    check: Callable[[], None] = lambda: None,
) -> tuple[RunEnd, JournalContent]:
    """Does ``units``; returns how that ended, and what the journal says then.

    Args:
        asked: What was typed: where the journal is, how long, whether anew, what is told.
        units: What is to be done; what the journal has is not done again.
        head: What the journal begins with.
        work: Of the lanes, as ``pool.run`` has it.
        options: Likewise.
        lanes: Which there are.
        check: Raises UsageError where nothing can be scored; called once it is known that the
            journal is this run's.

    Raises:
        UsageError: for a time or a folder that cannot be.
        JournalError: where the journal holds another run that is not finished.
    """
    from attncheck.core.files import check_names
    from attncheck.faults.fault_selection import priority
    from attncheck.workers.journal import Journal
    from attncheck.workers.pool import run_units

    seconds = seconds_of(asked.max_time, "--max-time")
    check_names(asked.directory, [JOURNAL])
    path = Path(asked.directory) / JOURNAL
    before = there(asked.directory, fresh=asked.fresh)
    resume = _goes_on(before, head, path) if before is not None else not asked.fresh
    with Journal.open(path, head, resume=resume) as journal:
        check()
        with faults_progress(quiet=asked.quiet, verbose=asked.verbose) as told:
            ended = run_units(
                units,
                work=work,
                options=options,
                journal=journal,
                lanes=lanes,
                seconds=seconds,
                told=told,
                priority=priority,
            )
        journal.end(ended.why)
    if ended.why:
        answered = f"{ended.finished} of {ended.finished + ended.left}"
        click.echo(f"attncheck: {ended.why} at {answered}: the same command goes on.", err=True)
    return ended, journal.content


def exit_code(ended: RunEnd, code: int) -> int:
    """``code``, which is the report's, unless the run was interrupted twice."""
    return _INTERRUPTED if ended.why == "interrupted" and ended.at_once else code


def _goes_on(before: JournalContent, head: dict[str, Any], path: Path) -> bool:
    """Whether the journal that is there is resumed; of a run that is finished it is forgotten.

    So is one of another attncheck: its scores say nothing of the one that is here.
    """
    differs = {key for key in {*before.head, *head} if before.head.get(key) != head.get(key)}
    if not before.unfinished:
        return False
    if differs - _OF_A_RUN - {"sources"}:
        return True  # the journal says what is another
    if "sources" in differs:
        click.echo(f"attncheck: sources have changed since {path}: all is asked anew.", err=True)
        return False
    known = f"{len(before.results)} of {len(before.results) + len(before.unfinished)}"
    click.echo(f"attncheck: goes on with {path}, {known} done (--fresh begins anew).", err=True)
    return True
