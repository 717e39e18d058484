"""The command line: arguments in, exit codes out.

One file a verb. Nothing heavy is imported until a verb runs, so that ``--help`` is instant.
"""

from __future__ import annotations

import sys

import click

from attncheck import __version__
from attncheck.cli.doctor import doctor
from attncheck.cli.list import list_
from attncheck.cli.rmse import rmse
from attncheck.errors import AttncheckError, UsageError

__all__ = ["main"]

USAGE, INFRASTRUCTURE = 2, 3


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="attncheck")
def attncheck() -> None:
    r"""Is the difference between your attention kernel and exact attention only rounding?

    \b
    Exit codes: 0 pass · 1 a check failed or a kernel raised · 2 usage · 3 infrastructure ·
    5 nothing was tested.
    """


attncheck.add_command(rmse)
attncheck.add_command(list_)
attncheck.add_command(doctor)


def main() -> None:
    """Run the command line; every expected error is one line on standard error."""
    try:
        code = attncheck.main(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as help_:
        click.echo(help_.format_message())
        code = USAGE
    except click.ClickException as error:
        code = _say(error.format_message(), USAGE)
    except UsageError as error:
        code = _say(str(error), USAGE)
    except AttncheckError as error:
        code = _say(str(error), INFRASTRUCTURE)
    except (click.Abort, KeyboardInterrupt):
        code = _say("interrupted; nothing was written.", 130)
    sys.exit(code if isinstance(code, int) else 0)


def _say(message: str, code: int) -> int:
    click.echo(f"attncheck: {' '.join(message.split())}", err=True)
    return code
