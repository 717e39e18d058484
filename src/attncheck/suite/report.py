"""``--attncheck-report DIR``: what the properties found, as JSON and as a page."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.records.run_reports import PropertyReport
    from attncheck.suite.options import Options
    from attncheck.suite.outcomes import Outcomes

__all__ = ["Written", "command"]

_OPTION = "--attncheck-report"


class Written:
    """A plugin in the process that talks to the user: writes the report when all is done.

    Args:
        options: Of the plugin; ``options.report`` is the folder.
        args: Of pytest, as typed.
        outcomes: Where they are gathered.

    Raises:
        pytest.UsageError: where the folder cannot be written to.
    """

    def __init__(self, options: Options, args: Sequence[str], outcomes: Outcomes) -> None:
        from attncheck.core.errors import UsageError
        from attncheck.reporting.rendering import check_writable

        self._options = options
        self._command = command(args)
        self._outcomes = outcomes
        try:
            check_writable(options.report, "properties")
        except UsageError as error:
            raise pytest.UsageError(f"attncheck: {error}") from None

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write properties.json and properties.md, and say so."""
        from attncheck.reporting.rendering import write_report

        formats = ("json", "md")
        folder = self._options.report
        written = write_report(self._report(), folder, "properties", formats=formats)
        terminalreporter.line(f"written: {', '.join(map(str, written))}")

    def _report(self) -> PropertyReport:
        from attncheck.records.run_reports import PropertyReport
        from attncheck.verify.environment import default_device, environment, prepare

        device = self._options.device or default_device()
        prepare(device)  # where other processes did the work, this one has not been
        found = self._outcomes
        return PropertyReport(
            command=self._command,
            environment=environment(device),
            tier=self._options.tier.name,
            processes=found.processes,
            seconds=found.seconds,
            untaken=found.untaken,
            outcomes=tuple(
                sorted(found.outcomes, key=lambda one: (one.file, one.test, one.kernel))
            ),
        )


def command(args: Sequence[str]) -> str:
    """``pytest`` with its arguments: without the report's folder, and paths by their last name."""
    said, rest = ["pytest"], list(args)
    while rest:
        arg = rest.pop(0)
        if arg == _OPTION:
            del rest[:1]
        elif not arg.startswith(f"{_OPTION}="):
            said.append(_named(arg))
    return shlex.join(said)


def _named(arg: str) -> str:
    name, equals, value = arg.partition("=")
    if equals and name.startswith("-"):
        return f"{name}={_named(value)}"
    path, separator, test = arg.partition("::")
    return Path(path).name + separator + test if Path(path).is_absolute() else arg
