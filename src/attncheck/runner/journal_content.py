"""What a journal says, from its events; its lines are read and written by ``journal_lines``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attncheck.errors import AttncheckError
from attncheck.runner.shards import Shard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attncheck.runner.unit import Done, Unit

__all__ = ["SCHEMA", "JournalContent", "JournalError"]

SCHEMA = 1


class JournalError(AttncheckError):
    """A journal that cannot be written or believed; the command line exits with 3."""


@dataclass(slots=True)
class JournalContent:
    """What a journal says.

    Attributes:
        head: What its writer says of the plan.
        version: Of the attncheck that wrote it.
        plan: Fingerprint of ``head`` and ``version``.
        results: What came of each unit, by its id, in the order of their writing.
        units: All work that is known, by id: from the outset, begun, or following from a result.
        lost: How often each unit was begun without a result or an excuse.
        quarantined: Ids of those whose result was written without their being done.
        earlier, latest: Seconds that the last session took, up to its last line, and all before it.
        why: Why the last session ended early; ``killed`` where it did not say so.
        pid, host: Of the last writer.
        lines: How many there are.
        size: Bytes up to the end of the last whole one.
        torn: Whether another follows, which is not whole.
    """

    head: dict[str, Any] = field(default_factory=dict)
    version: str = ""
    plan: str = ""
    results: dict[str, Done] = field(default_factory=dict)
    units: dict[str, Unit] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    quarantined: set[str] = field(default_factory=set)
    earlier: float = 0.0
    latest: float = 0.0
    why: str = ""
    pid: int = 0
    host: str = ""
    lines: int = 0
    size: int = 0
    torn: bool = False

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
        """What one event adds, whose units and results are structs.

        Raises:
            JournalError, LookupError, TypeError: for one that cannot stand there.
        """
        kind = event["kind"]
        if (kind == "header") != (self.lines == 0):
            raise JournalError("a header is its first line, and no other")
        self.latest = max(self.latest, float(event["at"]))
        _TAKES[kind](self, event)
        self.lines += 1

    def _take_header(self, event: Mapping[str, Any]) -> None:
        if event["schema"] != SCHEMA:
            raise JournalError(f"its schema is {event['schema']}, this version reads {SCHEMA}")
        self.head, self.version = dict(event["head"]), str(event["version"])
        self.plan = str(event["plan"])

    def _take_session(self, event: Mapping[str, Any]) -> None:
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
