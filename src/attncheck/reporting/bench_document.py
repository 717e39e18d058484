"""The page of ``attncheck bench``: rates of kernels that were timed in turn, cell by cell."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace as replace_struct

from attncheck.records.problem_summary import problem_of
from attncheck.reporting import number_text, record_text
from attncheck.reporting.document import (
    Cell,
    Column,
    Document,
    LiveRows,
    Look,
    Note,
    Row,
    Section,
    Table,
    row,
)

if TYPE_CHECKING:
    from attncheck.records.bench_report import BenchCell, BenchReport, BenchRow, Finding, Times

_READING = (
    "verdict: on what the timed calls themselves gave.",
    "TFLOP/s: 4·D operations a visible pair forward, 10·D backward, ÷ the median time.",
    "backward: the time of both less the forward's, by round.",
    "±: half of what lies between the quartiles. Kernels took turns; who begins moved on.",
)
_DECODING = "TB/s: k and v, read once, ÷ the median time."
_CLOCKS = {
    "cpu": "Times are of a CPU. Triton kernels are interpreted there and their times mean nothing: "
    "none is timed.",
    "events": "Timed between CUDA events, L2 overwritten before each call; launches count.",
    "graph": "g: timed in a CUDA graph, without launches.",
}
_MOVED = 0.02  # relative change of a clock above which it is reported as moved
_LOOKS: dict[Finding, Look] = {
    "faster": "good",
    "slower": "bad",
    "same": "plain",
    "unclear": "notable",
}
_WRONG = "wrong: its time counts for nothing"


def bench_document(report: BenchReport) -> Document:
    """Return the page of ``report``: cells as planned, kernels as asked for."""
    notes: dict[tuple[str, str], int] = {}
    tables: dict[str, Table] = {}
    for cell in report.cells:
        title, table = cell_table(report, cell, notes)
        before = tables.get(title, replace(table, rows=()))
        tables[title] = replace(before, rows=before.rows + table.rows)
    closing = bench_closing(report, notes)
    return replace(
        closing,
        command=report.command,
        facts=bench_facts(report),
        sections=(*(Section(name, (t,)) for name, t in tables.items()), *closing.sections),
    )


class CellsAsTimed(LiveRows):
    """The page of a report whose cells come one by one."""

    def __init__(self, report: BenchReport) -> None:
        self.head = Document(title="", command=report.command, facts=bench_facts(report))
        self.tables: dict[Any, Table] = {}
        self._report, self._title = report, ""
        self._notes: dict[tuple[str, str], int] = {}

    def row(self, cell: BenchCell) -> tuple[Section, bool]:
        """Return a section of ``cell`` alone."""
        title, table = cell_table(replace_struct(self._report, cells=(cell,)), cell, self._notes)
        new = title != self._title or table.columns not in self.tables
        self._title, self.tables[table.columns] = title, table
        return Section(title, (table,)), new

    def closing(self, report: BenchReport) -> Document:
        """Return the end of the page, below the cells."""
        return bench_closing(report, self._notes)


def bench_facts(report: BenchReport) -> tuple[str, ...]:
    """Return the environment, and the matmul and copy rates measured on that machine."""
    products = [
        f"matmul {dtype} {rate / 1e12:,.3g} TFLOP/s" for dtype, rate in report.matmul.items()
    ]
    copied = [f"copy {report.copy / 1e12:.3g} TB/s"] if report.copy else []
    measured = "; ".join(products + copied)
    return (
        record_text.environment_facts(report.environment),
        *([f"measured here: {measured}"] if measured else []),
    )


def cell_table(
    report: BenchReport, cell: BenchCell, notes: dict[tuple[str, str], int]
) -> tuple[str, Table]:
    """Return a cell's section title and table; reasons are numbered in ``notes``."""
    problem = problem_of(cell)
    kind = (cell.table, cell.work.decoding)
    alike = (one for one in report.cells if (one.table, one.work.decoding) == kind)
    both = any(row.both for each in (cell, *alike) for row in each.rows)
    base_row = next((row for row in cell.rows if row.record.kernel == report.baseline), None)
    columns = [
        Column("kernel", words=True, cut=True, most=28, least=12),
        Column("verdict", words=True, least=8),
        _number(f"forward {'TB/s' if cell.work.decoding else 'TFLOP/s'}", 0),
        _number("±", 2),
        _number(f"×{report.baseline}", 3),
        _number("÷copy" if cell.work.decoding else "÷matmul", 1),
    ]
    if both:
        names = (("backward", 4), ("both", 0), ("± both", 2), ("× both", 3))
        columns += [_number(heading, spare) for heading, spare in names]
    columns += [Column("time", least=8)]
    group = (cell.variant, f"{problem.batch} × {problem.kv:,}")
    rows = [
        Row(_cells(report, cell, row, base_row, notes, both=both), group=group) for row in cell.rows
    ]
    if rows and cell.clocks and _moved(*cell.clocks):
        low, high = cell.clocks
        moved = Note(f"the SM clock moved: {low:,}–{high:,} MHz", "notable")
        rows[-1] = replace(rows[-1], remarks=(moved,))
    heads = f"{cell.heads} {problem.head_counts}"
    title = " · ".join([cell.table, problem.dtype, heads, problem.dims])
    return title, Table(tuple(columns), tuple(rows), groups=("variant", "batch × length"))


def _number(heading: str, spare: int) -> Column:
    return Column(heading, spare=spare, least=7)


def rate(cell: BenchCell, times: Times | None, *, both: bool = False) -> float | None:
    """Return operations a second of a forward, or of ``both``; for decoding bytes a second."""
    if times is None:
        return None
    work = cell.work
    return (work.cache_bytes if work.decoding else work.flops(backward=both)) / times.median


def _cells(
    report: BenchReport,
    cell: BenchCell,
    row: BenchRow,
    base_row: BenchRow | None,
    notes: dict[tuple[str, str], int],
    *,
    both: bool,
) -> tuple[Cell, ...]:
    record = row.record
    reason = record_text.footnote(record) or (f"no backward: {row.lacks}" if row.lacks else "")
    wrong = record.status == "fail"
    texts = (Cell(record.kernel, code=True), record_text.status_cell(record, reason, notes))
    if row.forward is None:
        return texts
    limit = report.copy if cell.work.decoding else report.matmul.get(problem_of(cell).dtype)
    speed = rate(cell, row.forward) or 0.0
    numbers = [
        _rate_text(speed, row.forward),
        f"{100 * row.forward.spread:.1f}%",
        _speedup(row.forward, base_row.forward if base_row else None),
        number_text.ratio(speed, limit) if limit else number_text.NOTHING,
    ]
    if both:
        backward = row.backward
        numbers += [
            _rate_text(cell.work.backward_flops / backward if backward and backward > 0 else None),
            _rate_text(rate(cell, row.both, both=True), row.both),
            f"{100 * row.both.spread:.1f}%" if row.both else number_text.NOTHING,
            _speedup(row.both, base_row.both if base_row else None),
        ]
    numbers.append(number_text.duration((row.both or row.forward).median))
    look: Look = "bad" if wrong else "plain"
    return (*texts, *(Cell(text, look, spoken=_WRONG if wrong else "") for text in numbers))


def _rate_text(rate: float | None, times: Times | None = None) -> str:
    if rate is None:
        return number_text.NOTHING
    graph = " g" if times is not None and times.clock == "graph" else ""
    return f"{rate / 1e12:.3g}{graph}"


def _speedup(times: Times | None, other: Times | None) -> str:
    if times is None or other is None:
        return number_text.NOTHING
    return number_text.ratio(other.median, times.median)


def _moved(low: int, high: int) -> bool:
    return high - low > _MOVED * high


def bench_closing(report: BenchReport, notes: dict[tuple[str, str], int]) -> Document:
    """Return the page below its cells: reasons of rows not passed, changes, how to read it."""
    rows = [row for cell in report.cells for row in cell.rows]
    verified = Counter(row.verified for row in rows if row.verified)
    compared = ", ".join(f"{what} ({number_text.plural(n, 'row')})" for what, n in verified.items())
    clocks = {t.clock for row in rows for t in (row.forward, row.both) if t}
    cell_clocks = [cell.clocks for cell in report.cells if cell.clocks]
    return Document(
        title="Times of attention kernels",
        sections=(
            *record_text.reason_sections(notes, report.claims, report.absent),
            *([_changes(report)] if report.changes else []),
        ),
        notes=(
            *_READING,
            *([_DECODING] if any(cell.work.decoding for cell in report.cells) else []),
            *(text for clock, text in _CLOCKS.items() if clock in clocks),
            *([f"compared with the exact result: {compared}"] if compared else []),
            *([_clocks_text(cell_clocks)] if cell_clocks else []),
            *([] if cell_clocks or "events" not in clocks else ["SM clocks are not known."]),
        ),
        closing=(
            Note(bench_counts(report), "plain"),
            *([Note(f"Incomplete: {report.incomplete}.", "bad")] if report.incomplete else []),
        ),
    )


def _clocks_text(cell_clocks: list[tuple[int, int]]) -> str:
    low, high = min(one for one, _ in cell_clocks), max(one for _, one in cell_clocks)
    moved = " (they moved)" if _moved(low, high) else ""
    return f"SM clocks while timed: {low:,}–{high:,} MHz{moved}"


def _changes(report: BenchReport) -> Section:
    rows = []
    for change in report.changes:
        cell = report.cells[change.cell]
        problem = problem_of(cell)
        interval = "–".join(f"{end:.3f}" for end in change.interval or ())
        rows.append(
            row(
                Cell(change.kernel, code=True),
                f"{cell.variant} {problem.dtype} {problem.full_shape}",
                change.timed,
                Cell(change.finding, _LOOKS[change.finding]),
                f"{change.ratio:.3f}",
                interval or number_text.NOTHING,
            )
        )
    words = ("kernel", "problem", "timed", "finding")
    columns = [Column(one, words=True, cut=one == "kernel", most=28) for one in words]
    table = Table((*columns, Column("time ÷ theirs"), Column("interval")), tuple(rows))
    chance = Note(
        f"The chance that any of these is wrong is at most {report.chance:.0%}, if rounds are "
        f"independent; within {report.margin:.0%} is the same; too wide to say is unclear."
    )
    return Section(f"Beside {report.against}", (table, chance))


def bench_counts(report: BenchReport) -> str:
    """Return ``16 cells in 20 rounds: 70 pass, 2 unsupported; beside main: 8 same.``."""
    count = Counter(row.record.status for cell in report.cells for row in cell.rows)
    statuses = ", ".join(f"{count[s]} {s}" for s in record_text.STATUS_LOOKS if count[s])
    counts = Counter(change.finding for change in report.changes)
    beside = ", ".join(f"{counts[one]} {one}" for one in _LOOKS if counts[one])
    cells = number_text.plural(len(report.cells), "cell")
    text = f"{cells} in {number_text.plural(report.rounds, 'round')}: {statuses or 'no row'}"
    return f"{text}; beside {report.against}: {beside}." if beside else f"{text}."
