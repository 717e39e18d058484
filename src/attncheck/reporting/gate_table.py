"""What ``attncheck gate`` leaves on a terminal: counts, failures worst first, what is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from attncheck.core.sanitize_text import one_line, shortened
from attncheck.reporting import gate_content, screen
from attncheck.reporting.cells import STYLES
from attncheck.reporting.gate_verdict import PASSED, exit_code, failing, policy_of
from attncheck.reporting.sheet import terminal_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.records.run_reports import GateReport

__all__ = ["MOST", "head", "table_lines", "verdict"]

MOST = 5
"""Failures that a terminal shows in full."""


def table_lines(report: GateReport, width: int) -> Iterator[Text]:
    """All of it, at most ``width`` columns wide but for diagnoses, which are to be copied."""
    yield from head(report, width)
    yield from verdict(report, width)


def head(report: GateReport, width: int) -> Iterator[Text]:
    """The command, the machine and the kernels."""
    for line in gate_content.above(report):
        yield from screen.wrapped(shortened(line), width, style="dim")


def verdict(report: GateReport, width: int, *, most: int = MOST) -> Iterator[Text]:
    """Counts, failures, what was not looked at, and the verdict, which is the last line.

    Args:
        report: What was found.
        width: Columns.
        most: Failures that are shown in full.
    """
    sheets = (gate_content.stage_sheet(report), gate_content.baseline_sheet(report))
    for sheet in sheets:
        if sheet is not None and sheet.lines:
            yield Text("")
            yield from terminal_lines(sheet, width)
    yield from _changes(report, width)
    yield from _failures(report, width, most)
    yield from _missing(report, width)
    policy = policy_of(report)
    code = exit_code(
        report, strict=policy.strict, strict_baseline=policy.strict_baseline, flaky=policy.flaky
    )
    look = STYLES["good" if code == PASSED else "bad"]
    yield Text("")
    yield from screen.wrapped(gate_content.title(report), width, style=f"bold {look}".strip())


def _changes(report: GateReport, width: int) -> Iterator[Text]:
    shown, more = gate_content.changes_shown(report)
    for change in shown:
        line = f"{change.standing}: {change.kernel} {change.case_id}: {change.reason}"
        style = STYLES["bad" if change.standing == "worse" else "notable"]
        yield from screen.wrapped(shortened(line), width, style=style, indent="    ")
    if more:
        yield Text(f"    and {more:,} more", style="dim")


def _failures(report: GateReport, width: int, most: int) -> Iterator[Text]:
    found = failing(report, policy_of(report))
    for one in found[:most]:
        yield Text("")
        first, *rest = gate_content.diagnosis_lines(report, one)
        yield from screen.wrapped(first, width, style=f"bold {STYLES['bad']}")
        yield from map(Text, rest)
    if len(found) > most:
        yield Text("")
        line = f"and {len(found) - most:,} more kinds of failure: --out has all of them."
        yield from screen.wrapped(line, width)


def _missing(report: GateReport, width: int) -> Iterator[Text]:
    lines = list(gate_content.missing(report))
    if not lines:
        return
    yield Text("")
    yield Text("not looked at", style="bold")
    for line in lines:
        yield from screen.wrapped(one_line(shortened(line)), width, style="dim", indent="  ")
