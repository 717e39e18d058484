"""Standard output, which has only the report, and Ctrl-C, which ends a run with one line."""

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
_AT_END = "attncheck.at_end"
_EXIT = os._exit  # the original, which is replaced while a verb runs


@contextmanager
def standard_output() -> Iterator[None]:
    """Direct prints of the block to standard output, where a verb otherwise never writes.

    If the reader has left (``attncheck … | head``), the run goes on and ends with its usual exit
    code.

    Raises:
        AttncheckError: if writing fails, for example on a full disk.
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
        discard(stream)  # writing to it may be what was interrupted
        raise
    except OSError as error:
        discard(stream)
        reason = error.strerror or str(error)
        raise AttncheckError(f"standard output cannot be written to: {reason}.") from None


def at_end(show: Callable[..., None]) -> None:
    """Call ``show(passed=…)`` when the verb ends: whether with exit code 0. It may be repeated."""
    context = click.get_current_context()
    context.meta.setdefault(_AT_END, []).append(show)
    context.call_on_close(partial(show, passed=False))  # the verb may end by an error


def show_report(report: msgspec.Struct, fmt: str = "table") -> int:
    """Show a report of any kind; return its exit code."""
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
        """Show the head of a page and return the page; None if standard output is no terminal."""
        with standard_output():
            is_terminal = sys.stdout.isatty()
        return cls(rows) if is_terminal else None

    def show(self, one: Any) -> None:
        """Show one more row, or the rows of one more cell."""
        from attncheck.reporting.terminal import row_lines

        if shown := self._rows.row(one):
            section, first = shown
            self._print(partial(row_lines, section, first=first))

    def close(self, report: Any) -> int:
        """Show the end of the page, below all rows of ``report``; return its exit code."""
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
    """Discard buffered text of ``stream``, which Python would otherwise write again at exit."""
    with suppress(AttributeError, OSError, ValueError):  # no stream, or one without a file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]  # None has no fileno
        os.close(nowhere)


def _private_stdout(stream: TextIO) -> TextIO:
    """Return standard output on a new descriptor, and point descriptor 1 at standard error.

    This keeps prints of device code, C libraries, child processes and ``sys.__stdout__`` out of the
    report. Return ``stream`` itself if it is not descriptor 1 (as in tests), or if there is no
    standard error.
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
    """Make ``os._exit`` raise SystemExit, so that no user's mod ends a run silently."""
    original_exit, process = os._exit, os.getpid()

    def raise_instead(status: int) -> NoReturn:
        if os.getpid() != process:  # a forked child may end like this
            original_exit(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = raise_instead
    try:
        yield
    finally:
        os._exit = original_exit


class _HelpOnStdout(click.Command):
    """A command whose ``--help`` and ``--version``, shown while parsing, go to standard output."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse as click does; ``attncheck`` without arguments shows the help and exits with 2."""
        with standard_output():
            try:
                return super().make_context(*args, **kwargs)
            except click.exceptions.NoArgsIsHelpError as help_:
                click.echo(help_.format_message())
                raise click.exceptions.Exit(help_.exit_code) from None
        raise click.exceptions.Exit(0)  # the reader of the help has left


class Verb(_HelpOnStdout):
    """A verb of the command line; its callback returns the exit code, or None for 0.

    Prints of users' kernels and mods go to standard error meanwhile.
    """

    def invoke(self, ctx: click.Context) -> Any:
        """Run as click does; raise UsageError if users' code tries to end the process."""
        ctx.meta[_OURS] = _private_stdout(sys.stdout)
        try:
            with redirect_stdout(DivertedOutput(sys.stderr)), _no_silent_end():
                code = super().invoke(ctx)
                for show in ctx.meta.get(_AT_END, ()):
                    show(passed=not code)
                return code
        except (SystemExit, click.exceptions.Exit) as end:
            frames = traceback.extract_tb(end.__traceback__)
            last = next(frame for frame in reversed(frames) if frame.filename != __file__)
            place = f"{Path(last.filename).name}:{last.lineno}"
            raise UsageError(f"{place} ends the process: {error_line(end)}.") from end


class Group(_HelpOnStdout, click.Group):
    """A group of verbs."""


class Interrupts:
    """The handling of SIGINT while a verb runs.

    The first one raises KeyboardInterrupt and is remembered, since it may turn into another error:
    a half-imported module raises an ImportError, or users' code swallows it. A second one ends the
    process at once.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.raised = False
        self.message = "interrupted; nothing was written."
        self._is_listening = self._is_writing = self._is_pending = False

    def listen(self) -> None:
        """Handle SIGINT from now on, unless the parent ignores it or a handler is already set."""
        self._reset()  # main may have run in this process before
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_interrupt)
            self._is_listening = True

    def stop_listening(self) -> None:
        """Let SIGINT end the process without a traceback, as all work is done."""
        if self._is_listening:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def take(self) -> None:
        """Forget the raised interrupt; the caller writes its results and then raises it again."""
        self.raised = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if one was raised before and was swallowed."""
        if self.raised:
            raise KeyboardInterrupt

    @contextmanager
    def importing(self) -> Iterator[None]:
        """Enclose imports of a verb, which take a while and may swallow an interrupt.

        Raise KeyboardInterrupt after them if there was one.
        """
        with no_garbage_collection():
            yield
        self.check()

    @contextmanager
    def writing(self, directory: str, said: str = "the report is written") -> Iterator[None]:
        """Delay an interrupt until all files of the block are written to ``directory``."""
        self.check()
        self._is_writing = True
        try:
            yield
            self.message = f"interrupted; {said}, in {directory!r}."
        finally:
            self._is_writing = False
        if self._is_pending:
            self._raise()

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        del frame
        signal.signal(number, signal.SIG_DFL)
        spec = getattr(sys.modules.get("torch"), "__spec__", None)
        if getattr(spec, "_initializing", False):
            # Raising here would abort in the C++ code that imports torch; no work has begun.
            os.write(2, f"attncheck: {self.message}\n".encode())
            _EXIT(INTERRUPTED)
        if self._is_writing:
            self._is_pending = True
        else:
            self._raise()

    def _raise(self) -> None:
        self.raised = True
        # Warnings and errors during clean-up would hide our message.
        warnings.simplefilter("ignore")
        sys.unraisablehook = lambda _: None
        raise KeyboardInterrupt


interrupts = Interrupts()
"""The handling of SIGINT in this process, which runs one verb."""
