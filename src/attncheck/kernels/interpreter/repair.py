"""One repair of the interpreter: what it says of itself, what it replaces and what it needs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from attncheck.errors import InterpreterUnavailable

__all__ = ["Methods", "Repair", "Stock", "lookup"]

Stock = Callable[[str], Any]
"""Dotted name → the interpreter's own function of that name."""

Methods = Callable[[Any, Stock], dict[str, Any]]
"""(interpreter module, stock) → dotted name → replacement."""

_ABSENT = object()


def lookup(interp: Any, name: str) -> Any:
    """What ``interp`` has under the dotted ``name``; a sentinel if it has nothing."""
    found = interp
    for part in name.split("."):
        found = getattr(found, part, _ABSENT)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """One repair.

    Attributes:
        description: For a report.
        methods: What it replaces, in groups of names that belong together.
        uses: Further names of the interpreter that it cannot do without.
        adds: Replaced names that some versions of triton do not have at all.
    """

    description: str
    methods: tuple[Methods, ...]
    uses: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()

    def replacements(self, interp: Any) -> dict[str, Any]:
        """Dotted name → replacement; raises InterpreterUnavailable if this triton lacks a name."""
        stock = partial(self._require, interp)
        for name in self.uses:
            stock(name)
        found: dict[str, Any] = {}
        for group in self.methods:
            found |= group(interp, stock)
        for name in found.keys() - set(self.adds):
            stock(name)
        return found

    def _require(self, interp: Any, name: str) -> Any:
        found = lookup(interp, name)
        if found is _ABSENT:
            version = sys.modules["triton"].__version__
            raise InterpreterUnavailable(
                f"the interpreter of triton {version} has no '{name}', which the repair "
                f"'{self.description}' needs: use a triton from 3.6 to 3.9, or a GPU."
            )
        return found
