"""``attncheck rmse``: how far is each kernel from exact attention?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from attncheck.cli.options import (
    device_option,
    format_option,
    load_kernels,
    not_applicable,
    out_option,
    quiet_option,
    seed_option,
    typed_command,
)
from attncheck.cli.standard_output import Interrupts, Verb, standard_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.capabilities.subject import Subject
    from attncheck.cases.variants import Cell
    from attncheck.records.record import Report

__all__ = [
    "chosen_cells",
    "chosen_kernels",
    "explain_cell",
    "refuse_not_applicable",
    "refuse_options_with",
    "rmse",
    "was_typed",
    "without_gradients",
]


FAILED, IN_DOUBT, NOTHING_TESTED = 1, 3, 5
_WRITES_NOTHING = "prints one cell and writes no files"
# Options that take a file: reports name it without its folder.
_FILES = {"--kernel", "--mask", "--score", "--inputs", "--plot", "--from"}
# What says what is measured, which a report that is there has said.
_MEASURES = (
    *("kernels", "variants", "mask", "score", "recording", "dtypes", "shapes", "distributions"),
    *("backward", "seed", "device", "explained", "quiet"),
)


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
    help="A mask and score mod, or softmax, or all (repeatable; default: the first eight of "
    "`attncheck list`).",
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
@click.option(
    "--backward",
    is_flag=True,
    help="Also dQ, dK and dV, of a loss whose gradient is drawn; not in fp8, of softmax or of "
    "pages. Times are of forward and backward together.",
)
@seed_option
@device_option(
    "Where kernels run (default: cuda where there is a GPU; on a cpu Triton kernels are "
    "interpreted)."
)
@format_option("table, json, md or csv")
@out_option("rmse.json, rmse.md and rmse.csv")
@click.option(
    "--plot",
    "plots",
    multiple=True,
    metavar="FILE",
    help="Also draw the RMSE of every kernel, to FILE.png or FILE.svg (repeatable; needs "
    "attncheck[plot]).",
)
@click.option(
    "--from",
    "sources",
    multiple=True,
    metavar="FILE",
    help="Measure nothing: show the report that an earlier run wrote, rmse.json, again (repeatable:"
    " the parts of a run as one); files only where --out or --plot says so.",
)
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
    backward: bool,
    seed: int,
    device: str | None,
    fmt: str,
    directory: str,
    plots: tuple[str, ...],
    sources: tuple[str, ...],
    explained: str | None,
    quiet: bool,
) -> int:
    """Measure each kernel's RMSE against exact attention in fp64.

    Every error also stands beside the two that bound what can be asked: the rounding floor (the
    exact result correctly rounded) and the ideal kernel (a perfect tiled kernel at these dtypes).

    The verdict asks whether every error is rounding: it compares each element with what the
    kernel's declared arithmetic allows there, and its precision with the ideal kernel's.

    With --backward it judges gradients too, by what the kernel's own forward left for them.

    Exit code 1 when a verdict is fail or a kernel raised, 5 when no cell could be measured.
    """
    _check(fmt, plots)
    if sources:
        refuse_options_with("--from", _MEASURES, "shows what was measured")
        directory = directory if was_typed("directory") else ""
        return _shown_again(interrupts, sources, fmt, directory, plots)
    if backward:
        refuse_options_with("--backward", ("plots",), "gives gradients, which a plot does not show")
    from msgspec.structs import replace

    from attncheck.cli.progress import progress
    from attncheck.inputs.problem import Case
    from attncheck.reporting import rendering
    from attncheck.verify.environment import default_device, require_device
    from attncheck.verify.verify import (
        applicable_subjects,
        assemble_report,
        case_subjects,
        iter_records,
    )

    interrupts.check()  # the imports above take a while, and may have swallowed one
    device = device or default_device()
    require_device(device)
    subjects = chosen_kernels(kernels, device)
    cells = chosen_cells(
        variants=variants,
        mask=mask,
        score=score,
        recording=recording,
        dtypes=dtypes,
        shapes=shapes,
        distributions=distributions,
        seed=seed,
        device=device,
        backward=backward,
    )
    if kernels:
        refuse_not_applicable(cells, subjects)
    elif unasked := without_gradients(cells, subjects):
        click.echo(f"attncheck: without gradients, and so without a row: {unasked}.", err=True)
    if explained is not None:
        refuse_options_with("--explain", ("fmt", "directory", "plots"), _WRITES_NOTHING)
        return _exit_code(explain_cell(explained, cells, subjects, device))
    problems = [cell.problem for cell in cells]
    total = sum(map(len, case_subjects(problems, subjects, device)))
    rendering.check_writable(directory)
    report = assemble_report(
        applicable_subjects(problems, subjects),
        (),
        device=device,
        command=typed_command(files=_FILES),
    )
    records = []
    with progress(total, quiet=quiet) as advance:
        cases = [(cell.variant, Case(problem=cell.problem)) for cell in cells]
        for record in iter_records(
            subjects,
            cases,
            device=device,
            environment_key=next(iter(report.environments)),
            applicable_only=True,
            timed=True,
        ):
            interrupts.check()
            advance(f"{record.kernel} {record.variant} {record.heads}")
            records.append(record)
    report = replace(report, records=tuple(records))
    with interrupts.writing(directory):
        rendering.write_report(report, directory, "rmse")
        _draw(report, plots)
    with standard_output():
        rendering.show(report, fmt)
    return _exit_code(report)


def _check(fmt: str, plots: tuple[str, ...]) -> None:
    """Raises UsageError for a format or a plot that cannot be."""
    from attncheck.reporting import rendering

    rendering.check_format(fmt)
    if plots:
        from attncheck.reporting.image_files import check_plots

        check_plots(plots)


def _shown_again(
    interrupts: Interrupts,
    sources: tuple[str, ...],
    fmt: str,
    directory: str,
    plots: tuple[str, ...],
) -> int:
    """Show the reports of files as one; the exit code is that of the runs that made them.

    Raises UsageError for a file that is no report, for two of the same, and for a plot of one
    without numbers.
    """
    from pathlib import Path

    from attncheck.records.json_reports import load_report
    from attncheck.records.record import Report, join_reports
    from attncheck.reporting import rendering

    report = join_reports([load_report(Path(source), Report) for source in sources])
    if plots:
        from attncheck.reporting.image_files import write_plots

        write_plots(report, plots)
    if directory:
        with interrupts.writing(directory):
            rendering.write_report(report, directory, "rmse")
    with standard_output():
        rendering.show(report, fmt)
    return _exit_code(report)


def _draw(report: Report, plots: tuple[str, ...]) -> None:
    """Draw what was measured just now; where that is nothing, say so and no more."""
    if not plots:
        return
    from attncheck.reporting.image_files import measured, write_plots

    if measured(report):
        write_plots(report, plots)
    else:
        click.echo("attncheck: nothing was measured: no plot is drawn.", err=True)


def _exit_code(report: Report) -> int:
    from attncheck.records.record import FAILED_STATUSES, UNTRUSTED_STATUSES

    statuses = {record.status for record in report.records}
    if statuses & FAILED_STATUSES:
        return FAILED
    if statuses & UNTRUSTED_STATUSES:
        return IN_DOUBT
    return 0 if statuses - {"unsupported"} else NOTHING_TESTED


def chosen_cells(  # noqa: PLR0913  # one parameter per option
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
    backward: bool,
) -> list[Cell]:
    """What the options ask for: recorded inputs, own mods, or variants."""
    from attncheck.cases.variants import DEFAULT_SHAPES, own_variant, plan_cells, recorded_cells
    from attncheck.verify.environment import prepare

    if recording is not None:
        replaced = ("variants", "mask", "score", "shapes", "distributions", "seed")
        refuse_options_with("--inputs", replaced)
        return _asking(recorded_cells(recording, dtypes), backward=backward)
    own = mask is not None or score is not None
    if own:
        refuse_options_with("--mask or --score", ("variants",))
        prepare(device)  # torch's tracer imports Triton, which decides then how kernels run
    return plan_cells(
        dtypes=dtypes or ("bf16",),
        variants=variants,
        own=own_variant(mask, score) if own else None,
        shapes=shapes or (DEFAULT_SHAPES[device],),
        distributions=distributions or ("normal",),
        seed=seed,
        backward=backward,
    )


def _asking(cells: list[Cell], *, backward: bool) -> list[Cell]:
    """The recorded cells; raises ProblemError where gradients are asked for and cannot be."""
    from attncheck.cases.variants import check_memory

    if backward:
        cells = [cell.asking(backward=True) for cell in cells]
        for cell in cells:
            check_memory(cell.problem)
    return cells


def refuse_not_applicable(cells: list[Cell], subjects: list[Subject]) -> None:
    """Raises UsageError for a kernel asked for by name that nothing asked for concerns."""
    from attncheck.core.errors import UsageError
    from attncheck.verify.verify import applicable_subjects

    for subject in subjects:
        if not applicable_subjects([cell.problem for cell in cells], [subject]):
            if without_gradients(cells, [subject]):
                raise UsageError(f"kernel {subject.name!r} gives no gradients: see attncheck list.")
            raise UsageError(not_applicable(subject))


def without_gradients(cells: list[Cell], subjects: list[Subject]) -> str:
    """The kernels that no backward of ``cells`` concerns, though its forward does; by comma."""
    from attncheck.verify.verify import applicable_subjects

    if not any(cell.problem.backward for cell in cells):
        return ""
    asked = applicable_subjects([cell.problem for cell in cells], subjects)
    others = [subject for subject in subjects if subject not in asked]
    forward = [cell.asking(backward=False).problem for cell in cells]
    return ", ".join(subject.name for subject in applicable_subjects(forward, others))


def refuse_options_with(
    option: str, others: tuple[str, ...], says: str = "already says what to compute"
) -> None:
    """Raises UsageError when an option that ``option`` takes the place of is given too.

    Also as its default, or as nothing: ``--seed 0``, ``--mask ""``.
    """
    from attncheck.core.errors import UsageError

    parameters = click.get_current_context().command.params
    typed = [p.opts[0] for p in parameters if p.name in others and was_typed(p.name)]
    if typed:
        raise UsageError(f"{option} {says}: leave out {' and '.join(typed)}.")


def chosen_kernels(kernels: tuple[str, ...], device: str) -> list[Subject]:
    """The kernels asked for, or all built in."""
    from attncheck.capabilities import named_kernels
    from attncheck.verify.environment import prepare

    if any(":" in kernel for kernel in kernels):
        prepare(device)  # before the file's own Triton functions are decorated
    return load_kernels(kernels or named_kernels.builtin_names())


def was_typed(name: str) -> bool:
    """Whether the option of this parameter was typed, be it as its default."""
    source = click.get_current_context().get_parameter_source(name)
    return source is ParameterSource.COMMANDLINE


def explain_cell(
    name: str, cells: Sequence[Cell], subjects: Sequence[Subject], device: str
) -> Report:
    """Measure the one cell called ``name``, and show what its verdict is made of.

    Raises UsageError where ``name`` names none of ``cells``, or several.
    """
    from attncheck.cases.variants import choose_cell
    from attncheck.inputs.problem import Case
    from attncheck.reporting.check_document import explanation
    from attncheck.reporting.rendering import show
    from attncheck.verify.verify import case_subjects, verify

    concerned = case_subjects([cell.problem for cell in cells], subjects, device)
    cell, subject = choose_cell(name, list(zip(cells, concerned, strict=True)))
    asked = [(cell.variant, Case(problem=cell.problem))]
    report = verify(subject, asked, device=device, applicable_only=True, timed=True)
    (record,) = report.records
    with standard_output():
        show(record, document=explanation)
    return report
