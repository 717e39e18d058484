"""The plot of ``attncheck model``: each layer's drift ÷ that of right kernels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from attncheck.core.errors import UsageError
from attncheck.core.sanitize_text import one_line
from attncheck.reporting.model_document import model_facts
from attncheck.reporting.rmse_plot import Looks, draw_outside_legend, draw_rings, kernel_looks

if TYPE_CHECKING:
    from attncheck.records.model_report import Drift, ModelRecord, ModelReport, Phase

_PHASES: tuple[Phase, ...] = ("prefill", "decode")
_BAND, _MEDIAN = "#E4E4E4", "#404040"
_LEAST = (0.8, 1.25)  # range that a y axis shows at least, so that rounding errors look small
_FINE = (0.8, 0.9, 1.0, 1.1, 1.2)  # ticks of an axis with exactly that range


def model_figure(report: ModelReport) -> Any:
    """Return a ``matplotlib.figure.Figure``: a column for each model, rows for prefill and decode.

    Points are drifts of the state after each layer and of the logits ÷ the median of right
    kernels; above the shade they are larger than all of those. A circle is the first failed call.

    Raises:
        UsageError: if no kernel ran in a model.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    ran = [record for record in report.records if record.drifts]
    models = list(dict.fromkeys(record.model for record in ran))
    if not models:
        raise UsageError("no kernel took a model: there is nothing to plot.")
    looks = kernel_looks(list(dict.fromkeys(record.kernel for record in ran)))
    fig = Figure(figsize=(3.4 * len(models) + 2.2, 6.4), layout="constrained")
    grid = fig.subplots(len(_PHASES), len(models), squeeze=False, sharex="col", sharey=True)
    ratios = [over for one in ran for phase in _PHASES for over in _ratios(one, phase)]
    low, high = min(*_LEAST, *ratios), max(*_LEAST, *ratios)
    ticks = FixedLocator(_FINE) if (low, high) == _LEAST else LogLocator(subs=(1, 2, 5))
    for column, model in enumerate(models):
        for row, phase in enumerate(_PHASES):
            ax, records = grid[row][column], [one for one in ran if one.model == model]
            ax.set_title(f"{one_line(model)} · {phase}", loc="left", fontsize=10, fontweight="bold")
            if not _layers(records[0], phase):
                ax.set_axis_off()
                ax.text(0, 0.9, "nothing is decoded", transform=ax.transAxes, color="#707070")
                continue
            ax.set_yscale("log")
            ax.set_ylim(low / 1.02, high * 1.02)
            ax.yaxis.set_major_locator(ticks)
            ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}×"))
            ax.yaxis.set_minor_locator(NullLocator())
            ax.tick_params(labelbottom=True)
            ax.set_xlabel("layer")
            _draw(ax, records, phase, looks, low / 2)
    draw_outside_legend(fig)
    fig.supylabel("drift from fp64 ÷ the median of right kernels", fontsize=9)
    fig.suptitle("\n".join(model_facts(report)), x=0.01, ha="left", fontsize=8)
    return fig


def _layers(record: ModelRecord, phase: Phase) -> list[Drift]:
    return [one for one in record.drifts if one.phase == phase and one.where != "KL"]


def _ratios(record: ModelRecord, phase: Phase) -> list[float]:
    """Return positive, finite ratios of the kernel's and the furthest right kernel's drifts."""
    pairs = [(each, one.floor) for one in _layers(record, phase) for each in (one.error, one.most)]
    ratios = [each / floor for each, floor in pairs if floor]
    return [ratio for ratio in ratios if 0 < ratio < math.inf]


def _draw(ax: Any, records: list[ModelRecord], phase: Phase, looks: Looks, bottom: float) -> None:
    places = _layers(records[0], phase)
    xs = range(len(places))
    most = [one.most / one.floor if one.floor else 1.0 for one in places]
    label = "no further than the furthest right kernel"
    ax.fill_between(xs, bottom, most, color=_BAND, linewidth=0, label=label)
    ax.axhline(1.0, color=_MEDIAN, linewidth=0.8, label="median of the right kernels")
    for record in records:
        colour, shape = looks[record.kernel]
        drifts = [one.error / one.floor if one.floor else 1.0 for one in _layers(record, phase)]
        ax.plot(
            xs,
            drifts,
            color=colour,
            marker=shape,
            markersize=3 if record.for_comparison else 5,
            linewidth=0.9 if record.for_comparison else 1.8,
            linestyle=":" if record.for_comparison else "-",
            label=one_line(record.kernel),
        )
        fault = record.fault
        if fault is not None and (phase == "decode") == (fault.step > 0) and not fault.backward:
            draw_rings(ax, [(fault.layer, drifts[fault.layer])], s=120, zorder=4, gid="wrong")
    ax.set_xticks(xs, [one.where.removeprefix("layer ") for one in places])
