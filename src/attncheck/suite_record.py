"""What the property suite found: one run of ``pytest properties``, as data."""

from __future__ import annotations

from typing import Literal

import msgspec

from attncheck.record import Environment  # noqa: TC001  # msgspec reads the annotations

__all__ = ["SCHEMA", "Outcome", "SuiteReport", "Tally"]

SCHEMA = 1


class Tally(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Problems that one kernel was asked.

    Attributes:
        problems: By status: those of a Record. A Case is one problem, however many runs it takes.
        seconds: In the kernel, the oracle and the judge.
        compiling: Of these, in compilers.
    """

    problems: dict[str, int] = msgspec.field(default_factory=dict)
    seconds: float = 0.0
    compiling: float = 0.0

    @property
    def total(self) -> int:
        """Problems that were answered: refusals do not count."""
        return sum(count for status, count in self.problems.items() if status != "unsupported")

    def add(self, other: Tally) -> None:
        """Count what ``other`` counted too."""
        for status, count in other.problems.items():
            self.problems[status] = self.problems.get(status, 0) + count
        self.seconds += other.seconds
        self.compiling += other.compiling


class Outcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One test.

    Attributes:
        file: Name of its file, ``test_causal.py``.
        test: Name of the function.
        kernel, dtype, family: What its id says.
        outcome: ``known`` where it fails as a known failure does.
        reason: Why it was skipped, what is known, or the first line of the failure.
        tally: Its problems.
    """

    file: str
    test: str
    kernel: str
    dtype: str
    family: str
    outcome: Literal["passed", "failed", "known", "skipped"]
    reason: str = ""
    tally: Tally


class SuiteReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Outcomes with what they share.

    Attributes:
        schema: Version of this layout.
        command: The command line that made it, without paths.
        environment: Where.
        tier: How hard was asked.
        processes: That shared the work.
        seconds: From the first test to the last, collection included.
        untaken: Kernel → dtype → why it takes nothing of it.
        outcomes: In the order of files, tests, kernels.
    """

    schema: int = SCHEMA
    command: str
    environment: Environment
    tier: str
    processes: int
    seconds: float
    untaken: dict[str, dict[str, str]]
    outcomes: tuple[Outcome, ...]
