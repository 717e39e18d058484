"""A GateReport → table, JSON, CSV, Markdown, HTML, JUnit, SARIF, GitHub's annotations."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

from attncheck.core.errors import UnknownName
from attncheck.reporting import screen
from attncheck.reporting.gate_csv import as_csv
from attncheck.reporting.gate_github import as_github
from attncheck.reporting.gate_html import as_html
from attncheck.reporting.gate_json import as_json, load
from attncheck.reporting.gate_junit import as_junit
from attncheck.reporting.gate_markdown import as_markdown
from attncheck.reporting.gate_sarif import as_sarif
from attncheck.reporting.gate_table import head, table_lines, verdict
from attncheck.reporting.gate_verdict import exit_code

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.records.run_reports import GateReport

__all__ = ["FORMATS", "check_format", "exit_code", "head", "load", "render", "show", "verdict"]


def _as_table(report: GateReport) -> str:
    return screen.plain(lambda width: table_lines(report, width))


_RENDERERS: dict[str, Callable[[GateReport], str]] = {
    "table": _as_table,
    "json": as_json,
    "csv": as_csv,
    "md": as_markdown,
    "html": as_html,
    "junit": as_junit,
    "sarif": as_sarif,
    "github": as_github,
}

FORMATS = tuple(_RENDERERS)


def check_format(fmt: str) -> None:
    """Raises UnknownName unless ``fmt`` is one of ``FORMATS``."""
    if fmt not in _RENDERERS:
        raise UnknownName("format", fmt, FORMATS)


def render(report: GateReport, fmt: str) -> str:
    """``report`` in ``fmt``, one of ``FORMATS``, the same on every machine (no colours).

    Raises UnknownName for another format; see ``check_format``.
    """
    check_format(fmt)
    return _RENDERERS[fmt](report)


def show(report: GateReport, fmt: str = "table", stream: TextIO | None = None) -> None:
    """Write ``report`` to ``stream`` (default: standard output); a table takes its colours."""
    stream = stream or sys.stdout
    if fmt == "table":
        text = screen.drawn(lambda width: table_lines(report, width), stream)
    else:
        text = render(report, fmt)
    screen.put(text, stream)
