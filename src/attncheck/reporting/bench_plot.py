"""The roofline plot of ``attncheck bench``: rates over operations a byte, and their limits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from attncheck.core.errors import UsageError
from attncheck.core.sanitize_text import one_line
from attncheck.records.problem_summary import problem_of
from attncheck.reporting.bench_document import bench_facts
from attncheck.reporting.rmse_plot import draw_outside_legend, draw_rings, kernel_looks

if TYPE_CHECKING:
    from attncheck.records.bench_report import BenchCell, BenchReport, BenchRow

_Points = dict[str, list[tuple[float, float, bool]]]  # by kernel: intensity, rate, wrong


def bench_figure(report: BenchReport) -> Any:
    """Return a ``matplotlib.figure.Figure``: a panel for each dtype and direction, log-log axes.

    A point is one kernel in one cell, at its operations a byte of q, k, v and out; a circle around
    it means that it is wrong. The line is the limit by the copy and matmul measured in the run.

    Raises:
        UsageError: if nothing was timed.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    panels = _panels(report)
    if not panels:
        raise UsageError("nothing was timed: there is nothing to plot.")
    fig = Figure(figsize=(6.4 * len(panels) + 2.4, 5.6), layout="constrained")
    kernels = list(dict.fromkeys(name for points in panels.values() for name in points))
    looks = kernel_looks(kernels)
    row = fig.subplots(1, len(panels), squeeze=False)[0]
    for ax, ((dtype, direction), points) in zip(row, panels.items(), strict=True):
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        # As plain numbers, since matplotlib's powers need mathematics, which STYLE turns off.
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
            axis.set_minor_locator(NullLocator())
        ax.set_title(f"{dtype} · {direction}", loc="left", fontsize=10, fontweight="bold")
        ax.set_xlabel("operations a byte of q, k, v and out")
        ax.set_ylabel("TFLOP/s")
        ax.grid(color="#DDDDDD", linewidth=0.6)
        _draw_roof(ax, points, report.matmul.get(dtype, math.inf), report.copy or math.inf)
        for name, values in points.items():
            colour, shape = looks[name]
            xs, ys = [x for x, _, _ in values], [y for _, y, _ in values]
            ax.scatter(xs, ys, s=26, c=colour, marker=shape, label=one_line(name), zorder=3)
            wrong = [(x, y) for x, y, is_wrong in values if is_wrong]
            draw_rings(ax, wrong, s=120, linewidths=1.6, zorder=4, gid="wrong")
    draw_outside_legend(fig)
    fig.suptitle("\n".join(bench_facts(report)), x=0.01, ha="left", fontsize=8)
    return fig


def _panels(report: BenchReport) -> dict[tuple[str, str], _Points]:
    panels: dict[tuple[str, str], _Points] = {}
    for cell in report.cells:
        for row in cell.rows:
            for direction, x, y in _rates(cell, row):
                panel = panels.setdefault((problem_of(cell).dtype, direction), {})
                point = (x, y / 1e12, row.record.status == "fail")
                panel.setdefault(row.record.kernel, []).append(point)
    return panels


def _rates(cell: BenchCell, row: BenchRow) -> list[tuple[str, float, float]]:
    """Return direction, operations a byte and operations a second of each timed direction."""
    rates = []
    if row.forward is not None:
        flops = cell.work.forward_flops
        rates.append(("forward", flops / cell.work.forward_bytes, flops / row.forward.median))
    if row.both is not None:
        flops = cell.work.flops(backward=True)
        # A backward reads q, k, v, out and dout, and writes as much as it reads of the first three.
        rates.append(
            ("forward and backward", flops / (3 * cell.work.forward_bytes), flops / row.both.median)
        )
    return rates


def _draw_roof(ax: Any, points: _Points, matmul: float, copy: float) -> None:
    xs = [x for values in points.values() for x, _, _ in values]
    ends = [min(xs) / 2, max(xs) * 2]
    if math.isfinite(matmul / copy) and ends[0] < matmul / copy < ends[1]:
        ends.insert(1, matmul / copy)
    roof = [min(copy * x, matmul) / 1e12 for x in ends]
    if all(map(math.isfinite, roof)):
        ax.plot(ends, roof, color="#404040", linewidth=1.4, label="measured limit", gid="roof")
