"""Outcomes of a property suite: gathered over processes, summarised, and written."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from attncheck.records.run_reports import PropertyOutcome, PropertyReport, Tally

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from attncheck.suite.pytest_options import Options
    from attncheck.suite.under_test import UnderTest

WORKER_OUTPUT = "attncheck"
"""Under which a process of pytest-xdist tells what it found out while it collected."""

_ATTACHED = "attncheck"


def attach_outcome(report: pytest.TestReport, item: pytest.Item, kernel: UnderTest | None) -> None:
    """Say in ``report`` what became of a test of a kernel; pytest-xdist takes it along.

    Args:
        report: Of one phase of the test.
        item: The test; nothing is said of one that is about no kernel.
        kernel: What it got; None where it was not called.
    """
    # Heavy, but loaded already wherever a test has a kernel.
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
        reason=_reason(report) or (kernel.odd if kernel else ""),
        tally=kernel.tally if kernel else Tally(),
    )
    setattr(report, _ATTACHED, msgspec.to_builtins(outcome))


class Outcomes:
    """A plugin in the process that talks to the user."""

    def __init__(self) -> None:
        self.started = time.perf_counter()  # when the session began, by ``time.perf_counter``
        self.outcomes: list[PropertyOutcome] = []  # in the order in which they came
        # Kernel → dtype → why no test was made of it.
        self.untaken: dict[str, dict[str, str]] = {}
        self.claims: dict[str, list[str]] = {}  # kernel → what it was found to take
        # Why nothing can be tested, found out while tests were collected; empty for nothing.
        self.error = ""
        self.processes = 1  # that shared the work
        self._others = 0

    @property
    def seconds(self) -> float:
        """Return the time since the session began."""
        return time.perf_counter() - self.started

    def add_collected(
        self,
        *,
        untaken: Mapping[str, dict[str, str]],
        claims: Mapping[str, list[str]],
        error: str = "",
    ) -> None:
        """Add what a process learned while it collected tests."""
        self.untaken.update(untaken)
        self.claims.update(claims)
        self.error = self.error or error

    def collected(self) -> dict[str, Any]:
        """Return what was learned while tests were collected, for another process."""
        return {"untaken": self.untaken, "claims": self.claims, "error": self.error}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take what ``attach_outcome`` left."""
        attached: dict[str, Any] | None = getattr(report, _ATTACHED, None)
        if attached is not None:
            self.outcomes.append(msgspec.convert(attached, PropertyOutcome))
        # Where one of somebody's other tests ran, the session did test something.
        elif report.when == "call" and report.outcome != "skipped":
            self._others += 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take what a process of pytest-xdist learned while it collected."""
        self.processes = max(self.processes, 1 + int(node.gateway.id.removeprefix("gw") or 0))
        output = getattr(node, "workeroutput", {}).get(WORKER_OUTPUT)
        if output:
            self.add_collected(**output)

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
        # A worker of pytest-xdist cannot end the whole run by itself: it is told here.
        if self.error:
            terminalreporter.line(f"ERROR: {self.error}", red=True)
        lines = list(summary_lines(self.outcomes, self.untaken, self.seconds))
        lines += [
            f"{kernel} {line}"
            for kernel, claim_lines in self.claims.items()
            for line in claim_lines
        ]
        if lines:
            terminalreporter.section("attncheck")
            for line in lines:
                terminalreporter.line(line)


def _reason(report: pytest.TestReport) -> str:
    """Return why a test did not pass, in one line."""
    if hasattr(report, "wasxfail"):
        return str(report.wasxfail)
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return report.longreprtext.strip().partition("\n")[0] if report.outcome == "failed" else ""


def summary_lines(
    outcomes: Iterable[PropertyOutcome], untaken: Mapping[str, Mapping[str, str]], seconds: float
) -> Iterator[str]:
    """Return the summary, line by line; none where nothing was asked and nothing refused.

    Args:
        untaken: Kernel → dtype → why no test was made of it.
        seconds: That the session took.
    """
    outcomes = [*outcomes]
    tallies = _by_kernel(outcomes)
    width = max(map(len, tallies), default=0)
    for name, tally in tallies.items():
        yield f"{name:<{width}}  {_tally_text(tally)}"
    if tallies:
        whole = Tally()
        for tally in tallies.values():
            whole.add(tally)
        rate = whole.total / seconds if seconds else 0.0
        share = _share(whole.compiling, whole.seconds)
        yield (
            f"{whole.total:,} problems in {seconds:.0f} s: {rate:.1f} a second; of the time spent "
            f"on them {share} was compiling"
        )
    odd: dict[str, list[PropertyOutcome]] = {}
    for each in outcomes:
        if each.outcome == "passed" and each.reason:
            odd.setdefault(each.kernel, []).append(each)
    for name, (first, *more) in sorted(odd.items()):
        tests = f" (and {len(more)} more)" if more else ""
        yield f"warning of {name}, {first.file}::{first.test}{tests}: {first.reason}"
    for reason, kernels in _by_reason(untaken).items():
        yield f"no tests of {', '.join(kernels)}: {reason}"


def _by_kernel(outcomes: Iterable[PropertyOutcome]) -> dict[str, Tally]:
    tallies: dict[str, Tally] = {}
    for each in outcomes:
        tallies.setdefault(each.kernel, Tally()).add(each.tally)
    return {name: tally for name, tally in sorted(tallies.items()) if tally.problems}


def _tally_text(tally: Tally) -> str:
    others = [f"{n:,} {status}" for status, n in sorted(tally.problems.items()) if status != "pass"]
    detail = f" ({', '.join(others)})" if others else ""
    share = _share(tally.compiling, tally.seconds)
    return f"{tally.total:,} problems{detail} in {tally.seconds:.1f} s, {share} compiling"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def _by_reason(untaken: Mapping[str, Mapping[str, str]]) -> dict[str, list[str]]:
    """Group by reason: kernels with their dtypes, ``flex in tf32``."""
    kernels: dict[str, list[str]] = {}
    for kernel, reasons in untaken.items():
        for dtype, reason in reasons.items():
            kernels.setdefault(reason, []).append(f"{kernel} in {dtype}")
    return kernels


_OPTION = "--attncheck-report"


class ReportWriter:
    """A plugin in the process that talks to the user: writes the report when all is done.

    Raises:
        pytest.UsageError: where the folder cannot be written to.
    """

    def __init__(self, options: Options, args: Sequence[str], outcomes: Outcomes) -> None:
        from attncheck.core.errors import UsageError
        from attncheck.reporting.rendering import check_writable

        self._options = options
        self._command = pytest_command(args)
        self._outcomes = outcomes
        try:
            # Now, and not after an hour of tests.
            check_writable(options.report, "properties")
        except UsageError as error:
            raise pytest.UsageError(f"attncheck: {error}") from None

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write properties.json and properties.md, and say so."""
        from attncheck.reporting.rendering import write_report

        formats = ("json", "md")
        written = write_report(self._report(), self._options.report, "properties", formats=formats)
        terminalreporter.line(f"written: {', '.join(map(str, written))}")

    def _report(self) -> PropertyReport:
        from attncheck.records.run_reports import PropertyReport
        from attncheck.verify.environment import default_device, environment, prepare

        device = self._options.device or default_device()
        prepare(device)  # where other processes did the work, this one has not been
        outcomes = self._outcomes
        return PropertyReport(
            command=self._command,
            environment=environment(device),
            tier=self._options.tier.name,
            processes=outcomes.processes,
            seconds=outcomes.seconds,
            untaken=outcomes.untaken,
            outcomes=tuple(
                sorted(outcomes.outcomes, key=lambda one: (one.file, one.test, one.kernel))
            ),
        )


def pytest_command(args: Sequence[str]) -> str:
    """Return ``pytest`` and its arguments, without the report's folder, paths by last name."""
    words, rest = ["pytest"], list(args)
    while rest:
        arg = rest.pop(0)
        if arg == _OPTION:
            # The folder is this machine's own; a report's command is typed on others, too.
            del rest[:1]
        elif not arg.startswith(f"{_OPTION}="):
            words.append(_shortened(arg))
    return shlex.join(words)


def _shortened(arg: str) -> str:
    name, equals, value = arg.partition("=")
    if equals and name.startswith("-"):
        return f"{name}={_shortened(value)}"
    path, separator, test = arg.partition("::")
    return Path(path).name + separator + test if Path(path).is_absolute() else arg
