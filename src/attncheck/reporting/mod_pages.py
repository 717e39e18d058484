"""A ModReport → table, Markdown, JSON."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from attncheck.core.sanitize_text import shortened
from attncheck.records.survey_reports import MOD_SCHEMA, ModReport
from attncheck.reporting import figures, struct_json
from attncheck.reporting.by_format import FORMATS, Page, paged
from attncheck.reporting.cells import Cell
from attncheck.reporting.sheet import Line, Sheet, least_width

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from attncheck.records.survey_reports import ModAnswer, ModRecord

__all__ = ["FORMATS", "load", "render", "show"]

_LONGEST = 72  # characters of an expression that a page shows; the JSON has all
_LONGEST_WORLD = 28
_CELLS = {
    "equal": Cell("equal"),
    "different": Cell("different", "bad"),
    "unknown": Cell("unknown", "notable"),
    "error": Cell("error", "bad"),
    "unsupported": Cell(figures.NOTHING, "dim"),
}


def load(text: str) -> ModReport:
    """The report that ``render(report, "json")`` wrote; raises UsageError for anything else."""
    return struct_json.read(text, ModReport, MOD_SCHEMA)


def _fitting(report: ModReport, width: int | None) -> Iterator[Sheet]:
    """The worlds that stand side by side in ``width`` columns, then the next; None takes all."""
    beside: list[str] = []
    for world in report.worlds:
        if beside and least_width(_sheet(report, [*beside, world])) > (width or math.inf):
            yield _sheet(report, beside)
            beside = []
        beside.append(world)
    yield _sheet(report, beside)


def _above(report: ModReport) -> Iterator[str]:
    yield shortened(report.command)
    env = report.environment
    facts = [env.device, f"torch {env.torch}", f"triton {env.triton or 'missing'}"]
    yield " · ".join([*facts, f"mpmath {report.mpmath}", f"attncheck {env.attncheck}"])


def _sheet(report: ModReport, worlds: Iterable[str]) -> Sheet:
    asked = list(worlds)
    columns = ("mod", "kind", "expression", *(_head(world, _LONGEST_WORLD) for world in asked))
    lines = [_line(record, asked) for record in report.records]
    title = f"{report.file} · {report.shape}"
    return Sheet(title, columns, words=len(columns), cut=3, lines=lines)


def _line(record: ModRecord, worlds: list[str]) -> Line:
    cells = [Cell(record.name), Cell(record.kind, "dim"), Cell(_head(record.expression, _LONGEST))]
    answers = [(world, record.answers[world]) for world in worlds]
    cells += [_CELLS[answer.status] for _, answer in answers]
    return Line(tuple(cells), tuple(_remark(*a) for a in answers if _speaks(a[1])))


def _head(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1].rstrip() + "…"


def _speaks(answer: ModAnswer) -> bool:
    return answer.status in {"different", "unknown", "error"}


def _remark(world: str, answer: ModAnswer) -> str:
    return f"{world}: {shortened(answer.detail)}"


def _below(report: ModReport) -> Iterator[str]:
    for reason, where in _absences(report).items():
        yield f"{figures.NOTHING} {where}: {shortened(reason)}"
    yield "equal: as the callable says, at every place. Whole expressions: --format json."
    count = Counter[str](a.status for record in report.records for a in record.answers.values())
    said = ", ".join(f"{count[status]} {status}" for status in _CELLS if count[status])
    total = len(report.records)
    yield f"{total} {'mod' if total == 1 else 'mods'}: {said or 'nobody was asked'}."


def _absences(report: ModReport) -> dict[str, str]:
    """Reason → the worlds (and mods, where it is not for all) that it holds for."""
    held: dict[str, dict[str, list[str]]] = {}
    for record in report.records:
        for world, answer in record.answers.items():
            if answer.status == "unsupported":
                held.setdefault(answer.detail, {}).setdefault(world, []).append(record.name)
    return {
        reason: "; ".join(
            world if len(names) == len(report.records) else f"{world} of {', '.join(names)}"
            for world, names in worlds.items()
        )
        for reason, worlds in held.items()
    }


_PAGE: Page[ModReport] = paged("Masks and score mods in every world", _above, _fitting, _below)
render, show = _PAGE.render, _PAGE.show
