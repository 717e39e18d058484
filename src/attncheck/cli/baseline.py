"""``attncheck baseline``: what kernels could do, kept in a file, and what has become of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from attncheck.cli.options import format_option
from attncheck.cli.standard_output import Group, Verb, standard_output
from attncheck.core.sanitize_text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from attncheck.cli.measurements import Measured
    from attncheck.records.baseline_entries import Baseline, Entry
    from attncheck.records.run_reports import Change

__all__ = ["baseline"]

_TAKEN = ("worse", "better", "new", "gone")


@click.group(cls=Group)
def baseline() -> None:
    """Keep what your kernels can do in a file of the project, and see what has become of it.

    SOURCE is what a gate wrote: its gate.json, or its journal results.jsonl.
    """


_sources = click.argument("sources", nargs=-1, required=True, metavar="SOURCE…")
_file = click.option(
    "--baseline",
    "file",
    metavar="FILE",
    help="The baseline (default: attncheck-baseline.json of the project).",
)
_kernels = click.option(
    "--kernel", "kernels", multiple=True, metavar="NAME", help="Only of this kernel; repeatable."
)
_cases = click.option(
    "--case", "cases", multiple=True, metavar="ID", help="Only of this case; repeatable."
)


@baseline.command(cls=Verb)
@_sources
@_file
@click.option("--force", is_flag=True, help="Replace a baseline that is there.")
def write(*, sources: tuple[str, ...], file: str | None, force: bool) -> int:
    """Make the file, of what the kernels of SOURCE can do.

    What fails cannot be kept: a baseline excuses no wrong answer. Commit the file.
    """
    from attncheck.cli.measurements import measured, path_of
    from attncheck.core.errors import UsageError
    from attncheck.records.baseline_entries import make_baseline

    path = path_of(file)
    if path.exists() and not force:
        raise UsageError(
            f"{path} is there: take changes over with attncheck baseline accept, or add --force."
        )
    found = measured(sources)
    wrong = _wrong(found.entries.values()) or _failed(found)
    if wrong:
        return _refused(wrong)
    _put(path, make_baseline(found.entries.values(), found.environments, _version()))
    with standard_output():
        click.echo(f"{len(found.entries):,} cases are kept in {path}")
    return 0


@baseline.command(cls=Verb)
@_sources
@_file
@_kernels
@_cases
@click.option(
    "--strict-baseline", "strict", is_flag=True, help="Exit code 1 for what is better or gone, too."
)
@format_option("table, json or md")
def diff(
    *,
    sources: tuple[str, ...],
    file: str | None,
    kernels: tuple[str, ...],
    cases: tuple[str, ...],
    strict: bool,
    fmt: str,
) -> int:
    """Show what the kernels of SOURCE can do beside the baseline.

    Exit code 1 when a case is worse.
    """
    from attncheck.cli.as_typed import as_typed
    from attncheck.cli.measurements import measured, path_of
    from attncheck.records.run_reports import BaselineComparison
    from attncheck.reporting import rendering

    rendering.check_format(fmt)
    path = path_of(file)
    found = measured(sources)
    changes = _chosen(_changes(path, found), kernels, cases)
    report = BaselineComparison(
        command=as_typed(), baseline=path.name, problems=found.problems, changes=changes
    )
    with standard_output():
        rendering.show(report, fmt)
    bad = {"worse", "better", "gone"} if strict else {"worse"}
    return int(any(change.standing in bad for change in changes))


@baseline.command(cls=Verb)
@_sources
@_file
@_kernels
@_cases
@click.option("--reason", default="", metavar="TEXT", help="Why; it must be said of what is worse.")
def accept(
    *,
    sources: tuple[str, ...],
    file: str | None,
    kernels: tuple[str, ...],
    cases: tuple[str, ...],
    reason: str,
) -> int:
    """Take over what has become of SOURCE's kernels: all, or by --kernel and --case.

    What is worse needs a reason, which stands in the file from then on. What is within rounding
    stays as it was, unless its case is named: else a baseline would creep.
    """
    from attncheck.cli.measurements import measured, path_of
    from attncheck.core.errors import UsageError

    path = path_of(file)
    found = measured(sources)
    changes = _chosen(_changes(path, found), kernels, cases)
    taken = [c for c in changes if c.standing in _TAKEN or c.case_id in cases]
    worse = [change for change in taken if change.standing == "worse"]
    entries = _entries(taken, found)
    wrong = _wrong(entries)
    if wrong:
        return _refused(wrong)
    if worse and not reason.strip():
        raise UsageError(
            f"case {worse[0].case_id} of kernel {worse[0].kernel!r} is worse: say why it is to be "
            "accepted with --reason."
        )
    gone = {(change.kernel, change.case_id) for change in taken if change.standing == "gone"}
    _put(path, _after(path, found, entries, gone, reason.strip(), worse))
    from attncheck.reporting.score_documents import tally

    with standard_output():
        click.echo(f"{path}: {tally(taken)} taken over")
    return 0


def _changes(path: Path, found: Measured) -> tuple[Change, ...]:
    from attncheck.baseline.comparison import compare_runs
    from attncheck.records.baseline_entries import read_baseline

    kept = read_baseline(path)
    return compare_runs(kept, found.answers, found.by_record, complete=found.complete)


def _chosen(
    changes: Iterable[Change], kernels: Sequence[str], cases: Sequence[str]
) -> tuple[Change, ...]:
    """Raises UnknownName for a kernel or case that none of them is about."""
    from attncheck.core.errors import UnknownName

    changes = tuple(changes)
    about: tuple[tuple[str, Sequence[str], Callable[[Change], str]], ...]
    about = (("kernel", kernels, lambda c: c.kernel), ("case", cases, lambda c: c.case_id))
    for what, names, of in about:
        known = tuple(dict.fromkeys(of(change) for change in changes))
        for name in names:
            if name not in known:
                raise UnknownName(what, name, known)
    return tuple(
        change
        for change in changes
        if (not kernels or change.kernel in kernels) and (not cases or change.case_id in cases)
    )


def _entries(taken: Iterable[Change], found: Measured) -> list[Entry]:
    """What the changes that are taken over say now, on whichever architecture."""
    wanted = {(change.kernel, change.case_id) for change in taken}
    return [entry for entry in found.entries.values() if (entry.kernel, entry.case) in wanted]


def _after(  # what becomes of a baseline
    path: Path,
    found: Measured,
    entries: Iterable[Entry],
    gone: set[tuple[str, str]],
    reason: str,
    worse: Iterable[Change],
) -> Baseline:
    from msgspec.structs import replace

    from attncheck.records.baseline_entries import make_baseline, read_baseline

    kept = read_baseline(path)
    asked = {entry.device for entry in found.entries.values()}
    accused = {(change.kernel, change.case_id) for change in worse}
    excused = [
        replace(entry, reason=reason) if (entry.kernel, entry.case) in accused else entry
        for entry in entries
    ]
    left = [e for e in kept.entries if (e.kernel, e.case) not in gone or e.device not in asked]
    by_key = {entry.key: entry for entry in (*left, *excused)}
    return make_baseline(by_key.values(), {**kept.environments, **found.environments}, _version())


def _wrong(entries: Iterable[Entry]) -> list[tuple[str, str, str]]:
    """Kernel, case and status of what cannot be kept."""
    from attncheck.baseline.comparison import KEPT_STATUSES

    return [
        (one.kernel, one.case, one.status) for one in entries if one.status not in KEPT_STATUSES
    ]


def _failed(found: Measured) -> list[tuple[str, str, str]]:
    """The same of whatever else a gate has asked: there is no baseline of a kernel that fails."""
    from attncheck.records.record import FAILED_STATUSES

    records = (answer.record for answer in found.answers)
    return [
        (one.kernel, one.case_id, one.status) for one in records if one.status in FAILED_STATUSES
    ]


def _refused(wrong: Sequence[tuple[str, str, str]]) -> int:
    kernel, case, status = wrong[0]
    more = f" (and {len(wrong) - 1:,} more)" if len(wrong) > 1 else ""
    said = (
        f"kernel {one_line(kernel)!r}, case {case}: {status}{more}; a wrong answer cannot be kept "
        "in a baseline: mend the kernel."
    )
    click.echo(f"attncheck: {said}", err=True)
    return 1


def _put(path: Path, kept: Baseline) -> None:
    from attncheck.core.files import write_texts
    from attncheck.records.baseline_entries import baseline_text

    files: dict[str, Any] = {path.name: baseline_text(kept)}
    write_texts(files, path.parent, what="the baseline", instead="--baseline")


def _version() -> str:
    from attncheck import __version__

    return __version__
