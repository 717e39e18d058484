"""Records as CSV: one row each, every number in full and under its own name."""

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
    gradients_of,
    reason_of,
)
from attncheck.records.run_reports import GateReport
from attncheck.reporting.document import Document, Table
from attncheck.reporting.number_text import quotient

_ANSWER_FIELDS = (
    *("unit", "stage", "test", "attempts", "smallest_of", "failure"),
    *("seconds", "compiling"),
)
# Fields with another name in a CSV, where an answer's seconds would be taken for its record's.
_HEADINGS = {"heads": "head_arrangement", "seconds": "work_seconds"}
# Fields whose structs are flattened into columns, since a CSV has no nesting.
_NESTED: dict[str, type[msgspec.Struct]] = {
    "max_at": Place,
    "at": Place,
    "worst": Worst,
    "precision": Precision,
    "blind_spot": BlindSpot,
}

Field = tuple[str, Any]  # a heading and the value under it, which may be None


def report_csv(report: Report) -> str:
    """Return ``report`` as CSV; numbers as Python's repr, texts safe from spreadsheet formulas.

    Errors of gradients have columns only if the report has gradients.
    """
    return _csv_text(_record_rows(report.records, report.environments))


def gate_csv(report: GateReport) -> str:
    """Return ``report`` as CSV, a row for each answer: the gate's columns, then a report's."""
    rows = _record_rows([answer.record for answer in report.answers], report.environments)
    # The first row of a report's CSV has the headings.
    lines = [[*(_HEADINGS.get(name, name) for name in _ANSWER_FIELDS), *next(rows)]]
    for answer, row in zip(report.answers, rows, strict=True):
        lines.append([*(getattr(answer, name) for name in _ANSWER_FIELDS), *row])
    return _csv_text(lines)


def document_csv(document: Document) -> str:
    """Return the tables of ``document``, each below its section's title; empty lines between."""
    rows: list[Sequence[Any]] = []
    for section in document.sections:
        for table in (block for block in section.blocks if isinstance(block, Table)):
            rows += [[]] if rows else []
            rows.append([section.title])
            rows.append([*table.groups, *(column.heading for column in table.columns), "remark"])
            for row in table.rows:
                cells = [cell.text.strip() for cell in row.cells]
                # Pad short rows, whose remark would otherwise be under another heading.
                cells += [""] * (len(table.columns) - len(cells))
                rows.append([*row.group, *cells, "; ".join(note.text for note in row.remarks)])
    return _csv_text(rows)


def _record_rows(
    records: Iterable[Record], environments: dict[str, Environment]
) -> Iterator[list[Any]]:
    """Yield the headings, then the values of each record."""
    records = list(records)
    # Gradients take many columns, which a forward's CSV leaves out.
    backward = any(map(gradients_of, records))
    yield [name for name, _ in _fields(None, None, backward=backward)]
    for record in records:
        environment = environments[record.environment]
        yield [value for _, value in _fields(record, environment, backward=backward)]


def _fields(
    record: Record | None, environment: Environment | None, *, backward: bool
) -> Iterator[Field]:
    """Yield all columns of ``record`` in reading order; for None only their names."""
    for name in ("case_id", "kernel", "variant", "heads", "status"):
        yield _HEADINGS.get(name, name), getattr(record, name, None)
    yield "reason", reason_of(record) if record else None
    yield from _flat(ProblemSummary, None if record is None else problem_of(record))
    out = record.out if record else None
    yield from (*_flat(OutErrors, out, "out_"), *_ratios("out", out))
    yield from _flat(LseErrors, record.lse if record else None, "lse_")
    if backward:
        gradients = gradients_of(record) if record else {}
        for tensor in GRADIENTS:
            errors = gradients.get(tensor)
            yield from (*_flat(GradientErrors, errors, f"{tensor}_"), *_ratios(tensor, errors))
    verdict = _flat(Judgement, record.judgement if record else None)
    # Status and reason are already among the record's own columns.
    yield from ((name, value) for name, value in verdict if name not in {"status", "reason"})
    for name in ("seconds", "interpreted", "tiling", "environment"):
        yield name, getattr(record, name, None)
    yield from _flat(Environment, environment)


def _flat(kind: type[msgspec.Struct], struct: Any, prefix: str = "") -> Iterator[Field]:
    """Yield the fields of a struct, or None for each; nested ones are prefixed by their name."""
    for name in kind.__struct_fields__:
        value = getattr(struct, name, None)
        if name in _NESTED:
            # Every row has all columns, also if a tensor has no elements.
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
        return repr(value)  # every digit, for further computations
    if isinstance(value, dict):
        return for_spreadsheet(json.dumps(value, separators=(",", ":")))
    if isinstance(value, tuple):
        return for_spreadsheet(", ".join(map(str, value)))
    return for_spreadsheet(str(value))
