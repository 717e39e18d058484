"""``attncheck gate``: everything that a change of a kernel needs, with one exit code."""

from __future__ import annotations

import os

import click

from attncheck.cli.interrupts import Interrupts
from attncheck.cli.options import device_option, format_option
from attncheck.cli.standard_output import Verb

__all__ = ["gate"]


@click.command(cls=Verb)
@click.argument("kernels", nargs=-1, metavar="[KERNEL]…")
@click.option(
    "--tier", metavar="NAME", help="smoke, pr or nightly (default: smoke on a cpu, pr on cuda)."
)
@device_option(
    "Where kernels run (default: cuda where there is a GPU; on a cpu Triton kernels are "
    "interpreted)."
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    metavar="NAME",
    help="fp32, tf32, fp16, bf16, e4m3 or e5m2 (repeatable; default: all that a kernel takes).",
)
@click.option(
    "--convention",
    default="",
    metavar="NAME",
    help="How the kernels are called (default: the first that fits, or as configured).",
)
@click.option(
    "--stage",
    "stages",
    multiple=True,
    metavar="NAME",
    help="contract, probes, bounds, properties, memory, determinism or baseline (repeatable; "
    "default: all).",
)
@click.option("--skip", "skipped", multiple=True, metavar="NAME", help="Leave a stage out.")
@click.option("-x", "--exitfirst", is_flag=True, help="Stop at the first failure.")
@click.option(
    "--jobs",
    type=click.IntRange(1, 256),
    metavar="N",
    help="Kernels at work at the same time (default: by cores and GPUs, at most 4 for each).",
)
@click.option("--timeout", metavar="TIME", help="Of one call of a kernel, such as 90s.")
@click.option("--max-time", metavar="TIME", help="Stop then, such as 10m; resumable.")
@click.option(
    "--seed",
    type=click.IntRange(0, 10**18),
    metavar="N",
    help="Which numbers are drawn (default: others each time in tier nightly, else the same).",
)
@click.option("--shard", default="", metavar="I/N", help="Ask the I-th of N parts.")
@click.option(
    "--changed-since",
    metavar="REF",
    help="Only kernels whose sources git says have changed since then.",
)
@click.option(
    "--against",
    metavar="REF",
    help="Ask the kernels of another commit too; fail where these are worse.",
)
@click.option("--baseline", metavar="FILE", help="Fail where a kernel is worse than it was.")
@click.option("--strict", is_flag=True, help="Warnings and inconclusive answers fail too.")
@click.option("--strict-baseline", is_flag=True, help="What is better or gone fails too.")
@click.option(
    "--flaky",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Answers that may be flaky.",
)
@click.option(
    "--sanitizer",
    is_flag=True,
    help="A few small problems under NVIDIA's compute-sanitizer too, where it is installed.",
)
@click.option(
    "--cluster", metavar="ADDRESS", help="A Ray cluster to work on: auto, local, or an address."
)
@click.option("--fresh", is_flag=True, help="Forget an unfinished run, in place of going on.")
@click.option(
    "--in-process",
    is_flag=True,
    help="For a debugger: call kernels in the judge's process, where they can break it.",
)
@format_option("table, json, csv, md, html, junit, sarif or github")
@click.option(
    "--out",
    "directory",
    default="reports/gate",
    show_default=True,
    metavar="DIR",
    help="Folder for the journal and the reports.",
)
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
@click.option("-v", "--verbose", is_flag=True, help="Each failure in a line as it is found.")
@click.make_pass_decorator(Interrupts, ensure=True)
def gate(  # noqa: PLR0913  # one parameter per option
    interrupts: Interrupts,
    /,
    *,
    kernels: tuple[str, ...],
    tier: str | None,
    device: str | None,
    dtypes: tuple[str, ...],
    convention: str,
    stages: tuple[str, ...],
    skipped: tuple[str, ...],
    exitfirst: bool,
    jobs: int | None,
    timeout: str | None,
    max_time: str | None,
    seed: int | None,
    shard: str,
    changed_since: str | None,
    against: str | None,
    baseline: str | None,
    strict: bool,
    strict_baseline: bool,
    flaky: int,
    sanitizer: bool,
    cluster: str | None,
    fresh: bool,
    in_process: bool,
    fmt: str,
    directory: str,
    quiet: bool,
    verbose: bool,
) -> int:
    """Ask kernels everything that a change of them needs: is every answer right, and repeatable?

    KERNEL is FILE.py::NAME, package.module:NAME, a kernel of `attncheck list`, or a name of
    [tool.attncheck.kernels] (default: all of those). Each runs in a process of its own. A run that
    was stopped goes on where it was.

    Exit code 1 when a check failed, 3 when not everything was asked or the gate itself failed, 5
    when nothing was tested, 130 when it was interrupted twice.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in attncheck check
    from attncheck.cli.gate_asked import JOURNAL, asked, changed_only, seconds_of
    from attncheck.cli.gate_finish import finished, known_baseline
    from attncheck.cli.gate_run import beside, ran
    from attncheck.core.files import check_names
    from attncheck.reporting.rendering import GATE_FORMATS, check_format

    interrupts.check()  # the imports above take a while, and may have swallowed one
    check_format(fmt, GATE_FORMATS)
    seconds = seconds_of(max_time, "--max-time")
    call = seconds_of(timeout, "--timeout") or 0.0
    known = known_baseline(baseline)
    kernels, unchanged = changed_only(kernels, changed_since)
    if unchanged and not kernels:
        click.echo(f"attncheck: no kernel has changed since {changed_since}.", err=True)
        return 0
    check_names(directory, [JOURNAL, "gate.json"])
    with beside(against, kernels, cluster=cluster) as tree:
        this = asked(
            kernels,
            tier=tier,
            device=device,
            dtypes=dtypes,
            convention=convention,
            stages=stages,
            skipped=skipped,
            seed=seed,
            shard=shard,
            timeout=call,
            isolated=not in_process,
            sanitizer=sanitizer,
            tree=tree,
            baseline=known[1] if known else None,
            directory=directory,
            fresh=fresh,
        )
        ended, content = ran(
            this,
            directory=directory,
            fresh=fresh,
            jobs=jobs,
            seconds=seconds,
            cluster=cluster,
            first=exitfirst,
            quiet=quiet,
            verbose=verbose,
        )
    return finished(
        interrupts,
        ended,
        content,
        directory=directory,
        fmt=fmt,
        baseline=known,
        policy={"strict": strict, "strict_baseline": strict_baseline, "flaky": flaky},
    )
