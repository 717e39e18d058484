"""``attncheck report``: show the report of an earlier run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from attncheck.cli import verb
from attncheck.cli.standard_output import interrupts, standard_output
from attncheck.core import json_numbers
from attncheck.core.errors import UsageError, require_known
from attncheck.records.bench_report import BenchReport
from attncheck.records.json_reports import LARGEST_GATE, load_report, report_schema
from attncheck.records.model_report import ModelReport
from attncheck.records.record import Report
from attncheck.records.run_reports import GateReport
from attncheck.reporting.gate_verdict import failure_groups
from attncheck.workers.journal_format import JournalError, read_journal

# Fields that identify each kind of report; the first match counts.
_KINDS: tuple[tuple[Any, set[str]], ...] = (
    (GateReport, {"tier", "started"}),
    (BenchReport, {"cells", "matmul"}),
    (ModelReport, {"models", "records"}),
    (Report, {"records"}),
)
_LARGEST_SCRIPT = 2**20  # bytes of a script up to which it is copied into a page


@verb.command
def report(
    *,
    source: str = verb.argument("SOURCE"),
    fmt: str = verb.option(
        "--format",
        "FORMAT",
        "Of standard output: table, json, csv, md, html, junit, sarif or github.",
        "table",
    ),
    directory: str | None = verb.option(
        "--out", "DIR", "Write all files of the report there (default: none)."
    ),
) -> int:
    """Show the results of an earlier run again.

    SOURCE is the journal of a gate (results.jsonl), its gate.json, or the report of attncheck rmse,
    check, bench or model (rmse.json, check.json, …), which are shown as table, json, md, csv or
    html. No kernel is imported.

    Exit code 0 whatever the results are.
    """
    # The kind is found from the contents, since a gate's report may have any name.
    path = Path(source)
    loaded = _load_any(path)
    from attncheck.reporting import rendering

    if isinstance(loaded, GateReport):
        rendering.check_format(fmt, rendering.GATE_FORMATS)
    else:
        require_known("format of this report", [fmt], rendering.FORMATS)
    if directory is not None:
        with interrupts.writing(directory):
            if isinstance(loaded, GateReport):
                scripts = _scripts(loaded, path.parent / rendering.SCRIPTS)
                rendering.write_gate(loaded, directory, scripts)
            else:
                rendering.write_report(loaded, directory, "report")
    with standard_output():
        rendering.show(loaded, fmt)
    return 0


report.params.append(
    click.Option(
        ["--schema"],
        metavar="KIND",
        is_eager=True,
        expose_value=False,
        callback=lambda context, _, kind: _print_schema(context, kind) if kind else None,
        help="Print the JSON Schema of a kind of report, such as check or gate, and stop.",
    )
)


def _print_schema(context: click.Context, kind: str) -> None:
    click.echo(json.dumps(report_schema(kind), indent=2))
    context.exit()


def _load_any(path: Path) -> GateReport | Report | BenchReport | ModelReport:
    """Return the report in a file; raise UsageError, in one line, if it is of no known kind."""
    if path.suffix == ".jsonl":
        return read_run_journal(path)
    data = json_numbers.read_json(path, "report", LARGEST_GATE)
    keys = set(data) if isinstance(data, dict) else set()
    for kind, identifying_keys in _KINDS:
        if identifying_keys <= keys:
            result: GateReport | Report | BenchReport | ModelReport = load_report(path, kind)
            return result
    fact = "it has neither records nor the answers of a gate"
    raise UsageError(json_numbers.refusal_message(json_numbers.source_name(path), "report", fact))


def read_run_journal(path: Path) -> GateReport:
    """Return the report of the gate's journal ``path``; raise UsageError if it is no journal."""
    from attncheck.gate.gate_report import build_report as of_content

    try:
        return of_content(read_journal(path))
    except JournalError as error:
        raise UsageError(str(error)) from None


def _scripts(loaded: GateReport, folder: Path) -> dict[str, str]:
    """Return the scripts of failures that are stored beside the report, by id."""
    scripts = {}
    for one in failure_groups(loaded):
        path = folder / f"{one.id}.py"
        try:
            if one.id.isalnum() and path.stat().st_size <= _LARGEST_SCRIPT:
                scripts[one.id] = path.read_text(encoding="utf-8", errors="backslashreplace")
        except (OSError, ValueError):  # there is none, or it is unreadable
            continue
    return scripts
