"""The report as JSON, and back: the only format that is read again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncheck.core import json_numbers
from attncheck.records.record import REPORT_SCHEMA, Report
from attncheck.reporting import records_json

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LARGEST", "as_json", "load"]

LARGEST = 2**26
"""Bytes of the largest report that is read: some 40,000 records."""


def as_json(report: Report) -> str:
    """``report`` as indented JSON, keys in the order of the schema; see ``json_numbers``."""
    return json_numbers.to_json_text(report)


def load(source: Path | str) -> Report:
    """The Report that ``as_json`` wrote.

    Args:
        source: A Path is read, a str is the JSON itself.

    Raises:
        UsageError: for anything else: unreadable, too large, no JSON, unknown or missing fields,
            another schema version, a record without a problem or environment.
    """
    return records_json.read(
        source,
        Report,
        what="report",
        schema=REPORT_SCHEMA,
        largest=LARGEST,
        numbered=_numbered,
        records=lambda report: report.records,
    )


def _numbered(data: dict[str, Any]) -> dict[str, Any]:
    """``data`` with numbers for the words, where a number can stand."""
    records = data.get("records")
    if not isinstance(records, list):
        return data
    return data | {"records": [json_numbers.words_to_record_numbers(record) for record in records]}
