"""Paged keys and values: the layout of a paged KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from attncheck.core.errors import ProblemError

LARGEST_PAGE = 4096
# Seeds have to fit in a signed 64-bit number for JSON and NumPy.
_LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Paging:
    """Layout of keys and values in pages in arbitrary order, as in a serving engine.

    Raises:
        ProblemError: for a number out of range.
    """

    size: int  # Keys in a page, 1–4096.
    seed: int = 0  # Seed of the order of pages in memory, with free pages between them.
    # Number of leading pages that all sequences share, as for a common prompt: they have equal
    # contents and are in memory once.
    shared: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("size", 1, LARGEST_PAGE),
            ("seed", 0, _LARGEST_SEED),
            ("shared", 0, _LARGEST_SEED),
        ):
            value = getattr(self, name)
            # bool is an int, so that True would be accepted as 1.
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ProblemError(
                    f"paging.{name}={value!r} must be a whole number, {least}–{most}."
                )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; ``from_json`` gives the same Paging back."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Paging:
        """Return the Paging that ``to_json`` wrote; raises ProblemError on anything else."""
        known = {field.name for field in fields(cls)}
        if not isinstance(data, Mapping) or "size" not in data or set(data) - known:
            raise ProblemError(f"paging is an object with size, seed and shared, not {data!r}.")
        return cls(**data)

    def __str__(self) -> str:
        shared = f", {self.shared} shared" if self.shared else ""
        return f"pages of {self.size} (order {self.seed}{shared})"
