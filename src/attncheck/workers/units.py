"""A piece of work that is done whole or again, its result, and the part of a run that does it."""

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
    """One piece of work. It says all that doing it takes: any process can, on any machine."""

    # ``describe``: which kernel is this, and what is it to be asked. ``draw``: Cases of a
    # property. ``ask``: one Case. ``shrink``: the smallest Case that fails like this one.
    # ``fault``: whether a whole gate sees a planted fault.
    kind: Literal["describe", "draw", "ask", "shrink", "fault"]
    stage: Stage  # which part of the gate it belongs to
    # As asked for: a name, ``file.py::name`` or ``package.module:name``; of a fault
    # ``name@host``.
    kernel: str
    convention: str = ""  # a name of a calling convention; empty for the first that fits
    # Of which commit the kernel is: forty hexadecimal digits. Empty for the files as they are.
    # Where its files lie is no part of a unit: that differs from run to run.
    commit: str = ""
    device: str  # ``cpu`` or ``cuda``
    tier: str = ""  # how hard the kernel is asked
    # dtype, family: of a draw; empty elsewhere.
    dtype: str = ""
    family: str = ""
    variant: str = ""  # what reports call the Case
    test: str = ""  # ``test_causal.py::test_attention_is_exact``; empty where none asks
    case: dict[str, Any] = {}  # as JSON; empty of a unit that has none
    alone: bool = False  # whether it is to be done in processes that have done nothing else

    @property
    def id(self) -> str:
        """Sixteen letters and digits that stand for it on every machine; ``alone`` is no part."""
        data = msgspec.to_builtins(msgspec.structs.replace(self, alone=False))
        # Sorted, because equal Cases may have been written down in another order.
        digest = hashlib.sha256(msgspec.json.encode(data, order="sorted")).digest()
        return base64.b32encode(digest)[:16].decode().lower()


class Done(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of a unit."""

    unit: str  # its id
    # Of an ``ask`` one; of a ``shrink`` that found a smaller Case, that one.
    answers: tuple[Answer, ...] = ()
    units: tuple[Unit, ...] = ()  # further work that follows from it, in order
    # Of a ``describe``: ``name``, ``summary``, ``absent``, and the ``environment``. With
    # ``usage``, why nobody can do it before something is mended, it is no result: the run ends.
    # Of a ``fault`` its ``score``, or that of a control.
    facts: dict[str, Any] = {}
    harness: str = ""  # what went wrong that is no kernel's fault, in one line; empty where nothing
    seconds: float = 0.0  # from start to end
    attempts: int = 1  # how often it was begun


MOST_SHARDS = 1000

_IN_PARTS = frozenset({"ask", "shrink"})
"""What is done in one part. The rest is cheap, and every part needs what follows from it."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Part ``number`` of ``count``."""

    number: int = 1  # from 1
    count: int = 1  # of all parts

    @classmethod
    def parse(cls, text: str) -> Self:
        """Of ``2/4``; of the empty text the whole run.

        Raises:
            UsageError: for anything else.
        """
        if not text:
            return cls()
        # ASCII, because \d takes the digits of every script.
        parts = re.fullmatch(r"([1-9]\d{0,3})/([1-9]\d{0,3})", text, re.ASCII)
        number, count = map(int, parts.groups()) if parts else (0, 0)
        if not 1 <= number <= count <= MOST_SHARDS:
            raise UsageError(
                f"shard {text!r} must be I/N: the I-th of N parts, at most {MOST_SHARDS}, from 1."
            )
        return cls(number, count)

    def __str__(self) -> str:
        """``2/4``; empty for the whole run."""
        return f"{self.number}/{self.count}" if self.count > 1 else ""

    def has(self, unit: Unit) -> bool:
        """Return whether this part does ``unit`` by its id but for the commit: alike everywhere."""
        if self.count == 1 or unit.kind not in _IN_PARTS:
            return True
        # In one part: a question, the same of another commit, and what makes its failure smaller,
        # which no other part hears of.
        question = replace(unit, commit="", kind="ask")
        digest = hashlib.sha256(question.id.encode()).digest()
        return int.from_bytes(digest[:8]) % self.count == self.number - 1
