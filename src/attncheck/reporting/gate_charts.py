"""Drawings of a gate's page: results by mask and dtype, maps of errors, error against length."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import groupby

from attncheck.core.judgement import share_text
from attncheck.records.problem_summary import problem_of
from attncheck.records.record import ErrorMap, Record, Status
from attncheck.records.run_reports import GateReport
from attncheck.reporting import document, number_text
from attncheck.reporting.gate_verdict import questions, status_sides
from attncheck.reporting.number_text import plural

_DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2")  # the most precise first


def results_table(report: GateReport, kernel: str) -> document.Table:
    """Return a table of the results of ``kernel``, by mask and score mod and by dtype."""
    counts: dict[str, dict[str, Counter[Status]]] = {}
    for answer in questions(report):
        if answer.record.kernel == kernel:
            problem = problem_of(answer.record)
            by_dtype = counts.setdefault(" + ".join(problem.mod_names), {})
            by_dtype.setdefault(problem.dtype, Counter())[answer.record.status] += 1
    order = {name: i for i, name in enumerate(_DTYPES)}
    dtypes = {dtype for by_dtype in counts.values() for dtype in by_dtype}
    ordered = sorted(dtypes, key=lambda name: (order.get(name, len(order)), name))
    sides = status_sides(report)
    rows = (
        document.row(mods, *(_result(by.get(dtype, Counter()), *sides) for dtype in ordered))
        for mods, by in counts.items()
    )
    return document.Table(document.columns(["mask + score mod"], ordered, cut=1), tuple(rows))


def _result(
    count: Counter[Status], failing: frozenset[Status], doubtful: frozenset[Status]
) -> document.Cell:
    """Return the cell of a result: a symbol for the colour, a count, and both in words."""
    total = count.total()
    if not total:
        return document.Cell("", "dim", "not asked")
    answered = total - count["unsupported"]
    for sign, look, statuses, outcome in (
        ("✗", "bad", failing, "failed"),
        ("!", "notable", doubtful, "are doubtful"),
    ):
        number = sum(count[status] for status in statuses)
        if number:
            words = f"{number} of {answered} {outcome}"
            return document.Cell(f"{sign} {number}/{answered}", look, words)  # type: ignore[arg-type]  # of a tuple
    if answered:
        return document.Cell(f"✓ {answered}", "good", f"all {answered} passed")
    return document.Cell(f"– {total}", "dim", f"{total} not supported")


# Maps of errors

LEVELS: tuple[tuple[float, str], ...] = (
    (0.1, "≤ 0.1"),
    (0.5, "≤ 0.5"),
    (1.0, "≤ 1"),
    (3.0, "≤ 3"),
    (10.0, "≤ 10"),
    (100.0, "≤ 100"),
    (math.inf, "> 100"),
)
"""Largest error ÷ allowance of each level, and its name in a legend; above 1 is wrong."""

_MAP_WIDTH, _MAP_HEIGHT = 320.0, 220.0  # largest size of a map, in units of the drawing
_LEAST_CELL, _LARGEST_CELL = 6.0, 26.0


def level(share: float) -> int:
    """Return the index of ``share`` in ``LEVELS``; the last for NaN."""
    return next((i for i, (most, _) in enumerate(LEVELS) if share <= most), len(LEVELS) - 1)


def heat_map(record: Record, *, before_shrinking: bool = False) -> document.HeatMap | None:
    """Return a map of the errors of ``record``, or None if there is none worth showing.

    A map of a single cell is not worth showing, nor one of a right out when LSE or a gradient is
    wrong.
    """
    error_map = record.error_map
    if not isinstance(error_map, ErrorMap) or sum(map(len, error_map.values)) <= 1:
        return None
    worst = None if record.judgement is None else record.judgement.worst
    beyond = sum(not share <= 1 for line in error_map.values for share in line)  # NaN too
    if not beyond and worst is not None and worst.tensor != "out":
        return None
    columns, lines = max(map(len, error_map.values)), len(error_map.values)
    wide = max(_LEAST_CELL, min(_LARGEST_CELL, _MAP_WIDTH / columns))
    high = max(_LEAST_CELL, min(_LARGEST_CELL, _MAP_HEIGHT / lines))
    heads = f"{lines} groups of {error_map.heads} heads" if error_map.heads > 1 else "heads"
    cell = f"{plural(error_map.heads, 'head')} × {plural(error_map.rows, 'row')}"
    before = ", of the problem before it was shrunk" if before_shrinking else ""
    return document.HeatMap(
        width=columns * wide,
        height=lines * high,
        tiles=tuple(
            tile
            for i, line in enumerate(error_map.values)
            for tile in _tiles(error_map, i, line, wide, high)
        ),
        levels=tuple(name for _, name in LEVELS),
        description=f"largest error ÷ allowance of out over {heads} down and tiles of "
        f"{error_map.rows} rows to the right: beyond it in {beyond} of {columns * lines} cells",
        caption=f"Largest error of out ÷ what is allowed; a cell is {cell}{before}",
    )


def _tiles(
    error_map: ErrorMap, i: int, line: tuple[float, ...], wide: float, high: float
) -> list[document.Tile]:
    """Return line ``i`` of the map, with neighbours of one level merged into a tile."""
    # Thousands of cells with a title each would make a page of megabytes.
    tiles, start = [], 0
    for place, cells in groupby(line, key=level):
        shares = list(cells)
        worst = max(shares, key=lambda share: (math.isnan(share), share))
        first, last = start * error_map.rows, (start + len(shares)) * error_map.rows - 1
        head = i * error_map.heads
        several = f"heads {head}–{head + error_map.heads - 1}"
        heads = f"head {head}" if error_map.heads == 1 else several
        text = f"{heads}, rows {first}–{last}: {share_text(worst)} × what is allowed"
        tiles.append(document.Tile(start * wide, i * high, len(shares) * wide, high, place, text))
        start += len(shares)
    return tiles


# Error against length

_MOST_TICKS = 6  # labels of an axis
_CEILING = 1e12  # y at which infinite values are drawn
_COLOURS = 6
_MOST_LINES = 120  # lines of a chart


def charts(report: GateReport, kernel: str) -> tuple[document.Chart, ...]:
    """Return two charts of ``kernel``; none if it was compared at only one length."""
    records = [a.record for a in questions(report) if a.record.kernel == kernel]

    def share(record: Record) -> float | None:
        return record.judgement.out_over_bound if record.judgement and record.out else None

    def over_ideal(record: Record) -> float | None:
        out = record.out
        return number_text.quotient(out.rmse, out.ideal_rmse) if out else None

    drawn = (
        _chart(records, "max error ÷ bound", "the bound", share),
        _chart(records, "RMSE ÷ RMSE of the ideal kernel", "the ideal kernel", over_ideal),
    )
    return tuple(chart for chart in drawn if chart is not None)


def _chart(
    records: Iterable[Record], title: str, limit: str, value: Callable[[Record], float | None]
) -> document.Chart | None:
    """Return a chart of the largest ``value`` at each number of keys, a series for each dtype.

    A line joins Problems that differ only in lengths, batch, heads and seed.
    """
    lines: dict[tuple[str, str], dict[int, float]] = {}
    for record in records:
        number = value(record)
        if number is None or number <= 0:
            continue
        problem = problem_of(record)
        by_length = lines.setdefault((problem.dtype, _line_name(record)), {})
        drawn = number if number < _CEILING else _CEILING  # NaN compares as less
        by_length[problem.kv] = max(by_length.get(problem.kv, 0.0), drawn)
    lengths = sorted({kv for by_length in lines.values() for kv in by_length})
    values = [number for by_length in lines.values() for number in by_length.values()]
    if len(lengths) < 2:  # a point is no curve
        return None
    x = _Scale(lengths[0], lengths[-1], document.LEFT + 12, document.RIGHT - 12)
    # 1 is always in range, since the bound or the ideal kernel lies there.
    y = _Scale(min(*values, 1.0), max(*values, 1.0), document.BOTTOM, document.TOP, whole=True)
    # Only the lines with the largest errors, since a page must stay small enough to open.
    drawn_lines = set(sorted(lines, key=lambda key: -max(lines[key].values()))[:_MOST_LINES])
    series = tuple(
        document.Series(
            dtype,
            place % _COLOURS,
            tuple(
                tuple(
                    document.Point(x(kv), y(n), f"{dtype} {name}, {kv:,} keys: {share_text(n)}")
                    for kv, n in sorted(lines[dtype, name].items())
                )
                for line_dtype, name in lines
                if line_dtype == dtype and (line_dtype, name) in drawn_lines
            ),
        )
        for place, dtype in enumerate(dict.fromkeys(dtype for dtype, _ in lines))
    )
    left_out = f"; {len(lines) - len(drawn_lines):,} lines of smaller errors are left out"
    labelled: list[int] = []
    for kv in lengths:  # choose lengths whose labels do not touch
        if (
            not labelled
            or x(kv) - x(labelled[-1]) >= (document.RIGHT - document.LEFT) / _MOST_TICKS
        ):
            labelled.append(kv)
    return document.Chart(
        title=title,
        description=f"{title} against the number of keys, {lengths[0]:,} to {lengths[-1]:,}, both "
        f"logarithmic; the largest is {share_text(max(values))}"
        f"{left_out if len(drawn_lines) < len(lines) else ''}",
        x_ticks=tuple((x(kv), f"{kv:,}") for kv in labelled),
        y_ticks=y.ticks,
        x_name="keys",
        limit=(y(1.0), limit),
        series=series,
    )


def _line_name(record: Record) -> str:
    """Return the name of a record's line, such as ``causal softcap D64 large_logits decode``."""
    problem = problem_of(record)
    question = str(record.case.get("question", ""))
    parts = [*problem.mod_names, problem.dims, problem.distribution, question]
    return " ".join(part for part in parts if part not in {"compare", "normal"})


class _Scale:
    """A logarithmic scale from ``low`` to ``high``, drawn from ``start`` to ``end``."""

    def __init__(
        self, low: float, high: float, start: float, end: float, *, whole: bool = False
    ) -> None:
        self._low, self._high = math.log10(low), math.log10(high)
        if whole:
            self._low, self._high = math.floor(self._low), math.ceil(self._high)
        if self._low == self._high:
            self._high += 1
        self._start, self._end = start, end

    def __call__(self, number: float) -> float:
        part = (math.log10(number) - self._low) / (self._high - self._low)
        return self._start + part * (self._end - self._start)

    @property
    def ticks(self) -> tuple[tuple[float, str], ...]:
        """Return places and labels of a few powers of ten."""
        low, high = int(self._low), int(self._high)
        step = max(1, math.ceil((high - low) / _MOST_TICKS))
        return tuple((self(10.0**n), f"{10.0**n:g}") for n in range(low, high + 1, step))
