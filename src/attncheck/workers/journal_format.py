"""A journal's lines: one event each, numbered, with a checksum; and what they say together.

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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from attncheck.core import json_numbers
from attncheck.core.errors import AttncheckError
from attncheck.core.sanitize_text import one_line
from attncheck.workers.units import Done, Shard, Unit

SCHEMA = 1


class JournalError(AttncheckError):
    """A journal that cannot be written or believed; the command line exits with 3."""


@dataclass(slots=True)
class JournalContent:
    """The content of a journal."""

    head: dict[str, Any] = field(default_factory=dict)  # what its writer says of the plan
    version: str = ""  # of the attncheck that wrote it
    plan: str = ""  # fingerprint of ``head`` and ``version``
    # What came of each unit, by its id, in the order of their writing.
    results: dict[str, Done] = field(default_factory=dict)
    # All work that is known, by id: from the outset, begun, or following from a result.
    units: dict[str, Unit] = field(default_factory=dict)
    # How often each unit was begun without a result or an excuse.
    lost: dict[str, int] = field(default_factory=dict)
    # Ids of those whose result was written without their being done.
    quarantined: set[str] = field(default_factory=set)
    # earlier, latest: seconds that the last session took, up to its last line, and all before it.
    earlier: float = 0.0
    latest: float = 0.0
    why: str = ""  # why the last session ended early; ``killed`` where it did not say so
    # pid, host: of the last writer.
    pid: int = 0
    host: str = ""
    lines: int = 0  # how many there are
    size: int = 0  # bytes up to the end of the last whole one
    torn: bool = False  # whether another follows, which is not whole

    @property
    def seconds(self) -> float:
        """That all sessions took."""
        return self.earlier + self.latest

    @property
    def unfinished(self) -> tuple[Unit, ...]:
        """Units that are known, are no other shard's, and have no result."""
        shard = Shard.parse(str(self.head.get("shard", "")))
        return tuple(
            unit for id_, unit in self.units.items() if id_ not in self.results and shard.has(unit)
        )

    @property
    def unanswered(self) -> tuple[Unit, ...]:
        """Unfinished units whose want of a result leaves something unsaid.

        A failure that could be smaller is none the less one.
        """
        return tuple(unit for unit in self.unfinished if unit.kind != "shrink")

    def take(self, event: Mapping[str, Any]) -> None:
        """Add one event, whose units and results are structs.

        Raises:
            JournalError, LookupError, TypeError: for one that cannot stand there.
        """
        kind = event["kind"]
        if (kind == "header") != (self.lines == 0):
            raise JournalError("a header is its first line, and no other")
        # A session that is killed has no end: its last line says how long it took.
        self.latest = max(self.latest, float(event["at"]))
        _TAKES[kind](self, event)
        self.lines += 1

    def _take_header(self, event: Mapping[str, Any]) -> None:
        if event["schema"] != SCHEMA:
            raise JournalError(f"its schema is {event['schema']}, this version reads {SCHEMA}")
        self.head, self.version = dict(event["head"]), str(event["version"])
        self.plan = str(event["plan"])

    def _take_session(self, event: Mapping[str, Any]) -> None:
        # Who is killed writes nothing: it holds until an end says otherwise.
        self.earlier, self.latest, self.why = self.seconds, 0.0, "killed"
        self.pid, self.host = int(event["pid"]), str(event["host"])
        if event.get("typed"):  # of a run that goes on, what was typed last
            self.head["typed"] = str(event["typed"])

    def _take_queued(self, event: Mapping[str, Any]) -> None:
        for unit in event["units"]:
            self._know(unit)

    def _take_start(self, event: Mapping[str, Any]) -> None:
        unit: Unit = event["unit"]
        if unit.id in self.results:
            raise JournalError(f"unit {unit.id} is begun after its result")
        self._know(unit)
        self.lost[unit.id] = self.lost.get(unit.id, 0) + 1

    def _take_result(self, event: Mapping[str, Any]) -> None:
        done: Done = event["done"]
        if done.unit in self.results:
            raise JournalError(f"unit {done.unit} has two results")
        self.results[done.unit] = done
        # It could be done after all: what was lost before says nothing against it.
        self.lost.pop(done.unit, None)
        for unit in done.units:
            self._know(unit)

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

    def _know(self, unit: Unit) -> None:
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


LONGEST = 2**26  # bytes of the longest line: one result, with all work that follows from it
# Far below the depth at which Python itself gives up.
_DEEPEST = 64
_SUM = b',"sum":"'
_TAIL = len(_SUM) + 16 + len(b'"}')
# By it a torn first line is told from the first line of some other file.
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


def journal_line(number: int, kind: str, at: float, rest: Mapping[str, Any]) -> bytes:
    """The line of one event.

    Raises:
        JournalError: where it is longer than a reader would take, or deeper.
    """
    data = {"n": number, "kind": kind, "at": round(at, 3), **json_numbers.to_plain_data(rest)}
    # Also on writing, because a line that no reader takes would end every later session.
    _check_depth(data)
    body = msgspec.json.encode(data)[:-1]
    if len(body) + _TAIL > LONGEST:
        raise JournalError(f"a line of {len(body)} bytes is longer than {LONGEST}")
    return b'%s%s%s"}\n' % (body, _SUM, _checksum(body))


def plan_fingerprint(head: Mapping[str, Any], version: str) -> str:
    """Return what two headers of one plan have in common."""
    same = {k: v for k, v in json_numbers.to_plain_data(head).items() if k not in VOLATILE}
    text = msgspec.json.encode([SCHEMA, version, same], order="sorted")
    return hashlib.sha256(text).hexdigest()[:16]


def read_journal(path: Path) -> JournalContent:
    """Return what the journal ``path`` says now; another process may be writing it.

    Raises:
        JournalError: where it cannot be read, is no journal, or is damaged before its last line.
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
    """Read an open journal from its beginning; empty where not even its header is whole.

    Raises:
        JournalError: where it is no journal, or is damaged before its last line.
    """
    content, place = JournalContent(), one_line(name)
    # One byte more, for the newline of the longest line.
    while raw := file.readline(LONGEST + 1):
        try:
            content.take(_event(raw, content.lines))
        except _Torn as torn:
            # Only a last line can be torn: a broken one before others is damage.
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
    return msgspec.convert(
        data | {"case": json_numbers.words_to_numbers(data.get("case", {}))}, Unit
    )


def _done(data: dict[str, Any]) -> Done:
    answers = [
        one | {"record": json_numbers.words_to_record_numbers(one.get("record"))}
        for one in data.get("answers", ())
    ]
    # Apart from the rest, because their Cases hold words in place of NaN and infinities.
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
