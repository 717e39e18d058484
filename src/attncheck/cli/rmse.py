"""``attncheck rmse``: how far is each kernel from exact attention?"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import UNSET
from msgspec.structs import replace

from attncheck.cli import verb
from attncheck.cli.long_runs import BY_HAND, collect, restrict_to_claims
from attncheck.cli.options import (
    end_without_gpu,
    not_applicable,
    open_kernels,
    start_compilers,
    start_worker,
    typed_command,
    was_typed,
)
from attncheck.cli.standard_output import LivePage, interrupts, show_report, standard_output
from attncheck.core.errors import UsageError, parse_seconds
from attncheck.records.json_reports import load_report
from attncheck.records.record import Record, Report, join_reports

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from attncheck.cases.variants import Cell
    from attncheck.subjects.capabilities.subject import Subject
    from attncheck.verify.kernel_hosts import KernelHost
    from attncheck.workers.process import Died, Worker

# Options that take a file, which reports name without its folder.
_FILES = {"--kernel", "--mask", "--score", "--inputs", "--plot", "--from"}
# Options that choose what is measured, and which --from refuses.
_MEASURES = (
    *("kernels", "variants", "mask", "score", "recording", "dtypes", "shapes", "distributions"),
    *("backward", "seed", "device", "timeout", "in_process", "explained", "max_time", "quiet"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RmseOptions:
    """Options of ``attncheck rmse``, as typed."""

    kernels: tuple[str, ...] = verb.kernels("all built in")
    variants: tuple[str, ...] = verb.several(
        "--variant",
        "NAME",
        "A mask and score mod, or softmax, or all (repeatable; default: the first eight of "
        "`attncheck list`).",
    )
    mask: str | None = verb.option(
        "--mask",
        "MASK",
        "Mask instead of the variants: one of your own, FILE.py::NAME, or one of `attncheck "
        "list` that needs no parameters.",
    )
    score: str | None = verb.option(
        "--score",
        "SCORE",
        "Score mod instead of the variants: one of your own, FILE.py::NAME, or one of "
        "`attncheck list` that needs no parameters.",
    )
    recording: str | None = verb.option(
        "--inputs",
        "FILE",
        "Inputs that attncheck.capture() recorded (safetensors), with their masks and scales, "
        "instead of variants, shapes and distributions.",
    )
    dtypes: tuple[str, ...] = verb.dtypes("bf16, or as recorded")
    shapes: tuple[str, ...] = verb.several(
        "--shape",
        "BxHxLxD",
        "Such as 1x4x256x64; 2x16/4x1024/4096x128/64 also sets kv heads, kv length and "
        "value dim (repeatable; default: 1x4x256x64 on a CPU, 2x16x4096x128 on a GPU).",
    )
    distributions: tuple[str, ...] = verb.several(
        "--distribution", "NAME", "Distribution of the inputs (repeatable; default: normal)."
    )
    backward: bool = verb.flag(
        "--backward",
        "Measure dQ, dK and dV too, for random gradients of out; not in fp8, of softmax or of "
        "pages. Times are of forward and backward together.",
    )
    seed: int = verb.seed()
    device: str = verb.device("Where kernels run")
    timeout: float | None = verb.timeout()
    in_process: bool = verb.in_process()
    fmt: str = verb.fmt()
    directory: str = verb.out("rmse.json, rmse.md and rmse.csv")
    plots: tuple[str, ...] = verb.plots("Also draw the RMSE of every kernel")
    sources: tuple[str, ...] = verb.several(
        "--from",
        "FILE",
        "Measure nothing, and show rmse.json of an earlier run again (repeatable: parts of a "
        "run are joined); files are written only for --out or --plot.",
    )
    max_time: str | None = verb.max_time(", and keep what has been measured")
    explained: str | None = verb.option(
        "--explain",
        "CELL",
        "Print the verdict on KERNEL/VARIANT[/HEADS[/DTYPE]] term by term, instead of the table.",
    )
    quiet: bool = verb.quiet()


@verb.command
def rmse(options: RmseOptions) -> int:
    """Measure each kernel's RMSE against exact attention in fp64.

    Every error is also compared with two others: the rounding floor, the error of the exact result
    rounded once, which no kernel can beat; and the error of the ideal kernel, a perfect tiled
    kernel at these dtypes.

    The verdict says whether every error is only rounding: the error of each element is compared
    with what the kernel's declared arithmetic allows there, and the kernel's precision with the
    ideal kernel's.

    With --backward gradients are judged too, given the out and LSE of the kernel's own forward.

    On a terminal each row is shown as it is measured. A run that is stopped, by Ctrl-C or
    --max-time, writes and shows what it has, marked incomplete.

    Exit code 1 when a verdict is fail or a kernel raised, 3 when --max-time was too short, 5 when
    no cell could be measured, 130 after Ctrl-C.
    """
    page = None
    # Options that measure nothing are refused below, which ends these workers.
    workers = {each: start_worker(each, in_process=options.in_process) for each in options.kernels}
    # Compiling a single cell in another process saves no time.
    no_compilers = options.sources or options.explained is not None
    compilers = [] if no_compilers else start_compilers(options.kernels, options.device)
    with interrupts.importing():
        from attncheck.reporting import exit_codes, rendering
        from attncheck.reporting.image_files import check_plots

    rendering.check_format(options.fmt)
    check_plots(options.plots)
    if options.sources:
        _refuse_with("--from", _MEASURES, "shows what was measured")
        report = join_reports([load_report(Path(one), Report) for one in options.sources])
        # An existing report is written again only if --out is typed.
        directory = options.directory if was_typed("directory") else ""
    else:
        if options.backward:
            _refuse_with("--backward", ("plots",), "gives gradients, which a plot does not show")
        report, page = _measure(options, workers, compilers)
        if options.explained is not None:
            return exit_codes.exit_code(report)
        directory = options.directory
    if directory:
        how_far = f", {report.incomplete}" if report.incomplete else ""
        with interrupts.writing(directory, f"the report is written{how_far}"):
            rendering.write_report(report, directory, "rmse")
            _draw(report, options)
    elif options.plots:
        _draw(report, options)
    code = page.close(report) if page else show_report(report, options.fmt)
    if report.incomplete and report.incomplete.startswith(BY_HAND):
        raise KeyboardInterrupt
    return code


def _measure(
    options: RmseOptions,
    workers: Mapping[str, Worker | None],
    compilers: Sequence[Worker],
) -> tuple[Report, LivePage | None]:
    """Measure the kernels of ``workers``, or all built-in ones.

    Returns:
        The Report, and the page if its rows have been shown.
    """
    with interrupts.importing():
        from attncheck.mods.mod_files import is_mod_reference
        from attncheck.subjects.capabilities import named_kernels
        from attncheck.verify.environment import prepare, usable_device
        from attncheck.verify.kernel_hosts import try_mods

    parse_seconds(options.max_time, "--max-time")
    # Without --timeout calls may take hours, since rmse measures and does not look for hangs.
    seconds = options.timeout or math.inf
    mod_options = {"mask": options.mask, "score": options.score}
    mods = {name: text for name, text in mod_options.items() if text and is_mod_reference(text)}
    device = usable_device(options.device)
    end_without_gpu(compilers, device)
    options = dataclasses.replace(options, device=device)
    if any(":" in kernel for kernel in options.kernels):
        prepare(device)  # before the file's own Triton functions are decorated
    kernels = workers or dict.fromkeys(named_kernels.builtin_names())
    if mods and not any(workers.values()) and not options.in_process:
        trial = start_worker(next(iter(mods.values())), in_process=False, echo=False)
        assert trial is not None, "a file's name is no kernel's"
        try_mods(mods, trial, device=device)
    if options.recording is not None:
        mods["recording"] = options.recording
    how: dict[str, Any] = {"in_process": options.in_process, "seconds": seconds, "mods": mods}
    died: dict[str, Died] = {}
    with open_kernels(kernels, device=device, died=died, **how) as hosts:
        return _measure_kernels(options, hosts, died, compilers)


def _measure_kernels(
    options: RmseOptions,
    hosts: Mapping[str, KernelHost],
    died: Mapping[str, Died],
    compilers: Sequence[Worker],
) -> tuple[Report, LivePage | None]:
    """Measure the kernels of ``hosts``, or show the one cell of --explain."""
    from attncheck.reporting import rendering
    from attncheck.verify.compile_ahead import load_ahead
    from attncheck.verify.verify import applicable_subjects, assemble_report

    cells, device = _cells(options), options.device
    subjects = [host.subject for host in hosts.values()]
    # Before the trials of plain functions, which may take minutes.
    if options.kernels:
        _refuse_not_applicable(cells, subjects)
    # Kernels that were not named are left out with a message instead of an error.
    elif left_out := _without_gradients(cells, subjects):
        click.echo(f"attncheck: without gradients, and so without a row: {left_out}.", err=True)
    if options.explained is not None:
        others = ("fmt", "directory", "plots")
        _refuse_with("--explain", others, "prints one cell and writes no files")
        cells, hosts = _choose(options.explained, cells, hosts, device)
    load_ahead([cell.problem for cell in cells], hosts, device)
    typed = options.shapes or options.recording
    claims = restrict_to_claims(
        hosts,
        device,
        quiet=options.quiet,
        dtypes=options.dtypes,
        problems=[cell.problem for cell in cells if typed],
    )
    subjects = [host.subject for host in hosts.values()]
    if options.explained is not None:
        return _explain(cells[0], subjects[0], device), None
    # Check before the first kernel runs, since measuring may take an hour.
    rendering.check_writable(options.directory)
    concerned = applicable_subjects([cell.problem for cell in cells], subjects)
    report = assemble_report(concerned, (), device=device, command=typed_command(files=_FILES))
    report = replace(
        report,
        claims=claims or UNSET,
        # Besides the kernels to measure, list those that died while loading, which have failed.
        kernels=report.kernels | dict.fromkeys(died, ""),
        records=tuple(_death_records(died, cells, *report.environments)),
    )
    return _add_records(options, report, cells, subjects, compilers)


def _death_records(died: Mapping[str, Died], cells: list[Cell], key: str) -> Iterator[Record]:
    """Yield a Record for each cell of the kernels whose processes died while loading."""
    from attncheck.inputs.problem import Case
    from attncheck.verify.deaths import death_record

    for kernel, error in died.items():
        for cell in cells:
            case = Case(problem=cell.problem)
            yield death_record(error, case, kernel=kernel, variant=cell.variant, environment=key)


def _add_records(
    options: RmseOptions,
    report: Report,
    cells: list[Cell],
    subjects: list[Subject],
    compilers: Sequence[Worker],
) -> tuple[Report, LivePage | None]:
    """Return ``report`` with all Records, or those measured before the run was stopped."""
    from attncheck.inputs.problem import Case
    from attncheck.reporting.measurement_document import RowsAsMeasured
    from attncheck.verify.compile_ahead import compiling_ahead
    from attncheck.verify.verify import case_subjects, iter_records

    page = LivePage.of(RowsAsMeasured(report)) if options.fmt == "table" else None
    # Progress counts only the kernels that apply to each cell.
    problems = [cell.problem for cell in cells]
    subjects_of_cells = case_subjects(problems, subjects, options.device)
    show = page.show if page else None
    for record in report.records:
        show(record) if show else None
    cases = [(cell.variant, Case(problem=cell.problem)) for cell in cells]
    (key,) = report.environments  # every Record of one run is from this machine
    run_options: dict[str, Any] = {"device": options.device, "environment_key": key}
    run_options |= {"applicable_only": True, "timed": True}
    with compiling_ahead(zip(problems, subjects_of_cells, strict=True), options.device, compilers):
        records, stopped = collect(
            lambda stage: iter_records(subjects, cases, stage=stage, **run_options),
            total=sum(map(len, subjects_of_cells)),
            what=lambda record: f"{record.kernel} {record.variant} {record.heads}",
            show=show,
            quiet=options.quiet,
            max_time=options.max_time,
        )
    every = (*report.records, *records)
    return replace(report, records=every, incomplete=stopped or UNSET), page


def _draw(report: Report, options: RmseOptions) -> None:
    """Draw the report; if this run measured nothing, only say so."""
    from attncheck.reporting.image_files import write_plots
    from attncheck.reporting.rmse_plot import measured

    if options.plots and not options.sources and not measured(report):
        click.echo("attncheck: nothing was measured: no plot is drawn.", err=True)
    elif options.plots:
        write_plots(report, options.plots)


def _cells(options: RmseOptions) -> list[Cell]:
    """Return the planned cells: of recorded inputs, of own mods, or of variants.

    Raise ProblemError if --backward is impossible for recorded inputs.
    """
    from attncheck.cases.variants import DEFAULT_SHAPES, own_variant, plan_cells, recorded_cells
    from attncheck.inputs.problem import check_size
    from attncheck.verify.environment import prepare

    device = options.device
    if options.recording is not None:
        replaced = ("variants", "mask", "score", "shapes", "distributions", "seed")
        _refuse_with("--inputs", replaced)
        cells = recorded_cells(options.recording, options.dtypes, device)
        if options.backward:
            cells = [cell.asking(backward=True) for cell in cells]
            # A backward needs more memory than its forward alone.
            for cell in cells:
                check_size(cell.problem, device)
        return cells
    own = options.mask is not None or options.score is not None
    if own:
        _refuse_with("--mask or --score", ("variants",))
        prepare(device)  # torch's tracer imports Triton, which decides at import how kernels run
    return plan_cells(
        dtypes=options.dtypes or ("bf16",),
        variants=options.variants,
        own=own_variant(options.mask, options.score) if own else None,
        shapes=options.shapes or (DEFAULT_SHAPES[device],),
        distributions=options.distributions or ("normal",),
        seed=options.seed,
        backward=options.backward,
        device=device,
    )


def _refuse_not_applicable(cells: list[Cell], subjects: list[Subject]) -> None:
    """Raise UsageError for a named kernel to which no cell applies."""
    from attncheck.verify.verify import applicable_subjects

    for subject in subjects:
        if not applicable_subjects([cell.problem for cell in cells], [subject]):
            if _without_gradients(cells, [subject]):
                raise UsageError(f"kernel {subject.name!r} gives no gradients: see attncheck list.")
            raise UsageError(not_applicable(subject))


def _without_gradients(cells: list[Cell], subjects: list[Subject]) -> str:
    """Return names of kernels that ``cells`` concern only without their backward, by comma."""
    from attncheck.verify.verify import applicable_subjects

    if not any(cell.problem.backward for cell in cells):
        return ""
    concerned = applicable_subjects([cell.problem for cell in cells], subjects)
    others = [subject for subject in subjects if subject not in concerned]
    # Only kernels whose forward the plan concerns, since others lack more than gradients.
    forward = [cell.asking(backward=False).problem for cell in cells]
    return ", ".join(subject.name for subject in applicable_subjects(forward, others))


def _refuse_with(
    option: str, others: tuple[str, ...], reason: str = "already says what to compute"
) -> None:
    """Raise UsageError if one of ``others``, which ``option`` replaces, is typed too.

    Even with its default value or an empty one: ``--seed 0``, ``--mask ""``.
    """
    parameters = click.get_current_context().command.params
    typed = [p.opts[0] for p in parameters if p.name in others and was_typed(p.name)]
    if typed:
        raise UsageError(f"{option} {reason}: leave out {' and '.join(typed)}.")


def _choose(
    name: str, cells: list[Cell], hosts: Mapping[str, KernelHost], device: str
) -> tuple[list[Cell], dict[str, KernelHost]]:
    """Return the one cell called ``name``, and the host of its kernel.

    The kernel is called as in reports, or as it was typed. Raise UsageError if ``name`` matches
    none of ``cells``, or several.
    """
    from attncheck.cases.variants import choose_cell
    from attncheck.verify.verify import case_subjects

    subjects = {host.subject.name: kernel for kernel, host in hosts.items()}
    for label, kernel in subjects.items():
        whole_name, whole_kernel = _with_whole_path(name), _with_whole_path(kernel)
        if f"{whole_name}/".startswith(f"{whole_kernel}/"):
            name = label + whole_name.removeprefix(whole_kernel)
            break
    every = [host.subject for host in hosts.values()]
    subjects_of_cells = case_subjects([cell.problem for cell in cells], every, device)
    cell, subject = choose_cell(name, list(zip(cells, subjects_of_cells, strict=True)))
    kernel = subjects[subject.name]
    return [cell], {kernel: hosts[kernel]}


def _with_whole_path(name: str) -> str:
    """Return ``FILE.py::NAME`` with the file's whole path, which has but one spelling."""
    file, colons, rest = name.partition("::")
    return f"{Path(file).resolve()}{colons}{rest}" if colons else name


def _explain(cell: Cell, subject: Subject, device: str) -> Report:
    """Measure one cell, and show the parts of its verdict."""
    from attncheck.inputs.problem import Case
    from attncheck.reporting.check_document import explanation
    from attncheck.reporting.rendering import show
    from attncheck.verify.verify import verify

    cases = [(cell.variant, Case(problem=cell.problem))]
    report = verify(subject, cases, device=device, timed=True)
    (record,) = report.records
    with standard_output():
        show(record, document=explanation)
    return report
