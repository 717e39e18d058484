"""A report, or the error of one Record, as an image in PNG or SVG.

matplotlib, the extra ``plot``, is imported when one is drawn and not before.
"""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attncheck.core.errors import UsageError
from attncheck.core.sanitize_text import one_line
from attncheck.reporting.error_figure import error_figure
from attncheck.reporting.files import check_names, write_files
from attncheck.reporting.marks import measured
from attncheck.reporting.plot_figure import STYLE, figure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attncheck.records.record import Record, Report

__all__ = [
    "INSTALL",
    "SUFFIXES",
    "check_plots",
    "drawn",
    "error_drawn",
    "measured",
    "write_error_plots",
    "write_plots",
]

SUFFIXES = (".png", ".svg")
INSTALL = "pip install 'attncheck[plot]'"

_DPI = 200  # 3200 × 1800 pixels or more; half of them are enough to read it


def check_plots(paths: Sequence[str]) -> None:
    """Raise UsageError unless a figure could be written to each of ``paths`` now.

    For a name that does not end in one of ``SUFFIXES``, a folder that cannot be written to, and
    where matplotlib is missing; nothing is drawn, and nothing left behind.
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


def write_plots(report: Report, paths: Sequence[str]) -> None:
    """Draw ``report`` once for each of ``paths``; each file replaces an older one in one step.

    Raises:
        UsageError: as ``check_plots``, and where no cell of the report was measured.
    """
    _write(lambda suffix: drawn(report, suffix), paths)


def write_error_plots(record: Record, paths: Sequence[str], *, kernel: str) -> None:
    """Draw where the error of ``record`` is, as ``write_plots`` does a report.

    Args:
        record: For which ``error_figure.is_mapped``.
        paths: Where.
        kernel: What was asked, in a line.

    Raises:
        UsageError: as ``check_plots``, and for a Record that holds no Problem.
    """
    _write(lambda suffix: error_drawn(record, suffix, kernel=kernel), paths)


def _write(image: Callable[[str], bytes], paths: Sequence[str]) -> None:
    check_plots(paths)
    files = [(path, image(path.suffix.lower())) for path in map(Path, paths)]
    for path, data in files:
        write_files({path.name: data}, path.parent, what="plots", instead="--plot")


def drawn(report: Report, suffix: str) -> bytes:
    """The image of ``report``, the same bytes for the same report and matplotlib.

    Args:
        report: What is shown.
        suffix: One of ``SUFFIXES``.

    Raises:
        UsageError: where no cell of the report was measured.
    """
    return _image(lambda: figure(report), suffix)


def error_drawn(record: Record, suffix: str, *, kernel: str) -> bytes:
    """The image of where the error of ``record`` is, the same bytes for the same Record.

    Arguments as of ``drawn`` and ``write_error_plots``.
    """
    return _image(lambda: error_figure(record, kernel=kernel), suffix)


def _image(figure_: Callable[[], Any], suffix: str) -> bytes:
    import matplotlib as mpl

    # matplotlib's own settings: a user's matplotlibrc changes no report.
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        file = io.BytesIO()
        # Neither the date nor the version: they would be news where there is none.
        metadata = {"Date": None, "Creator": None} if suffix == ".svg" else {"Software": None}
        figure_().savefig(file, format=suffix[1:], dpi=_DPI, metadata=metadata)
    return file.getvalue()
