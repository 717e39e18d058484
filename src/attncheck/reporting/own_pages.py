"""An OwnReport → table, Markdown, JSON; and the exit code that it deserves."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from attncheck.core.sanitize_text import shortened
from attncheck.records.fault_scores import FAULT_SCHEMA, OwnTestsReport
from attncheck.reporting import figures, struct_json
from attncheck.reporting.by_format import FORMATS, Page, paged
from attncheck.reporting.cells import Cell
from attncheck.reporting.sheet import Line, Sheet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.records.fault_scores import OwnTestsScore
    from attncheck.reporting.cells import Look

__all__ = ["FORMATS", "exit_code", "load", "render", "show"]

_PASSED, _FAILED, _UNFINISHED, _NOTHING = 0, 1, 3, 5
_LOOKS: dict[str, Look] = {"caught": "good", "missed": "bad", "not scored": "bad"}


def load(text: str) -> OwnTestsReport:
    """The report that ``render(report, "json")`` wrote; raises UsageError for anything else."""
    return struct_json.read(text, OwnTestsReport, FAULT_SCHEMA)


def exit_code(report: OwnTestsReport) -> int:
    """0 where all that were shown are caught; 1 where one is missed; 3 where one has no score.

    And 5 where nothing was scored at all.
    """
    count = Counter(score.status for score in report.scores)
    if count["missed"]:
        return _FAILED
    if count["not scored"] or report.unfinished:
        return _UNFINISHED
    return _PASSED if count["caught"] else _NOTHING


def _above(report: OwnTestsReport) -> Iterator[str]:
    yield shortened(report.command)
    yield shortened(f"pytest {report.pytest}, {report.replace} replaced")


def _sheets(report: OwnTestsReport, width: int | None) -> Iterator[Sheet]:
    del width
    yield _by_category(report)
    columns = ("fault", "category", "status", "failed first", "s")
    lines = [_line(score) for score in report.scores]
    yield Sheet("Fault by fault", columns, words=4, cut=4, lines=lines)


def _by_category(report: OwnTestsReport) -> Sheet:
    columns = ("category", "caught", "missed", "not shown", "not reached", "not scored")
    categories = dict.fromkeys(score.category for score in report.scores)
    lines = [
        _counts(category, [score for score in report.scores if score.category == category])
        for category in categories
    ]
    lines.append(_counts("all", list(report.scores)))
    return Sheet("Score by category", columns, words=1, cut=1, lines=lines)


def _counts(name: str, scores: list[OwnTestsScore]) -> Line:
    count = Counter(score.status for score in scores)
    scored = count["caught"] + count["missed"]
    return Line(
        (
            Cell(name),
            Cell(f"{count['caught']}/{scored}", "good" if scored == count["caught"] else "plain"),
            Cell(str(count["missed"]), "bad" if count["missed"] else "dim"),
            Cell(str(count["not shown"]), "dim"),
            Cell(str(count["not reached"]), "dim"),
            Cell(str(count["not scored"]), "bad" if count["not scored"] else "dim"),
        )
    )


def _line(score: OwnTestsScore) -> Line:
    cells = (
        Cell(score.fault),
        Cell(score.category, "dim"),
        Cell(score.status, _LOOKS.get(score.status, "dim")),
        Cell(score.tests[0] if score.tests else figures.NOTHING, "dim"),
        Cell(f"{score.seconds:.1f}"),
    )
    return Line(cells, (shortened(score.reason),) if score.reason else ())


def _below(report: OwnTestsReport) -> Iterator[str]:
    yield (
        "not shown: in no call of these tests does the fault change a bit of the result. "
        "not reached: no call came to the faulty kernel."
    )
    count = Counter(score.status for score in report.scores)
    scored = count["caught"] + count["missed"]
    if report.unfinished:
        yield f"{report.unfinished} have no score: {report.unfinished_because}."
    yield f"{count['caught']} of {scored} faults that show are caught by these tests."


_PAGE: Page[OwnTestsReport] = paged("Your tests on planted faults", _above, _sheets, _below)
render, show = _PAGE.render, _PAGE.show
