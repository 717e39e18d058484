"""Write and read reports as JSON, the only report format that is read back, and strictly."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from attncheck.core import json_numbers
from attncheck.core.errors import UsageError, require_known
from attncheck.records import fault_scores, run_reports, survey_reports
from attncheck.records.bench_report import BenchReport
from attncheck.records.model_report import ModelReport
from attncheck.records.problem_summary import problem_of
from attncheck.records.record import Report
from attncheck.records.run_reports import GateReport
from attncheck.records.survey_reports import CertificateReport, OracleReport

LARGEST_REPORT = 2**26  # Bytes of the largest report that is read: some 40,000 records.

LARGEST_GATE = 2**28  # Bytes of the largest gate report that is read: some 100,000 answers.

R = TypeVar("R", bound=msgspec.Struct)


def report_json(report: msgspec.Struct) -> str:
    """Write ``report`` as indented JSON, keys in the order of its fields; see ``json_numbers``."""
    return json_numbers.to_json_text(report)


REPORTS: dict[str, type[msgspec.Struct]] = {
    "check": Report,
    "rmse": Report,
    "bench": BenchReport,
    "gate": GateReport,
    "properties": run_reports.PropertyReport,
    "baseline": run_reports.BaselineComparison,
    "faults": fault_scores.FaultReport,
    "mutants": fault_scores.MutantReport,
    "own-tests": fault_scores.OwnTestsReport,
    "sensitivity": fault_scores.SensitivityReport,
    "oracles": OracleReport,
    "certificates": CertificateReport,
    "mods": survey_reports.ModReport,
    "blocks": survey_reports.BlockReport,
    "fingerprint": survey_reports.FingerprintReport,
    "model": ModelReport,
}
"""Report types by the command, or part of it, that makes them."""


def report_schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a ``kind`` of report; raise UnknownName if there is no such kind.

    Non-finite numbers are strings: ``"nan"``, ``"inf"`` or ``"-inf"``. Properties are described by
    the comments on the fields in the source.
    """
    require_known("kind of report", [kind], REPORTS)
    words: dict[str, Any] = {"enum": ["nan", "inf", "-inf"]}

    def with_words(part: Any) -> Any:
        if isinstance(part, list):
            return [with_words(one) for one in part]
        if not isinstance(part, dict):
            return part
        if part.get("type") == "number":
            return {"anyOf": [part, words]}
        return {name: with_words(value) for name, value in part.items()}

    schema: dict[str, Any] = with_words(msgspec.json.schema(REPORTS[kind]))
    for struct in set(_structs(REPORTS[kind])):
        properties = schema["$defs"][struct.__name__]["properties"]
        json_names = {field.name: field.encode_name for field in msgspec.structs.fields(struct)}
        for name, text in _field_descriptions(struct).items():
            properties[json_names[name]]["description"] = text
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _structs(annotation: Any) -> Iterator[type[msgspec.Struct]]:
    """Yield every Struct in an annotation, and recursively in its fields."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        yield annotation
        for field in msgspec.structs.fields(annotation):
            yield from _structs(field.type)
    for part in get_args(annotation):
        yield from _structs(part)


def _field_descriptions(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the comments on a class's fields: at the end of the field's line, and above it."""
    described: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(struct).splitlines():
        if comment := re.fullmatch(r" {4}# (.*)", line):
            above.append(comment[1])
            continue
        if field := re.match(r" {4}(\w+): (?:.*?  # (.*))?", line):
            behind = f"{field[2][0].upper()}{field[2][1:]}." if field[2] else ""
            text = " ".join(filter(None, [behind, *above]))
            # A comment "batch, heads: …" above the first of several fields describes each of them.
            names, _, rest = text.partition(": ")
            several = set(names.split(", ")) <= set(struct.__struct_fields__)
            for name in names.split(", ") if several else [field[1]] if text else []:
                described[name] = rest if several else text
        above = []
    return described


def load_report(source: Path | str, kind: type[R]) -> R:
    """Read the report of type ``kind`` that ``report_json`` wrote.

    Args:
        source: A Path to read, or the JSON itself as a str.
        kind: Type of the report; the default of its field ``schema`` is the only version accepted.

    Raises:
        UsageError: if it is unreadable, too large or no JSON, or has unknown or missing fields,
            another schema version, or a Record without a problem or environment.
    """
    what = {Report: "report", GateReport: "gate's report"}.get(kind, kind.__name__)
    data = json_numbers.read_json(
        source, what, LARGEST_GATE if kind is GateReport else LARGEST_REPORT
    )

    def refused(fact: str) -> UsageError:
        return UsageError(
            json_numbers.refusal_message(json_numbers.source_name(source), what, fact)
        )

    version = next(f.default for f in msgspec.structs.fields(kind) if f.name == "schema")
    if other := json_numbers.other_schema(data, version):
        raise refused(other)
    try:
        report = msgspec.convert(_with_numbers(data, kind), kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise refused(str(error)) from None
    if isinstance(report, OracleReport | CertificateReport | BenchReport):
        for one in report.cells if isinstance(report, BenchReport) else report.records:
            problem_of(one)
    elif isinstance(report, Report | GateReport):
        records = (
            report.records
            if isinstance(report, Report)
            else [answer.record for answer in report.answers]
        )
        for record in records:
            problem_of(record)  # raises here rather than while the report is rendered
            if record.environment not in report.environments:
                raise refused(f"no environment {record.environment!r}")
    return report


def _with_numbers(data: Any, annotation: Any) -> Any:
    """Return ``data`` with floats for strings such as ``"nan"`` where ``annotation`` has a float.

    Other strings stay, since a kernel may be called "nan"; a Case may have numbers anywhere.
    """
    if annotation is float or annotation is Any:
        return json_numbers.words_to_numbers(data)
    origin, parts = get_origin(annotation), get_args(annotation)
    if isinstance(data, dict):
        if origin is dict:
            return {name: _with_numbers(one, parts[1]) for name, one in data.items()}
        if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
            fields = _numeric_fields(annotation).items()
            return data | {name: _with_numbers(data[name], t) for name, t in fields if name in data}
    if isinstance(data, list) and origin is tuple:
        return [_with_numbers(one, parts[0]) for one in data]
    if origin is UnionType and str not in parts:
        for part in parts:
            data = _with_numbers(data, part)
    return data


@cache
def _numeric_fields(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the types of a Struct's fields by name in JSON, without those that hold no float."""
    types = {field.encode_name: field.type for field in msgspec.structs.fields(struct)}
    return {name: t for name, t in types.items() if t not in {str, int, bool}}
