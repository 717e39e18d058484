"""The files of a gate: written whole or not at all."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from attncheck.core.errors import UsageError
from attncheck.core.sanitize_text import one_line
from attncheck.reporting import gate_pages
from attncheck.reporting.files import check_names, write_texts
from attncheck.reporting.gate_html import as_html

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from attncheck.records.run_reports import GateReport

__all__ = ["FILES", "SCRIPTS", "write"]

FILES = {
    "gate.json": "json",
    "junit.xml": "junit",
    "results.sarif": "sarif",
    "summary.md": "md",
}
"""Name → format, beside report.html, which shows the scripts too."""
SCRIPTS = "repro"
"""Folder of the scripts."""
_ID = re.compile(r"[a-z0-9]{1,40}")


def write(
    report: GateReport, directory: Path | str, scripts: Mapping[str, str]
) -> tuple[Path, ...]:
    """Write each of ``FILES`` into ``directory``, and ``repro/ID.py`` of each script.

    Everything is rendered before anything is written; names are of ids alone.

    Args:
        report: What was found.
        directory: Made if need be.
        scripts: The text of a standalone script by the id of its failure.

    Raises:
        UsageError: where the directory cannot be written to, or for an id that is none.
    """
    for name in scripts:
        if not _ID.fullmatch(name):
            raise UsageError(f"{one_line(name)!r} is no id: it has letters and digits.")
    texts = {name: gate_pages.render(report, fmt) for name, fmt in FILES.items()}
    texts["report.html"] = as_html(report, scripts)
    texts |= {f"{SCRIPTS}/{name}.py": text for name, text in scripts.items()}
    check_names(directory, texts)  # where one cannot be replaced, none is
    return write_texts(texts, directory)
