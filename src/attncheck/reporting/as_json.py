"""The report as JSON, and back: the only format that is read again."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from attncheck.errors import UsageError
from attncheck.record import SCHEMA, Report
from attncheck.reporting.asked import asked
from attncheck.reporting.inert import one_line

__all__ = ["LARGEST", "as_json", "load"]

LARGEST = 2**26
"""Bytes of the largest report that is read: some 40,000 records."""

# JSON has no word for these; strings keep the file valid for every reader.
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_LONGEST_MESSAGE = 300


def as_json(report: Report) -> str:
    """``report`` as indented JSON, keys in the order of the schema.

    NaN and infinities are the strings ``"nan"``, ``"inf"`` and ``"-inf"``. What is no Unicode text
    (a lone surrogate in a foreign message) is written as its escape.
    """
    data = _worded(msgspec.to_builtins(report))
    return msgspec.json.format(msgspec.json.encode(data), indent=2).decode() + "\n"


def load(source: Path | str) -> Report:
    """The Report that ``as_json`` wrote.

    Args:
        source: A Path is read, a str is the JSON itself.

    Raises:
        UsageError: for anything else: unreadable, too large, no JSON, unknown or missing fields,
            another schema version, a record without a problem or environment.
    """
    name = one_line(str(source)) if isinstance(source, Path) else "the text"
    data = _decoded(_bytes(source, name), name)
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA or isinstance(schema, bool):
        raise UsageError(_refusal(name, f"schema is {schema!r}, this version reads {SCHEMA}"))
    try:
        report = msgspec.convert(_numbered(data), Report)
    except (msgspec.ValidationError, RecursionError) as error:
        raise UsageError(_refusal(name, str(error))) from None
    for record in report.records:
        asked(record)
        if record.environment not in report.environments:
            raise UsageError(_refusal(name, f"no environment {record.environment!r}"))
    return report


def _bytes(source: Path | str, name: str) -> bytes:
    try:
        if isinstance(source, str):
            raw = source.encode()
        else:
            with source.open("rb") as file:
                raw = file.read(LARGEST + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{name} cannot be read: {one_line(reason)}.") from None
    if len(raw) > LARGEST:
        raise UsageError(f"{name} is larger than {LARGEST} bytes, the most that a report may be.")
    return raw


def _decoded(raw: bytes, name: str) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise UsageError(_refusal(name, str(error))) from None


def _refusal(name: str, fact: str) -> str:
    return f"{name} is no report of attncheck: {one_line(fact)[:_LONGEST_MESSAGE]}."


def _worded(value: Any) -> Any:
    """``value`` with words for what JSON cannot say."""
    if isinstance(value, dict):
        return {_worded(k): _worded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_worded(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def _numbered(data: dict[str, Any]) -> dict[str, Any]:
    """``data`` with numbers for the words, where a number can stand."""
    records = data.get("records")
    if not isinstance(records, list):
        return data
    places = ("case", "out", "lse", "judgement", "seconds")
    numbered = [
        r | {k: _unworded(r[k]) for k in places if k in r} if isinstance(r, dict) else r
        for r in records
    ]
    return data | {"records": numbered}


def _unworded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _unworded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_unworded(v) for v in value]
    return _WORDS.get(value, value) if isinstance(value, str) else value
