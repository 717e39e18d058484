"""``attncheck fingerprint``: what is a kernel's arithmetic, and is it what it declares?"""

from __future__ import annotations

from attncheck.cli import verb
from attncheck.cli.long_runs import progress
from attncheck.cli.options import few_threads, open_host, start_worker, typed_command
from attncheck.cli.standard_output import interrupts, show_report
from attncheck.core.formats import MEASURED_DTYPES


@verb.command
def fingerprint(
    *,
    kernel: str = verb.argument("KERNEL"),
    convention: str = verb.convention("the one that its signature shows"),
    dtypes: tuple[str, ...] = verb.dtypes("all"),
    device: str | None = verb.device("Where the kernel runs"),
    timeout: float | None = verb.timeout(),
    as_json: bool = verb.as_json(),
    quiet: bool = verb.quiet(),
) -> int:
    """Read a kernel's arithmetic from its outputs, and compare it with what it declares.

    KERNEL is FILE.py::NAME, package.module:NAME, or a name of `attncheck list`. From the outputs
    for specially built inputs it finds the format of P, the bits of sums, the tile size, the value
    of masked scores and more.

    Exit code 1 when something differs from what is declared and is not more precise; 5 when the
    kernel supports none of the inputs.
    """
    few_threads(small=False)
    worker = start_worker(kernel, in_process=False)
    with interrupts.importing():
        from attncheck.cases.variants import check_measured
        from attncheck.verify.environment import prepare, usable_device
    for name in dtypes:
        check_measured(name)
    dtype_names = list(dtypes or MEASURED_DTYPES)
    device = usable_device(device)
    prepare(device)

    from attncheck.surveys.arithmetic_survey import survey_arithmetic

    host_options = {"convention": convention, "device": device}
    with (
        open_host(kernel, worker, seconds=timeout, **host_options) as host,
        progress("dtype", len(dtype_names), quiet=quiet) as advance,
    ):
        subject, command = host.subject, typed_command(arguments=[kernel])
        report = survey_arithmetic(
            subject, dtype_names, device=device, command=command, done=advance
        )
    return show_report(report, "json" if as_json else "table")
