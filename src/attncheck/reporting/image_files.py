"""Plots of reports as image files, and figures of a Record's error over tiles, heads and rows.

matplotlib, the extra ``plot``, is imported only when something is drawn.
"""

from __future__ import annotations

import io
import math
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from attncheck.core.errors import UsageError
from attncheck.core.files import check_names, write_files
from attncheck.core.judgement import share_text
from attncheck.core.sanitize_text import cut_line, one_line
from attncheck.records.bench_report import BenchReport
from attncheck.records.model_report import ModelReport
from attncheck.records.problem_summary import problem_of
from attncheck.records.record import Diagnosis, ErrorMap, Record, Report, TileMap
from attncheck.reporting.bench_plot import bench_figure
from attncheck.reporting.diagnosis_text import explanation_facts
from attncheck.reporting.model_plot import model_figure
from attncheck.reporting.number_text import plural
from attncheck.reporting.rmse_plot import STYLE, figure

if TYPE_CHECKING:
    from collections.abc import Sequence

Plotted: TypeAlias = Report | BenchReport | ModelReport | Record

SUFFIXES = (".png", ".svg")
INSTALL = "pip install 'attncheck[plot]'"

_DPI = 200  # gives 3200 × 1800 pixels or more; half of that is still readable


def check_plots(paths: Sequence[str]) -> None:
    """Raise UsageError unless a figure could be written to each of ``paths`` now.

    Each path must end in one of ``SUFFIXES``, its folder must be writable, and matplotlib must be
    installed. Nothing is drawn, and no file is left behind.
    """
    for path in map(Path, paths):
        if path.suffix.lower() not in SUFFIXES:
            raise UsageError(
                f"plot {one_line(str(path))!r} does not end in {' or '.join(SUFFIXES)}: "
                "the end of its name says what it is."
            )
    if paths and find_spec("matplotlib") is None:
        raise UsageError(f"a plot needs matplotlib, which is not installed: {INSTALL}.")
    for path in map(Path, paths):
        check_names(path.parent, [path.name], what="plots", instead="--plot")


def write_plots(plotted: Plotted, paths: Sequence[str], *, kernel: str = "") -> None:
    """Draw a report, or the places of a Record's error, to each of ``paths``.

    Each file atomically replaces an older one. For the arguments see ``image``.

    Raises:
        UsageError: as ``check_plots``, if no cell of the report was measured, and for a Record that
            holds no Problem.
    """
    check_plots(paths)
    files = {one: image(plotted, one.suffix.lower(), kernel=kernel) for one in map(Path, paths)}
    for path, data in files.items():
        write_files({path.name: data}, path.parent, what="plots", instead="--plot")


def image(plotted: Plotted, suffix: str, *, kernel: str = "") -> bytes:
    """Return an image of a report or a Record, the same bytes for the same one and matplotlib.

    Args:
        plotted: A report, or a Record for which ``is_mapped`` is true.
        suffix: One of ``SUFFIXES``.
        kernel: The kernel and device of a Record, in a line.

    Raises:
        UsageError: if no cell of the report was measured.
    """
    import matplotlib as mpl

    # matplotlib's default settings, so that a user's matplotlibrc changes no image.
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        match plotted:
            case Record():
                fig = error_figure(plotted, kernel=kernel)
            case Report():
                fig = figure(plotted)
            case BenchReport():
                fig = bench_figure(plotted)
            case ModelReport():
                fig = model_figure(plotted)
        file = io.BytesIO()
        # Without date and version, which would make equal images differ.
        metadata = {"Date": None, "Creator": None} if suffix == ".svg" else {"Software": None}
        fig.savefig(file, format=suffix[1:], dpi=_DPI, metadata=metadata)
    return file.getvalue()


_PANEL, _HEIGHT = 7.6, 7.2  # inches
_LEFT, _TOP, _BOTTOM, _BETWEEN, _RIGHT = 0.8, 1.35, 0.95, 1.5, 0.7
_LETTER = 0.098  # average width in inches of a letter at 10 points
_MOST_TICKS = 17
_LEAST_TICK_GAP = 0.6  # of the usual distance between ticks, below which labels would touch
_MOST_NUMBERS = 24  # cells side by side up to which each has a readable number
_DARK = 0.55  # part of the colour scale above which numbers are white
_DECADES = 2  # powers of ten that colours distinguish, above the allowance and below


class _Panel(NamedTuple):
    """The contents of one map."""

    title: str
    # across, down: names of the axes.
    across: str
    down: str
    # edges_across, edges_down: edges of the cells, in units of the axes.
    edges_across: list[int]
    edges_down: list[int]
    shades: list[list[float]]  # place of each cell on the colour scale
    texts: list[list[str]]  # number in each cell
    colours: tuple[str, float, float]  # matplotlib's name of the scale, and its ends
    ticks: dict[float, str]  # labels of the colour bar, by place on the scale
    unit: str  # label of the colour bar


def is_mapped(record: Record) -> bool:
    """Return whether the places of the error of ``record`` are known."""
    return bool(_panels(record))


def error_figure(record: Record, *, kernel: str) -> Any:
    """Return a ``matplotlib.figure.Figure`` of the places of a failure's error.

    One panel shows the tiles of rows and keys that cause it, one the heads and rows that are
    wrong; a panel is left out if the Record has no data for it.

    Args:
        record: A record for which ``is_mapped`` is true.
        kernel: The kernel and device, in a line: ``mine.py::attention on cuda``.

    Raises:
        UsageError: for a Record that holds no Problem.
    """
    from matplotlib.figure import Figure

    panels = _panels(record)
    width = _LEFT + len(panels) * _PANEL + (len(panels) - 1) * _BETWEEN + _RIGHT
    fig = Figure(figsize=(width, _HEIGHT))
    grid = {
        "left": _LEFT / width,
        "right": 1 - _RIGHT / width,
        "top": 1 - _TOP / _HEIGHT,
        "bottom": _BOTTOM / _HEIGHT,
        "wspace": _BETWEEN / _PANEL,
    }
    row = fig.subplots(1, len(panels), squeeze=False, gridspec_kw=grid)[0]
    for ax, panel in zip(row, panels, strict=True):
        _draw(fig, ax, panel)
    lines = [(problem_of(record).full_line, 0.32, 13.0, "bold"), (kernel, 0.62, 9.0, "normal")]
    likely = list(explanation_facts(record.diagnosis))[:1]
    lines += [(f"{name}: {text}", 0.86, 9.0, "normal") for name, text in likely]
    for text, below, size, weight in lines:
        letters = int((width - 1.5 * _LEFT) / (_LETTER * size / 10))
        y = 1 - below / _HEIGHT
        line = cut_line(text, letters)
        fig.text(_LEFT / width, y, line, fontsize=size, fontweight=weight, va="center")
    return fig


def _panels(record: Record) -> list[_Panel]:
    diagnosis, panels = record.diagnosis, []
    if isinstance(diagnosis, Diagnosis) and isinstance(diagnosis.tiles, TileMap):
        panels.append(_by_tiles(diagnosis.tiles, record))
    if isinstance(record.error_map, ErrorMap):
        panels.append(_by_heads(record.error_map, record))
    return panels


def _by_tiles(tiles: TileMap, record: Record) -> _Panel:
    problem = problem_of(record)
    cell = f"{plural(tiles.rows, 'row')} × {plural(tiles.keys, 'key')}"
    return _Panel(
        title=f"Where it is from: tiles of {cell}",
        across="key",
        down="query row",
        edges_across=_edges(len(tiles.values[0]), tiles.keys, problem.kv),
        edges_down=_edges(len(tiles.values), tiles.rows, problem.query),
        shades=[[100 * share for share in line] for line in tiles.values],
        texts=[[_percent(share) for share in line] for line in tiles.values],
        colours=("OrRd", 0.0, 100.0),
        ticks={float(share): f"{share} %" for share in range(0, 101, 20)},
        unit="by how much weights are off, in % of the worst tile",
    )


def _by_heads(error_map: ErrorMap, record: Record) -> _Panel:
    problem = problem_of(record)
    heads, rows = plural(error_map.heads, "head"), plural(error_map.rows, "row")
    powers = range(-_DECADES, _DECADES + 1)
    names = {-_DECADES: "≤ 0.01", -1: "0.1", 0: "1", 1: "10", _DECADES: "≥ 100"}
    return _Panel(
        title=f"Where it shows: out, by {heads} × {rows}",
        across="query row",
        down="query head",
        edges_across=_edges(len(error_map.values[0]), error_map.rows, problem.query),
        edges_down=_edges(len(error_map.values), error_map.heads, problem.heads),
        shades=[[_decades(ratio) for ratio in line] for line in error_map.values],
        texts=[[_ratio(ratio) for ratio in line] for line in error_map.values],
        colours=("RdBu_r", float(-_DECADES), float(_DECADES)),
        ticks={float(power): names[power] for power in powers},
        unit="largest |error| ÷ what is allowed there",
    )


def _draw(fig: Any, ax: Any, panel: _Panel) -> None:
    name, low, high = panel.colours
    mesh = ax.pcolormesh(
        panel.edges_across,
        panel.edges_down,
        panel.shades,
        cmap=name,
        vmin=low,
        vmax=high,
        edgecolors="#BBBBBB",
        linewidth=0.4,
        gid="cells",
    )
    ax.set_xlim(panel.edges_across[0], panel.edges_across[-1])
    ax.set_ylim(panel.edges_down[-1], panel.edges_down[0])  # rows downwards, as in a matrix
    ax.set_title(panel.title, loc="left", fontsize=10, fontweight="bold", pad=6)
    ax.set_xlabel(panel.across)
    ax.set_ylabel(panel.down)
    ax.set_xticks(*_ticks(panel.edges_across))
    ax.set_yticks(*_ticks(panel.edges_down))
    _write_numbers(ax, panel)
    bar = fig.colorbar(mesh, ax=ax, fraction=0.045, pad=0.02)
    bar.set_ticks(list(panel.ticks), labels=list(panel.ticks.values()))
    bar.set_label(panel.unit)


def _write_numbers(ax: Any, panel: _Panel) -> None:
    """Write its number into each cell, unless there are too many cells."""
    down, across = len(panel.texts), len(panel.texts[0])
    if max(down, across) > _MOST_NUMBERS:
        return
    _, low, high = panel.colours
    diverging = low < 0
    size = max(5.0, min(10.0, 120 / max(across, down / 2)))
    for i, line in enumerate(panel.texts):
        for j, text in enumerate(line):
            shade = (panel.shades[i][j] - low) / (high - low)
            dark = abs(2 * shade - 1) > _DARK + 0.1 if diverging else shade > _DARK
            ax.text(
                sum(panel.edges_across[j : j + 2]) / 2,
                sum(panel.edges_down[i : i + 2]) / 2,
                text,
                ha="center",
                va="center",
                fontsize=size,
                color="white" if dark else "#222222",
            )


def _edges(cells: int, step: int, size: int) -> list[int]:
    """Return the edges of ``cells`` cells of ``step``; the last cell may be shorter."""
    edges = [step * cell for cell in range(cells + 1)]
    if edges[-2] < size <= edges[-1]:  # a relation's runs may have another size
        edges[-1] = size
    return edges


def _ticks(edges: Sequence[int]) -> tuple[list[float], list[str]]:
    """Return as many places and labels of ticks as have room.

    Ticks are between cells, but in the middle of cells that hold a single row, key or head.
    """
    every = math.ceil(len(edges) / _MOST_TICKS)
    if edges[-1] - edges[0] == len(edges) - 1:
        shown = edges[:-1:every]
        return [number + 0.5 for number in shown], [str(number) for number in shown]
    shown, least = edges[:-1:every], _LEAST_TICK_GAP * (edges[1] - edges[0]) * every
    if edges[-1] - shown[-1] < least:
        shown = shown[:-1]
    shown = [*shown, edges[-1]]
    return [float(number) for number in shown], [str(number) for number in shown]


def _decades(ratio: float) -> float:
    """Return the power of ten of ``ratio``, clipped to the scale; its upper end for NaN."""
    if ratio != ratio:  # noqa: PLR0124  # NaN
        return float(_DECADES)
    return max(-_DECADES, min(_DECADES, math.log10(ratio))) if ratio > 0 else float(-_DECADES)


def _percent(share: float) -> str:
    return f"{100 * share:.0f}" if share >= 0.01 else "·"


def _ratio(ratio: float) -> str:
    if not math.isfinite(ratio):
        return "∞" if ratio > 0 else "NaN"
    return share_text(ratio) if ratio >= 100 else f"{ratio:.{0 if ratio >= 10 else 1}f}"
