"""A SuiteReport → table, Markdown, JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.core.sanitize_text import shortened
from attncheck.records.record import FAILED_STATUSES
from attncheck.records.run_reports import PROPERTY_SCHEMA, PropertyOutcome, PropertyReport, Tally
from attncheck.reporting import figures, struct_json
from attncheck.reporting.by_format import FORMATS, Page, paged
from attncheck.reporting.cells import Cell
from attncheck.reporting.sheet import Line, Sheet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["FORMATS", "load", "rate", "render", "show", "total"]

_STATUSES = ("warn", "inconclusive", "fail", "error")
_COUNTED = {"error": FAILED_STATUSES - {"fail"}}  # where a word stands for several


def load(text: str) -> PropertyReport:
    """The report that ``render(report, "json")`` wrote; raises UsageError for anything else."""
    return struct_json.read(text, PropertyReport, PROPERTY_SCHEMA)


def total(outcomes: Iterable[PropertyOutcome]) -> Tally:
    """Everything that these outcomes counted."""
    tally = Tally()
    for outcome in outcomes:
        tally.add(outcome.tally)
    return tally


def rate(tally: Tally, seconds: float) -> str:
    """``2,345 problems in 61 s (38 a second), 12 % of the work compiling``."""
    problems = f"{tally.total:,} problem{'' if tally.total == 1 else 's'}"
    speed = f" ({tally.total / seconds:.3g} a second)" if seconds > 0 and tally.total else ""
    share = (
        f", {tally.compiling / tally.seconds:.0%} of the work compiling" if tally.seconds else ""
    )
    took = f"{seconds:,.0f}" if seconds >= 1000 else f"{seconds:.3g}"
    return f"{problems} in {took} s{speed}{share}"


def _above(report: PropertyReport) -> Iterator[str]:
    yield shortened(report.command)
    env = report.environment
    facts = [env.device, f"torch {env.torch}", f"triton {env.triton or 'missing'}"]
    if env.cuda:
        facts.append(f"CUDA {env.cuda}")
    yield " · ".join([*facts, f"attncheck {env.attncheck}"])
    shared = "" if report.processes == 1 else f", {report.processes} processes"
    yield f"tier {report.tier}{shared}: {rate(total(report.outcomes), report.seconds)}"


def _sheets(report: PropertyReport, width: int | None) -> Iterator[Sheet]:
    del width  # few columns
    yield _by(report, "kernel", lambda one: one.kernel)
    yield _by(report, "dtype", lambda one: one.dtype)
    yield _by(report, "mask family", lambda one: one.family)
    yield _by(report, "file", lambda one: one.file)
    known = [one for one in report.outcomes if one.outcome == "known"]
    if known:
        yield _reasons("known failures", known)
    failed = [one for one in report.outcomes if one.outcome == "failed"]
    if failed:
        yield _reasons("failures", failed)


def _by(report: PropertyReport, name: str, key: Callable[[PropertyOutcome], str]) -> Sheet:
    columns = (name, "tests", "problems", *_STATUSES, "known", "failed", "skipped", "work")
    groups: dict[str, list[PropertyOutcome]] = {}
    for outcome in report.outcomes:
        groups.setdefault(key(outcome), []).append(outcome)
    lines = [_line(name, outcomes) for name, outcomes in groups.items()]
    return Sheet(f"by {name}", columns, lines=lines)


def _line(name: str, outcomes: list[PropertyOutcome]) -> Line:
    tally = total(outcomes)
    counts = {kind: sum(one.outcome == kind for one in outcomes) for kind in ("known", "failed")}
    skipped = sum(one.outcome == "skipped" for one in outcomes)
    statuses = [
        sum(tally.problems.get(each, 0) for each in _COUNTED.get(status, {status}))
        for status in _STATUSES
    ]
    numbers = [len(outcomes), tally.total, *statuses, counts["known"], counts["failed"], skipped]
    cells = [Cell(name or figures.NOTHING), *(_number(number) for number in numbers)]
    return Line((*cells, Cell(figures.duration(tally.seconds))))


def _number(count: int) -> Cell:
    return Cell(f"{count:,}") if count else Cell(figures.NOTHING, "dim")


def _reasons(title: str, outcomes: list[PropertyOutcome]) -> Sheet:
    """One row a kernel, test and reason: with the dtypes and families that it holds for."""
    groups: dict[tuple[str, str, str], list[PropertyOutcome]] = {}
    for one in outcomes:
        groups.setdefault((one.kernel, one.test, one.reason), []).append(one)
    lines = []
    for (kernel, test, reason), found in groups.items():
        dtypes = ", ".join(dict.fromkeys(one.dtype for one in found))
        families = ", ".join(dict.fromkeys(one.family for one in found))
        lines.append(Line(tuple(map(Cell, (kernel, test, dtypes, families))), (shortened(reason),)))
    return Sheet(title, ("kernel", "test", "dtypes", "mask families"), words=4, cut=4, lines=lines)


def _below(report: PropertyReport) -> Iterator[str]:
    yield (
        "A problem is one Case that was answered, however many runs of the kernel it takes; work "
        "is the time in kernel, oracle and judge, of all processes together."
    )
    yield (
        "warn and inconclusive are no proof of a fault. known: fails as it is known to, with a "
        "reason; skipped: the kernel takes none of those problems."
    )
    for kernel, dtypes in report.untaken.items():
        reasons: dict[str, list[str]] = {}
        for dtype, reason in dtypes.items():
            reasons.setdefault(reason, []).append(dtype)
        said = "; ".join(f"{', '.join(of)}: {shortened(why)}" for why, of in reasons.items())
        yield f"{kernel} takes no {said}"
    counts = {
        kind: sum(one.outcome == kind for one in report.outcomes)
        for kind in ("passed", "known", "failed", "skipped")
    }
    yield f"{len(report.outcomes):,} tests: " + ", ".join(f"{n:,} {k}" for k, n in counts.items())


_PAGE: Page[PropertyReport] = paged("Properties", _above, _sheets, _below)
render, show = _PAGE.render, _PAGE.show
