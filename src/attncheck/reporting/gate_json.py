"""A GateReport as JSON, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncheck.core import json_numbers
from attncheck.records.run_reports import GATE_SCHEMA, GateReport
from attncheck.reporting import records_json

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LARGEST", "as_json", "load"]

LARGEST = 2**28
"""Bytes of the largest report that is read: some 100,000 answers."""


def as_json(report: GateReport) -> str:
    """``report`` as indented JSON, keys in the order of the schema; see ``json_numbers``."""
    return json_numbers.to_json_text(report)


def load(source: Path | str) -> GateReport:
    """The GateReport that ``as_json`` wrote.

    Args:
        source: A Path is read, a str is the JSON itself.

    Raises:
        UsageError: for anything else: unreadable, too large, no JSON, unknown or missing fields,
            another schema version, an answer without a problem or environment.
    """
    return records_json.read(
        source,
        GateReport,
        what="gate's report",
        schema=GATE_SCHEMA,
        largest=LARGEST,
        numbered=_numbered,
        records=lambda report: (answer.record for answer in report.answers),
    )


def _numbered(data: dict[str, Any]) -> dict[str, Any]:
    """``data`` with numbers for the words, where a number can stand."""
    changed = dict(data)
    for name, number in (("answers", _answer), ("changes", _change)):
        if isinstance(data.get(name), list):
            changed[name] = [number(one) for one in data[name]]
    return changed


def _answer(answer: Any) -> Any:
    if not isinstance(answer, dict):
        return answer
    return answer | {"record": json_numbers.words_to_record_numbers(answer.get("record"))}


def _change(change: Any) -> Any:
    if not isinstance(change, dict):
        return change
    told = {name: change[name] for name in ("before", "after") if name in change}
    return change | json_numbers.words_to_numbers(told)
