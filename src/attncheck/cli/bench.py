"""``attncheck bench``: how fast is each kernel, and is its result right?"""

from __future__ import annotations

import math
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

from attncheck.cli import verb
from attncheck.cli.long_runs import BY_HAND, collect, restrict_to_claims
from attncheck.cli.options import (
    end_without_gpu,
    open_kernels,
    start_compilers,
    start_worker,
    typed_command,
)
from attncheck.cli.standard_output import LivePage, interrupts, show_report
from attncheck.core.errors import UsageError, parse_seconds
from attncheck.records.bench_report import BenchCell, BenchReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from attncheck.bench.tables import BenchPlan
    from attncheck.subjects.capabilities.subject import Subject
    from attncheck.workers.process import Worker

_FILES = {"--kernel", "--plot", "--baseline"}
# Default kernels; on a CPU only those that run without Triton's interpreter.
_KERNELS = {
    "cpu": ("sdpa-math", "sdpa-flash"),
    "cuda": (
        *("triton-flash2", "triton-flash3"),
        *("sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "flex"),
    ),
}
_CACHE_KERNELS = ("triton-decode", "triton-paged")  # added if a table decodes or has paged keys
_BASELINE = "sdpa-flash"
_ROUNDS, _ROUNDS_AGAINST = 20, 40  # default rounds, without and with --against
_COMPILING = 300.0  # seconds that compiling ahead may take


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Options of ``attncheck bench``, as typed."""

    kernels: tuple[str, ...] = verb.kernels("our attention kernels and torch's, on a cpu torch's")
    tables: tuple[str, ...] = verb.several(
        "--table",
        "NAME",
        "main, flash2, flash3, flash3-fp8, flex, tutorial, tutorial-fp8, decode, paged or cpu "
        "(repeatable; default: main, on a cpu cpu).",
    )
    dtypes: tuple[str, ...] = verb.several(
        "--dtype", "NAME", "Dtype, instead of the table's: fp32, tf32, fp16, bf16, e4m3 or e5m2."
    )
    variants: tuple[str, ...] = verb.several(
        "--variant", "NAME", "Mask and score mod of `attncheck list`, instead of the table's."
    )
    lengths: tuple[int, ...] = verb.several(
        "--length", "N", "Sequence length, instead of the table's.", type=click.IntRange(1)
    )
    dims: tuple[int, ...] = verb.several(
        "--head-dim", "N", "Head dim, instead of the table's.", type=click.IntRange(1, 256)
    )
    shapes: tuple[str, ...] = verb.several(
        "--shape", "BxHxLxD", "Sizes, written as for `attncheck rmse`, instead of a table."
    )
    backward: bool | None = verb.option(
        "--backward/--forward",
        "",
        "Time the backward too, or the forward alone (default: as the table says).",
        is_flag=True,
    )
    baseline: str = verb.option(
        "--baseline",
        "NAME",
        f"Kernel that the others are compared with (default: {_BASELINE}).",
        "",
    )
    against: str | None = verb.option(
        "--against",
        "REF",
        "Time the --kernel of a file as of git commit REF too, and say whether it has become "
        "faster or slower.",
    )
    rounds: int | None = verb.option(
        "--rounds",
        "N",
        f"Number of rounds in which the kernels take turns (default: {_ROUNDS}, with --against "
        f"{_ROUNDS_AGAINST}).",
        type=click.IntRange(1, 10_000),
    )
    graph: bool = verb.flag(
        "--graph",
        "Time CUDA graphs of the calls, which leaves out launches, where they can be captured.",
    )
    seed: int = verb.seed()
    device: str | None = verb.device("Where kernels run", verb.GPU)
    timeout: float | None = verb.timeout()
    in_process: bool = verb.in_process()
    fmt: str = verb.fmt()
    directory: str = verb.out("bench.json, bench.md and bench.csv")
    plots: tuple[str, ...] = verb.plots("Also draw a roofline")
    max_time: str | None = verb.max_time(", and keep what has been measured")
    quiet: bool = verb.quiet()


@verb.command
def bench(options: BenchOptions) -> int:
    """Time kernels in turns, and check the outputs of the timed calls.

    Shapes are those of the FlashAttention and FlexAttention papers and of Triton's tutorial, or
    your own. Each kernel's TFLOP/s (TB/s for decoding) stand beside those of the --baseline kernel,
    and beside the best of this machine: a large matmul and a large copy, measured in the same run.

    A wrong kernel is `fail`, however fast. On a CPU only torch's kernels and functions of torch's
    operations are timed: Triton kernels are interpreted there, and their times mean nothing.

    A run that is stopped, by Ctrl-C or --max-time, writes and shows the cells that it has measured.

    Exit code 1 when a verdict is fail, a kernel raised, or one is slower than --against, 3 when
    --max-time was too short, 5 when nothing could be timed, 130 after Ctrl-C.
    """
    workers = {each: start_worker(each, in_process=options.in_process) for each in options.kernels}
    compilers = start_compilers(options.kernels, options.device)
    with interrupts.importing():
        from attncheck.reporting import rendering
        from attncheck.reporting.image_files import check_plots, write_plots
    rendering.check_format(options.fmt)
    check_plots(options.plots)
    rendering.check_writable(options.directory, "bench")
    report, page = time_kernels(options, workers, compilers)
    how_far = f", {report.incomplete}" if report.incomplete else ""
    with interrupts.writing(options.directory, f"the report is written{how_far}"):
        rendering.write_report(report, options.directory, "bench")
        if options.plots and any(row.forward for cell in report.cells for row in cell.rows):
            write_plots(report, options.plots)
        elif options.plots:
            click.echo("attncheck: nothing was timed: no plot is drawn.", err=True)
    code = page.close(report) if page else show_report(report, options.fmt)
    if report.incomplete.startswith(BY_HAND):
        raise KeyboardInterrupt
    return code


def time_kernels(
    options: BenchOptions,
    workers: dict[str, Worker | None],
    compilers: Sequence[Worker] = (),
) -> tuple[BenchReport, LivePage | None]:
    """Load kernels and time them.

    Args:
        workers: The process started for each named kernel, or None.
        compilers: Processes started to compile our kernels.

    Returns:
        The report, and the page if its rows have been shown.

    Raises:
        UsageError: if something cannot be timed.
    """
    from attncheck.bench.tables import DEFAULT_TABLE, bench_plan
    from attncheck.verify.environment import prepare, usable_device

    parse_seconds(options.max_time, "--max-time")
    seconds = options.timeout or math.inf
    device = usable_device(options.device)
    end_without_gpu(compilers, device)
    prepare(device)
    plan = bench_plan(
        options.tables or (DEFAULT_TABLE[device],),
        shapes=options.shapes,
        dtypes=options.dtypes,
        variants=options.variants,
        lengths=options.lengths,
        dims=options.dims,
        backward=options.backward,
        seed=options.seed,
        device=device,
    )
    if options.shapes and (options.tables or options.lengths or options.dims):
        raise UsageError("--shape stands in place of --table, --length and --head-dim.")
    names: dict[str, Worker | None] = workers or dict.fromkeys(_KERNELS[device])
    problems = [one.problem for one in plan]
    # A decoding step, or keys in pages.
    reads_cache = any(p.paging is not None or p.query < p.kv for p in problems)
    if not workers and device == "cuda" and reads_cache:
        names |= dict.fromkeys(_CACHE_KERNELS)
    if options.baseline and options.baseline not in names:
        names |= {options.baseline: start_worker(options.baseline, in_process=options.in_process)}
    with ExitStack() as stack:
        opened = open_kernels(names, device=device, in_process=options.in_process, seconds=seconds)
        hosts = stack.enter_context(opened)
        interpreted = [host.subject.name for host in hosts.values() if host.subject.triton]
        if interpreted and device == "cpu":
            raise UsageError(
                f"kernel {interpreted[0]!r} is interpreted on a CPU, where its time means nothing: "
                "bench times torch's kernels there."
            )
        claims = restrict_to_claims(
            hosts,
            device,
            quiet=options.quiet,
            dtypes=options.dtypes,
            problems=[one.replace(backward=False) for one in problems if options.shapes],
        )
        subjects = [host.subject for host in hosts.values()]
        others: dict[str, str] = {}
        if options.against is not None:
            subjects, others = _with_other_commit(options, subjects, names, stack, device)
        return _time_cells(options, plan, subjects, others, claims, device, compilers)


def _with_other_commit(
    options: BenchOptions,
    subjects: list[Subject],
    names: dict[str, Worker | None],
    stack: ExitStack,
    device: str,
) -> tuple[list[Subject], dict[str, str]]:
    """Return the kernels, each of a file followed by the other commit's, and names {here: there}.

    Raises:
        UsageError: if there is no such commit, or a kernel is not in it.
    """
    from attncheck.gate.other_commit import commit_tree
    from attncheck.subjects.capabilities.named_kernels import BUILTIN
    from attncheck.verify.isolated import IsolatedKernel, RemoteSubject
    from attncheck.verify.kernel_hosts import on_terms

    file_kernels = [name for name in names if name not in BUILTIN]
    if not file_kernels:
        raise UsageError("--against compares kernels of a repository: name one by --kernel.")
    tree = stack.enter_context(commit_tree(str(options.against)))
    all_subjects, others = [], {}
    for name, subject in zip(names, subjects, strict=True):
        all_subjects.append(subject)
        if name not in file_kernels:
            continue
        side = tree.kernel(name)
        if side.missing:
            raise UsageError(f"kernel {name!r}: {side.missing}.")
        remote = IsolatedKernel(side.kernel, device=device, folder=side.folder, paths=side.paths)
        stack.enter_context(closing(remote))
        if strayed := tree.strayed(remote.files()):
            raise UsageError(f"kernel {name!r}: {strayed}.")
        other = remote.subject
        if isinstance(subject, RemoteSubject) and subject.terms is not None:
            other = on_terms(other, subject.terms)  # trials found the terms of the kernel here
        other.name = f"{subject.name} @{tree.ref}"
        others[subject.name] = other.name
        all_subjects.append(other)
    return all_subjects, others


def _time_cells(
    options: BenchOptions,
    plan: list[BenchPlan],
    subjects: list[Subject],
    others: dict[str, str],
    claims: dict[str, tuple[str, ...]],
    device: str,
    started: Sequence[Worker],
) -> tuple[BenchReport, LivePage | None]:
    """Measure the machine, then cell by cell; a stopped run has the cells measured so far."""
    from attncheck.bench.comparison import CHANCE, MARGIN, time_changes
    from attncheck.bench.machine import machine_limits
    from attncheck.bench.measure import time_cells
    from attncheck.reporting.bench_document import CellsAsTimed
    from attncheck.verify.compile_ahead import compiling_ahead
    from attncheck.verify.environment import environment
    from attncheck.verify.verify import absence_reasons, case_subjects

    names = [subject.name for subject in subjects]
    default = _BASELINE if _BASELINE in names else names[0]
    rounds = options.rounds or (_ROUNDS_AGAINST if others else _ROUNDS)
    problems = [one.problem for one in plan]
    matmul, copy = machine_limits(list(dict.fromkeys(p.dtype for p in problems)), device)
    report = BenchReport(
        command=typed_command(files=_FILES),
        environment=environment(device),
        kernels={subject.name: subject.summary for subject in subjects},
        absent=absence_reasons(subjects, device),
        claims=claims,
        baseline=options.baseline or default,
        rounds=rounds,
        matmul=matmul,
        copy=copy,
        against=options.against or "",
    )
    page = LivePage.of(CellsAsTimed(report)) if options.fmt == "table" else None

    def cells_of(stage: Callable[[str], None]) -> Iterator[BenchCell]:
        # Finish compiling before timing, since compilers call kernels on the same GPU.
        passes = [*problems, *(one.replace(backward=False) for one in problems if one.backward)]
        calls = zip(passes, case_subjects(passes, subjects, device), strict=True)
        with compiling_ahead(calls, device, started) as compilers:
            for compiler in compilers:
                stage("kernels are compiled")
                compiler.await_end(_COMPILING)
        yield from time_cells(
            plan, subjects, device=device, rounds=rounds, graph=options.graph, stage=stage
        )

    cells, stopped = collect(
        cells_of,
        total=len(plan),
        what=lambda cell: f"{cell.variant} {cell.table}",
        show=page.show if page else None,
        quiet=options.quiet,
        max_time=options.max_time,
    )
    report = replace(report, cells=tuple(cells), incomplete=stopped)
    if others:
        changes = time_changes(cells, others)
        report = replace(report, chance=CHANCE, margin=MARGIN, changes=changes)
    return report, page
