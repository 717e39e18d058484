"""What the property suite found: one run of ``pytest properties``, as data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from attncheck.record import Environment  # noqa: TC001  # msgspec reads the annotations

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SCHEMA", "Outcome", "SuiteReport", "Tally", "joined"]

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


def joined(reports: Sequence[SuiteReport]) -> SuiteReport:
    """Several runs of one tier on one machine, as one: of a test that ran again its last outcome.

    Raises:
        ValueError: if there are none, or their tiers or environments differ.
    """
    if len({(one.tier, str(one.environment)) for one in reports}) != 1:
        raise ValueError("reports of one tier in one environment can be joined, and no others.")
    last: dict[tuple[str, ...], Outcome] = {}
    untaken: dict[str, dict[str, str]] = {}
    for report in reports:
        for one in report.outcomes:
            last[one.file, one.test, one.kernel, one.dtype, one.family] = one
        for kernel, of_dtypes in report.untaken.items():
            untaken.setdefault(kernel, {}).update(of_dtypes)
    return SuiteReport(
        command=" && ".join(dict.fromkeys(one.command for one in reports)),
        environment=reports[0].environment,
        tier=reports[0].tier,
        processes=max(one.processes for one in reports),
        seconds=sum(one.seconds for one in reports),
        untaken=untaken,
        outcomes=tuple(sorted(last.values(), key=lambda one: (one.file, one.test, one.kernel))),
    )
