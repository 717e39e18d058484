"""A Report as marks on a plane: what a plot shows and where, without drawing it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attncheck.core.errors import UsageError
from attncheck.core.sanitize_text import one_line
from attncheck.records.problem_summary import ProblemSummary, problem_of
from attncheck.records.record import FAILED_STATUSES
from attncheck.reporting.gradients import gradients_of
from attncheck.reporting.verdicts import JUDGED

if TYPE_CHECKING:
    from attncheck.records.record import Record, Report, Status

__all__ = ["GAP", "Column", "Mark", "Page", "Panel", "Slot", "measured", "page"]

GAP = 0.3
"""Between variants, where a slot is 1 wide."""
_TAKEN = 0.84  # of a slot's width by its marks
_LONGEST = 28


@dataclass(frozen=True, slots=True)
class Slot:
    """Where the marks of one variant and head arrangement stand, in every panel alike.

    Attributes:
        label: The variant, with sizes that differ from those of the panel's title.
        heads: ``MHA``, ``GQA``, ``MQA``; ``rows`` of a softmax.
        left: Where it begins; it is 1 wide.
        kernels: Those that have a mark there in any panel, in the report's order.
    """

    label: str
    heads: str
    left: float
    kernels: tuple[str, ...]

    @property
    def extent(self) -> tuple[float, float]:
        """From where to where its marks may spread."""
        return self.left + (1 - _TAKEN) / 2, self.left + (1 + _TAKEN) / 2

    def places(self) -> dict[str, tuple[float, float]]:
        """Of each kernel, from where to where its share of the width reaches."""
        step = _TAKEN / max(1, len(self.kernels))
        begin, _ = self.extent
        return {k: (begin + i * step, begin + (i + 1) * step) for i, k in enumerate(self.kernels)}


@dataclass(frozen=True, slots=True)
class Mark:
    """One kernel in one cell.

    Attributes:
        kernel: Its name.
        operation: The column it stands in.
        reach: From where to where on the x axis it may spread.
        status: Its verdict, or ``error``.
        rmse: NaN where it raised.
        floor: RMSE of the exact result correctly rounded; NaN where it raised.
        ideal: RMSE of the ideal kernel at its tiles; NaN where it raised.
    """

    kernel: str
    operation: str
    reach: tuple[float, float]
    status: Status
    rmse: float = math.nan
    floor: float = math.nan
    ideal: float = math.nan

    @property
    def middle(self) -> float:
        """Where on the x axis it stands."""
        return sum(self.reach) / 2


@dataclass(frozen=True, slots=True)
class Panel:
    """All marks of one dtype, distribution and seed, under a title."""

    title: str
    marks: list[Mark] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Column:
    """The x axis of one operation, which all panels share: its slots from left to right.

    Attention and softmax stand side by side: weights are smaller than sums of values, and one
    scale would show neither.
    """

    operation: str
    slots: tuple[Slot, ...]

    @property
    def variants(self) -> tuple[tuple[str, float, float], ...]:
        """Labels with where each begins and ends."""
        found: dict[str, tuple[float, float]] = {}
        for slot in self.slots:
            left, _ = found.get(slot.label, (slot.left, 0.0))
            found[slot.label] = (left, slot.left + 1)
        return tuple((label, *ends) for label, ends in found.items())

    @property
    def ends(self) -> tuple[float, float]:
        """Where it begins and ends, with half a gap on either side; at least two slots apart."""
        used = self.slots[-1].left + 1
        spare = max(0.0, 2 - used) / 2
        return -GAP / 2 - spare, used + GAP / 2 + spare


@dataclass(frozen=True, slots=True)
class Page:
    """Panels one below the other, and what they share.

    Attributes:
        columns: The x axes, one for each operation.
        panels: In the report's order.
        kernels: Every kernel with a mark, in the report's order.
        unsupported: How many cells have no mark because the kernel does not take them.
    """

    columns: tuple[Column, ...]
    panels: tuple[Panel, ...]
    kernels: tuple[str, ...]
    unsupported: int


def measured(report: Report) -> bool:
    """Whether any cell of ``report`` has numbers."""
    return any(record.status in JUDGED and record.out for record in report.records)


def page(report: Report) -> Page:
    """Everything that a plot of ``report`` shows.

    Raises:
        UsageError: where no cell of the report was measured, and for one of several machines or
            with gradients.
    """
    if not measured(report):
        raise UsageError("the report has no cell that was measured: there is nothing to plot.")
    if len(report.environments) > 1:
        raise UsageError(
            f"the reports are of {len(report.environments)} machines: a plot shows one. Plot each."
        )
    if any(map(gradients_of, report.records)):
        raise UsageError(
            "the report has gradients, which a plot does not show: plot one without --backward."
        )
    shown = [
        r for r in report.records if r.status in FAILED_STATUSES or (r.status in JUDGED and r.out)
    ]
    usual = _usual_shapes(shown)
    order = _order(report)
    columns = tuple(_column(name, shown, usual, order) for name in usual)
    places = {(slot.label, slot.heads): slot.places() for c in columns for slot in c.slots}
    panels: dict[str, Panel] = {}
    for record in shown:
        problem = problem_of(record)
        title = " · ".join(_title(problem, usual))
        reach = places[_key(record, usual)][record.kernel]
        panels.setdefault(title, Panel(title)).marks.append(_mark(record, problem.operation, reach))
    return Page(
        columns=columns,
        panels=tuple(panels.values()),
        kernels=tuple(sorted({record.kernel for record in shown}, key=order.__getitem__)),
        unsupported=sum(record.status == "unsupported" for record in report.records),
    )


def _mark(record: Record, operation: str, reach: tuple[float, float]) -> Mark:
    out = record.out
    if out is None:
        return Mark(record.kernel, operation, reach, "error")
    numbers = out.rmse, out.floor_rmse, out.ideal_rmse
    return Mark(record.kernel, operation, reach, record.status, *numbers)


def _order(report: Report) -> dict[str, int]:
    """Kernels as they were asked for, then any others."""
    names = [*report.kernels, *(record.kernel for record in report.records)]
    return {name: i for i, name in enumerate(dict.fromkeys(names))}


def _usual_shapes(records: list[Record]) -> dict[str, str]:
    """Of each operation its first shape: titles say attention's, or softmax's where it is alone."""
    usual: dict[str, str] = {}
    for record in records:
        problem = problem_of(record)
        usual.setdefault(problem.operation, problem.shape)
    return usual


def _title(problem: ProblemSummary, usual: dict[str, str]) -> list[str]:
    shape = usual.get("attention", usual.get(problem.operation, ""))
    return [one_line(problem.dtype), shape, one_line(problem.distribution), f"seed {problem.seed}"]


def _key(record: Record, usual: dict[str, str]) -> tuple[str, str]:
    """Label and heads of a record's slot."""
    problem = problem_of(record)
    name = one_line(record.variant) or "?"
    label = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
    known = usual[problem.operation].split()
    others = " ".join(size for size in problem.shape.split() if size not in known)
    return (f"{label} ({others})" if others else label), one_line(record.heads) or "rows"


def _column(
    operation: str, records: list[Record], usual: dict[str, str], order: dict[str, int]
) -> Column:
    """Slots in the order of the report, those of one label side by side."""
    labels: dict[str, dict[str, set[str]]] = {}
    for record in records:
        if problem_of(record).operation == operation:
            label, heads = _key(record, usual)
            labels.setdefault(label, {}).setdefault(heads, set()).add(record.kernel)
    slots, left = [], 0.0
    for label, arrangements in labels.items():
        for heads, kernels in arrangements.items():
            slots.append(Slot(label, heads, left, tuple(sorted(kernels, key=order.__getitem__))))
            left += 1
        left += GAP
    return Column(operation, tuple(slots))
