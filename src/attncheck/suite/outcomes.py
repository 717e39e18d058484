"""Collect outcomes of a property suite from all processes, and summarise and write them."""

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
"""Key in a pytest-xdist worker's output for what it learned while it collected tests."""

_ATTACHED = "attncheck"


def attach_outcome(report: pytest.TestReport, item: pytest.Item, kernel: UnderTest | None) -> None:
    """Attach the outcome of a kernel's test to ``report``, with which pytest-xdist transfers it.

    Args:
        report: The report of one phase of the test.
        item: The test; tests without a kernel are ignored.
        kernel: The kernel under test; None if the test was not called.
    """
    # A slow import, but already loaded wherever a test has a kernel.
    from attncheck.suite.session import Param

    param = item.callspec.params.get("kernel") if hasattr(item, "callspec") else None
    # A test's outcome is that of its call, or of a setup that did not pass.
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
    """A plugin that collects outcomes in the main process."""

    def __init__(self) -> None:
        self.started = time.perf_counter()  # Start of the session.
        self.outcomes: list[PropertyOutcome] = []  # In the order of their arrival.
        # Kernel → dtype that it does not take → why.
        self.untaken: dict[str, dict[str, str]] = {}
        self.claims: dict[str, list[str]] = {}  # Kernel → lines about the problems that it takes.
        # An error during collection, which prevents all tests; empty for none.
        self.error = ""
        self.processes = 1  # Number of processes that share the work.
        self._others = 0

    @property
    def seconds(self) -> float:
        """Seconds since the session began."""
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

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the outcome that ``attach_outcome`` attached."""
        attached: dict[str, Any] | None = getattr(report, _ATTACHED, None)
        if attached is not None:
            self.outcomes.append(msgspec.convert(attached, PropertyOutcome))
        # Other tests of the user count as well: the session did test something.
        elif report.when == "call" and report.outcome != "skipped":
            self._others += 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add what a pytest-xdist worker learned while it collected tests."""
        self.processes = max(self.processes, 1 + int(node.gateway.id.removeprefix("gw") or 0))
        output = getattr(node, "workeroutput", {}).get(WORKER_OUTPUT)
        if output:
            self.add_collected(**output)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Exit with code 5 if every test was skipped, since nothing was tested."""
        if self.error:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
            return
        skipped = all(each.outcome == "skipped" for each in self.outcomes)
        if exitstatus == pytest.ExitCode.OK and self.outcomes and skipped and not self._others:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the number of problems, their rate, and the share of compilation."""
        # A pytest-xdist worker cannot end the run itself, so that its error is printed here.
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
    """Yield the lines of the summary; none if nothing was asked and nothing refused.

    Args:
        untaken: Kernel → dtype that it does not take → why.
        seconds: Duration of the session.
    """
    outcomes = [*outcomes]
    tallies = _by_kernel(outcomes)
    width = max(map(len, tallies), default=0)
    for name, tally in tallies.items():
        yield f"{name:<{width}}  {_tally_text(tally)}"
    if tallies:
        total = Tally()
        for tally in tallies.values():
            total.add(tally)
        rate = total.total / seconds if seconds else 0.0
        share = _share(total.compiling, total.seconds)
        yield (
            f"{total.total:,} problems in {seconds:.0f} s: {rate:.1f} a second; of the time spent "
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
    """Return kernels with dtypes, such as ``flex in tf32``, by the reason of their refusal."""
    kernels: dict[str, list[str]] = {}
    for kernel, reasons in untaken.items():
        for dtype, reason in reasons.items():
            kernels.setdefault(reason, []).append(f"{kernel} in {dtype}")
    return kernels


_OPTION = "--attncheck-report"


class ReportWriter:
    """A plugin that writes the report in the main process at the end.

    Raises:
        pytest.UsageError: if the folder cannot be written to.
    """

    def __init__(self, options: Options, args: Sequence[str], outcomes: Outcomes) -> None:
        from attncheck.core.errors import UsageError
        from attncheck.reporting.rendering import check_writable

        self._options = options
        self._command = pytest_command(args)
        self._outcomes = outcomes
        try:
            # Checked now instead of after an hour of tests.
            check_writable(options.report, "properties")
        except UsageError as error:
            raise pytest.UsageError(f"attncheck: {error}") from None

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write properties.json and properties.md, and print their names."""
        from attncheck.reporting.rendering import write_report

        formats = ("json", "md")
        written = write_report(self._report(), self._options.report, "properties", formats=formats)
        terminalreporter.line(f"written: {', '.join(map(str, written))}")

    def _report(self) -> PropertyReport:
        from attncheck.records.run_reports import PropertyReport
        from attncheck.verify.environment import default_device, environment, prepare

        device = self._options.device or default_device()
        prepare(device)  # not done yet if other processes did the work
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
    """Return the pytest command line without the report's folder and the folders of paths."""
    words, rest = ["pytest"], list(args)
    while rest:
        arg = rest.pop(0)
        if arg == _OPTION:
            # The folder is private to this machine, but the command may be used on others.
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
