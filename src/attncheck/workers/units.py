"""Units of work, their results, and the shards of a run."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from typing import Any, Literal, Self

import msgspec
from msgspec.structs import replace

from attncheck.core.errors import UsageError
from attncheck.records.run_reports import Answer, Stage


class Unit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One piece of work, self-contained: any process on any machine can do it."""

    # ``describe``: find out what the kernel is, and plan its questions. ``draw``: draw Cases of a
    # property, or without ``test`` those of the stages bounds and baseline. ``ask``: ask one Case.
    # ``shrink``: find the smallest Case that fails like this one. ``fault``: run a whole gate on a
    # planted fault.
    kind: Literal["describe", "draw", "ask", "shrink", "fault"]
    stage: Stage  # which part of the gate it belongs to
    # As the user named it: a name, ``file.py::name`` or ``package.module:name``; for a fault
    # ``name@host``.
    kernel: str
    convention: str = ""  # Name of the calling convention; empty for the first that fits.
    # Commit of the kernel, forty hexadecimal digits; empty for the working tree. The folder of its
    # files is not part of a unit, since it differs from run to run.
    commit: str = ""
    device: str  # ``cpu`` or ``cuda``.
    tier: str = ""  # How hard the kernel is asked.
    # dtype, family: parameters of a ``draw``; empty otherwise.
    dtype: str = ""
    family: str = ""
    variant: str = ""  # Name of the Case in reports.
    test: str = ""  # ``test_causal.py::test_attention_is_exact``; empty if no property asks.
    case: dict[str, Any] = {}  # The Case as JSON; empty for a unit without a Case.
    alone: bool = False  # Whether it must be done in an unused worker.

    @property
    def draws_stages(self) -> bool:
        """Whether it draws the questions of the stages bounds and baseline."""
        return self.kind == "draw" and not self.test

    @property
    def id(self) -> str:
        """Sixteen letters and digits, equal on every machine, derived from all but ``alone``."""
        data = msgspec.to_builtins(msgspec.structs.replace(self, alone=False))
        # Sorted, since the keys of equal Cases may be in a different order.
        digest = hashlib.sha256(msgspec.json.encode(data, order="sorted")).digest()
        return base64.b32encode(digest)[:16].decode().lower()


class UnitResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of a unit."""

    unit: str  # Id of the unit.
    # One answer for ``ask``; for ``shrink`` that of the smaller Case, if one was found.
    answers: tuple[Answer, ...] = ()
    units: tuple[Unit, ...] = ()  # Further units that follow from this one, in order.
    # For ``describe``: ``name``, ``summary``, ``absent`` and ``environment``. A fact ``usage``, the
    # text of a UsageError, means that there is no result, and ends the run. For ``fault`` the
    # ``score`` of a fault or a control.
    facts: dict[str, Any] = {}
    harness: str = ""  # An error that is not the kernel's fault, in one line; empty for none.
    seconds: float = 0.0
    attempts: int = 1  # How often the unit was begun.


MOST_SHARDS = 1000

# Units that only one shard does. The others are cheap, and their results are needed everywhere.
_SHARDED_KINDS = frozenset({"ask", "shrink"})


@dataclass(frozen=True, slots=True)
class Shard:
    """Part ``number`` of ``count`` of a run."""

    number: int = 1  # Counted from 1.
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the shard of a text ``2/4``, or the whole run for an empty text.

        Raises:
            UsageError: for anything else.
        """
        if not text:
            return cls()
        # ASCII, since \d would match the digits of any script.
        parts = re.fullmatch(r"([1-9]\d{0,3})/([1-9]\d{0,3})", text, re.ASCII)
        number, count = map(int, parts.groups()) if parts else (0, 0)
        if not 1 <= number <= count <= MOST_SHARDS:
            raise UsageError(
                f"shard {text!r} must be I/N: the I-th of N parts, at most {MOST_SHARDS}, from 1."
            )
        return cls(number, count)

    def __str__(self) -> str:
        """Return ``2/4``; empty for the whole run."""
        return f"{self.number}/{self.count}" if self.count > 1 else ""

    def has(self, unit: Unit) -> bool:
        """Return whether this shard does ``unit``; the result is the same on all machines."""
        if self.count == 1 or unit.kind not in _SHARDED_KINDS:
            return True
        # One shard does a question, its repetition at another commit, and the shrinking of its
        # failure, of which other shards do not know.
        question = replace(unit, commit="", kind="ask")
        digest = hashlib.sha256(question.id.encode()).digest()
        return int.from_bytes(digest[:8]) % self.count == self.number - 1
