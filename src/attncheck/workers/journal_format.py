"""The lines of a journal, each a numbered event with a checksum, and their combined content.

A line is a JSON object that begins with its number ``n``, its ``kind`` and ``at``, the seconds
since the session of its writer began, and ends with ``sum``: the first sixteen hexadecimal digits
of the SHA-256 of all bytes before it.

| kind | further fields |
|---|---|
| ``header`` | ``schema``, ``version`` (of attncheck), ``plan`` (its fingerprint), ``head`` |
| ``session`` | ``started``, ``pid``, ``host``, ``typed``: a process begins to write |
| ``queued`` | ``units``: work that is known from the outset |
| ``start`` | ``unit``: the unit is begun now |
| ``result`` | ``done``: the result of a unit |
| ``quarantine`` | ``done``: stands for the result of a unit that was lost too often |
| ``abandoned`` | ``units`` (ids): begun, and ended by us before they were done |
| ``end`` | ``seconds``, ``why``: the session ends; ``why`` is empty if all is done |
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from attncheck.core import json_numbers
from attncheck.core.errors import AttncheckError
from attncheck.core.sanitize_text import one_line
from attncheck.workers.units import Shard, Unit, UnitResult

SCHEMA = 1


class JournalError(AttncheckError):
    """A journal that cannot be written or believed; the command line exits with 3."""


@dataclass(slots=True)
class JournalContent:
    """The content of a journal."""

    head: dict[str, Any] = field(default_factory=dict)  # The header: data that identify the run.
    version: str = ""  # Version of attncheck that wrote it.
    plan: str = ""  # Fingerprint of ``head`` and ``version``.
    # Results by unit id, in the order in which they were written.
    results: dict[str, UnitResult] = field(default_factory=dict)
    # All known units by id: queued, begun, or following from a result.
    units: dict[str, Unit] = field(default_factory=dict)
    # How often each unit was begun but neither finished nor abandoned.
    lost: dict[str, int] = field(default_factory=dict)
    # Ids of units that were given up: their results only state this.
    quarantined: set[str] = field(default_factory=set)
    earlier: float = 0.0  # Seconds of all sessions before the last one.
    latest: float = 0.0  # Seconds of the last session, up to its last line.
    why: str = ""  # Why the last session ended early; ``killed`` if it has no ``end`` line.
    # pid, host: process and machine of the last session.
    pid: int = 0
    host: str = ""
    lines: int = 0  # Number of whole lines.
    size: int = 0  # Bytes of the whole lines.
    torn: bool = False  # Whether a partial line follows.

    @property
    def seconds(self) -> float:
        """Seconds of all sessions together."""
        return self.earlier + self.latest

    @property
    def unfinished(self) -> tuple[Unit, ...]:
        """Known units of this shard that have no result."""
        shard = Shard.parse(str(self.head.get("shard", "")))
        return tuple(
            unit for id_, unit in self.units.items() if id_ not in self.results and shard.has(unit)
        )

    @property
    def unanswered(self) -> tuple[Unit, ...]:
        """Unfinished units without those that only shrink a known failure."""
        return tuple(unit for unit in self.unfinished if unit.kind != "shrink")

    def take(self, event: Mapping[str, Any]) -> None:
        """Add one event, whose units and results are structs.

        Raises:
            JournalError, LookupError, TypeError: if the event is invalid at this position.
        """
        kind = event["kind"]
        if (kind == "header") != (self.lines == 0):
            raise JournalError("a header is its first line, and no other")
        # A session that is killed has no end: the time of its last line counts.
        self.latest = max(self.latest, float(event["at"]))
        _TAKES[kind](self, event)
        self.lines += 1

    def _take_header(self, event: Mapping[str, Any]) -> None:
        if event["schema"] != SCHEMA:
            raise JournalError(f"its schema is {event['schema']}, this version reads {SCHEMA}")
        self.head, self.version = dict(event["head"]), str(event["version"])
        self.plan = str(event["plan"])

    def _take_session(self, event: Mapping[str, Any]) -> None:
        # The session counts as killed until its end is read.
        self.earlier, self.latest, self.why = self.seconds, 0.0, "killed"
        self.pid, self.host = int(event["pid"]), str(event["host"])
        if event.get("typed"):  # the command line of the last session
            self.head["typed"] = str(event["typed"])

    def _take_queued(self, event: Mapping[str, Any]) -> None:
        for unit in event["units"]:
            self._add_unit(unit)

    def _take_start(self, event: Mapping[str, Any]) -> None:
        unit: Unit = event["unit"]
        if unit.id in self.results:
            raise JournalError(f"unit {unit.id} is begun after its result")
        self._add_unit(unit)
        self.lost[unit.id] = self.lost.get(unit.id, 0) + 1

    def _take_result(self, event: Mapping[str, Any]) -> None:
        done: UnitResult = event["done"]
        if done.unit in self.results:
            raise JournalError(f"unit {done.unit} has two results")
        self.results[done.unit] = done
        # The unit could be done after all: earlier lost attempts do not matter.
        self.lost.pop(done.unit, None)
        for unit in done.units:
            self._add_unit(unit)

    def _take_quarantine(self, event: Mapping[str, Any]) -> None:
        self._take_result(event)
        self.quarantined.add(event["done"].unit)

    def _take_abandoned(self, event: Mapping[str, Any]) -> None:
        for id_ in event["units"]:
            if self.lost.get(id_, 0) < 1:
                raise JournalError(f"unit {id_} is abandoned before it is begun")
            self.lost[id_] -= 1

    def _take_end(self, event: Mapping[str, Any]) -> None:
        self.latest, self.why = float(event["seconds"]), str(event["why"])

    def _add_unit(self, unit: Unit) -> None:
        self.units.setdefault(unit.id, unit)


_TAKES = {
    "header": JournalContent._take_header,
    "session": JournalContent._take_session,
    "queued": JournalContent._take_queued,
    "start": JournalContent._take_start,
    "result": JournalContent._take_result,
    "quarantine": JournalContent._take_quarantine,
    "abandoned": JournalContent._take_abandoned,
    "end": JournalContent._take_end,
}


LONGEST = 2**26  # Bytes of the longest line: one result, with all units that follow from it.
_DEEPEST = 64  # Deepest nesting of a line; far below Python's recursion limit.
_SUM = b',"sum":"'
_TAIL = len(_SUM) + 16 + len(b'"}')
# Start of every journal, which distinguishes a partial first line from some other file.
_BEGINNING = b'{"n":0,"kind":"header"'
# Exceptions raised while a line of another layout is read.
_MALFORMED = (
    msgspec.MsgspecError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
VOLATILE = frozenset({"started", "typed"})
"""Keys in which the headers of two sessions of one run may differ."""


class _Torn(Exception):
    """A line was not written completely, which is no error if it is the last line."""


def journal_line(number: int, kind: str, at: float, rest: Mapping[str, Any]) -> bytes:
    """Return the line of one event.

    Raises:
        JournalError: if it is longer or nested deeper than readers accept.
    """
    data = {"n": number, "kind": kind, "at": round(at, 3), **json_numbers.to_plain_data(rest)}
    # Checked on writing too, since a line that readers refuse would break every later session.
    _check_depth(data)
    body = msgspec.json.encode(data)[:-1]
    if len(body) + _TAIL > LONGEST:
        raise JournalError(f"a line of {len(body)} bytes is longer than {LONGEST}")
    return b'%s%s%s"}\n' % (body, _SUM, _checksum(body))


def plan_fingerprint(head: Mapping[str, Any], version: str) -> str:
    """Return a digest of the header, except the keys in ``VOLATILE``, and of the version."""
    identity = {k: v for k, v in json_numbers.to_plain_data(head).items() if k not in VOLATILE}
    text = msgspec.json.encode([SCHEMA, version, identity], order="sorted")
    return hashlib.sha256(text).hexdigest()[:16]


def read_journal(path: Path) -> JournalContent:
    """Return the present content of the journal ``path``, which another process may be writing.

    Raises:
        JournalError: if it cannot be read, is no journal, or is damaged before its last line.
    """
    try:
        with path.open("rb") as file:
            content = read_journal_file(file, str(path))
    except OSError as error:
        reason = error.strerror or str(error)
        raise JournalError(f"{one_line(str(path))} cannot be read: {reason}.") from None
    if not content.lines:
        raise JournalError(f"{one_line(str(path))} is an empty journal.")
    return content


def read_journal_file(file: BinaryIO, name: str) -> JournalContent:
    """Read an open journal from its beginning; the content is empty if its header is incomplete.

    Raises:
        JournalError: if it is no journal, or is damaged before its last line.
    """
    content, place = JournalContent(), one_line(name)
    # One byte more, for the newline of the longest line.
    while raw := file.readline(LONGEST + 1):
        try:
            content.take(_event(raw, content.lines))
        except _Torn as torn:
            # Only the last line may be incomplete: any other broken line is damage.
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
    """Return False for the first line of a file that is no journal and must not be cut."""
    begins = raw[: len(_BEGINNING)]
    return content.lines > 0 or begins == _BEGINNING[: len(raw)] or not raw.strip(b"\0")


def _event(raw: bytes, number: int) -> dict[str, Any]:
    """Parse a line and return its event, which must have the given number."""
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
    """Return the units and the result of an event as structs."""
    if event["kind"] == "start":
        return {"unit": _unit(event["unit"])}
    if event["kind"] == "queued":
        return {"units": [_unit(one) for one in event["units"]]}
    return {"done": _done(event["done"])} if "done" in event else {}


def _unit(data: dict[str, Any]) -> Unit:
    return msgspec.convert(
        data | {"case": json_numbers.words_to_numbers(data.get("case", {}))}, Unit
    )


def _done(data: dict[str, Any]) -> UnitResult:
    answers = [
        one | {"record": json_numbers.words_to_record_numbers(one.get("record"))}
        for one in data.get("answers", ())
    ]
    # Converted separately, since their Cases have strings for NaN and infinities.
    units = tuple(_unit(one) for one in data.get("units", ()))
    done = msgspec.convert(data | {"answers": answers, "units": []}, UnitResult)
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
