"""``attncheck faults``: does the suite see the faults that real kernels had?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from attncheck.cli.faults_options import FaultsAsked, faults_options
from attncheck.cli.interrupts import Interrupts
from attncheck.cli.standard_output import Verb

__all__ = ["faults"]


@click.command(cls=Verb)
@faults_options
@click.make_pass_decorator(Interrupts, ensure=True)
def faults(interrupts: Interrupts, /, **options: Any) -> int:
    """Score the gate: plant faults that real kernels had, and see which it catches.

    Each is planted in a copy of a kernel of ours, and asked everything that `attncheck gate` asks,
    up to the first wrong answer. A run that was stopped goes on where it was.

    Exit code 1 when a fault was missed or a control flagged, 3 when not everything could be scored,
    5 when nothing was, 130 when it was interrupted twice.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in attncheck check
    asked = FaultsAsked(**options)
    interrupts.check()  # imports take a while, and may have swallowed one
    _check(asked)
    if asked.command is not None and not asked.listed:
        from attncheck.cli.faults_own import own

        return own(interrupts, asked)
    if asked.small:
        from attncheck.cli.faults_sensitivity import sensitive

        return sensitive(interrupts, asked)
    from attncheck.cli.faults_planted import listed, planted

    return listed(asked) if asked.listed else planted(interrupts, asked)


def _check(asked: FaultsAsked) -> None:
    """Raises UsageError for files that cannot be written, and options that say nothing."""
    from attncheck.core.errors import UsageError
    from attncheck.core.files import check_names

    for each, _ in asked.outputs:
        check_names(Path(each).parent, [Path(each).name], instead="file")
    if asked.command is None and (asked.replace is not None or asked.convention):
        raise UsageError("--replace and --convention say what --pytest tests: give it too.")
    if asked.dtypes and not asked.small:
        raise UsageError("--dtype says in what --sensitivity asks: give it too.")
