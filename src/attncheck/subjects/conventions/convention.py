"""What a calling convention is to attncheck."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.subjects.contract import Subject

__all__ = ["Convention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """A way to call a kernel.

    Attributes:
        name: What it is called on the command line.
        summary: One line.
        unfit: Why an object is none of this convention, to stand after ``it must``: ``be a
            Subject``; None where it is one.
        adopt: (object, name for reports) → the Subject that it is then.
    """

    name: str
    summary: str
    unfit: Callable[[object], str | None]
    adopt: Callable[[object, str], Subject]
