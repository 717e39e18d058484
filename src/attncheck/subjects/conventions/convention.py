"""What a calling convention is to attncheck."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.subjects.contract import Subject
    from attncheck.subjects.conventions.options import ConventionOptions

__all__ = ["Convention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """A way to call a kernel.

    Attributes:
        name: What it is called on the command line.
        summary: One line.
        claims: Whether an object shows that it is of this convention and of no other.
        unfit: Why an object is none of this convention, to stand after ``it must``: ``be a
            Subject``; None where it is one.
        adopt: (object, name for reports, options) → the Subject that it is then.
    """

    name: str
    summary: str
    claims: Callable[[object], bool]
    unfit: Callable[[object], str | None]
    adopt: Callable[[object, str, ConventionOptions], Subject]
