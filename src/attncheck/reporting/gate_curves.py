"""Error against length: for each kernel and dtype the largest over what it was asked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attncheck.records.problem_summary import problem_of
from attncheck.reporting import figures
from attncheck.reporting.gate_verdict import questions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from attncheck.records.record import Record
    from attncheck.records.run_reports import GateReport

__all__ = ["Axis", "Curve", "Point", "Series", "curves"]

LEFT, RIGHT, TOP, BOTTOM = 46.0, 352.0, 12.0, 208.0
"""Of the axes, in the drawing's own units."""
_MOST_TICKS = 6
_CEILING = 1e12  # what is infinite is drawn there


@dataclass(frozen=True, slots=True)
class Point:
    """One length: where it is drawn, and what it says."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Series:
    """One dtype; ``place`` says which of the colours and marks."""

    name: str
    place: int
    points: tuple[Point, ...]

    @property
    def line(self) -> str:
        """The points of a polyline."""
        return " ".join(f"{point.x:.1f},{point.y:.1f}" for point in self.points)


@dataclass(frozen=True, slots=True)
class Axis:
    """A logarithmic axis: where each of its labels is."""

    ticks: tuple[tuple[float, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One drawing.

    Attributes:
        title: What is drawn.
        description: The same for those who do not see it, with the largest value.
        x, y: Axes.
        limit: Where 1 is; what it means is said in the legend.
        limit_text: That.
        series: One a dtype.
    """

    title: str
    description: str
    x: Axis
    y: Axis
    limit: float | None
    limit_text: str
    series: tuple[Series, ...]


def curves(report: GateReport, kernel: str) -> tuple[Curve, ...]:
    """The two drawings of ``kernel``; none where it was compared at one length only."""
    records = [a.record for a in questions(report) if a.record.kernel == kernel]
    drawn = (
        _curve(records, "max error ÷ bound", "the bound", _share),
        _curve(records, "RMSE ÷ RMSE of the ideal kernel", "the ideal kernel", _over_ideal),
    )
    return tuple(curve for curve in drawn if curve is not None)


def _share(record: Record) -> float | None:
    return record.judgement.out_over_bound if record.judgement and record.out else None


def _over_ideal(record: Record) -> float | None:
    return figures.quotient(record.out.rmse, record.out.ideal_rmse) if record.out else None


def _curve(
    records: Iterable[Record], title: str, limit: str, value: Callable[[Record], float | None]
) -> Curve | None:
    found = _largest(records, value)
    lengths = sorted({kv for series in found.values() for kv in series})
    values = [number for series in found.values() for number in series.values()]
    if len(lengths) < 2:
        return None
    x = _Scale(lengths[0], lengths[-1], LEFT + 12, RIGHT - 12)
    y = _Scale(min(*values, 1.0), max(*values, 1.0), BOTTOM, TOP, whole=True)
    series = [
        Series(
            dtype,
            place % 6,
            tuple(
                Point(x(kv), y(number), f"{dtype}, {kv:,} keys: {figures.share(number)}")
                for kv, number in sorted(of_dtype.items())
            ),
        )
        for place, (dtype, of_dtype) in enumerate(found.items())
    ]
    most = figures.share(max(values))
    return Curve(
        title=title,
        description=f"{title} against the number of keys, {lengths[0]:,} to {lengths[-1]:,}, both "
        f"logarithmic; the largest is {most}",
        x=Axis(tuple((x(kv), f"{kv:,}") for kv in _few(lengths, x))),
        y=Axis(y.ticks),
        limit=y(1.0),
        limit_text=limit,
        series=tuple(series),
    )


def _largest(
    records: Iterable[Record], value: Callable[[Record], float | None]
) -> dict[str, dict[int, float]]:
    """By dtype: keys → the largest value; what is not finite as a very large one."""
    found: dict[str, dict[int, float]] = {}
    for record in records:
        number = value(record)
        if number is None or number <= 0:
            continue
        number = number if number < _CEILING else _CEILING  # NaN compares as less
        problem = problem_of(record)
        of_dtype = found.setdefault(problem.dtype, {})
        of_dtype[problem.kv] = max(of_dtype.get(problem.kv, 0.0), number)
    return found


def _few(lengths: list[int], x: _Scale) -> list[int]:
    """Of ``lengths`` those whose labels do not touch."""
    kept: list[int] = []
    for kv in lengths:
        if not kept or x(kv) - x(kept[-1]) >= (RIGHT - LEFT) / _MOST_TICKS:
            kept.append(kv)
    return kept


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
        """Powers of ten, a handful."""
        low, high = int(self._low), int(self._high)
        step = max(1, math.ceil((high - low) / _MOST_TICKS))
        return tuple((self(10.0**n), f"{10.0**n:g}") for n in range(low, high + 1, step))
