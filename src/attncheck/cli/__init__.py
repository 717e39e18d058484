"""The command line: arguments in, exit codes out.

Each verb has a file. Nothing heavy is imported until a verb runs, so that ``--help`` is instant.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import click

from attncheck.cli.baseline import baseline
from attncheck.cli.bench import bench
from attncheck.cli.blocks import blocks
from attncheck.cli.check import check
from attncheck.cli.completion import complete, completion
from attncheck.cli.config import config
from attncheck.cli.demo import demo
from attncheck.cli.doctor import doctor
from attncheck.cli.faults import faults
from attncheck.cli.fingerprint import fingerprint
from attncheck.cli.gate import gate
from attncheck.cli.init import init
from attncheck.cli.list import list_
from attncheck.cli.merge import merge
from attncheck.cli.model import model
from attncheck.cli.mods import mods
from attncheck.cli.oracles import oracles
from attncheck.cli.probe import probe
from attncheck.cli.report import report
from attncheck.cli.repro import repro
from attncheck.cli.rmse import rmse
from attncheck.cli.standard_output import Group, discard, interrupts
from attncheck.core import VERSION
from attncheck.core.errors import AttncheckError, UsageError
from attncheck.core.sanitize_text import one_line
from attncheck.reporting.exit_codes import INCOMPLETE, INTERRUPTED, USAGE

__all__ = ["main"]

_LONGEST = 1500  # characters of an error message; the longest list of names has fewer

# \b tells click not to wrap the lines below it.
_EXIT_CODES = """\b
Exit codes:
  0    pass
  1    a check failed or a kernel raised
  2    usage
  3    infrastructure: Triton's interpreter, or standard output that is full
  5    nothing was tested
  130  interrupted
"""


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_EXIT_CODES,
)
@click.version_option(VERSION, prog_name="attncheck")
def attncheck() -> None:
    """Is the difference between your attention kernel and exact attention only rounding?"""


_VERBS = (
    *(check, gate, faults, repro, probe, fingerprint, init, config, baseline, rmse, bench, model),
    list_,
    *(doctor, demo, oracles, mods, blocks, merge, report, completion),
)
for _verb in _VERBS:
    attncheck.add_command(_verb)


def main() -> None:
    """Run the command line; every expected error is one line on standard error.

    click's own ``main`` is not used, since it handles interrupts and broken pipes differently.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed: else a pipe to a worker would get this number
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:  # closed by the shell's >&-
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  # stays open
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # hide warnings of users' code; its errors are shown
    if instruction := os.environ.get("_ATTNCHECK_COMPLETE"):
        sys.exit(complete(attncheck, instruction))
    try:
        Path.cwd()
    except OSError:  # without a working directory torch would end the process
        sys.exit(_say("the working directory is gone: change to another.", USAGE))
    try:
        try:
            interrupts.listen()
            code = _run_verb()
        finally:
            interrupts.stop_listening()
    except BaseException as error:
        if not interrupts.raised and not isinstance(error, KeyboardInterrupt):
            raise
        discard(sys.stdout)  # writing to it may be what was interrupted
        code = _say(interrupts.message, INTERRUPTED)
    _flush()
    sys.exit(code)


def _run_verb() -> int:
    """Run the verb that the arguments name; return its exit code."""
    try:
        with attncheck.make_context("attncheck", sys.argv[1:]) as context:
            code: int | None = attncheck.invoke(context)
    except click.exceptions.Exit as end:  # from --help, since a verb returns its code
        interrupts.check()
        return end.exit_code
    except click.ClickException as error:
        return _say(error.format_message(), USAGE)
    except AttncheckError as error:
        interrupts.check()  # after an interrupt, an error is its consequence
        return _say(str(error), USAGE if isinstance(error, UsageError) else INCOMPLETE)
    interrupts.check()
    return code or 0


def _say(message: str, code: int) -> int:
    try:
        # Errors may quote users' code and files: remove escape codes and limit the length.
        line = one_line(message)
        rest = len(line) - _LONGEST
        more = f"… ({rest} more characters)" if rest > 0 else ""
        click.echo(f"attncheck: {line[:_LONGEST]}{more}", err=True)
    except (OSError, ValueError):  # unread, or closed by users' code: only the exit code remains
        discard(sys.stderr)
    return code


def _flush() -> None:
    """Flush prints of users' code; discard them silently if nobody reads the stream."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):  # missing, broken, or closed by users' code
            discard(stream)
