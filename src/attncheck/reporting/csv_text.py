"""Records as CSV: one row each, every number in full and under a name of its own."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from attncheck.core.judgement import BlindSpot, Judgement, Place, Precision, Worst
from attncheck.core.sanitize_text import for_spreadsheet
from attncheck.core.tensor_names import GRADIENTS
from attncheck.records.problem_summary import ProblemSummary, problem_of
from attncheck.records.record import (
    Environment,
    GradientErrors,
    LseErrors,
    OutErrors,
    Record,
    Report,
    reason_of,
)
from attncheck.records.run_reports import GateReport
from attncheck.reporting.document import Document, Table
from attncheck.reporting.number_text import quotient

_OF_RECORD = ("case_id", "kernel", "variant", "head_arrangement", "status", "reason")
_OF_ANSWER = ("unit", "stage", "test", "attempts", "smallest_of", "failure", "work_seconds")
# A CSV has no nesting: the fields of these become columns.
_NESTED: dict[str, type[msgspec.Struct]] = {
    "max_at": Place,
    "at": Place,
    "worst": Worst,
    "precision": Precision,
    "blind_spot": BlindSpot,
}

Field = tuple[str, Any]  # a heading, and the value under it; None where there is none


def report_csv(report: Report) -> str:
    """``report`` as CSV; numbers as Python's repr, text so that no spreadsheet runs it.

    Errors of gradients have columns where the report has gradients.
    """
    return _csv_text(_record_rows(report.records, report.environments))


def gate_csv(report: GateReport) -> str:
    """``report`` as CSV: the columns of a report, one row an answer, what the gate knows first."""
    rows = _record_rows([answer.record for answer in report.answers], report.environments)
    # The first row of a report's CSV is its headings.
    head = [*_OF_ANSWER, "compiling", *next(rows)]
    lines = [head]
    for answer, row in zip(report.answers, rows, strict=True):
        own = [answer.unit, answer.stage, answer.test, answer.attempts]
        own += [answer.smallest_of, answer.failure, answer.seconds, answer.compiling]
        lines.append([*own, *row])
    return _csv_text(lines)


def document_csv(document: Document) -> str:
    """The tables of ``document``, each below its section's title, an empty line between them."""
    rows: list[Sequence[Any]] = []
    for section in document.sections:
        for table in (block for block in section.blocks if isinstance(block, Table)):
            rows += [[]] if rows else []
            rows.append([section.title])
            rows.append([*table.groups, *(column.heading for column in table.columns), "remark"])
            for row in table.rows:
                cells = [cell.text.strip() for cell in row.cells]
                # A row that is cut short would move its remark under another heading.
                cells += [""] * (len(table.columns) - len(cells))
                rows.append([*row.group, *cells, "; ".join(note.text for note in row.remarks)])
    return _csv_text(rows)


def _record_rows(
    records: Iterable[Record], environments: dict[str, Environment]
) -> Iterator[list[Any]]:
    """The headings, then the values of each record."""
    records = list(records)
    # Six columns a gradient: a forward's CSV is spared them.
    backward = any(isinstance(record.gradients, dict) and record.gradients for record in records)
    yield [name for name, _ in _fields(None, None, backward=backward)]
    for record in records:
        environment = environments[record.environment]
        yield [value for _, value in _fields(record, environment, backward=backward)]


def _fields(
    record: Record | None, environment: Environment | None, *, backward: bool
) -> Iterator[Field]:
    """All columns of ``record`` in reading order; of None their names alone."""
    yield from zip(_OF_RECORD, _of_record(record), strict=True)
    yield from _flat(ProblemSummary, None if record is None else problem_of(record))
    out = record.out if record else None
    yield from (*_flat(OutErrors, out, "out_"), *_ratios("out", out))
    yield from _flat(LseErrors, record.lse if record else None, "lse_")
    if backward:
        gradients = record.gradients if record and isinstance(record.gradients, dict) else {}
        for tensor in GRADIENTS:
            errors = gradients.get(tensor)
            yield from (*_flat(GradientErrors, errors, f"{tensor}_"), *_ratios(tensor, errors))
    verdict = _flat(Judgement, record.judgement if record else None)
    # The record's own columns have them.
    yield from ((name, value) for name, value in verdict if name not in {"status", "reason"})
    for name in ("seconds", "interpreted", "tiling", "environment"):
        yield name, getattr(record, name, None)
    yield from _flat(Environment, environment)


def _of_record(record: Record | None) -> tuple[str, ...]:
    if record is None:
        return ("",) * len(_OF_RECORD)
    named = record.case_id, record.kernel, record.variant, record.heads
    return *named, record.status, reason_of(record)


def _flat(kind: type[msgspec.Struct], struct: Any, prefix: str = "") -> Iterator[Field]:
    """The fields of a struct of a kind, those of structs in it behind their names; None: empty."""
    for name in kind.__struct_fields__:
        value = getattr(struct, name, None)
        if name in _NESTED:
            # Every row has all columns, also where a tensor has no element.
            yield from _flat(_NESTED[name], value, f"{prefix}{name.removeprefix('max_')}_")
        elif name == "gradients_over_bound":
            shares = value if isinstance(value, dict) else {}
            yield from ((f"{tensor}_over_bound", shares.get(tensor)) for tensor in GRADIENTS)
        else:
            yield prefix + name, value


def _ratios(tensor: str, errors: Any) -> Iterator[Field]:
    for name in ("floor", "ideal"):
        over = quotient(errors.rmse, getattr(errors, f"{name}_rmse")) if errors else None
        yield f"{tensor}_over_{name}", over


def _csv_text(rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([_text(value) for value in row] for row in rows)
    return text.getvalue()


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, int | float):
        return repr(value)  # every digit: a CSV is computed with
    if isinstance(value, dict):
        return for_spreadsheet(json.dumps(value, separators=(",", ":")))
    if isinstance(value, tuple):
        return for_spreadsheet(", ".join(map(str, value)))
    return for_spreadsheet(str(value))
