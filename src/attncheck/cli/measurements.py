"""What gates and reports have measured, as a baseline takes it: read from their files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from attncheck.core.errors import UsageError
from attncheck.core.sanitize_text import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.records.baseline_entries import Entry, Key
    from attncheck.records.record import Environment, Record
    from attncheck.records.run_reports import Answer, GateReport

__all__ = ["Measured", "measured", "path_of"]


@dataclass(slots=True, kw_only=True)
class Measured:
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


def path_of(typed: str | None) -> Path:
    """Where the baseline is: as typed, or beside the project's configuration, or here."""
    from attncheck.capabilities.configuration import nearest_tables
    from attncheck.records.baseline_entries import BASELINE_FILE

    if typed is not None:
        return Path(typed)
    configuration, _ = nearest_tables()
    return configuration.parent / BASELINE_FILE if configuration else Path(BASELINE_FILE)


def measured(sources: Sequence[str]) -> Measured:
    """What the files ``sources`` say; later ones take the place of earlier ones.

    Raises:
        UsageError: for what is no report of attncheck's, or has nothing for a baseline.
    """
    from attncheck.baseline.comparison import comparable_entries, measurements
    from attncheck.records.baseline_entries import environment_id

    found = Measured()
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
