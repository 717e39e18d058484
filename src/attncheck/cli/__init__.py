"""The command line: arguments in, exit codes out.

One file a verb. Nothing heavy is imported until a verb runs, so that ``--help`` is instant.
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
from attncheck.cli.standard_output import Group, Interrupts, discard
from attncheck.core import VERSION
from attncheck.core.errors import AttncheckError, UsageError
from attncheck.core.sanitize_text import one_line
from attncheck.reporting.exit_codes import INCOMPLETE, INTERRUPTED, USAGE

__all__ = ["main"]

_LONGEST = 1500  # characters of an error; the longest list of names has fewer

# \b: click leaves the lines below it as they are.
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

    Not click's own ``main``, which ends interrupts and broken pipes in its own way.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed: a pipe to a worker would take its place, and not get there
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:  # the shell's >&-: nobody wants to read
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  # stays open
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # of somebody's code; what it raises is said
    if instruction := os.environ.get("_ATTNCHECK_COMPLETE"):
        sys.exit(complete(attncheck, instruction))
    interrupts = Interrupts()
    try:
        Path.cwd()
    except OSError:  # torch would end the process
        sys.exit(_say("the working directory is gone: change to another.", USAGE))
    try:
        try:
            interrupts.listen()
            code = _code(interrupts)
        finally:
            interrupts.stop_listening()
    except BaseException as error:
        if not interrupts.raised and not isinstance(error, KeyboardInterrupt):
            raise
        discard(sys.stdout)  # which may be what was waited for
        code = _say(interrupts.message, INTERRUPTED)
    _flush()
    sys.exit(code)


def _code(interrupts: Interrupts) -> int:
    """The exit code that the arguments give."""
    try:
        with attncheck.make_context("attncheck", sys.argv[1:], obj=interrupts) as context:
            code: int | None = attncheck.invoke(context)
    except click.exceptions.Exit as end:  # of --help: a verb returns its own
        interrupts.check()
        return end.exit_code
    except click.ClickException as error:
        return _say(error.format_message(), USAGE)
    except AttncheckError as error:
        interrupts.check()  # after one, an error is its consequence
        return _say(str(error), USAGE if isinstance(error, UsageError) else INCOMPLETE)
    interrupts.check()
    return code or 0


def _say(message: str, code: int) -> int:
    try:
        # Foreign code and files speak through errors: no escape codes, and no megabytes.
        line = one_line(message)
        rest = len(line) - _LONGEST
        more = f"… ({rest} more characters)" if rest > 0 else ""
        click.echo(f"attncheck: {line[:_LONGEST]}{more}", err=True)
    except (OSError, ValueError):  # nobody hears, or foreign code closed it: the exit code remains
        discard(sys.stderr)
    return code


def _flush() -> None:
    """Write out the prints of foreign code; lost where nobody reads them, and without noise."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):  # none, broken, closed by foreign code
            discard(stream)
