"""Cases beside their baseline → table, Markdown, JSON."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from attncheck.core.sanitize_text import shortened
from attncheck.records.run_reports import (
    BaselineStanding,  # noqa: TC001  # msgspec reads the annotations
    Change,  # noqa: TC001  # msgspec reads the annotations
)
from attncheck.reporting import figures, struct_json
from attncheck.reporting.by_format import FORMATS, Page, paged
from attncheck.reporting.cells import Cell, Look
from attncheck.reporting.sheet import Line, Sheet

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["FORMATS", "SCHEMA", "Beside", "load", "render", "show", "tally"]

SCHEMA = 1

_LOOKS: dict[BaselineStanding, Look] = {
    "worse": "bad",
    "better": "good",
    "gone": "notable",
    "new": "plain",
    "within rounding": "dim",
    "identical": "dim",
}
_COLUMNS = ("kernel", "case", "problem", "standing", "RMSE before", "now", "now ÷ before")
_MOST = 50  # of a standing that asks for nothing, on a page; the JSON has all


class Beside(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a comparison with a baseline found.

    Attributes:
        schema: Version of this layout.
        command: The command line that made it, without paths.
        baseline: The file or the commit that the cases are beside.
        problems: What each case is, in a few words, by its id.
        changes: The worst first.
    """

    schema: int = SCHEMA
    command: str
    baseline: str
    problems: dict[str, str] = {}
    changes: tuple[Change, ...]


def load(text: str) -> Beside:
    """The report that ``render(report, "json")`` wrote; raises UsageError for anything else."""
    return struct_json.read(text, Beside, SCHEMA)


def tally(changes: Iterable[Change]) -> str:
    """``1 worse, 2 better, 31 identical``; standings that nothing has are left out."""
    counts = Counter(change.standing for change in changes)
    parts = [f"{counts[standing]:,} {standing}" for standing in _LOOKS if counts[standing]]
    return ", ".join(parts) or "nothing to compare"


def _above(report: Beside) -> Iterator[str]:
    yield shortened(report.command)
    yield f"beside {shortened(report.baseline)}: {tally(report.changes)}"


def _sheets(report: Beside, width: int | None) -> Iterator[Sheet]:
    del width  # few columns
    for standing in _LOOKS:
        found = [change for change in report.changes if change.standing == standing]
        if not found or standing == "identical":
            continue
        most = len(found) if standing in {"worse", "better"} else _MOST
        lines = [_line(change, report) for change in found[:most]]
        more = f" (the first {most} of {len(found):,})" if most < len(found) else ""
        yield Sheet(f"{standing}{more}", _COLUMNS, words=4, cut=3, lines=lines)


def _line(change: Change, report: Beside) -> Line:
    cells = (
        Cell(change.kernel),
        Cell(change.case_id),
        Cell(report.problems.get(change.case_id, "")),
        Cell(change.standing, _LOOKS[change.standing]),
        _rmse(change.before),
        _rmse(change.after),
        Cell(_times(change)),
    )
    return Line(cells, (shortened(change.reason),) if change.reason else ())


def _rmse(value: float | None) -> Cell:
    return Cell(figures.NOTHING if value is None else figures.scientific(value))


def _times(change: Change) -> str:
    if change.before is None or change.after is None:
        return figures.NOTHING
    return figures.ratio(change.after, change.before)


def _below(report: Beside) -> Iterator[str]:
    del report
    yield (
        "identical: the same bits. within rounding: other bits, and errors no larger than another "
        "order of the same roundings explains. worse: larger than that, or judged worse."
    )
    yield "new: the baseline has no such case on this architecture. gone: it was not asked now."


_PAGE: Page[Beside] = paged("Beside the baseline", _above, _sheets, _below)
render, show = _PAGE.render, _PAGE.show
