"""A gate as CSV: the columns of a report, one row an answer, what the gate knows before them."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from attncheck.core.sanitize_text import for_spreadsheet
from attncheck.records.record import Report
from attncheck.reporting.as_csv import as_csv as records_as_csv

if TYPE_CHECKING:
    from attncheck.records.run_reports import GateReport

__all__ = ["as_csv"]

_OWN = ("unit", "stage", "test", "attempts", "smallest_of", "failure", "work_seconds", "compiling")


def as_csv(report: GateReport) -> str:
    """``report`` as CSV; numbers as Python's repr, text so that no spreadsheet runs it."""
    records = Report(
        command=report.command,
        environments=report.environments,
        kernels=report.kernels,
        absent=report.absent,
        records=tuple(answer.record for answer in report.answers),
    )
    head, *rows = csv.reader(io.StringIO(records_as_csv(records)))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_OWN, *head])
    for answer, row in zip(report.answers, rows, strict=True):
        words = (answer.unit, answer.stage, answer.test)
        own = [*map(for_spreadsheet, words), str(answer.attempts)]
        own += [for_spreadsheet(answer.smallest_of), for_spreadsheet(answer.failure)]
        own += [repr(answer.seconds), repr(answer.compiling)]
        writer.writerow([*own, *row])
    return text.getvalue()
