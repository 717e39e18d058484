"""The plot of ``attncheck rmse``: a panel for each dtype, RMSE on a log scale.

The first half computes as plain data which marks are drawn where; the second half draws them with
matplotlib (the extra ``plot``), which is imported only when something is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attncheck.core.errors import UsageError
from attncheck.core.sanitize_text import cut_line, one_line
from attncheck.records.problem_summary import problem_of
from attncheck.records.record import FAILED_STATUSES, Record, Report, Status, gradients_of
from attncheck.reporting.measurement_document import environment_lines
from attncheck.reporting.record_text import JUDGED

GAP = 0.3  # space between variants; a slot is 1 wide
_MARKS_WIDTH = 0.84  # part of a slot's width over which its marks spread
_LONGEST_VARIANT = 28  # characters of a variant's name; a kernel's name may have _LONGEST


@dataclass(frozen=True, slots=True)
class Slot:
    """Place on the x axis of one variant and head arrangement, the same in every panel."""

    label: str  # the variant, with the sizes that differ from the panel's title
    heads: str  # ``MHA``, ``GQA``, ``MQA``; ``rows`` of a softmax
    left: float  # its left end on the x axis; it is 1 wide
    kernels: tuple[str, ...]  # kernels with a mark here in any panel, in the report's order

    @property
    def extent(self) -> tuple[float, float]:
        """Return the left and right end of the range in which its marks are drawn."""
        return self.left + (1 - _MARKS_WIDTH) / 2, self.left + (1 + _MARKS_WIDTH) / 2

    def places(self) -> dict[str, tuple[float, float]]:
        """Return for each kernel the left and right end of its share of the width."""
        step = _MARKS_WIDTH / max(1, len(self.kernels))
        begin, _ = self.extent
        return {k: (begin + i * step, begin + (i + 1) * step) for i, k in enumerate(self.kernels)}


@dataclass(frozen=True, slots=True)
class Mark:
    """The result of one kernel in one cell, and where it is drawn."""

    kernel: str
    operation: str
    reach: tuple[float, float]  # left and right end of its room on the x axis
    status: Status
    rmse: float = math.nan  # NaN where the kernel raised
    floor: float = math.nan  # RMSE of the exact result correctly rounded; NaN where it raised
    ideal: float = math.nan  # RMSE of the ideal kernel at its tiles; NaN where it raised

    @property
    def middle(self) -> float:
        """Return the position of the mark on the x axis."""
        return sum(self.reach) / 2


@dataclass(frozen=True, slots=True)
class PlotColumn:
    """The x axis of one operation, shared by all panels: its slots from left to right.

    Attention and softmax have columns side by side with scales of their own, since softmax
    weights are much smaller than attention outputs.
    """

    operation: str
    slots: tuple[Slot, ...]

    @property
    def variants(self) -> tuple[tuple[str, float, float], ...]:
        """Return each label with its left and right end."""
        extents: dict[str, tuple[float, float]] = {}
        for slot in self.slots:
            left, _ = extents.get(slot.label, (slot.left, 0.0))
            extents[slot.label] = (left, slot.left + 1)
        return tuple((label, *ends) for label, ends in extents.items())

    @property
    def ends(self) -> tuple[float, float]:
        """Return both ends of the axis: half a gap beyond the slots, at least two slots apart."""
        used = self.slots[-1].left + 1
        spare = max(0.0, 2 - used) / 2
        return -GAP / 2 - spare, used + GAP / 2 + spare


@dataclass(frozen=True, slots=True)
class Plot:
    """Panels one below the other, and the x axes and kernels that they share."""

    columns: tuple[PlotColumn, ...]  # the x axes, one for each operation
    panels: dict[str, list[Mark]]  # title, with dtype, distribution and seed → its marks
    kernels: tuple[str, ...]  # every kernel with a mark, in the report's order
    unsupported: int  # number of cells without a mark because the kernel does not support them


def measured(report: Report) -> bool:
    """Return whether any cell of ``report`` has numbers."""
    return any(record.status in JUDGED and record.out for record in report.records)


def plot_of(report: Report) -> Plot:
    """Return the contents of a plot of ``report``.

    Raises:
        UsageError: if no cell of the report was measured, or if the report is of several machines
            or has gradients.
    """
    if not measured(report):
        raise UsageError("the report has no cell that was measured: there is nothing to plot.")
    # Marks do not show the machine, so numbers of two machines would look like one measurement.
    if len(report.environments) > 1:
        raise UsageError(
            f"the reports are of {len(report.environments)} machines: a plot shows one. Plot each."
        )
    if any(map(gradients_of, report.records)):
        raise UsageError(
            "the report has gradients, which a plot does not show: plot one without --backward."
        )
    records = [
        r for r in report.records if r.status in FAILED_STATUSES or (r.status in JUDGED and r.out)
    ]
    # The first shape of each operation; titles show attention's, or softmax's if it is alone.
    usual: dict[str, str] = {}
    for record in records:
        usual.setdefault(problem_of(record).operation, problem_of(record).shape)
    # Kernels in the order of the command line, then any others.
    names = dict.fromkeys([*report.kernels, *(record.kernel for record in report.records)])
    order = {name: i for i, name in enumerate(names)}
    columns = tuple(_column(name, records, usual, order) for name in usual)
    places = {(slot.label, slot.heads): slot.places() for c in columns for slot in c.slots}
    panels: dict[str, list[Mark]] = {}
    for record in records:
        problem, out = problem_of(record), record.out
        shape = usual.get("attention", usual.get(problem.operation, ""))
        words = (problem.dtype, shape, problem.distribution, f"seed {problem.seed}")
        title = " · ".join(map(one_line, words))
        reach = places[_key(record, usual)][record.kernel]
        numbers = (out.rmse, out.floor_rmse, out.ideal_rmse) if out else ()
        status = record.status if out else "error"
        mark = Mark(record.kernel, problem.operation, reach, status, *numbers)
        panels.setdefault(title, []).append(mark)
    return Plot(
        columns=columns,
        panels=panels,
        kernels=tuple(sorted({record.kernel for record in records}, key=order.__getitem__)),
        unsupported=sum(record.status == "unsupported" for record in report.records),
    )


def _key(record: Record, usual: dict[str, str]) -> tuple[str, str]:
    """Return the label and the heads of a record's slot."""
    problem = problem_of(record)
    label = cut_line(record.variant, _LONGEST_VARIANT) or "?"
    usual_sizes = usual[problem.operation].split()
    others = " ".join(size for size in problem.shape.split() if size not in usual_sizes)
    return (f"{label} ({others})" if others else label), one_line(record.heads) or "rows"


def _column(
    operation: str, records: list[Record], usual: dict[str, str], order: dict[str, int]
) -> PlotColumn:
    """Return the x axis of an operation: slots in the report's order, grouped by label."""
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


# Okabe and Ito's colours for colour-blind readers, without yellow, which is hard to see on white.
# Seven colours and nine shapes have no common divisor, so that 63 kernels look different.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_SHAPES = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_FAILED, _FLOOR, _IDEAL, _BAND = "#C00000", "#404040", "#8A8A8A", "#F3F3F3"

_WIDTH, _LEAST_HEIGHT = 16.0, 9.0  # inches
_LEFT, _RIGHT, _TOP, _BETWEEN, _PANEL = 0.85, 2.7, 0.95, 0.42, 1.9  # inches
_LEVEL, _TILTED = 0.95, 1.6  # margin in inches below the panels for level and tilted variant names
_COLUMN_GAP = 0.015  # space between attention and softmax, in units of their mean width
_LONGEST, _LINE = 24, 190  # characters of a kernel's name, and of a line above or below panels
_TICKS = ((1,), (1, 2, 5), tuple(range(1, 10)), tuple(1 + i / 2 for i in range(18)))
_LEAST_TICKS = 3  # on a y axis
_MOST_ACROSS, _MOST_LEVEL = 44, 10  # most slots and variants whose labels fit side by side
_DOUBTED: frozenset[Status] = frozenset({"warn", "inconclusive"})
STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "text.parse_math": False,  # a $ in a kernel's name must not start mathematics
    "svg.hashsalt": "attncheck",  # so that the same report gives the same bytes
}
"""matplotlib's settings for a figure."""


Looks = dict[str, tuple[str, str]]
"""Colour and shape of the marks of each kernel."""


def kernel_looks(kernels: Sequence[str]) -> Looks:
    """Return a colour and a marker shape for each of ``kernels``."""
    return {
        name: (_COLOURS[i % len(_COLOURS)], _SHAPES[i % len(_SHAPES)])
        for i, name in enumerate(kernels)
    }


def figure(report: Report) -> Any:
    """Return a ``matplotlib.figure.Figure`` of ``report``, 16 inches wide and 9 or more high.

    There is one panel for each dtype (and distribution and seed). The x axis shows variants with
    their head arrangements, the y axis the RMSE of out against exact attention in fp64, in the
    units of the values. Every cell that was measured or raised is one mark.

    Raises:
        UsageError: if no cell of the report was measured.
    """
    from matplotlib.figure import Figure

    plot = plot_of(report)
    tilted = sum(len(column.variants) for column in plot.columns) > _MOST_LEVEL
    # The page grows if its panels would get too small.
    bottom, count = _TILTED if tilted else _LEVEL, len(plot.panels)
    margins = _TOP + bottom + (count - 1) * _BETWEEN
    height = max(_LEAST_HEIGHT, margins + count * _PANEL)
    grid = {
        "left": _LEFT / _WIDTH,
        "right": 1 - _RIGHT / _WIDTH,
        "top": 1 - _TOP / height,
        "bottom": bottom / height,
        "hspace": _BETWEEN / ((height - margins) / count),
        "wspace": _COLUMN_GAP,
        "width_ratios": [column.ends[1] - column.ends[0] for column in plot.columns],
    }
    fig = Figure(figsize=(_WIDTH, height))
    rows = fig.subplots(count, len(plot.columns), sharex="col", squeeze=False, gridspec_kw=grid)
    looks = kernel_looks(plot.kernels)
    for row, (title, of_panel) in zip(rows, plot.panels.items(), strict=True):
        row[0].set_title(title, loc="left", fontsize=10, fontweight="bold", pad=4)
        row[0].set_ylabel("RMSE of out")
        for ax, column in zip(row, plot.columns, strict=True):
            marks = [mark for mark in of_panel if mark.operation == column.operation]
            _draw_panel(ax, marks, column, looks)
        for ax in row[1:]:
            ax.yaxis.tick_right()
    for ax, column in zip(rows[-1], plot.columns, strict=True):
        _draw_variants(ax, column, tilted=tilted)
    _draw_titles(fig, report, height)
    _draw_legend(fig, plot, looks, height)
    return fig


def _draw_panel(ax: Any, marks: list[Mark], column: PlotColumn, looks: Looks) -> None:
    _draw_scale(ax, marks)
    ax.set_xlim(*column.ends)
    for i, (_, left, right) in enumerate(column.variants):
        if i % 2 == 0:
            ax.axvspan(left - GAP / 2, right + GAP / 2, color=_BAND, zorder=0, linewidth=0)
    _draw_yardsticks(ax, marks, column)
    for kernel, (colour, shape) in looks.items():
        _draw_kernel(ax, [m for m in marks if m.kernel == kernel], colour, shape)
    failed = [(m.middle, _height(ax, m)) for m in marks if m.status == "fail"]
    draw_rings(ax, failed, s=110, linewidths=1.6, zorder=6, clip_on=False, gid="failed")


def _draw_scale(ax: Any, marks: list[Mark]) -> None:
    """Set up a log y axis that holds every number, with its ticks and grid."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    numbers = [x for m in marks for x in (m.rmse, m.floor, m.ideal)]
    logs = [math.log10(x) for x in numbers if 0 < x < math.inf] or [0.0]
    margin = max(0.15, 0.08 * (max(logs) - min(logs)))
    low, high = 10 ** (min(logs) - margin), 10 ** (max(logs) + margin)
    ax.set_yscale("log")
    ax.set_ylim(low, high)
    # A panel without marks, such as softmax in fp8, needs no ticks.
    ax.yaxis.set_major_locator(FixedLocator(_ticks(low, high) if marks else []))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.1e}".replace(".0e", "e")))
    ax.grid(axis="y", color="#DDDDDD", linewidth=0.6, zorder=1)
    ax.tick_params(axis="x", length=0)


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers from low to high: the fewest per decade that give three or more."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for digits in _TICKS:
        # Parsed from text, since 2 * 10**-5 would have a rounding error and 2e-05 has none.
        numbers = [float(f"{digit}e{power}") for power in powers for digit in digits]
        ticks = [number for number in numbers if low <= number <= high]
        if len(ticks) >= _LEAST_TICKS:
            break
    return ticks


def _draw_yardsticks(ax: Any, marks: list[Mark], column: PlotColumn) -> None:
    """Draw the rounding floor across each slot, and the ideal kernel across each mark's room."""
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
        drawable = sorted((at, reach) for at, reach in lines if 0 < at < math.inf)
        ax.hlines(
            [at for at, _ in drawable],
            [left for _, (left, _) in drawable],
            [right for _, (_, right) in drawable],
            colors=colour,
            linewidths=width,
            linestyles=[dashes],
            zorder=3,
            gid=gid,
        )


def _draw_kernel(ax: Any, marks: list[Mark], colour: str, shape: str) -> None:
    """Draw a kernel's marks: filled, hollow where the status is doubtful, a cross if it raised."""
    for raised, marker, gid in ((False, shape, "marks"), (True, "x", "raised")):
        chosen = [m for m in marks if (m.status == "error") == raised]
        if not chosen:
            continue
        hollow = [m.status in _DOUBTED for m in chosen]
        filled = {  # a white edge separates marks that touch
            "edgecolors": [colour if h else "white" for h in hollow],
            "facecolors": ["white" if h else colour for h in hollow],
        }
        ax.scatter(
            [m.middle for m in chosen],
            [_height(ax, m) for m in chosen],
            s=26,
            marker=marker,
            linewidths=[1.5 if raised else 1.1 if h else 0.4 for h in hollow],
            zorder=5,
            clip_on=False,
            gid=gid,
            **({"color": colour} if raised else filled),
        )


def _height(ax: Any, mark: Mark) -> float:
    """Return the y of a mark: the lower edge if exact or raised, the upper one if not finite."""
    lowest, highest = map(float, ax.get_ylim())
    if mark.rmse == 0 or mark.status == "error":
        return lowest
    return mark.rmse if math.isfinite(mark.rmse) else highest


def _draw_variants(ax: Any, column: PlotColumn, *, tilted: bool) -> None:
    """Label the head arrangements below the last panel, and the variants below those."""
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


def draw_rings(ax: Any, places: Sequence[tuple[float, float]], **look: Any) -> None:
    """Draw a ring around each of ``places``, at which something is wrong."""
    if places:
        ax.scatter(*zip(*places, strict=True), facecolors="none", edgecolors=_FAILED, **look)


def draw_outside_legend(fig: Any) -> None:
    """Draw a legend right of all panels, with each label once."""
    handles: dict[str, Any] = {}
    for ax in fig.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    fig.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False)


def _draw_legend(fig: Any, plot: Plot, looks: Looks, height: float) -> None:
    from matplotlib.lines import Line2D

    def sign(**look: Any) -> Any:
        return Line2D([], [], **({"linestyle": "none"} | look))

    entries = {
        cut_line(kernel, _LONGEST) or "?": sign(marker=shape, color=colour, markersize=6)
        for kernel, (colour, shape) in looks.items()
    }
    statuses = {mark.status for marks in plot.panels.values() for mark in marks}
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
        [str(i) for i in range(len(entries))],  # matplotlib leaves out names that begin with _
        loc="upper left",
        bbox_to_anchor=(
            1 - (_RIGHT - (0.12 if len(plot.columns) == 1 else 0.6)) / _WIDTH,
            1 - (_TOP - 0.1) / height,
        ),
        frameon=False,
        fontsize=9,
        labelspacing=0.55,
        handletextpad=0.5,
    )
    for text, name in zip(legend.get_texts(), entries, strict=True):
        text.set_text(name)
    if plot.unsupported:
        cells = "1 cell" if plot.unsupported == 1 else f"{plot.unsupported} cells"
        fig.text(
            1 - 0.15 / _WIDTH,
            0.15 / height,
            f"{cells} without a mark: unsupported",
            fontsize=8,
            color="#555555",
            ha="right",
            va="center",
        )
