"""What became of each test that asked something of a kernel: gathered over processes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from attncheck.records.run_reports import PropertyOutcome, Tally
from attncheck.suite import summary

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attncheck.suite.under_test import UnderTest

__all__ = ["WORKER_OUTPUT", "Outcomes", "attach"]

WORKER_OUTPUT = "attncheck"
"""Under which a process of pytest-xdist tells what it found out while it collected."""

_ATTACHED = "attncheck"


def attach(report: pytest.TestReport, item: pytest.Item, kernel: UnderTest | None) -> None:
    """Say in ``report`` what became of a test of a kernel; pytest-xdist takes it along.

    Args:
        report: Of one phase of the test.
        item: The test; nothing is said of one that is about no kernel.
        kernel: What it got; None where it was not called.
    """
    from attncheck.suite.session import Param

    param = item.callspec.params.get("kernel") if hasattr(item, "callspec") else None
    # A test's outcome is that of its call, or of what kept it from being called.
    passing = report.when == "setup" and report.outcome == "passed"
    if not isinstance(param, Param) or report.when == "teardown" or passing:
        return
    outcome = PropertyOutcome(
        file=item.path.name,
        test=getattr(item, "originalname", item.name),
        kernel=param.kernel.name,
        dtype=param.dtype,
        family=param.family,
        outcome="known" if hasattr(report, "wasxfail") else report.outcome,
        reason=_reason(report),
        tally=kernel.tally if kernel else Tally(),
    )
    setattr(report, _ATTACHED, msgspec.to_builtins(outcome))


class Outcomes:
    """A plugin in the process that talks to the user.

    Attributes:
        started: When the session began, by ``time.perf_counter``.
        outcomes: In the order in which they came.
        untaken: Kernel → dtype → why no test was made of it.
        error: Why nothing can be tested, found out while tests were collected; empty for nothing.
        processes: That shared the work.
    """

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.outcomes: list[PropertyOutcome] = []
        self.untaken: dict[str, dict[str, str]] = {}
        self.error = ""
        self.processes = 1
        self._others = 0

    @property
    def seconds(self) -> float:
        """Since the session began."""
        return time.perf_counter() - self.started

    def found(self, *, untaken: Mapping[str, dict[str, str]], error: str = "") -> None:
        """Add what was found out while tests were collected."""
        self.untaken.update(untaken)
        self.error = self.error or error

    def collected(self) -> dict[str, Any]:
        """What was found out while tests were collected, for ``found`` of another process."""
        return {"untaken": self.untaken, "error": self.error}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes what ``attach`` left."""
        attached: dict[str, Any] | None = getattr(report, _ATTACHED, None)
        if attached is not None:
            self.outcomes.append(msgspec.convert(attached, PropertyOutcome))
        elif report.when == "call" and report.outcome != "skipped":
            self._others += 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Takes what a process of pytest-xdist found out while it collected."""
        self.processes = max(self.processes, 1 + int(node.gateway.id.removeprefix("gw") or 0))
        told = getattr(node, "workeroutput", {}).get(WORKER_OUTPUT)
        if told:
            self.found(**told)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Exit code 5 where every test was skipped: nothing was tested, so nothing passed."""
        if self.error:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
            return
        skipped = all(each.outcome == "skipped" for each in self.outcomes)
        if exitstatus == pytest.ExitCode.OK and self.outcomes and skipped and not self._others:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Problems examined, how fast, and how much of it was compiling."""
        if self.error:
            terminalreporter.line(f"ERROR: {self.error}", red=True)
        lines = list(summary.lines(self.outcomes, self.untaken, self.seconds))
        if lines:
            terminalreporter.section("attncheck")
            for line in lines:
                terminalreporter.line(line)


def _reason(report: pytest.TestReport) -> str:
    """Why it did not pass, in one line."""
    if hasattr(report, "wasxfail"):
        return str(report.wasxfail)
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return report.longreprtext.strip().partition("\n")[0] if report.outcome == "failed" else ""
