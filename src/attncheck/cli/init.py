"""``attncheck init``: write the table that a probe proposes into the project's file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

from attncheck.cli import verb
from attncheck.cli.probe import RIGHT, name_of, run_probe
from attncheck.cli.standard_output import interrupts, standard_output
from attncheck.reporting.exit_codes import UNTESTED

if TYPE_CHECKING:
    from attncheck.subjects.load import Entry
    from attncheck.verify.capability_detection import DetectedCapabilities


@verb.command
def init(
    *,
    spec: str = verb.argument("SPEC"),
    name: str | None = verb.option(
        "--name", "NAME", "Name of the kernel from now on (default: as in SPEC)."
    ),
    file: str | None = verb.option(
        "--file",
        "FILE",
        "File for its table (default: the nearest attncheck.toml or pyproject.toml).",
    ),
    force: bool = verb.flag("--force", "Replace a table of this name."),
    dry_run: bool = verb.flag("--dry-run", "Show the table, and write nothing."),
    convention: str = verb.convention(RIGHT),
    device: str | None = verb.device("Where the kernel is tried", verb.GPU),
    timeout: float | None = verb.timeout(),
    quiet: bool = verb.quiet(),
) -> int:
    """Write what a kernel supports, as `attncheck probe` finds it, into the configuration.

    Everything else in the file stays as it is, to the byte. Afterwards the kernel has a name:
    `attncheck check NAME`, `pytest --pyargs attncheck.properties --kernel NAME`.

    Exit code 5, and nothing is written, when the kernel supports nothing.
    """
    from attncheck.subjects.capabilities.configuration import (
        check_kernel_name,
        default_path,
        with_table,
        write_file,
    )

    path = Path(file) if file else default_path()
    name = name or name_of(spec)
    check_kernel_name(name, path, force=force or dry_run)  # before a minute is spent
    arguments = (convention, device, timeout)
    _, kernel, detected = run_probe(spec, *arguments, quiet=quiet)
    if detected.base is None:
        reasons = (one.reason for one in detected.tried)
        reason = next(filter(None, reasons), "it refuses everything")
        click.echo(f"attncheck: kernel {spec!r} takes nothing that was tried: {reason}", err=True)
        return UNTESTED
    table = _table(kernel, detected, path, name)
    text = with_table(path, name, table)
    if not dry_run:
        interrupts.check()
        write_file(path, text)
    with standard_output():
        click.echo(table)
        click.echo(_next_steps(path, name, dry_run=dry_run, detected=detected))
    return 0


def _table(kernel: Entry, detected: DetectedCapabilities, path: Path, name: str) -> str:
    """Return the proposal, keeping fields that no probe can find from the table it replaces."""
    from attncheck.subjects.capabilities.capability_table import render_table
    from attncheck.subjects.capabilities.configuration import entry_from, table_header
    from attncheck.verify.proposed_table import propose_table

    proposal, comments = propose_table(detected, entry_from(kernel.entry, path))
    before = kernel.capabilities
    if before is not None:
        kept = ("arithmetic", "backward", "sources", "max_query", "max_rows", "max_kv", "override")
        proposal = replace(proposal, **{field: getattr(before, field) for field in kept})
    return render_table(proposal, table_header(path, name), comments)


def _next_steps(path: Path, name: str, *, dry_run: bool, detected: DetectedCapabilities) -> str:
    from attncheck.verify.proposed_table import is_capability

    lines = [f"{'would be written' if dry_run else 'written'} to {path}"]
    tried = filter(is_capability, detected.tried)
    wrong = [f"{one.aspect} {one.what}" for one in tried if one.verdict == "wrong"]
    if wrong:
        lines.append(f"wrong answers, which stay in the table: {', '.join(dict.fromkeys(wrong))}")
    if not dry_run:
        lines += [
            "next:",
            f"  attncheck check {name}",
            f"  pytest --pyargs attncheck.properties --kernel {name}",
        ]
    return "\n".join(lines)
