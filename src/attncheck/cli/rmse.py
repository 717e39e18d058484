"""``attncheck rmse``: how far is each kernel from exact attention?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from attncheck.cli.as_typed import as_typed
from attncheck.cli.explain import explain
from attncheck.cli.interrupts import Interrupts
from attncheck.cli.options import (
    device_option,
    format_option,
    out_option,
    quiet_option,
    seed_option,
)
from attncheck.cli.standard_output import Verb, standard_output
from attncheck.cli.subjects import named, unconcerned

if TYPE_CHECKING:
    from attncheck.record import Record, Report
    from attncheck.runner.plan import Cell
    from attncheck.subjects.contract import Subject

__all__ = ["rmse"]

FAILED, NOTHING_TESTED = 1, 5
# Options that take a file: reports name it without its folder.
_FILES = {"--kernel", "--mask", "--score", "--inputs"}


@click.command(cls=Verb)
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    metavar="NAME",
    help="A kernel of `attncheck list`, or FILE.py::NAME (repeatable; default: all built in).",
)
@click.option(
    "--variant",
    "variants",
    multiple=True,
    metavar="NAME",
    help="A mask and score mod, or softmax (repeatable; default: all).",
)
@click.option(
    "--mask",
    metavar="MASK",
    help="In place of the variants: a mask of your own, FILE.py::NAME, or one of the library that "
    "needs no numbers.",
)
@click.option(
    "--score",
    metavar="SCORE",
    help="In place of the variants: a score mod of your own, or of the library, likewise.",
)
@click.option(
    "--inputs",
    "recording",
    metavar="FILE",
    help="Inputs that attncheck.capture() recorded (safetensors), with their masks and scales, in "
    "place of variants, shapes and distributions.",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    metavar="NAME",
    help="fp32, tf32, fp16, bf16, e4m3 or e5m2 (repeatable; default: bf16, or as recorded).",
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="BxHxLxD",
    help="Such as 1x4x256x64; 2x16/4x1024/4096x128/64 also sets kv heads, kv length and "
    "value dim (repeatable).",
)
@click.option(
    "--distribution",
    "distributions",
    multiple=True,
    metavar="NAME",
    help="Of the inputs (repeatable; default: normal).",
)
@seed_option
@device_option(
    "Where kernels run (default: cuda where there is a GPU; on a cpu Triton kernels are "
    "interpreted)."
)
@format_option("table, json, md or csv")
@out_option("rmse.json, rmse.md and rmse.csv")
@click.option(
    "--explain",
    "explained",
    metavar="CELL",
    help="In place of the table: the verdict on KERNEL/VARIANT[/HEADS[/DTYPE]] term by term.",
)
@quiet_option
@click.make_pass_decorator(Interrupts, ensure=True)
def rmse(  # noqa: PLR0913  # one parameter per option
    interrupts: Interrupts,
    /,
    *,
    kernels: tuple[str, ...],
    variants: tuple[str, ...],
    mask: str | None,
    score: str | None,
    recording: str | None,
    dtypes: tuple[str, ...],
    shapes: tuple[str, ...],
    distributions: tuple[str, ...],
    seed: int,
    device: str | None,
    fmt: str,
    directory: str,
    explained: str | None,
    quiet: bool,
) -> int:
    """Measure each kernel's RMSE against exact attention in fp64.

    Every error also stands beside the two that bound what can be asked: the rounding floor (the
    exact result correctly rounded) and the ideal kernel (a perfect tiled kernel at these dtypes).

    The verdict asks whether every error is rounding: it compares each element with what the
    kernel's declared arithmetic allows there, and its precision with the ideal kernel's.

    Exit code 1 when a verdict is fail or a kernel raised, 5 when no cell could be measured.
    """
    from attncheck import reporting
    from attncheck.cli.progress import progress
    from attncheck.errors import UnknownName
    from attncheck.examine.environment import default_device, require_device
    from attncheck.runner.measure import measure, pairs

    interrupts.check()  # the imports above take a while, and may have swallowed one
    if fmt not in reporting.FORMATS:
        raise UnknownName("format", fmt, reporting.FORMATS)
    device = device or default_device()
    require_device(device)
    subjects = _subjects(kernels, device)
    cells = _cells(
        variants=variants,
        mask=mask,
        score=score,
        recording=recording,
        dtypes=dtypes,
        shapes=shapes,
        distributions=distributions,
        seed=seed,
        device=device,
    )
    if kernels:
        _refuse_unconcerned(cells, subjects)
    if explained is not None:
        _refuse_beside("--explain", ("fmt", "directory"), "prints one cell and writes no files")
        return _exit_code(explain(explained, cells, subjects, device))
    total = sum(len(asked) for _, asked in pairs(cells, subjects, device))
    reporting.check_writable(directory)
    with progress(total, quiet=quiet) as advance:

        def done(record: Record) -> None:
            interrupts.check()
            advance(f"{record.kernel} {record.variant} {record.heads}")

        report = measure(cells, subjects, device=device, command=as_typed(files=_FILES), done=done)
    with interrupts.writing(directory):
        reporting.write(report, directory)
    with standard_output():
        reporting.show(report, fmt)
    return _exit_code(report)


def _cells(  # noqa: PLR0913  # one parameter per option
    *,
    variants: tuple[str, ...],
    mask: str | None,
    score: str | None,
    recording: str | None,
    dtypes: tuple[str, ...],
    shapes: tuple[str, ...],
    distributions: tuple[str, ...],
    seed: int,
    device: str,
) -> list[Cell]:
    """What the options ask for: recorded inputs, own mods, or variants."""
    from attncheck.examine.environment import prepare
    from attncheck.runner.plan import DEFAULT_SHAPES, plan
    from attncheck.runner.questions import own_variant, recorded

    if recording is not None:
        replaced = ("variants", "mask", "score", "shapes", "distributions", "seed")
        _refuse_beside("--inputs", replaced)
        return recorded(recording, dtypes)
    own = mask is not None or score is not None
    if own:
        _refuse_beside("--mask or --score", ("variants",))
        prepare(device)  # torch's tracer imports Triton, which decides then how kernels run
    return plan(
        dtypes=dtypes or ("bf16",),
        variants=variants,
        own=own_variant(mask, score) if own else None,
        shapes=shapes or (DEFAULT_SHAPES[device],),
        distributions=distributions or ("normal",),
        seed=seed,
    )


def _refuse_unconcerned(cells: list[Cell], subjects: list[Subject]) -> None:
    """Raises UsageError for a kernel asked for by name that nothing asked for concerns."""
    from attncheck.errors import UsageError
    from attncheck.runner.measure import concerned

    for subject in subjects:
        if not concerned(cells, [subject]):
            raise UsageError(unconcerned(subject))


def _refuse_beside(
    option: str, others: tuple[str, ...], says: str = "already says what to compute"
) -> None:
    """Raises UsageError when an option that ``option`` takes the place of is given too.

    Also as its default, or as nothing: ``--seed 0``, ``--mask ""``.
    """
    from attncheck.errors import UsageError

    context = click.get_current_context()
    typed = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in others
        and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]
    if typed:
        raise UsageError(f"{option} {says}: leave out {' and '.join(typed)}.")


def _subjects(kernels: tuple[str, ...], device: str) -> list[Subject]:
    from attncheck.examine.environment import prepare
    from attncheck.subjects import builtin

    if any(":" in kernel for kernel in kernels):
        prepare(device)  # before the file's own Triton functions are decorated
    return named(kernels or builtin.names())


def _exit_code(report: Report) -> int:
    statuses = {record.status for record in report.records}
    if statuses & {"fail", "error"}:
        return FAILED
    return 0 if statuses - {"unsupported"} else NOTHING_TESTED
