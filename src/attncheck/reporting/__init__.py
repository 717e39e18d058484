"""Records → what a user sees: table, JSON, Markdown, CSV."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

from attncheck.core.errors import UnknownName
from attncheck.reporting import screen
from attncheck.reporting.as_csv import as_csv
from attncheck.reporting.as_json import as_json, load
from attncheck.reporting.as_markdown import as_markdown
from attncheck.reporting.as_table import as_table, table_lines
from attncheck.reporting.files import check_writable, write
from attncheck.reporting.joined import joined

if TYPE_CHECKING:
    from attncheck.records.record import Report

__all__ = ["FORMATS", "check_writable", "joined", "load", "render", "show", "write"]

FORMATS = ("table", "json", "md", "csv")

_RENDERERS = {"table": as_table, "json": as_json, "md": as_markdown, "csv": as_csv}


def render(report: Report, fmt: str) -> str:
    """``report`` in ``fmt``, one of ``FORMATS``, the same on every machine (no colours).

    Raises UnknownName for another format.
    """
    if fmt not in _RENDERERS:
        raise UnknownName("format", fmt, FORMATS)
    return _RENDERERS[fmt](report)


def show(report: Report, fmt: str = "table", stream: TextIO | None = None) -> None:
    """Write ``report`` to ``stream`` (default: standard output).

    A table takes the terminal's width and colours; NO_COLOR, FORCE_COLOR and COLUMNS are heeded.
    A stream that cannot say a sign gets a question mark for it.
    """
    stream = stream or sys.stdout
    if fmt == "table":
        text = screen.drawn(lambda width: table_lines(report, width), stream)
    else:
        text = render(report, fmt)
    screen.put(text, stream)
