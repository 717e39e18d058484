"""``attncheck merge``: the journals of all shards of a run, as one."""

from __future__ import annotations

from pathlib import Path

import click

from attncheck.cli import verb
from attncheck.cli.standard_output import Interrupts, standard_output
from attncheck.core.errors import UsageError
from attncheck.core.files import write_files
from attncheck.core.sanitize_text import one_line
from attncheck.reporting.exit_codes import INCOMPLETE, PASSED


@verb.command
def merge(
    interrupts: Interrupts,
    *,
    journals: tuple[str, ...] = verb.argument("JOURNAL...", nargs=-1, required=True),
    target: str = verb.option("--out", "FILE", "The merged journal.", required=True),
) -> int:
    """Join the journals that the shards of one gate have written, one results.jsonl each.

    They must be parts of the same run: of the same command but for --shard, on equal machines. A
    result that several have must be the same but for times. The file can be rendered by attncheck
    report, and resumed by attncheck gate without --shard.

    Exit code 2 when a file is no journal, 3 when a shard is missing, or has not finished.
    """
    from attncheck.workers import journal as parts
    from attncheck.workers.journal_format import JournalError, read_journal

    interrupts.check()
    try:
        named = {name: read_journal(Path(name)) for name in journals}
    except JournalError as error:  # what was named is no journal, or no whole one
        raise UsageError(str(error)) from None
    # A dictionary has swallowed the second: a missing shard may be meant.
    if len(named) < len(journals):
        raise UsageError("a journal is named twice.")
    merged, absent = parts.merge_journals(named), parts.missing_shards(list(named.values()))
    path = Path(target)
    with interrupts.writing(target):
        files = {path.name: parts.merged_journal_bytes(merged)}
        write_files(files, path.parent, what="the merged journal")
    unfinished = len(merged.unanswered)
    with standard_output():
        click.echo(
            f"{one_line(target)}: {len(named)} journals, {len(merged.results)} results"
            + (f", {unfinished} units unfinished" if unfinished else "")
            + (f", shards missing: {', '.join(map(str, absent))}" if absent else "")
        )
    # The journal is written all the same: it can be resumed.
    return INCOMPLETE if absent or unfinished else PASSED
