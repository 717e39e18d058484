"""A SensitivityReport → table, Markdown, JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.core.sanitize_text import shortened
from attncheck.records.fault_scores import ATTNCHECK_RULE, SENSITIVITY_SCHEMA, SensitivityReport
from attncheck.reporting import figures, struct_json
from attncheck.reporting.by_format import FORMATS, Page, paged
from attncheck.reporting.cells import Cell
from attncheck.reporting.sheet import Line, Sheet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.records.fault_scores import FaultSensitivity, SmallestFault

__all__ = ["FORMATS", "exit_code", "load", "render", "show"]


def load(text: str) -> SensitivityReport:
    """The report that ``render(report, "json")`` wrote; raises UsageError for anything else."""
    return struct_json.read(text, SensitivityReport, SENSITIVITY_SCHEMA)


def exit_code(report: SensitivityReport) -> int:
    """0 where the gate sees each fault of some size; 1 where it sees one of none."""
    return int(any(seen.rules[ATTNCHECK_RULE].size is None for seen in report.seen))


def _above(report: SensitivityReport) -> Iterator[str]:
    yield shortened(report.command)
    yield from dict.fromkeys(f"tier {seen.tier} on {seen.device}" for seen in report.seen)


def _sheets(report: SensitivityReport, width: int | None) -> Iterator[Sheet]:
    del width
    for dtype in dict.fromkeys(seen.dtype for seen in report.seen):
        these = [seen for seen in report.seen if seen.dtype == dtype]
        rules = dict.fromkeys(rule for seen in these for rule in seen.rules)
        columns = ("smallest fault seen", "in", *rules, "s")
        lines = [_line(seen, list(rules)) for seen in these]
        yield Sheet(dtype, columns, words=2, cut=1, lines=lines)


def _line(seen: FaultSensitivity, rules: list[str]) -> Line:
    least = {rule: seen.rules.get(rule) for rule in rules}
    cells = (
        Cell(seen.summary),
        Cell(seen.unit, "dim"),
        *(_cell(found, seen.unit) for found in least.values()),
        Cell(f"{seen.seconds:.0f}"),
    )
    ours = seen.rules[ATTNCHECK_RULE]
    return Line(cells, (shortened(f"by {ours.question}"),) if ours.question else ())


def _cell(found: SmallestFault | None, unit: str) -> Cell:
    if found is None:
        return Cell(figures.NOTHING, "dim")
    if found.size is None:
        return Cell("none", "bad")
    return Cell(f"{found.size:.0f}" if unit == "bits" else figures.scientific(found.size))


def _below(report: SensitivityReport) -> Iterator[str]:
    yield (
        "ε: the smallest error seen, in steps of a quarter of an octave. bits: the most that are "
        "still seen to be too few. none: not even the largest is seen."
    )
    for seen in report.seen[:1]:
        yield (
            f"attncheck asks {seen.questions} questions; the rules are asked of the {seen.plain} "
            "plain ones among them, but for those on which they refuse a right kernel."
        )


_PAGE: Page[SensitivityReport] = paged("The smallest faults seen", _above, _sheets, _below)
render, show = _PAGE.render, _PAGE.show
