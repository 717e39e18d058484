"""Standard output that nobody reads, or that is full."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

import click

from attncheck.errors import AttncheckError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Group", "Verb", "discard", "standard_output"]


@contextmanager
def standard_output() -> Iterator[None]:
    """Within, standard output is written to, and nothing else.

    A reader that has left (``attncheck … | head``) has what it wants: the run goes on, and ends
    with the exit code that it deserves.

    Raises:
        AttncheckError: where the disk behind it is full, say.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)
    except OSError as error:
        discard(sys.stdout)
        reason = error.strerror or str(error)
        raise AttncheckError(f"standard output cannot be written to: {reason}.") from None


def discard(stream: TextIO | None) -> None:
    """Send what ``stream`` still holds nowhere; Python would try again as it shuts down."""
    with suppress(AttributeError, OSError, ValueError):  # no stream at all, or none of a file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]  # None has no fileno
        os.close(nowhere)


class _PrintsHelp(click.Command):
    """Whose ``--help`` and ``--version`` are standard output too: click prints as it parses."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """As click does it; ``attncheck`` alone shows the help and exits with 2."""
        with standard_output():
            try:
                return super().make_context(*args, **kwargs)
            except click.exceptions.NoArgsIsHelpError as help_:
                click.echo(help_.format_message())
                raise click.exceptions.Exit(help_.exit_code) from None
        raise click.exceptions.Exit(0)  # the reader of the help has left


class Verb(_PrintsHelp):
    """A verb of the command line."""


class Group(_PrintsHelp, click.Group):
    """All verbs."""
