"""``attncheck fingerprint``: what is a kernel's arithmetic, and is it what it declares?"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from attncheck.cli.options import device_option, quiet_option, typed_command
from attncheck.cli.standard_output import Interrupts, Verb, standard_output

if TYPE_CHECKING:
    from attncheck.records.survey_reports import FingerprintReport


@click.command(cls=Verb)
@click.argument("kernel", metavar="KERNEL")
@click.option(
    "--convention",
    metavar="NAME",
    help="How the kernel is called (default: the one that its signature shows).",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    metavar="NAME",
    help="fp32, tf32, fp16, bf16, e4m3 or e5m2 (repeatable; default: all).",
)
@device_option(
    "Where the kernel runs (default: cuda where there is a GPU; on a cpu Triton kernels are "
    "interpreted)."
)
@click.option("--json", "as_json", is_flag=True, help="JSON on standard output, nothing else.")
@quiet_option
@click.make_pass_decorator(Interrupts, ensure=True)
def fingerprint(  # one parameter per option
    interrupts: Interrupts,
    /,
    *,
    kernel: str,
    convention: str | None,
    dtypes: tuple[str, ...],
    device: str | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Read a kernel's arithmetic from its outputs, and compare it with what it declares.

    KERNEL is FILE.py::NAME, package.module:NAME, or a name of `attncheck list`. On inputs made for
    the purpose out and LSE tell the format of P, the bits of sums, the tile, the sentinel and more.

    Exit code 1 where something is read that differs from what is declared, and is not finer; 5 when
    the kernel takes none of the inputs.
    """
    # Before torch is imported: see ``attncheck check``.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from attncheck.cases.variants import check_measured
    from attncheck.core.errors import UsageError
    from attncheck.core.formats import DTYPES
    from attncheck.reporting.exit_codes import exit_code
    from attncheck.subjects.load import load_subject
    from attncheck.verify.environment import default_device, prepare, require_device

    interrupts.check()  # the imports above take a while, and may have swallowed one
    every = [name for name, dtype in DTYPES.items() if dtype.measured]
    for name in dtypes:
        check_measured(name)
    asked = list(dtypes) or every
    device = device or default_device()
    require_device(device)
    prepare(device)  # before the file's own Triton functions are decorated
    subject = load_subject(kernel, convention)
    absent = subject.absent(device)
    if absent:
        raise UsageError(f"kernel {kernel!r} cannot run on {device}: {absent}.")

    from attncheck.cli.progress import progress
    from attncheck.surveys.arithmetic_survey import survey_arithmetic

    with progress(len(asked), quiet=quiet) as advance:

        def done(dtype: str) -> None:
            interrupts.check()
            advance(dtype)

        report = survey_arithmetic(
            subject, asked, device=device, command=typed_command(argument=kernel), done=done
        )
    _show(report, as_json=as_json)
    return exit_code(report)


def _show(report: FingerprintReport, *, as_json: bool) -> None:
    from attncheck.reporting import rendering

    with standard_output():
        rendering.show(report, "json" if as_json else "table")
