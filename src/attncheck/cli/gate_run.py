"""The run of ``attncheck gate``: its journal and its lanes."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attncheck.cli.gate_asked import JOURNAL, Asked, lanes_of, there
from attncheck.cli.gate_progress import gate_progress
from attncheck.core.errors import UsageError
from attncheck.core.sanitize_text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.gate.sources import CommitTree
    from attncheck.workers.journal_format import JournalContent
    from attncheck.workers.pool import RunEnd
    from attncheck.workers.units import Done

__all__ = ["beside", "ran"]

_OF_THE_FILES = frozenset({"sources", "started", "seed", "typed"})


@contextmanager
def beside(
    ref: str | None, kernels: tuple[str, ...], *, cluster: str | None
) -> Iterator[CommitTree | None]:
    """The files of the commit ``ref``, until the end of the block; None where there is none.

    Raises:
        UsageError: for a commit that is not here, or a kernel that is no part of any.
    """
    if ref is None:
        yield None
        return
    from attncheck.gate.sources import commit_tree

    if cluster is not None:
        raise UsageError("--against has the files of the commit here alone: leave --cluster out.")
    with commit_tree(ref) as found:
        for kernel in kernels:
            found.kernel(kernel)
        yield found


def ran(  # noqa: PLR0913  # one parameter per option
    this: Asked,
    *,
    directory: str,
    fresh: bool,
    jobs: int | None,
    seconds: float | None,
    cluster: str | None,
    first: bool,
    quiet: bool,
    verbose: bool,
) -> tuple[RunEnd, JournalContent]:
    """Does it; returns how it ended, and what the journal says then.

    Raises:
        JournalError: where the journal holds another run that is not finished.
        UsageError: for a kernel that cannot be loaded.
    """
    from attncheck.gate.plan import priority
    from attncheck.records.record import FAILED_STATUSES
    from attncheck.workers.journal import Journal
    from attncheck.workers.units import Shard

    if not this.choices.isolated:
        click.echo("attncheck: --in-process: the kernel can end or alter the judge.", err=True)
    before = there(directory, fresh=fresh)
    resume = _goes_on(before, this, directory) if before is not None else not fresh
    usage: list[str] = []

    def stop(done: Done) -> bool:
        if "usage" in done.facts:
            usage.append(str(done.facts["usage"]))
            return True
        if not first or journal.content.units[done.unit].commit:  # another commit's fails nothing
            return False
        return any(answer.record.status in FAILED_STATUSES for answer in done.answers)

    units = [unit for unit in this.units if not (resume and _is_replayed(unit, before))]
    with Journal.open(Path(directory) / JOURNAL, this.head, resume=resume) as journal:
        with gate_progress(quiet=quiet, verbose=verbose) as told:
            how: dict[str, Any] = {
                "work": "attncheck.gate.gate_worker:work",
                "options": this.choices.options(),
                "journal": journal,
                "seconds": seconds,
                "stop": stop,
                "told": told,
                "priority": priority,
                "mine": Shard.parse(this.shard).has,
            }
            if cluster is None:
                from attncheck.workers.pool import run_units

                ended = run_units(units, lanes=lanes_of(jobs, this.device), **how)
            else:
                from attncheck.workers.ray_pool import run_on_cluster as on_cluster

                ended = on_cluster(units, address=cluster, device=this.device, most=jobs, **how)
        journal.end(ended.why)
    if usage:
        raise UsageError(usage[0])
    return ended, journal.content


def _goes_on(before: JournalContent, this: Asked, directory: str) -> bool:
    """Whether the journal that is there is resumed; of a run that is finished it is forgotten.

    So is one whose kernels were others: their answers say nothing of those that are here.
    """
    there, here = before.head, this.head
    differs = {key for key in {*there, *here} if there.get(key) != here.get(key)}
    if not before.unfinished:
        return False
    if differs - _OF_THE_FILES or ("seed" in differs and "sources" not in differs):
        return True  # the journal says what is another
    path = Path(directory) / JOURNAL
    if "sources" in differs:
        click.echo(f"attncheck: the kernel has changed since {path}: all is asked anew.", err=True)
        return False
    from attncheck.gate.sources import changed_source as changed

    if what := changed(before):
        click.echo(f"attncheck: {one_line(what)} since {path}: all is asked anew.", err=True)
        return False
    known = f"{len(before.results)} of {len(before.results) + len(before.unfinished)}"
    click.echo(f"attncheck: goes on with {path}, {known} done (--fresh begins anew).", err=True)
    return True


def _is_replayed(unit: Any, before: JournalContent | None) -> bool:
    """Whether a failure of before is of this very run."""
    if unit.kind != "ask" or before is None or unit.id in before.units:
        return False
    records = (a.record for done in before.results.values() for a in done.answers)
    case = unit.case
    return any(record.case == case for record in records)
