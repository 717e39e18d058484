"""``attncheck check``: a line a question as it is answered, then the verdict, worst case first."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from typing import TYPE_CHECKING, TextIO

from rich.text import Text

from attncheck.core.errors import UnknownName
from attncheck.core.judgement import Rule
from attncheck.core.sanitize_text import for_markdown, one_line, shortened
from attncheck.records.problem_summary import problem_of
from attncheck.records.record import FAILED_STATUSES, UNTRUSTED_STATUSES
from attncheck.reporting import figures, screen
from attncheck.reporting.as_json import as_json
from attncheck.reporting.blind_spots import insensitive, visible
from attncheck.reporting.cells import STYLES, Cell
from attncheck.reporting.content import content
from attncheck.reporting.explain import explanation_lines
from attncheck.reporting.files import write_texts
from attncheck.reporting.gradients import gradient_shares
from attncheck.reporting.sheet import Line, Sheet, markdown_lines
from attncheck.reporting.verdicts import JUDGED, STATUSES, footnote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from attncheck.records.record import Record, Report

__all__ = ["FORMATS", "head", "render", "row", "show", "verdict", "worst", "write"]

FORMATS = ("table", "json", "md")

_NAME, _VERDICT, _SHARE = 20, 12, 9  # columns
_RULES: tuple[str, ...] = Rule.__args__  # type: ignore[attr-defined]  # a Literal has them
_OPTION = "--question"
_MOST_NAMED = 8
_REMEDY = (
    "A kernel that does not take a question's sizes says so by raising ValueError or "
    "NotImplementedError; --head-dim names those that it takes."
)


def render(report: Report, fmt: str) -> str:
    """``report`` in ``fmt``, one of ``FORMATS``, the same on every machine (no colours).

    Raises UnknownName for another format.
    """
    if fmt not in FORMATS:
        raise UnknownName("format", fmt, FORMATS)
    if fmt == "json":
        return as_json(report)
    if fmt == "md":
        return "\n".join(_markdown(report)) + "\n"
    return screen.plain(lambda width: _table(report, width))


def write(report: Report, directory: Path | str) -> tuple[Path, ...]:
    """Write check.json and check.md into ``directory``, as ``files.write`` does it."""
    return write_texts({f"check.{fmt}": render(report, fmt) for fmt in ("json", "md")}, directory)


def show(lines: Callable[[int], Iterable[Text]], stream: TextIO | None = None) -> None:
    """Write ``lines(width)``, of ``head``, ``row`` or ``verdict``, to ``stream`` at once.

    A terminal gets its width and colours.
    """
    stream = stream or sys.stdout
    screen.put(screen.drawn(lines, stream), stream)
    stream.flush()


def head(report: Report, width: int) -> Iterator[Text]:
    """What stands above the first question: the command, the machine and the kernel."""
    page = content(report)
    for line in (page.command, *page.environments):
        yield from screen.wrapped(line, width, style="dim")
    for name, summary in report.kernels.items():
        yield from screen.wrapped(f"{name} · {summary}", width, style="dim")


def row(record: Record, width: int, *, first: bool) -> Iterator[Text]:
    """The line of one question; above the ``first`` of a dtype the headings."""
    problem = problem_of(record)
    if first:
        title = f"{problem.dtype} · largest error ÷ bound, of out and of LSE; above 1 is a fault"
        yield Text("")
        yield from screen.wrapped(title, width, style="bold")
    line = Text("  ")
    for cell, size in zip(_cells(record), (_NAME, _VERDICT, _SHARE, _SHARE), strict=False):
        number = size == _SHARE
        line.append(cell.text.rjust(size) if number else cell.text.ljust(size), STYLES[cell.look])
    line.append(f"  {shortened(_about(record))}", style="dim")
    yield line
    if record.status not in {"pass", "unsupported"}:
        style = STYLES[STATUSES[record.status]]
        yield from screen.wrapped(f"└ {footnote(record)}", width, style=style, indent="    ")


def verdict(report: Report, width: int, *, command: str = "") -> Iterator[Text]:
    """The verdict: the worst case in full, how to see it again, and what could not be seen.

    Args:
        report: All Records.
        width: Columns.
        command: The command line with its folders, where the reader is the one who typed it.
    """
    yield Text("")
    look = STYLES["bad" if exit_status(report) in {"fail", "in doubt"} else "good"]
    yield from screen.wrapped(_sentence(report), width, style=f"bold {look}")
    bad = worst(report)
    if bad is not None:
        yield Text("")
        yield from explanation_lines(bad, width)
        yield Text("")
        yield Text(f"Reproduce: {_again(command or report.command, bad)}")
        if bad.status == "error":
            yield from screen.wrapped(_REMEDY, width, style="dim")
        return
    yield from (
        line for fact in _facts(report) for line in screen.wrapped(fact, width, style="dim")
    )
    blind = _blind(report)
    if blind:
        yield from screen.wrapped(blind, width, style=STYLES["bad"])


def worst(report: Report) -> Record | None:
    """The failure that says most: by the order of the rules, then by its size; None if none."""
    return min((r for r in report.records if r.status in FAILED_STATUSES), key=_rank, default=None)


def exit_status(report: Report) -> str:
    """``fail``; ``in doubt``: oracles disagree; ``pass``; ``untested``: nothing was answered."""
    if worst(report) is not None or _blind(report):
        return "fail"
    if any(r.status in UNTRUSTED_STATUSES for r in report.records):
        return "in doubt"
    return "pass" if any(r.status in JUDGED for r in report.records) else "untested"


def _rank(record: Record) -> tuple[int, float]:
    found = record.judgement
    if found is None:
        return len(_RULES), 0.0
    if found.rule == "structure":  # names the row and the key, the first ones most readably
        return -1, 0.0
    shares = (found.out_over_bound, found.lse_over_bound, *gradient_shares(record).values())
    return _RULES.index(found.rule), -max(share or 0.0 for share in shares)


def _table(report: Report, width: int) -> Iterator[Text]:
    yield from head(report, width)
    before = ""
    for record in report.records:
        dtype = problem_of(record).dtype
        yield from row(record, width, first=dtype != before)
        before = dtype
    yield from verdict(report, width)


def _cells(record: Record) -> list[Cell]:
    shown = record.status if record.status != "unsupported" else figures.NOTHING
    cells = [Cell(record.variant), Cell(shown, STATUSES[record.status])]
    found = record.judgement
    for share in (found.out_over_bound, found.lse_over_bound) if found else (None, None):
        text = figures.NOTHING if share is None else figures.share(share)
        cells.append(Cell(text, "bad" if share is not None and share > 1 else "plain"))
    return cells


def _about(record: Record) -> str:
    """The Problem, or why it was not asked."""
    if record.status == "unsupported":
        return record.reason
    problem = problem_of(record)
    of = [problem.mask["name"], problem.shape, f"H{problem.head_counts}"]
    compared = record.case.get("question") == "compare"
    return " ".join([*of, problem.distribution if compared else ""]).strip()


def _sentence(report: Report) -> str:
    name = next(iter(report.kernels), "")
    count = Counter[str](record.status for record in report.records)
    failed, judged = (
        sum(count[s] for s in of) for of in (FAILED_STATUSES, FAILED_STATUSES | JUDGED)
    )
    said = {
        "fail": f"FAIL  {name}: {failed} of {judged} question{'s' * (judged != 1)} failed",
        "in doubt": f"IN DOUBT  {name}: the oracles disagree, and nothing is said of the kernel",
        "pass": f"PASS  {name}: {judged} question{'s' * (judged != 1)}",
        "untested": f"NOTHING TESTED  {name}: it takes none of the questions",
    }[exit_status(report)]
    if exit_status(report) == "fail" and not failed:
        said = f"FAIL  {name}: {judged} questions passed, and all are blind to a class of fault"
    odd = [f"{count[s]} {s}" for s in ("warn", "inconclusive") if count[s]]
    untaken = [f"{count['unsupported']} not taken"] if count["unsupported"] else []
    return ", ".join([said, *odd, *untaken])


def _facts(report: Report) -> Iterator[str]:
    yield from (f"judged as {profile}" for profile in content(report).profiles)
    seen = visible(report.records)
    if seen:
        yield seen


def _blind(report: Report) -> str:
    """What no question would have noticed; nothing where not all of them were asked."""
    words = shlex.split(report.command)
    if any(word.partition("=")[0] == _OPTION for word in words):
        return ""
    classes = insensitive(report.records)
    return f"insensitive: no question would have noticed {', or '.join(classes)}" if classes else ""


def _again(command: str, record: Record) -> str:
    words = shlex.split(command)
    if record.variant not in words:
        words += [_OPTION, record.variant]
    return one_line(shlex.join(words))


def _markdown(report: Report) -> Iterator[str]:
    yield f"# {for_markdown(_sentence(report))}"
    yield ""
    facts: list[str] = [line.plain for line in head(report, screen.PLAIN_WIDTH)]
    facts += [*_facts(report), _blind(report)]
    yield from (f"- {for_markdown(fact)}" for fact in facts if fact)
    yield ""
    for dtype in dict.fromkeys(problem_of(record).dtype for record in report.records):
        lines = [_line(record) for record in report.records if problem_of(record).dtype == dtype]
        columns = ("question", "verdict", "of", "why", "out/bound", "LSE/bound")
        yield from markdown_lines(Sheet(dtype, columns, words=4, lines=lines))
        yield ""
    bad = worst(report)
    if bad is not None:
        yield f"Reproduce: {for_markdown(_again(report.command, bad))}"


def _line(record: Record) -> Line:
    name, status, *shares = _cells(record)
    why = "" if record.status == "unsupported" else footnote(record)
    return Line((name, status, Cell(_about(record)), Cell(why), *shares))
