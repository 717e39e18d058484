"""Reads a report whose Records have numbers that JSON has no word for, as strictly as it says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from attncheck.core import json_numbers
from attncheck.core.errors import UsageError
from attncheck.records.problem_summary import problem_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from attncheck.records.record import Record

__all__ = ["read"]

S = TypeVar("S", bound=msgspec.Struct)


def read(  # what differs between the reports
    source: Path | str,
    kind: type[S],
    *,
    what: str,
    schema: int,
    largest: int,
    numbered: Callable[[dict[str, Any]], dict[str, Any]],
    records: Callable[[S], Iterable[Record]],
) -> S:
    """The report that ``source`` holds.

    Args:
        source: A Path is read, a str is the JSON itself.
        kind: Its type, which has ``environments``.
        what: What a message calls it.
        schema: The version that is read.
        largest: Bytes of the largest that is read.
        numbered: Its JSON → the same with numbers for words, where a number can stand.
        records: Its Records.

    Raises:
        UsageError: for anything else: unreadable, too large, no JSON, unknown or missing fields,
            another schema version, a Record without a problem or environment.
    """

    def refused(fact: str) -> UsageError:
        return UsageError(
            json_numbers.refusal_message(json_numbers.source_name(source), what, fact)
        )

    data = json_numbers.read_json(source, what, largest)
    found = data.get("schema") if isinstance(data, dict) else None
    if found != schema or isinstance(found, bool):
        raise refused(f"schema is {found!r}, this version reads {schema}")
    try:
        report = msgspec.convert(numbered(data), kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise refused(str(error)) from None
    environments: dict[str, Any] = report.environments  # type: ignore[attr-defined]  # each has them
    for record in records(report):
        problem_of(record)
        if record.environment not in environments:
            raise refused(f"no environment {record.environment!r}")
    return report
