"""``attncheck config``: is the file that names the project's kernels right?"""

from __future__ import annotations

import os
from pathlib import Path

import click

from attncheck.cli import verb
from attncheck.cli.standard_output import standard_output
from attncheck.core.errors import UsageError
from attncheck.core.sanitize_text import one_line
from attncheck.reporting.exit_codes import USAGE


@verb.command
def config(
    *,
    files: tuple[str, ...] = verb.argument("[FILE]…", nargs=-1),
) -> int:
    """Check the tables of kernels in a configuration, and print each mistake in a line.

    FILE is a pyproject.toml or an attncheck.toml (default: the nearest that names kernels, in this
    folder or above). Neither kernels nor torch are imported, so a pre-commit hook can run this.

    Exit code 2 when something is wrong.
    """
    from attncheck.subjects.capabilities.configuration import find_mistakes

    paths = [Path(file) for file in files] or [_nearest()]
    wrong = []
    # Read all files, to report all mistakes at once.
    for path in dict.fromkeys(paths):
        count, mistakes = find_mistakes(path)
        wrong += mistakes
        if not mistakes:
            with standard_output():
                click.echo(f"{one_line(str(path))}: {count} kernel{'' if count == 1 else 's'}")
    for line in wrong:
        click.echo(f"attncheck: {one_line(line)}", err=True)
    return USAGE if wrong else 0


def _nearest() -> Path:
    """Return the nearest file that names kernels; raise UsageError if there is none."""
    from attncheck.subjects.capabilities import configuration

    path, _ = configuration.nearest_tables()
    if path is None:
        raise UsageError(
            "neither attncheck.toml nor [tool.attncheck] of pyproject.toml is here or above: "
            "`attncheck init SPEC` writes a table."
        )
    return Path(os.path.relpath(path))
