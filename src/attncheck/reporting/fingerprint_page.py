"""A FingerprintReport → table, Markdown, JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.core.sanitize_text import shortened
from attncheck.records.survey_reports import FIELDS, FINGERPRINT_SCHEMA, FingerprintReport
from attncheck.reporting import figures, struct_json
from attncheck.reporting.by_format import FORMATS, Page, paged
from attncheck.reporting.cells import Cell
from attncheck.reporting.sheet import Line, Sheet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.records.survey_reports import DtypeFingerprint, Reading, ReadingVerdict
    from attncheck.reporting.cells import Look

__all__ = ["FORMATS", "exit_status", "load", "render", "show"]

_COLUMNS = ("field", "read", "declared", "")
_LOOKS: dict[ReadingVerdict, Look] = {
    "agrees": "good",
    "finer": "good",
    "differs": "bad",
    "not declared": "plain",
    "not seen": "dim",
}


def load(text: str) -> FingerprintReport:
    """The report that ``render(report, "json")`` wrote; raises UsageError for anything else."""
    return struct_json.read(text, FingerprintReport, FINGERPRINT_SCHEMA)


def exit_status(report: FingerprintReport) -> str:
    """``differs`` where anything does, ``untested`` where nothing was answered, else ``agrees``."""
    if not any(record.calls for record in report.records):
        return "untested"
    readings = (reading for record in report.records for reading in record.readings)
    return "differs" if any(r.standing == "differs" for r in readings) else "agrees"


def _above(report: FingerprintReport) -> Iterator[str]:
    yield shortened(report.command)
    env = report.environment
    facts = [report.kernel, env.device, env.machine, f"torch {env.torch}"]
    yield " · ".join([*facts, f"attncheck {env.attncheck}"])
    for record in report.records:
        if record.arithmetic:
            yield f"declared in {record.dtype}: {record.arithmetic}"


def _sheets(report: FingerprintReport, _: int | None) -> Iterator[Sheet]:
    for record in report.records:
        lines = [_line(reading) for reading in record.readings] if record.calls else []
        yield Sheet(_title(record), _COLUMNS, words=4, cut=3, lines=lines)


def _title(record: DtypeFingerprint) -> str:
    if not record.calls:
        return f"{record.dtype} · not asked: {record.readings[0].reason}"
    return f"{record.dtype} · {record.calls} calls"


def _line(reading: Reading) -> Line:
    cells = (
        Cell(reading.field),
        Cell(reading.read or figures.NOTHING),
        Cell(reading.declared or figures.NOTHING),
        Cell(reading.standing, _LOOKS[reading.standing]),
    )
    return Line(cells, (reading.reason,) if reading.reason else ())


def _below(report: FingerprintReport) -> Iterator[str]:
    del report
    yield "; ".join(f"{field}: {what}" for field, what in FIELDS.items()) + "."
    yield "finer: less error than is declared, so that bounds hold. docs/explanation/fingerprint.md says how."


_PAGE: Page[FingerprintReport] = paged("The arithmetic of a kernel", _above, _sheets, _below)
render, show = _PAGE.render, _PAGE.show
