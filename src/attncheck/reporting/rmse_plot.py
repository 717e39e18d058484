"""The plot of ``attncheck rmse``: a panel for each dtype, RMSE on a log scale.

First what is shown and where, as plain data; then the drawing of it with matplotlib, the extra
``plot``, which is imported when something is drawn and not before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from attncheck.core.errors import UsageError
from attncheck.core.sanitize_text import cut_line, one_line
from attncheck.records.problem_summary import problem_of
from attncheck.records.record import FAILED_STATUSES, Record, Report, Status
from attncheck.reporting.measurement_document import environment_lines
from attncheck.reporting.record_text import JUDGED, gradients_of

GAP = 0.3  # between variants, where a slot is 1 wide
_TAKEN = 0.84  # of a slot's width by its marks
_LONGEST_VARIANT = 28  # characters of its name; a kernel's are _LONGEST


@dataclass(frozen=True, slots=True)
class Slot:
    """Place of the marks of one variant and head arrangement, in every panel alike."""

    label: str  # the variant, with sizes that differ from those of the panel's title
    heads: str  # ``MHA``, ``GQA``, ``MQA``; ``rows`` of a softmax
    left: float  # where it begins; it is 1 wide
    kernels: tuple[str, ...]  # those that have a mark there in any panel, in the report's order

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
    """One kernel in one cell."""

    kernel: str
    operation: str
    reach: tuple[float, float]  # from where to where on the x axis it may spread
    status: Status
    rmse: float = math.nan  # NaN where it raised
    floor: float = math.nan  # RMSE of the exact result correctly rounded; NaN where it raised
    ideal: float = math.nan  # RMSE of the ideal kernel at its tiles; NaN where it raised

    @property
    def middle(self) -> float:
        """Position on the x axis."""
        return sum(self.reach) / 2


@dataclass(frozen=True, slots=True)
class Panel:
    """All marks of one dtype, distribution and seed, under a title."""

    title: str
    marks: list[Mark] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PlotColumn:
    """The x axis of one operation, which all panels share: its slots from left to right.

    Attention and softmax stand side by side: weights are smaller than sums of values, and one
    scale would show neither.
    """

    operation: str
    slots: tuple[Slot, ...]

    @property
    def variants(self) -> tuple[tuple[str, float, float], ...]:
        """Labels with where each begins and ends."""
        extents: dict[str, tuple[float, float]] = {}
        for slot in self.slots:
            left, _ = extents.get(slot.label, (slot.left, 0.0))
            extents[slot.label] = (left, slot.left + 1)
        return tuple((label, *ends) for label, ends in extents.items())

    @property
    def ends(self) -> tuple[float, float]:
        """Its two ends, with half a gap on either side; at least two slots apart."""
        used = self.slots[-1].left + 1
        spare = max(0.0, 2 - used) / 2
        return -GAP / 2 - spare, used + GAP / 2 + spare


@dataclass(frozen=True, slots=True)
class Plot:
    """Panels one below the other, and what they share."""

    columns: tuple[PlotColumn, ...]  # the x axes, one for each operation
    panels: tuple[Panel, ...]  # in the report's order
    kernels: tuple[str, ...]  # every kernel with a mark, in the report's order
    unsupported: int  # how many cells have no mark because the kernel does not take them


def measured(report: Report) -> bool:
    """Return whether any cell of ``report`` has numbers."""
    return any(record.status in JUDGED and record.out for record in report.records)


def plot_of(report: Report) -> Plot:
    """Everything that a plot of ``report`` shows.

    Raises:
        UsageError: where no cell of the report was measured, and for one of several machines or
            with gradients.
    """
    if not measured(report):
        raise UsageError("the report has no cell that was measured: there is nothing to plot.")
    # Numbers of two machines under one mark would look like one measurement.
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
    # Of each operation its first shape: titles say attention's, or softmax's where it is alone.
    usual: dict[str, str] = {}
    for record in shown:
        usual.setdefault(problem_of(record).operation, problem_of(record).shape)
    # Kernels as they were asked for, then any others.
    names = dict.fromkeys([*report.kernels, *(record.kernel for record in report.records)])
    order = {name: i for i, name in enumerate(names)}
    columns = tuple(_column(name, shown, usual, order) for name in usual)
    places = {(slot.label, slot.heads): slot.places() for c in columns for slot in c.slots}
    panels: dict[str, Panel] = {}
    for record in shown:
        problem, out = problem_of(record), record.out
        shape = usual.get("attention", usual.get(problem.operation, ""))
        words = (problem.dtype, shape, problem.distribution, f"seed {problem.seed}")
        title = " · ".join(map(one_line, words))
        reach = places[_key(record, usual)][record.kernel]
        mark = Mark(record.kernel, problem.operation, reach, "error")
        if out is not None:
            numbers = out.rmse, out.floor_rmse, out.ideal_rmse
            mark = Mark(record.kernel, problem.operation, reach, record.status, *numbers)
        panels.setdefault(title, Panel(title)).marks.append(mark)
    return Plot(
        columns=columns,
        panels=tuple(panels.values()),
        kernels=tuple(sorted({record.kernel for record in shown}, key=order.__getitem__)),
        unsupported=sum(record.status == "unsupported" for record in report.records),
    )


def _key(record: Record, usual: dict[str, str]) -> tuple[str, str]:
    """Label and heads of a record's slot."""
    problem = problem_of(record)
    label = cut_line(record.variant, _LONGEST_VARIANT) or "?"
    known = usual[problem.operation].split()
    others = " ".join(size for size in problem.shape.split() if size not in known)
    return (f"{label} ({others})" if others else label), one_line(record.heads) or "rows"


def _column(
    operation: str, records: list[Record], usual: dict[str, str], order: dict[str, int]
) -> PlotColumn:
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
    return PlotColumn(operation, tuple(slots))


# Okabe and Ito's colours, told apart by colour-blind readers; yellow, which white paper hides, is
# left out. Seven colours and nine shapes have no common divisor: 63 kernels look different.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_SHAPES = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_FAILED, _FLOOR, _IDEAL, _BAND = "#C00000", "#404040", "#8A8A8A", "#F3F3F3"

_WIDTH, _LEAST_HEIGHT = 16.0, 9.0  # inches
_LEFT, _RIGHT, _TOP, _BETWEEN, _PANEL = 0.85, 2.7, 0.95, 0.42, 1.9
_LEVEL, _TILTED = 0.95, 1.6  # below the panels, by how the names of variants stand
_APART = 0.015  # attention from softmax, in their mean width
_LONGEST, _LINE = 24, 190
_TICKS = ((1,), (1, 2, 5), tuple(range(1, 10)), tuple(1 + i / 2 for i in range(18)))
_LEAST_TICKS = 3
_MOST_ACROSS, _MOST_LEVEL = 44, 10  # slots and variants whose labels have room side by side
_DOUBTED: frozenset[Status] = frozenset({"warn", "inconclusive"})
STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "text.parse_math": False,  # names are foreign: a $ is a $
    "svg.hashsalt": "attncheck",  # the same report gives the same bytes
}
"""matplotlib's settings for a figure."""


Looks = dict[str, tuple[str, str]]
"""Colour and shape of the marks of each kernel."""


def kernel_looks(kernels: Sequence[str]) -> Looks:
    """Return for each of ``kernels`` a look of its own."""
    return {
        name: (_COLOURS[i % len(_COLOURS)], _SHAPES[i % len(_SHAPES)])
        for i, name in enumerate(kernels)
    }


def figure(report: Report) -> Any:
    """A ``matplotlib.figure.Figure`` of ``report``, 16 inches wide and 9 or more high.

    One panel for each dtype (and distribution and seed); on the x axis variants with their head
    arrangements, on the y axis the RMSE of out against exact attention in fp64, in the units of
    the values. Every measured cell and every one that raised is one mark.

    Raises:
        UsageError: where no cell of the report was measured.
    """
    from matplotlib.figure import Figure

    shown = plot_of(report)
    tilted = sum(len(column.variants) for column in shown.columns) > _MOST_LEVEL
    frame = _Frame(len(shown.panels), _TILTED if tilted else _LEVEL)
    fig = Figure(figsize=(_WIDTH, frame.height))
    widths = [ends[1] - ends[0] for ends in (column.ends for column in shown.columns)]
    rows = fig.subplots(
        frame.panels,
        len(shown.columns),
        sharex="col",
        squeeze=False,
        gridspec_kw={**frame.grid(), "wspace": _APART, "width_ratios": widths},
    )
    looks = kernel_looks(shown.kernels)
    for row, panel in zip(rows, shown.panels, strict=True):
        row[0].set_title(panel.title, loc="left", fontsize=10, fontweight="bold", pad=4)
        row[0].set_ylabel("RMSE of out")
        for ax, column in zip(row, shown.columns, strict=True):
            marks = [mark for mark in panel.marks if mark.operation == column.operation]
            _draw_panel(ax, marks, column, looks)
        for ax in row[1:]:
            ax.yaxis.tick_right()
    for ax, column in zip(rows[-1], shown.columns, strict=True):
        _draw_variants(ax, column, tilted=tilted)
    _draw_titles(fig, report, frame.height)
    _draw_legend(fig, shown, looks, frame.height)
    return fig


class _Frame:
    """Inches of each part: panels share what the margins leave, or the page grows."""

    def __init__(self, panels: int, bottom: float) -> None:
        self.panels, self.bottom = panels, bottom
        between = (panels - 1) * _BETWEEN
        self.height = max(_LEAST_HEIGHT, _TOP + bottom + between + panels * _PANEL)
        self.panel = (self.height - _TOP - bottom - between) / panels

    def grid(self) -> dict[str, float]:
        """Margins as matplotlib takes them, parts of the whole."""
        return {
            "left": _LEFT / _WIDTH,
            "right": 1 - _RIGHT / _WIDTH,
            "top": 1 - _TOP / self.height,
            "bottom": self.bottom / self.height,
            "hspace": _BETWEEN / self.panel,
        }


def _draw_panel(ax: Any, marks: list[Mark], column: PlotColumn, looks: Looks) -> None:
    _draw_scale(ax, marks)
    ax.set_xlim(*column.ends)
    for i, (_, left, right) in enumerate(column.variants):
        if i % 2 == 0:
            ax.axvspan(left - GAP / 2, right + GAP / 2, color=_BAND, zorder=0, linewidth=0)
    _draw_yardsticks(ax, marks, column)
    for kernel, (colour, shape) in looks.items():
        _draw_kernel(ax, [m for m in marks if m.kernel == kernel], colour, shape)
    failed = [m for m in marks if m.status == "fail"]
    if failed:
        ax.scatter(
            [m.middle for m in failed],
            [_height(ax, m) for m in failed],
            s=110,
            facecolors="none",
            edgecolors=_FAILED,
            linewidths=1.6,
            zorder=6,
            clip_on=False,
            gid="failed",
        )


def _draw_scale(ax: Any, marks: list[Mark]) -> None:
    """A log scale that holds every number, and twice the smallest at least."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    numbers = [x for m in marks for x in (m.rmse, m.floor, m.ideal)]
    logs = [math.log10(x) for x in numbers if 0 < x < math.inf] or [0.0]
    margin = max(0.15, 0.08 * (max(logs) - min(logs)))
    low, high = 10 ** (min(logs) - margin), 10 ** (max(logs) + margin)
    ax.set_yscale("log")
    ax.set_ylim(low, high)
    # Without a mark, as of softmax in fp8, there is nothing to read.
    ax.yaxis.set_major_locator(FixedLocator(_ticks(low, high) if marks else []))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.1e}".replace(".0e", "e")))
    ax.grid(axis="y", color="#DDDDDD", linewidth=0.6, zorder=1)
    ax.tick_params(axis="x", length=0)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between the two: as few to the power of ten as give at least three."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for digits in _TICKS:
        # As a reader would write them: 2e-05, and not 2 · 10⁻⁵ with a rounding error.
        numbers = [float(f"{digit}e{power}") for power in powers for digit in digits]
        ticks = [number for number in numbers if low <= number <= high]
        if len(ticks) >= _LEAST_TICKS:
            break
    return ticks


def _draw_yardsticks(ax: Any, marks: list[Mark], column: PlotColumn) -> None:
    """The floor as a line through a whole slot, the ideal kernel below each mark's own place."""
    floors = {
        (mark.floor, slot.extent)
        for slot in column.slots
        for mark in marks
        if slot.extent[0] < mark.middle < slot.extent[1]
    }
    ideals = {(mark.ideal, mark.reach) for mark in marks}
    for gid, lines, colour, width, dashes in (
        ("floor", floors, _FLOOR, 1.4, "solid"),
        ("ideal", ideals, _IDEAL, 1.2, (0, (2, 1))),
    ):
        known = sorted((at, reach) for at, reach in lines if 0 < at < math.inf)
        ax.hlines(
            [at for at, _ in known],
            [left for _, (left, _) in known],
            [right for _, (_, right) in known],
            colors=colour,
            linewidths=width,
            linestyles=[dashes],
            zorder=3,
            gid=gid,
        )


def _draw_kernel(ax: Any, marks: list[Mark], colour: str, shape: str) -> None:
    """One kernel's marks: filled, hollow where there is a doubt, a cross where it raised."""
    for raised, marker, gid in ((False, shape, "marks"), (True, "x", "raised")):
        some = [m for m in marks if (m.status == "error") == raised]
        if not some:
            continue
        hollow = [m.status in _DOUBTED for m in some]
        filled = {  # marks side by side may touch: white keeps them apart
            "edgecolors": [colour if h else "white" for h in hollow],
            "facecolors": ["white" if h else colour for h in hollow],
        }
        ax.scatter(
            [m.middle for m in some],
            [_height(ax, m) for m in some],
            s=26,
            marker=marker,
            linewidths=[1.5 if raised else 1.1 if h else 0.4 for h in hollow],
            zorder=5,
            clip_on=False,
            gid=gid,
            **({"color": colour} if raised else filled),
        )


def _height(ax: Any, mark: Mark) -> float:
    """On the lower edge what is exact or raised, on the upper one what is no number."""
    lowest, highest = map(float, ax.get_ylim())
    if mark.rmse == 0 or mark.status == "error":
        return lowest
    return mark.rmse if math.isfinite(mark.rmse) else highest


def _draw_variants(ax: Any, column: PlotColumn, *, tilted: bool) -> None:
    """Below the last panel: head arrangements, and under them the variants."""
    slots = column.slots
    ax.set_xticks([slot.left + 0.5 for slot in slots], [slot.heads for slot in slots])
    crowded = len(slots) > _MOST_ACROSS
    ax.tick_params(axis="x", labelsize=7.5, labelrotation=90 if crowded else 0, pad=3)
    for label, left, right in column.variants:
        ax.annotate(
            label,
            ((left + right) / 2, 0),
            (0, -30 if crowded else -18),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="right" if tilted else "center",
            va="top",
            rotation=32 if tilted else 0,
            rotation_mode="anchor" if tilted else "default",
            fontsize=9.5,
            annotation_clip=False,
        )


def _draw_titles(fig: Any, report: Report, height: float) -> None:
    lines = environment_lines(report)
    fig.text(
        _LEFT / _WIDTH,
        1 - 0.30 / height,
        "Distance from exact attention: RMSE of out against fp64, in the units of V",
        fontsize=13,
        fontweight="bold",
        va="center",
    )
    for y, line in ((height - 0.55, lines[0] if lines else ""), (0.15, report.command)):
        text = cut_line(line, _LINE)
        fig.text(_LEFT / _WIDTH, y / height, text, fontsize=8, color="#555555", va="center")


def draw_outside_legend(fig: Any) -> None:
    """Each label of any panel once, right of all of them."""
    handles: dict[str, Any] = {}
    for ax in fig.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    fig.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False)


def _draw_legend(fig: Any, shown: Plot, looks: Looks, height: float) -> None:
    from matplotlib.lines import Line2D

    def sign(**look: Any) -> Any:
        return Line2D([], [], **({"linestyle": "none"} | look))

    entries = {
        cut_line(kernel, _LONGEST) or "?": sign(marker=shape, color=colour, markersize=6)
        for kernel, (colour, shape) in looks.items()
    }
    statuses = {mark.status for panel in shown.panels for mark in panel.marks}
    entries["rounding floor"] = sign(linestyle="solid", color=_FLOOR, linewidth=1.4)
    entries["ideal kernel"] = sign(linestyle=(0, (2, 1)), color=_IDEAL, linewidth=1.2)
    hollow = {"color": "#555555", "markerfacecolor": "white"}
    if "fail" in statuses:
        entries["verdict: fail"] = sign(
            marker="o", markersize=10, markerfacecolor="none", color=_FAILED, markeredgewidth=1.6
        )
    if statuses & _DOUBTED:
        entries["warn, inconclusive"] = sign(marker="o", markersize=6, **hollow)
    if "error" in statuses:
        entries["raised, at the bottom"] = sign(marker="x", markersize=6, color="#555555")
    legend = fig.legend(
        list(entries.values()),
        [str(i) for i in range(len(entries))],  # a name that begins with _ would be left out
        loc="upper left",
        bbox_to_anchor=(
            1 - (_RIGHT - (0.12 if len(shown.columns) == 1 else 0.6)) / _WIDTH,
            1 - (_TOP - 0.1) / height,
        ),
        frameon=False,
        fontsize=9,
        labelspacing=0.55,
        handletextpad=0.5,
    )
    for text, name in zip(legend.get_texts(), entries, strict=True):
        text.set_text(name)
    if shown.unsupported:
        cells = "1 cell" if shown.unsupported == 1 else f"{shown.unsupported} cells"
        fig.text(
            1 - 0.15 / _WIDTH,
            0.15 / height,
            f"{cells} without a mark: unsupported",
            fontsize=8,
            color="#555555",
            ha="right",
            va="center",
        )
