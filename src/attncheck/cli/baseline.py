"""``attncheck baseline``: accuracies of kernels, kept in a file, and how they have changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace

from attncheck.cli import verb
from attncheck.cli.options import typed_command
from attncheck.cli.report import read_run_journal
from attncheck.cli.standard_output import Group, show_report, standard_output
from attncheck.core import VERSION, json_numbers
from attncheck.core.errors import UsageError, require_known
from attncheck.core.files import write_texts
from attncheck.core.sanitize_text import one_line
from attncheck.records.baseline_comparison import (
    KEPT_STATUSES,
    comparable_entries,
    compare_runs,
    measurements,
)
from attncheck.records.baseline_entries import (
    BASELINE_FILE,
    Entry,
    Key,
    baseline_text,
    make_baseline,
    read_baseline,
)
from attncheck.records.json_reports import LARGEST_GATE, load_report
from attncheck.records.problem_summary import problem_of
from attncheck.records.record import FAILED_STATUSES, Environment, Report
from attncheck.records.run_reports import Answer, BaselineComparison, Change, GateReport


@dataclass(slots=True, kw_only=True)
class Measurements:
    """Contents of the measured files."""

    answers: list[Answer] = field(default_factory=list)  # of all stages
    # Environments by the ids in the Records.
    by_record: dict[str, Environment] = field(default_factory=dict)
    # Environments by ``Environment.id``.
    environments: dict[str, Environment] = field(default_factory=dict)
    # Entries for a baseline, of right and wrong answers.
    entries: dict[Key, Entry] = field(default_factory=dict)
    # A short description of each case, by its id.
    problems: dict[str, str] = field(default_factory=dict)
    complete: bool = True  # whether every planned question was asked
    # Dtypes that every source was limited to, by --dtype; None before the first source, and empty
    # where one was not limited.
    dtypes: frozenset[str] | None = None


def baseline_path(typed: str | None) -> Path:
    """Return the baseline's path: as typed, or beside the project's configuration, or here."""
    from attncheck.subjects.capabilities.configuration import nearest_tables

    if typed is not None:
        return Path(typed)
    configuration, _ = nearest_tables()
    return configuration.parent / BASELINE_FILE if configuration else Path(BASELINE_FILE)


def read_measurements(sources: Sequence[str]) -> Measurements:
    """Return the measurements of the files ``sources``; later files override earlier ones.

    Raises:
        UsageError: if a file is no report of attncheck, or has nothing for a baseline.
    """
    measured = Measurements()
    for source in sources:
        answers, environments, complete, dtypes = _read(Path(source))
        measured.complete &= complete
        before = dtypes if measured.dtypes is None else measured.dtypes
        measured.dtypes = before | dtypes if before and dtypes else frozenset()
        measured.by_record |= environments
        measured.answers += answers
        records = list(measurements(answers))
        # Only records with an accuracy can be compared later.
        comparable = comparable_entries(records, environments)
        if not comparable:
            why = "no answer of the stage 'baseline' is in it"
            if records:
                why = "none of its records has an accuracy: attncheck gate measures it"
            raise UsageError(f"{one_line(source)} has nothing for a baseline: {why}.")
        measured.entries |= {key: entry for key, (entry, _) in comparable.items()}
        for record in records:
            problem = problem_of(record)
            words = (problem.dtype, record.variant, problem.full_shape)
            measured.problems[record.case_id] = " ".join(filter(None, words))
    measured.environments = {one.id: one for one in measured.by_record.values()}
    return measured


def _read(path: Path) -> tuple[list[Answer], dict[str, Environment], bool, frozenset[str]]:
    """Return the answers, the environments, whether all was asked, and the chosen dtypes."""
    from attncheck.reporting.gate_verdict import chosen_dtypes

    # A journal may be of an interrupted gate, which has no gate.json.
    if path.suffix == ".jsonl":
        report = read_run_journal(path)
    else:
        data = json_numbers.read_json(path, "report", LARGEST_GATE)
        if not (isinstance(data, dict) and "answers" in data):
            records = load_report(path, Report)
            # Not complete, since such a report does not say what was planned.
            answers = [Answer(unit="", stage="baseline", record=one) for one in records.records]
            return answers, records.environments, False, frozenset()
        report = load_report(path, GateReport)
    # A shard asked only a part, so cases that it lacks are not gone.
    complete = not report.unfinished and not report.shard
    return list(report.answers), report.environments, complete, frozenset(chosen_dtypes(report))


_ACCEPTED = ("worse", "better", "new", "gone")  # standings that ``accept`` takes over


@click.group(cls=Group)
def baseline() -> None:
    """Save the measured errors of your kernels in a file, and compare later ones with them.

    SOURCE is a file that `attncheck gate` wrote: its gate.json, or its journal results.jsonl.
    """


_SOURCES: Any = verb.argument("SOURCE…", nargs=-1, required=True)
_FILE: Any = verb.option(
    "--baseline", "FILE", "File of the baseline (default: attncheck-baseline.json of the project)."
)
_KERNELS: Any = verb.several("--kernel", "NAME", "Only cases of this kernel (repeatable).")
_CASES: Any = verb.several("--case", "ID", "Only the case of this id (repeatable).")


@verb.command
def write(
    *,
    sources: tuple[str, ...] = _SOURCES,
    file: str | None = _FILE,
    force: bool = verb.flag("--force", "Replace an existing baseline."),
) -> int:
    """Save the measured errors of the kernels in SOURCE.

    Nothing is saved if an answer is wrong, since a baseline excuses none. Commit the file.
    """
    path = baseline_path(file)
    if path.exists() and not force:
        raise UsageError(
            f"{path} is there: take changes over with attncheck baseline accept, or add --force."
        )
    measured = read_measurements(sources)
    entries = measured.entries.values()
    # Check before writing, so that the file stays unchanged on an error.
    if _has_failures(entries) or _has_failures((), measured.answers):
        return 1
    _write(path, entries, measured.environments)
    with standard_output():
        click.echo(f"{len(measured.entries):,} cases are kept in {path}")
    return 0


@verb.command
def diff(
    *,
    sources: tuple[str, ...] = _SOURCES,
    file: str | None = _FILE,
    kernels: tuple[str, ...] = _KERNELS,
    cases: tuple[str, ...] = _CASES,
    strict: bool = verb.flag(
        "--strict-baseline", "Exit with code 1 for cases that are better or gone, too."
    ),
    fmt: str = verb.fmt(),
) -> int:
    """Compare the measured errors of the kernels in SOURCE with the baseline.

    Exit code 1 when a case is worse.
    """
    from attncheck.reporting import rendering

    rendering.check_format(fmt)
    path = baseline_path(file)
    measured = read_measurements(sources)
    changes = _filter_changes(_changes(path, measured), kernels, cases)
    report = BaselineComparison(
        command=typed_command(), baseline=path.name, problems=measured.problems, changes=changes
    )
    show_report(report, fmt)
    # Better fails a strict diff too, since the baseline is out of date.
    bad = {"worse", "better", "gone"} if strict else {"worse"}
    return int(any(change.standing in bad for change in changes))


@verb.command
def accept(
    *,
    sources: tuple[str, ...] = _SOURCES,
    file: str | None = _FILE,
    kernels: tuple[str, ...] = _KERNELS,
    cases: tuple[str, ...] = _CASES,
    reason: str = verb.option(
        "--reason", "TEXT", "Reason for accepting a case that is worse; required for one.", ""
    ),
) -> int:
    """Put the changed errors in SOURCE into the baseline: all, or those of --kernel and --case.

    A case that is worse needs a --reason, which is kept in the file. A case that differs only by
    chance keeps its old value unless --case names it: else many small losses would add up.
    """
    from attncheck.reporting.score_documents import tally

    path = baseline_path(file)
    measured = read_measurements(sources)
    changes = _filter_changes(_changes(path, measured), kernels, cases)
    # A case named by the user is taken over even within rounding.
    accepted = [c for c in changes if c.standing in _ACCEPTED or c.case_id in cases]
    worse, gone, accepted_keys = (
        {(c.kernel, c.case_id) for c in accepted if not standing or c.standing == standing}
        for standing in ("worse", "gone", "")
    )
    entries = [e for e in measured.entries.values() if (e.kernel, e.case) in accepted_keys]
    if _has_failures(entries):
        return 1
    if worse and not reason.strip():
        kernel, case = next((c.kernel, c.case_id) for c in accepted if c.standing == "worse")
        raise UsageError(
            f"case {case} of kernel {kernel!r} is worse: say why it is to be accepted with "
            "--reason."
        )
    old = read_baseline(path)
    # Cases are gone only on the architectures of this run; on others they stay.
    devices = {entry.device for entry in measured.entries.values()}
    retained = [e for e in old.entries if (e.kernel, e.case) not in gone or e.device not in devices]
    # The reason is kept in the file, for later readers.
    new_entries = [
        replace(entry, reason=reason.strip()) if (entry.kernel, entry.case) in worse else entry
        for entry in entries
    ]
    # Later entries of a key replace earlier ones, so new measurements come last.
    by_key = {entry.key: entry for entry in (*retained, *new_entries)}
    _write(path, by_key.values(), {**old.environments, **measured.environments})
    with standard_output():
        click.echo(f"{path}: {tally(accepted)} taken over")
    return 0


for _verb in (write, diff, accept):
    baseline.add_command(_verb)


def _changes(path: Path, measured: Measurements) -> tuple[Change, ...]:
    old = read_baseline(path)
    return compare_runs(
        old,
        measured.answers,
        measured.by_record,
        complete=measured.complete,
        dtypes=measured.dtypes or (),
    )


def _filter_changes(
    changes: Sequence[Change], kernels: Sequence[str], cases: Sequence[str]
) -> tuple[Change, ...]:
    """Return the changes of these kernels and cases; raise UnknownName for one without a change."""
    # A misspelt name would otherwise leave nothing to compare, and pass.
    require_known("kernel", kernels, {change.kernel for change in changes})
    require_known("case", cases, {change.case_id for change in changes})
    return tuple(
        change
        for change in changes
        if (not kernels or change.kernel in kernels) and (not cases or change.case_id in cases)
    )


def _has_failures(entries: Iterable[Entry], answers: Iterable[Answer] = ()) -> bool:
    """Return whether an answer is wrong and cannot be kept; if so, print it to standard error.

    A kernel that failed any other question of a gate has no baseline either.
    """
    wrong = [(e.kernel, e.case, e.status) for e in entries if e.status not in KEPT_STATUSES]
    records = [answer.record for answer in answers]
    # A kernel that fails its probes may still be accurate by chance.
    wrong += [(r.kernel, r.case_id, r.status) for r in records if r.status in FAILED_STATUSES]
    if wrong:
        kernel, case, status = wrong[0]
        more = f" (and {len(wrong) - 1:,} more)" if len(wrong) > 1 else ""
        click.echo(
            f"attncheck: kernel {one_line(kernel)!r}, case {case}: {status}{more}; a wrong answer "
            "cannot be kept in a baseline: mend the kernel.",
            err=True,
        )
    return bool(wrong)


def _write(path: Path, entries: Iterable[Entry], environments: dict[str, Environment]) -> None:
    text = baseline_text(make_baseline(entries, environments, VERSION))
    write_texts({path.name: text}, path.parent, what="the baseline", instead="--baseline")
