"""``attncheck baseline``: what kernels could do, kept in a file, and what has become of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace

from attncheck.cli import verb
from attncheck.cli.options import typed_command
from attncheck.cli.report import read_run_journal
from attncheck.cli.standard_output import Group, standard_output
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
    """Contents of the files."""

    answers: list[Answer] = field(default_factory=list)  # of all stages
    # Environments by the ids that Records have.
    by_record: dict[str, Environment] = field(default_factory=dict)
    # Environments by ``Environment.id``.
    environments: dict[str, Environment] = field(default_factory=dict)
    # What a baseline would keep, right or wrong.
    entries: dict[Key, Entry] = field(default_factory=dict)
    # What each case is, in a few words, by its id.
    problems: dict[str, str] = field(default_factory=dict)
    complete: bool = True  # whether everything was asked that was to be


def baseline_path(typed: str | None) -> Path:
    """Return the baseline's path: as typed, or beside the project's configuration, or here."""
    from attncheck.subjects.capabilities.configuration import nearest_tables

    if typed is not None:
        return Path(typed)
    configuration, _ = nearest_tables()
    return configuration.parent / BASELINE_FILE if configuration else Path(BASELINE_FILE)


def read_measurements(sources: Sequence[str]) -> Measurements:
    """Read the files ``sources``; later ones take the place of earlier ones.

    Raises:
        UsageError: for what is no report of attncheck's, or has nothing for a baseline.
    """
    measured = Measurements()
    for source in sources:
        answers, environments, complete = _read(Path(source))
        measured.complete &= complete
        measured.by_record |= environments
        measured.answers += answers
        records = list(measurements(answers))
        # Only what has an accuracy can be compared with later.
        kept = comparable_entries(records, environments)
        if not kept:
            why = "no answer of the stage 'baseline' is in it"
            if records:
                why = "none of its records has an accuracy: attncheck gate measures it"
            raise UsageError(f"{one_line(source)} has nothing for a baseline: {why}.")
        measured.entries |= {key: entry for key, (entry, _) in kept.items()}
        for record in records:
            problem = problem_of(record)
            words = (problem.dtype, record.variant, problem.full_shape)
            measured.problems[record.case_id] = " ".join(filter(None, words))
    measured.environments = {one.id: one for one in measured.by_record.values()}
    return measured


def _read(path: Path) -> tuple[list[Answer], dict[str, Environment], bool]:
    """Answers, environments, and whether all was asked."""
    # A journal may be of a gate that was interrupted; no gate.json need be there.
    if path.suffix == ".jsonl":
        report = read_run_journal(path)
    else:
        data = json_numbers.read_json(path, "report", LARGEST_GATE)
        if not (isinstance(data, dict) and "answers" in data):
            records = load_report(path, Report)
            # Complete it is not: a report does not say what was planned.
            answers = [Answer(unit="", stage="baseline", record=one) for one in records.records]
            return answers, records.environments, False
        report = load_report(path, GateReport)
    # A shard has asked a part alone: what it lacks is not gone.
    return list(report.answers), report.environments, not report.unfinished and not report.shard


_TAKEN = ("worse", "better", "new", "gone")


@click.group(cls=Group)
def baseline() -> None:
    """Keep what your kernels can do in a file of the project, and see what has become of it.

    SOURCE is what a gate wrote: its gate.json, or its journal results.jsonl.
    """


def _sources() -> Any:
    return verb.argument("SOURCE…", nargs=-1, required=True)


def _file() -> Any:
    text = "The baseline (default: attncheck-baseline.json of the project)."
    return verb.option("--baseline", "FILE", text)


def _kernels() -> Any:
    return verb.several("--kernel", "NAME", "Only of this kernel; repeatable.")


def _cases() -> Any:
    return verb.several("--case", "ID", "Only of this case; repeatable.")


@verb.command
def write(
    *,
    sources: tuple[str, ...] = _sources(),
    file: str | None = _file(),
    force: bool = verb.flag("--force", "Replace a baseline that is there."),
) -> int:
    """Make the file, of what the kernels of SOURCE can do.

    What fails cannot be kept: a baseline excuses no wrong answer. Commit the file.
    """
    path = baseline_path(file)
    if path.exists() and not force:
        raise UsageError(
            f"{path} is there: take changes over with attncheck baseline accept, or add --force."
        )
    measured = read_measurements(sources)
    entries = measured.entries.values()
    # Before anything is written: a baseline is whole or stays as it was.
    if _refuses(entries) or _refuses((), measured.answers):
        return 1
    _write(path, entries, measured.environments)
    with standard_output():
        click.echo(f"{len(measured.entries):,} cases are kept in {path}")
    return 0


@verb.command
def diff(
    *,
    sources: tuple[str, ...] = _sources(),
    file: str | None = _file(),
    kernels: tuple[str, ...] = _kernels(),
    cases: tuple[str, ...] = _cases(),
    strict: bool = verb.flag("--strict-baseline", "Exit code 1 for what is better or gone, too."),
    fmt: str = verb.fmt(),
) -> int:
    """Show what the kernels of SOURCE can do, compared with the baseline.

    Exit code 1 when a case is worse.
    """
    from attncheck.reporting import rendering

    rendering.check_format(fmt)
    path = baseline_path(file)
    measured = read_measurements(sources)
    changes = _chosen(_changes(path, measured), kernels, cases)
    report = BaselineComparison(
        command=typed_command(), baseline=path.name, problems=measured.problems, changes=changes
    )
    with standard_output():
        rendering.show(report, fmt)
    # Better fails a strict diff too: the file no longer says what kernels can do.
    bad = {"worse", "better", "gone"} if strict else {"worse"}
    return int(any(change.standing in bad for change in changes))


@verb.command
def accept(
    *,
    sources: tuple[str, ...] = _sources(),
    file: str | None = _file(),
    kernels: tuple[str, ...] = _kernels(),
    cases: tuple[str, ...] = _cases(),
    reason: str = verb.option("--reason", "TEXT", "Why; it must be said of what is worse.", ""),
) -> int:
    """Take over what has become of SOURCE's kernels: all, or by --kernel and --case.

    What is worse needs a reason, which stands in the file from then on. What is within rounding
    stays as it was, unless its case is named: else a baseline would creep.
    """
    from attncheck.reporting.score_documents import tally

    path = baseline_path(file)
    measured = read_measurements(sources)
    changes = _chosen(_changes(path, measured), kernels, cases)
    # A named case is taken over even within rounding: somebody has looked at it.
    accepted = [c for c in changes if c.standing in _TAKEN or c.case_id in cases]
    worse, gone, named = (
        {(c.kernel, c.case_id) for c in accepted if not standing or c.standing == standing}
        for standing in ("worse", "gone", "")
    )
    entries = [e for e in measured.entries.values() if (e.kernel, e.case) in named]
    if _refuses(entries):
        return 1
    if worse and not reason.strip():
        kernel, case = next((c.kernel, c.case_id) for c in accepted if c.standing == "worse")
        raise UsageError(
            f"case {case} of kernel {kernel!r} is worse: say why it is to be accepted with "
            "--reason."
        )
    kept = read_baseline(path)
    # What is gone is so on the architectures that were asked now; on others it stays.
    devices = {entry.device for entry in measured.entries.values()}
    left = [e for e in kept.entries if (e.kernel, e.case) not in gone or e.device not in devices]
    # The reason stays in the file: whoever reads it later sees why it was accepted.
    excused = [
        replace(entry, reason=reason.strip()) if (entry.kernel, entry.case) in worse else entry
        for entry in entries
    ]
    # Later ones replace: what was measured now comes behind what the file has.
    by_key = {entry.key: entry for entry in (*left, *excused)}
    _write(path, by_key.values(), {**kept.environments, **measured.environments})
    with standard_output():
        click.echo(f"{path}: {tally(accepted)} taken over")
    return 0


for _verb in (write, diff, accept):
    baseline.add_command(_verb)


def _changes(path: Path, measured: Measurements) -> tuple[Change, ...]:

    kept = read_baseline(path)
    return compare_runs(kept, measured.answers, measured.by_record, complete=measured.complete)


def _chosen(
    changes: Iterable[Change], kernels: Sequence[str], cases: Sequence[str]
) -> tuple[Change, ...]:
    """Raises UnknownName for a kernel or case that none of them is about."""
    changes = tuple(changes)
    about: tuple[tuple[str, Sequence[str], Callable[[Change], str]], ...]
    about = (("kernel", kernels, lambda c: c.kernel), ("case", cases, lambda c: c.case_id))
    for what, names, of in about:
        known = tuple(dict.fromkeys(of(change) for change in changes))
        # A misspelt name would leave nothing to compare, and pass.
        require_known(what, names, known)
    return tuple(
        change
        for change in changes
        if (not kernels or change.kernel in kernels) and (not cases or change.case_id in cases)
    )


def _refuses(entries: Iterable[Entry], answers: Iterable[Answer] = ()) -> bool:
    """Return whether something is wrong and cannot be kept, which is said on standard error.

    Of a kernel that fails whatever else a gate has asked there is no baseline either.
    """
    wrong = [(e.kernel, e.case, e.status) for e in entries if e.status not in KEPT_STATUSES]
    records = [answer.record for answer in answers]
    # A kernel whose probes fail may be accurate by chance.
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
