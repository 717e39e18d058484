"""The report as CSV: one row for each Record, every number in full."""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Any

import msgspec

from attncheck.core.outputs import GRADIENTS
from attncheck.core.sanitize_text import for_spreadsheet
from attncheck.records.problem_summary import ProblemSummary, problem_of
from attncheck.records.record import Environment, GradientErrors, LseErrors, OutErrors
from attncheck.reporting.figures import quotient
from attncheck.reporting.gradients import gradients_of
from attncheck.reporting.verdict_columns import verdict_names, verdict_values

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from attncheck.core.judgement import Place
    from attncheck.records.record import Record, Report

__all__ = ["as_csv"]

_OWN = ("case_id", "kernel", "variant", "head_arrangement", "status", "reason")
_PLACE = ("batch", "head", "query", "dim")


def as_csv(report: Report) -> str:
    """``report`` as CSV; numbers as Python's repr, text so that no spreadsheet runs it.

    Errors of gradients have columns where the report has gradients.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    backward = any(map(gradients_of, report.records))
    writer.writerow(_header(backward=backward))
    for record in report.records:
        environment = report.environments[record.environment]
        writer.writerow(map(_field, _values(record, environment, backward=backward)))
    return text.getvalue()


def _header(*, backward: bool) -> list[str]:
    return [
        *_OWN,
        *ProblemSummary.__struct_fields__,
        *_error_names("out", OutErrors.__struct_fields__),
        "out_over_floor",
        "out_over_ideal",
        *_error_names("lse", LseErrors.__struct_fields__),
        *(_gradient_names() if backward else ()),
        *verdict_names(),
        "seconds",
        "interpreted",
        "tiling",
        "environment",
        *Environment.__struct_fields__,
    ]


def _error_names(prefix: str, fields: Iterable[str]) -> list[str]:
    names: list[str] = []
    for name in fields:
        names += (
            [f"{prefix}_at_{axis}" for axis in _PLACE] if name == "max_at" else [f"{prefix}_{name}"]
        )
    return names


def _gradient_names() -> Iterator[str]:
    for name in GRADIENTS:
        yield from _error_names(name, GradientErrors.__struct_fields__)
        yield from (f"{name}_over_floor", f"{name}_over_ideal")


def _values(record: Record, environment: Environment, *, backward: bool) -> list[Any]:
    out = record.out
    over_floor = quotient(out.rmse, out.floor_rmse) if out else None
    over_ideal = quotient(out.rmse, out.ideal_rmse) if out else None
    return [
        *(record.case_id, record.kernel, record.variant, record.heads),
        *(record.status, _reason(record)),
        *msgspec.structs.astuple(problem_of(record)),
        *_error_values(out, OutErrors.__struct_fields__),
        *(over_floor, over_ideal),
        *_error_values(record.lse, LseErrors.__struct_fields__),
        *(_gradient_values(record) if backward else ()),
        *verdict_values(record.judgement),
        *(record.seconds, record.interpreted, record.tiling, record.environment),
        *msgspec.structs.astuple(environment),
    ]


def _gradient_values(record: Record) -> Iterator[Any]:
    for name in GRADIENTS:
        found = gradients_of(record).get(name)
        yield from _error_values(found, GradientErrors.__struct_fields__)
        yield quotient(found.rmse, found.floor_rmse) if found else None
        yield quotient(found.rmse, found.ideal_rmse) if found else None


def _reason(record: Record) -> str:
    return record.reason or (record.judgement.reason if record.judgement else "")


def _error_values(
    errors: OutErrors | LseErrors | GradientErrors | None, fields: Iterable[str]
) -> list[Any]:
    values: list[Any] = []
    for name in fields:
        value = getattr(errors, name, None)
        values += _indices(value) if name == "max_at" else [value]
    return values


def _indices(at: Place | None) -> list[int | None]:
    return [None] * len(_PLACE) if at is None else [getattr(at, axis) for axis in _PLACE]


def _field(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, dict):
        return for_spreadsheet(json.dumps(value, separators=(",", ":")))
    if isinstance(value, tuple):
        return for_spreadsheet(", ".join(map(str, value)))
    return for_spreadsheet(str(value))
