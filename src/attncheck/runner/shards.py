"""A run in parts: which units are a part's, so that several machines do each of them once."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from msgspec.structs import replace

from attncheck.errors import UsageError

if TYPE_CHECKING:
    from attncheck.runner.unit import Unit

__all__ = ["MOST_SHARDS", "Shard"]

MOST_SHARDS = 1000

_IN_PARTS = frozenset({"ask", "shrink"})
"""What is done in one part. The rest is cheap, and every part needs what follows from it."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Part ``number`` of ``count``.

    Attributes:
        number: From 1.
        count: Of all parts.
    """

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Of ``2/4``; of the empty text the whole run.

        Raises:
            UsageError: for anything else.
        """
        if not text:
            return cls()
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
        """Whether this part does ``unit``: by its id but for the commit, equal on every machine."""
        if self.count == 1 or unit.kind not in _IN_PARTS:
            return True
        # In one part: a question, the same of another commit, and what makes its failure smaller,
        # which no other part hears of.
        question = replace(unit, commit="", kind="ask")
        digest = hashlib.sha256(question.id.encode()).digest()
        return int.from_bytes(digest[:8]) % self.count == self.number - 1
