"""``attncheck baseline``: what kernels could do, kept in a file, and what has become of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attncheck.cli.options import format_option
from attncheck.cli.standard_output import Group, Verb, standard_output
from attncheck.core.errors import UsageError
from attncheck.core.sanitize_text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from attncheck.records.baseline_entries import Baseline, Entry, Key
    from attncheck.records.record import Environment, Record
    from attncheck.records.run_reports import Answer, Change, GateReport

__all__ = ["Measurements", "baseline", "baseline_path", "read_measurements"]


@dataclass(slots=True, kw_only=True)
class Measurements:
    """What the files say.

    Attributes:
        answers: Of all stages.
        by_record: Environments by the ids that Records have.
        environments: Environments by ``baseline_record.fingerprint``.
        entries: What a baseline would keep, right or wrong.
        problems: What each case is, in a few words, by its id.
        complete: Whether everything was asked that was to be.
    """

    answers: list[Answer] = field(default_factory=list)
    by_record: dict[str, Environment] = field(default_factory=dict)
    environments: dict[str, Environment] = field(default_factory=dict)
    entries: dict[Key, Entry] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    complete: bool = True


def baseline_path(typed: str | None) -> Path:
    """Where the baseline is: as typed, or beside the project's configuration, or here."""
    from attncheck.capabilities.configuration import nearest_tables
    from attncheck.records.baseline_entries import BASELINE_FILE

    if typed is not None:
        return Path(typed)
    configuration, _ = nearest_tables()
    return configuration.parent / BASELINE_FILE if configuration else Path(BASELINE_FILE)


def read_measurements(sources: Sequence[str]) -> Measurements:
    """What the files ``sources`` say; later ones take the place of earlier ones.

    Raises:
        UsageError: for what is no report of attncheck's, or has nothing for a baseline.
    """
    from attncheck.baseline.comparison import comparable_entries, measurements
    from attncheck.records.baseline_entries import environment_id

    found = Measurements()
    for source in sources:
        answers, environments, complete = _read(Path(source))
        found.complete &= complete
        found.by_record |= environments
        found.answers += answers
        records = list(measurements(answers))
        kept = comparable_entries(records, environments)
        if not kept:
            raise UsageError(f"{one_line(source)} has nothing for a baseline: {_why(records)}.")
        found.entries |= {key: entry for key, (entry, _) in kept.items()}
        found.problems |= {record.case_id: _problem(record) for record in records}
    found.environments = {environment_id(one): one for one in found.by_record.values()}
    return found


def _read(path: Path) -> tuple[list[Answer], dict[str, Environment], bool]:
    """Answers, environments, and whether all was asked."""
    from attncheck.records.json_reports import load_report
    from attncheck.records.record import Report
    from attncheck.records.run_reports import Answer

    if path.suffix != ".jsonl" and not _of_a_gate(path):
        records = load_report(path, Report)
        answers = [Answer(unit="", stage="baseline", record=one) for one in records.records]
        return answers, records.environments, False
    report = _gate(path)
    return list(report.answers), report.environments, not report.unfinished and not report.shard


def _of_a_gate(path: Path) -> bool:
    from attncheck.core import json_numbers
    from attncheck.records.json_reports import LARGEST_GATE

    data = json_numbers.read_json(path, "report", LARGEST_GATE)
    return isinstance(data, dict) and "answers" in data


def _gate(path: Path) -> GateReport:
    if path.suffix == ".jsonl":
        from attncheck.gate.gate_report import build_report
        from attncheck.workers.journal_format import read_journal

        return build_report(read_journal(path))
    from attncheck.records.json_reports import load_report
    from attncheck.records.run_reports import GateReport

    return load_report(path, GateReport)


def _problem(record: Record) -> str:
    """``bf16 causal B1 H2 Q128 K128 D64``."""
    from attncheck.inputs.problem import Case

    problem = Case.from_json(record.case).problem
    return " ".join(part for part in (problem.dtype, record.variant, problem.shape) if part)


def _why(records: Sequence[Record]) -> str:
    if not records:
        return "no answer of the stage 'baseline' is in it"
    return "none of its records has an accuracy: attncheck gate measures it"


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
    from attncheck.core.errors import UsageError
    from attncheck.records.baseline_entries import make_baseline

    path = baseline_path(file)
    if path.exists() and not force:
        raise UsageError(
            f"{path} is there: take changes over with attncheck baseline accept, or add --force."
        )
    found = read_measurements(sources)
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
    from attncheck.cli.options import typed_command
    from attncheck.records.run_reports import BaselineComparison
    from attncheck.reporting import rendering

    rendering.check_format(fmt)
    path = baseline_path(file)
    found = read_measurements(sources)
    changes = _chosen(_changes(path, found), kernels, cases)
    report = BaselineComparison(
        command=typed_command(), baseline=path.name, problems=found.problems, changes=changes
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
    from attncheck.core.errors import UsageError

    path = baseline_path(file)
    found = read_measurements(sources)
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


def _changes(path: Path, found: Measurements) -> tuple[Change, ...]:
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


def _entries(taken: Iterable[Change], found: Measurements) -> list[Entry]:
    """What the changes that are taken over say now, on whichever architecture."""
    wanted = {(change.kernel, change.case_id) for change in taken}
    return [entry for entry in found.entries.values() if (entry.kernel, entry.case) in wanted]


def _after(  # what becomes of a baseline
    path: Path,
    found: Measurements,
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


def _failed(found: Measurements) -> list[tuple[str, str, str]]:
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
