"""Standard output, which holds the report alone, and Ctrl-C, which ends a run in one line."""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

import click
import msgspec

from attncheck.core.errors import AttncheckError, UsageError
from attncheck.core.own_process import no_garbage_collection
from attncheck.core.source_files import DivertedOutput, error_line
from attncheck.reporting.document import LiveRows
from attncheck.reporting.exit_codes import INTERRUPTED, exit_code

_OURS = "attncheck.standard_output"
_EXIT = os._exit  # as it is; within a verb it raises


@contextmanager
def standard_output() -> Iterator[None]:
    """Within, standard output is written to, and nothing else; elsewhere in a verb never.

    A reader that has left (``attncheck … | head``) has what it wants: the run goes on, and ends
    with the exit code that it deserves.

    Raises:
        AttncheckError: where the disk behind it is full, say.
    """
    context = click.get_current_context(silent=True)
    ours = context.meta.get(_OURS) if context else None
    stream: TextIO = ours or sys.stdout
    try:
        with redirect_stdout(stream):
            yield
            stream.flush()
    except BrokenPipeError:
        discard(stream)
    except KeyboardInterrupt:
        discard(stream)  # which may be what was waited for
        raise
    except OSError as error:
        discard(stream)
        reason = error.strerror or str(error)
        raise AttncheckError(f"standard output cannot be written to: {reason}.") from None


def show_report(report: msgspec.Struct, fmt: str = "table") -> int:
    """Show a report of any kind; return the exit code that it deserves."""
    from attncheck.reporting import rendering

    with standard_output():
        rendering.show(report, fmt)
    return exit_code(report)


class LivePage:
    """A page on a terminal, whose rows are shown as they are measured."""

    def __init__(self, rows: LiveRows) -> None:
        from attncheck.reporting.terminal import head_lines

        self._rows = rows
        self._print(partial(head_lines, rows.head))

    @classmethod
    def of(cls, rows: LiveRows) -> LivePage | None:
        """Show what a page begins with; None where standard output is no terminal."""
        with standard_output():
            shown = sys.stdout.isatty()
        return cls(rows) if shown else None

    def show(self, one: Any) -> None:
        """Show one more row, or the rows of one more cell."""
        from attncheck.reporting.terminal import row_lines

        section, first = self._rows.row(one)
        self._print(partial(row_lines, section, first=first))

    def close(self, report: Any) -> int:
        """Show what stands below all rows of ``report``; return the exit code that it deserves."""
        from attncheck.reporting.terminal import document_lines

        page = self._rows.closing(report)
        self._print(partial(document_lines, page, before=self._rows.tables.values()))
        return exit_code(report)

    @staticmethod
    def _print(lines: Callable[[int], Any]) -> None:
        from attncheck.reporting.terminal import print_lines

        with standard_output():
            print_lines(lines, sys.stdout)


def discard(stream: TextIO | None) -> None:
    """Send what ``stream`` still holds nowhere; Python would try again as it shuts down."""
    with suppress(AttributeError, OSError, ValueError):  # no stream at all, or none of a file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]  # None has no fileno
        os.close(nowhere)


def _of_our_own(stream: TextIO) -> TextIO:
    """Standard output on a descriptor that nobody else knows; the known one is standard error now.

    So that what a kernel's device code, a library in C or a child process prints, and what goes to
    ``sys.__stdout__``, is not in the report. ``stream`` itself where it is no descriptor 1 (a
    test's), or where there is no standard error.
    """
    try:
        if sys.stderr is None or (stream.fileno(), sys.stderr.fileno()) != (1, 2):
            return stream
        stream.flush()
        ours = os.fdopen(
            os.dup(1), "w", encoding=stream.encoding, errors=stream.errors, closefd=False
        )
    except (OSError, ValueError):
        return stream
    os.dup2(2, 1)
    return ours


@contextmanager
def _no_silent_end() -> Iterator[None]:
    """Within, ``os._exit`` raises SystemExit: somebody's mod must not end a run without a word."""
    ends, process = os._exit, os.getpid()

    def ends_loudly(status: int) -> NoReturn:
        if os.getpid() != process:  # a fork, which ends so
            ends(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = ends_loudly
    try:
        yield
    finally:
        os._exit = ends


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
    """A verb of the command line; its callback returns the exit code, or None for 0.

    What somebody's kernels and mods print meanwhile goes to standard error.
    """

    def invoke(self, ctx: click.Context) -> Any:
        """As click does it; raises UsageError where somebody else's code would end the process."""
        ctx.meta[_OURS] = _of_our_own(sys.stdout)
        try:
            with redirect_stdout(DivertedOutput(sys.stderr)), _no_silent_end():
                return super().invoke(ctx)
        except (SystemExit, click.exceptions.Exit) as end:
            frames = traceback.extract_tb(end.__traceback__)
            last = next(frame for frame in reversed(frames) if frame.filename != __file__)
            place = f"{Path(last.filename).name}:{last.lineno}"
            raise UsageError(f"{place} ends the process: {error_line(end)}.") from end


class Group(_PrintsHelp, click.Group):
    """All verbs."""


class Interrupts:
    """The handling of SIGINT while a verb runs.

    The first one raises KeyboardInterrupt and is remembered, since what comes of that may be
    something else: a half imported module raises an ImportError, or foreign code swallows it.
    A second one ends the process at once.
    """

    def __init__(self) -> None:
        self.raised = False
        self.message = "interrupted; nothing was written."
        self._listens = self._held = self._waits = False

    def listen(self) -> None:
        """From here on SIGINT is ours, unless whoever started us ignores or handles it."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._arrived)
            self._listens = True

    def stop_listening(self) -> None:
        """Nothing is left to lose: SIGINT ends the process, without a traceback of its exit."""
        if self._listens:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def take(self) -> None:
        """Forget the one that was raised: whoever caught it writes what there is, and raises it."""
        self.raised = False

    def check(self) -> None:
        """Raises KeyboardInterrupt where one was raised before and did not arrive."""
        if self.raised:
            raise KeyboardInterrupt

    @contextmanager
    def importing(self) -> Iterator[None]:
        """Within, a verb imports what it needs, which takes a while and may swallow an interrupt.

        Raises KeyboardInterrupt after it where one was raised.
        """
        with no_garbage_collection():
            yield
        self.check()

    @contextmanager
    def writing(self, directory: str, said: str = "the report is written") -> Iterator[None]:
        """Within, files are written to ``directory``: all of them, and then an interrupt counts."""
        self.check()
        self._held = True
        try:
            yield
            self.message = f"interrupted; {said}, in {directory!r}."
        finally:
            self._held = False
        if self._waits:
            self._raise()

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        del frame
        signal.signal(number, signal.SIG_DFL)
        spec = getattr(sys.modules.get("torch"), "__spec__", None)
        if getattr(spec, "_initializing", False):
            # C++ stands between its imports, which aborts where Python raises; nothing is begun.
            os.write(2, f"attncheck: {self.message}\n".encode())
            _EXIT(INTERRUPTED)
        if self._held:
            self._waits = True
        else:
            self._raise()

    def _raise(self) -> None:
        self.raised = True
        # What is torn down half way complains, in words that would hide ours.
        warnings.simplefilter("ignore")
        sys.unraisablehook = lambda _: None
        raise KeyboardInterrupt
