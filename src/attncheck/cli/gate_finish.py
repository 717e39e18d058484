"""The end of ``attncheck gate``: its report, beside what was before, its files, its exit code."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attncheck.cli.as_typed import as_typed
from attncheck.cli.gate_scripts import scripts_of
from attncheck.cli.standard_output import standard_output

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from attncheck.cli.interrupts import Interrupts
    from attncheck.records.baseline_entries import Baseline
    from attncheck.records.run_reports import GateReport
    from attncheck.workers.journal_format import JournalContent
    from attncheck.workers.pool import RunEnd

__all__ = ["finished", "known_baseline", "typed"]

_INTERRUPTED = 130
# Options that are files: a report may be read elsewhere.
_FILES = {"--baseline"}


def known_baseline(file: str | None) -> tuple[str, Baseline] | None:
    """Its name and what it says; raises UsageError for a file that is none."""
    if file is None:
        return None
    from attncheck.records.baseline_entries import read_baseline

    return Path(file).name, read_baseline(Path(file))


def finished(
    interrupts: Interrupts,
    ended: RunEnd,
    content: JournalContent,
    *,
    directory: str,
    fmt: str,
    baseline: tuple[str, Baseline] | None,
    policy: Mapping[str, Any],
) -> int:
    """Writes the files, shows the summary; returns the exit code."""
    from attncheck.reporting.gate_verdict import Policy, gate_exit_code
    from attncheck.reporting.rendering import show, write_gate

    report = _reported(content, baseline)
    scripts = {} if ended.why == "interrupted" else scripts_of(report)
    with interrupts.writing(directory):
        write_gate(report, directory, scripts)
    with standard_output():
        show(report, fmt)
    if ended.why:
        answered = f"{ended.finished} of {ended.finished + ended.left}"
        click.echo(f"attncheck: {ended.why} at {answered}: the same command goes on.", err=True)
    if ended.why == "interrupted" and ended.at_once:
        return _INTERRUPTED
    return gate_exit_code(report, Policy(**policy))


def _reported(content: JournalContent, baseline: tuple[str, Baseline] | None) -> GateReport:
    from attncheck.gate.gate_report import build_report

    return build_report(content, command=typed(content.head.get("kernels", ())), baseline=baseline)


def typed(kernels: Iterable[str]) -> str:
    """The command line, with files without their folders."""
    command = as_typed(files=_FILES)
    for kernel in kernels:
        file, colons, name = str(kernel).partition("::")
        if colons:
            shown = f"{Path(file).name}{colons}{name}"
            command = command.replace(shlex.quote(str(kernel)), shlex.quote(shown))
    return command
