"""The lines of a journal: one event each, numbered, with a checksum, and read back strictly.

A line is a JSON object that begins with its number ``n``, its ``kind`` and ``at``, the seconds
since the session of its writer began, and ends with ``sum``: the first sixteen hexadecimal digits
of the SHA-256 of all bytes before it.

| kind | beside these |
|---|---|
| ``header`` | ``schema``, ``version`` (of attncheck), ``plan`` (its fingerprint), ``head`` |
| ``session`` | ``started``, ``pid``, ``host``, ``typed``: a process begins to write |
| ``queued`` | ``units``: work that is known from the outset |
| ``start`` | ``unit``: it is begun now |
| ``result`` | ``done`` |
| ``quarantine`` | ``done``: of a unit that is not begun again, since it was lost too often |
| ``abandoned`` | ``units`` (ids): begun, and ended by us before they were done |
| ``end`` | ``seconds``, ``why``: the session ends; ``why`` is empty where nothing is left |
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec

from attncheck import json_numbers
from attncheck.inert import one_line
from attncheck.runner.journal_content import SCHEMA, JournalContent, JournalError
from attncheck.runner.unit import Done, Unit

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import BinaryIO

__all__ = [
    "LONGEST",
    "VOLATILE",
    "fingerprint",
    "line",
    "read",
    "read_file",
]

LONGEST = 2**26
"""Bytes of the longest line: one result, with all work that follows from it."""
_DEEPEST = 64
_SUM = b',"sum":"'
_TAIL = len(_SUM) + 16 + len(b'"}')
_BEGINNING = b'{"n":0,"kind":"header"'
# What reading a line of another layout raises.
_MALFORMED = (
    msgspec.MsgspecError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
VOLATILE = frozenset({"started", "typed"})
"""What two runs of one plan may say differently in their headers."""


class _Torn(Exception):
    """A line that was not written whole: no error where it is the last."""


def line(number: int, kind: str, at: float, rest: Mapping[str, Any]) -> bytes:
    """The line of one event.

    Raises:
        JournalError: where it is longer than a reader would take, or deeper.
    """
    data = {"n": number, "kind": kind, "at": round(at, 3), **json_numbers.builtins(rest)}
    _check_depth(data)
    body = msgspec.json.encode(data)[:-1]
    if len(body) + _TAIL > LONGEST:
        raise JournalError(f"a line of {len(body)} bytes is longer than {LONGEST}")
    return b'%s%s%s"}\n' % (body, _SUM, _checksum(body))


def fingerprint(head: Mapping[str, Any], version: str) -> str:
    """What two headers of one plan have in common."""
    same = {k: v for k, v in json_numbers.builtins(head).items() if k not in VOLATILE}
    text = msgspec.json.encode([SCHEMA, version, same], order="sorted")
    return hashlib.sha256(text).hexdigest()[:16]


def read(path: Path) -> JournalContent:
    """What the journal ``path`` says now; another process may be writing it.

    Raises:
        JournalError: where it cannot be read, is no journal, or is damaged before its last line.
    """
    try:
        with path.open("rb") as file:
            content = read_file(file, str(path))
    except OSError as error:
        reason = error.strerror or str(error)
        raise JournalError(f"{one_line(str(path))} cannot be read: {reason}.") from None
    if not content.lines:
        raise JournalError(f"{one_line(str(path))} is an empty journal.")
    return content


def read_file(file: BinaryIO, name: str) -> JournalContent:
    """What an open journal says, from its beginning; empty where not even its header is whole.

    Raises:
        JournalError: where it is no journal, or is damaged before its last line.
    """
    content, place = JournalContent(), one_line(name)
    while raw := file.readline(LONGEST + 1):
        try:
            content.take(_event(raw, content.lines))
        except _Torn as torn:
            if file.read(1) or not _may_be_torn(raw, content):
                raise JournalError(f"{place}, line {content.lines + 1}: {torn}.") from None
            content.torn = True
            break
        except (JournalError, *_MALFORMED) as error:
            fact = one_line(str(error)).removesuffix(".")
            raise JournalError(f"{place}, line {content.lines + 1}: {fact}.") from None
        content.size += len(raw)
    return content


def _may_be_torn(raw: bytes, content: JournalContent) -> bool:
    """Not where it is the first line of some other file, which nobody may cut."""
    begins = raw[: len(_BEGINNING)]
    return content.lines > 0 or begins == _BEGINNING[: len(raw)] or not raw.strip(b"\0")


def _event(raw: bytes, number: int) -> dict[str, Any]:
    """The event of a line, which must be the one of that number."""
    body = raw[: -_TAIL - 1]
    if not raw.endswith(b"\n") or raw[-_TAIL - 1 :] != _SUM + _checksum(body) + b'"}\n':
        raise _Torn("it is not whole, or its checksum is wrong")
    event: dict[str, Any] = msgspec.json.decode(body + b"}")
    _check_depth(event)
    if event["n"] != number:
        raise JournalError(f"its number is {event['n']!r}, not {number}")
    return event | _structs(event)


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:16].encode()


def _structs(event: Mapping[str, Any]) -> dict[str, Any]:
    """The units and the result of an event."""
    if event["kind"] == "start":
        return {"unit": _unit(event["unit"])}
    if event["kind"] == "queued":
        return {"units": [_unit(one) for one in event["units"]]}
    return {"done": _done(event["done"])} if "done" in event else {}


def _unit(data: dict[str, Any]) -> Unit:
    return msgspec.convert(data | {"case": json_numbers.numbers(data.get("case", {}))}, Unit)


def _done(data: dict[str, Any]) -> Done:
    answers = [
        one | {"record": json_numbers.record_numbers(one.get("record"))}
        for one in data.get("answers", ())
    ]
    units = tuple(_unit(one) for one in data.get("units", ()))
    done = msgspec.convert(data | {"answers": answers, "units": []}, Done)
    return msgspec.structs.replace(done, units=units)


def _check_depth(value: object) -> None:
    level, depth = [value], 0
    while level:
        if depth > _DEEPEST:
            raise JournalError(f"a line is nested deeper than {_DEEPEST}")
        depth += 1
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list | tuple)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
