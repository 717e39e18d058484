"""``attncheck merge``: join the journals of all shards of a run into one."""

from __future__ import annotations

from pathlib import Path

import click

from attncheck.cli import verb
from attncheck.cli.standard_output import interrupts, standard_output
from attncheck.core.errors import UsageError
from attncheck.core.files import write_files
from attncheck.core.sanitize_text import one_line
from attncheck.reporting.exit_codes import INCOMPLETE, PASSED
from attncheck.workers.journal import merge_journals, merged_journal_bytes, missing_shards
from attncheck.workers.journal_format import JournalError, read_journal


@verb.command
def merge(
    *,
    journals: tuple[str, ...] = verb.argument("JOURNAL...", nargs=-1, required=True),
    target: str = verb.option("--out", "FILE", "The merged journal.", required=True),
) -> int:
    """Join the journals that the shards of one gate have written, one results.jsonl each.

    They must come from the same command, except for --shard, on equal machines. A result that
    several of them have must be the same, except for times. `attncheck report` shows the merged
    journal, and `attncheck gate` without --shard can resume it.

    Exit code 2 when a file is no journal, 3 when a shard is missing, or has not finished.
    """
    interrupts.check()
    try:
        contents = {name: read_journal(Path(name)) for name in journals}
    except JournalError as error:  # a file is no journal, or an incomplete one
        raise UsageError(str(error)) from None
    # The dictionary keeps one of two equal names; the second may be meant to be another shard.
    if len(contents) < len(journals):
        raise UsageError("a journal is named twice.")
    merged, missing = merge_journals(contents), missing_shards(list(contents.values()))
    path = Path(target)
    with interrupts.writing(target):
        files = {path.name: merged_journal_bytes(merged)}
        write_files(files, path.parent, what="the merged journal")
    unfinished = len(merged.unanswered)
    with standard_output():
        click.echo(
            f"{one_line(target)}: {len(contents)} journals, {len(merged.results)} results"
            + (f", {unfinished} units unfinished" if unfinished else "")
            + (f", shards missing: {', '.join(map(str, missing))}" if missing else "")
        )
    # The journal is written even if incomplete, since it can be resumed.
    return INCOMPLETE if missing or unfinished else PASSED
