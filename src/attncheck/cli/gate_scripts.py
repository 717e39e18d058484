"""Standalone scripts of a gate's worst failures."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attncheck.records.run_reports import GateReport

__all__ = ["FAILURES", "scripts_of"]

FAILURES = "reports/failures"
"""Where failures are kept, and attncheck repro looks for them."""

_SCRIPTS, _SECONDS = 5, 120


def scripts_of(report: GateReport) -> dict[str, str]:
    """Standalone scripts of the worst failures, each written by a process of its own."""
    from attncheck.reporting.gate_verdict import failure_groups

    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for one in failure_groups(report)[:_SCRIPTS]:
            if not one.shown.failure or one.shown.record.status not in {"fail", "error"}:
                continue
            path = Path(folder) / f"{one.id}.py"
            words = [sys.executable, "-m", "attncheck", "repro", one.id, "--script", str(path)]
            try:
                subprocess.run(  # noqa: S603  # our own
                    [*words, "--reports", str(Path(FAILURES).parent)],
                    capture_output=True,
                    check=False,
                    stdin=subprocess.DEVNULL,
                    timeout=_SECONDS,
                )
                found[one.id] = path.read_text(encoding="utf-8")
            except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
                continue  # of attncheck's own kernels there is none
    return found
