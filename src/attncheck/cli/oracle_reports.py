"""The two reports of ``attncheck oracles``: what is measured in many digits, and what is proven."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attncheck.inputs.problem import Problem

__all__ = ["Kind", "certified", "measured"]


@dataclass(frozen=True, slots=True)
class Kind:
    """A report, how it is made and how it is shown.

    Attributes:
        name: Of its files.
        make: Variants and Problems, the command line, and what is told of each → the report.
    """

    name: str
    make: Callable[[Sequence[tuple[str, Problem]], str, Callable[[str], None]], Any]


def measured(digits: int) -> Kind:
    """Distances from the exact result in so many digits."""
    from attncheck.surveys.oracle_survey import survey_oracles

    return Kind(
        name="oracles",
        make=lambda named, command, done: survey_oracles(
            named, digits=digits, command=command, done=done
        ),
    )


def certified() -> Kind:
    """Proven errors; raises UsageError where python-flint is not installed."""
    from attncheck.surveys.oracle_survey import certify_oracles

    return Kind(
        name="certificates",
        make=lambda named, command, done: certify_oracles(named, command=command, done=done),
    )
