"""``attncheck gate``: everything that a change of a kernel needs, with one exit code."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import click

from attncheck.cli.options import device_option, format_option, typed_command
from attncheck.cli.progress import run_progress, time_left
from attncheck.cli.standard_output import Interrupts, Verb, standard_output
from attncheck.core.errors import UnknownName, UsageError
from attncheck.core.sanitize_text import one_line
from attncheck.records.record import FAILED_STATUSES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from attncheck.gate.choices import Choices
    from attncheck.gate.sources import CommitTree
    from attncheck.records.baseline_entries import Baseline
    from attncheck.records.run_reports import Answer, GateReport
    from attncheck.workers.journal_format import JournalContent
    from attncheck.workers.pool import RunEnd, RunEvent
    from attncheck.workers.units import Done, Unit
    from attncheck.workers.worker_pool import WorkerPlace

__all__ = [
    "FAILURES",
    "JOURNAL",
    "GateRun",
    "changed_kernels",
    "existing_journal",
    "failure_scripts",
    "finish_gate",
    "gate",
    "gate_progress",
    "load_baseline",
    "other_commit",
    "parse_seconds",
    "plan_run",
    "run_gate",
    "typed_gate_command",
    "worker_places",
]


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
    from attncheck.core.files import check_names
    from attncheck.reporting.rendering import GATE_FORMATS, check_format

    interrupts.check()  # the imports above take a while, and may have swallowed one
    check_format(fmt, GATE_FORMATS)
    seconds = parse_seconds(max_time, "--max-time")
    call = parse_seconds(timeout, "--timeout") or 0.0
    known = load_baseline(baseline)
    kernels, unchanged = changed_kernels(kernels, changed_since)
    if unchanged and not kernels:
        click.echo(f"attncheck: no kernel has changed since {changed_since}.", err=True)
        return 0
    check_names(directory, [JOURNAL, "gate.json"])
    with other_commit(against, kernels, cluster=cluster) as tree:
        this = plan_run(
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
        ended, content = run_gate(
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
    return finish_gate(
        interrupts,
        ended,
        content,
        directory=directory,
        fmt=fmt,
        baseline=known,
        policy={"strict": strict, "strict_baseline": strict_baseline, "flaky": flaky},
    )


JOURNAL = "results.jsonl"
_OF_A_RUN = {"seed", "started", "typed"}  # of a journal's header: no part of the plan
_MOST_LANES = 4  # that are started unless somebody asks for more
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)\s*([smh]?)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRun:
    """One run of the gate.

    Attributes:
        kernels: As asked for.
        device, convention: Of all of them.
        choices: What is asked.
        shard: ``2/4``; empty for the whole.
        head: What the journal begins with.
        units: The first work.
    """

    kernels: tuple[str, ...]
    device: str
    convention: str
    choices: Choices
    shard: str
    head: dict[str, Any]
    units: tuple[Unit, ...]


def changed_kernels(
    names: tuple[str, ...], ref: str | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The kernels to ask, and those that have not changed since ``ref``."""
    kernels = _kernels_of(names)
    if ref is None:
        return kernels, ()
    from attncheck.gate.sources import changed_kernels

    found = changed_kernels(kernels, ref)
    return found, tuple(kernel for kernel in kernels if kernel not in found)


def plan_run(  # noqa: PLR0913  # one parameter per option
    kernels: tuple[str, ...],
    *,
    tier: str | None,
    device: str | None,
    dtypes: tuple[str, ...],
    convention: str,
    stages: tuple[str, ...],
    skipped: tuple[str, ...],
    seed: int | None,
    shard: str,
    timeout: float,
    isolated: bool,
    sanitizer: bool,
    tree: CommitTree | None,
    baseline: Baseline | None,
    directory: str,
    fresh: bool,
) -> GateRun:
    """What is to be done; raises UsageError for what cannot be.

    With a baseline or a tree the stage baseline has to be part of it: something is to be compared.
    """
    if missing := [name for name in ("hypothesis", "pytest") if find_spec(name) is None]:
        raise UsageError(f"a gate needs {missing[0]}: pip install 'attncheck[properties]'.")
    from attncheck.cases.tier import default_tier, gate_tier_named
    from attncheck.conventions.declarations import convention_named
    from attncheck.gate.choices import BaselineCases, Choices, parse_stages
    from attncheck.gate.gate_report import journal_header
    from attncheck.gate.plan import describe_units, replay_units
    from attncheck.gate.sources import source_fingerprint
    from attncheck.verify.environment import default_device, require_device
    from attncheck.workers.units import Shard

    if convention:
        convention_named(convention)
    part = str(Shard.parse(shard))
    device = device or default_device()
    require_device(device)
    chosen = gate_tier_named(tier or default_tier(device))
    if part and chosen.draws_anew and seed is None:
        raise UsageError(
            f"--shard {part}: each run of tier {chosen.name} draws other numbers: "
            "give all parts the same --seed N."
        )
    options: dict[str, Any] = {
        "tier": chosen.name,
        "seed": seed or 0,
        "stages": ",".join(parse_stages(stages, skipped)),
        "dtypes": ",".join(dtypes),
        "isolated": isolated,
        "timeout": timeout,
        "failures": str(Path(FAILURES).absolute()),
        "sanitizer": sanitizer,
        "tree": tree.spelled() if tree else "",
        "held": BaselineCases.of(baseline).spelled() if baseline else "",
    }
    choices = Choices.of(options)
    _check_stages(choices, sanitizer=sanitizer, measures=bool(baseline or tree))

    sources = source_fingerprint(kernels, (directory, str(Path(FAILURES).parent)))

    def head_of(choices: Choices) -> dict[str, Any]:
        return journal_header(
            kernels,
            device=device,
            convention=convention,
            started=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            plan=choices.plan() | {"sources": sources},
            shard=part,
            typed=typed_gate_command(kernels),
        )

    head = head_of(choices)
    if chosen.draws_anew and seed is None:
        seed = _seed_of(head, existing_journal(directory, fresh=fresh))
        choices = Choices.of(options | {"seed": seed})
        head["seed"] = seed
    units = describe_units(kernels, device=device, tier=chosen.name, convention=convention)
    if not part:  # else: what failed on this machine is unknown to the other parts
        units += replay_units(
            kernels,
            FAILURES,
            device=device,
            convention=convention,
            tier=chosen.name,
            stages=choices.stages,
            dtypes=choices.dtypes,
        )
    return GateRun(
        kernels=kernels,
        device=device,
        convention=convention,
        choices=choices,
        shard=part,
        head=head,
        units=tuple(units),
    )


def _check_stages(choices: Choices, *, sanitizer: bool, measures: bool) -> None:
    """Raises UsageError where what an option needs is not part of the run: it would say nothing."""
    if measures and "baseline" not in choices.stages:
        raise UsageError(
            "--baseline and --against compare what the stage 'baseline' measures: it is left out."
        )
    if sanitizer and "memory" not in choices.stages:
        raise UsageError("--sanitizer is part of the stage 'memory': it is left out.")


def _kernels_of(words: tuple[str, ...]) -> tuple[str, ...]:
    """The kernels: those typed, each once; else those that the project names.

    No kernel is imported.

    Raises:
        UsageError: where there is none, or a name that nobody knows.
    """
    from attncheck.capabilities.configuration import read_configuration
    from attncheck.subjects.load import is_reference, kernel_names

    if not words:
        named = tuple(read_configuration().kernels)
        if not named:
            raise UsageError(
                "no kernel is named: give one, or name yours in [tool.attncheck.kernels] "
                "(attncheck init)."
            )
        return named
    for kernel in words:
        file, colons, _ = kernel.partition("::")
        if colons and not Path(file).is_file():
            raise UsageError(f"kernel {kernel!r}: there is no file {file!r}.")
        if not is_reference(kernel) and kernel not in kernel_names():
            raise UnknownName("kernel", kernel, kernel_names())
    return tuple(dict.fromkeys(words))


def parse_seconds(text: str | None, option: str) -> float | None:
    """Seconds of ``90``, ``90s``, ``10m`` or ``2h``; raises UsageError for anything else."""
    if text is None:
        return None
    found = _DURATION.fullmatch(text.strip().lower())
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if seconds <= 0:
        raise UsageError(f"{option} {text!r} must be a time above 0, such as 90s, 10m or 2h.")
    return seconds


def worker_places(jobs: int | None, device: str) -> list[WorkerPlace]:
    """Where units are done: on each GPU in turn, or on the CPU with a thread each."""
    from attncheck.workers.worker_pool import WorkerPlace

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if device == "cpu":
        return [WorkerPlace(threads=1)] * (jobs or min(cores, _MOST_LANES))
    gpus = _gpus()
    # A compiler works beside the GPU: several lanes of one GPU wait for it at the same time.
    count = jobs or max(1, min(cores // 2, _MOST_LANES * len(gpus)))
    return [WorkerPlace(gpu=gpus[number % len(gpus)], threads=1) for number in range(count)]


def _seed_of(head: dict[str, Any], journal: JournalContent | None) -> int:
    """Which draw: that of the journal where it is of the same plan, else another one."""
    if journal is not None:
        there = {k: v for k, v in journal.head.items() if k not in _OF_A_RUN}
        if there == {k: v for k, v in head.items() if k not in _OF_A_RUN}:
            return int(journal.head.get("seed", 0))
    return secrets.randbelow(10**6)


def existing_journal(directory: str, *, fresh: bool) -> JournalContent | None:
    """What the journal of a folder says; None where there is none, or it is to be forgotten."""
    from attncheck.workers.journal_format import JournalError, read_journal

    path = Path(directory) / JOURNAL
    if fresh or not path.exists():
        return None
    try:
        return read_journal(path)
    except JournalError:  # who opens it says what is wrong with it
        return None


def _gpus() -> list[str]:
    """Those that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible:
        return [name.strip() for name in visible.split(",") if name.strip()]
    import torch

    return [str(number) for number in range(max(1, torch.cuda.device_count()))]


_OF_THE_FILES = frozenset({"sources", "started", "seed", "typed"})


@contextmanager
def other_commit(
    ref: str | None, kernels: tuple[str, ...], *, cluster: str | None
) -> Iterator[CommitTree | None]:
    """The files of the commit ``ref``, until the end of the block; None where there is none.

    Raises:
        UsageError: for a commit that is not here, or a kernel that is no part of any.
    """
    if ref is None:
        yield None
        return
    from attncheck.gate.sources import commit_tree

    if cluster is not None:
        raise UsageError("--against has the files of the commit here alone: leave --cluster out.")
    with commit_tree(ref) as found:
        for kernel in kernels:
            found.kernel(kernel)
        yield found


def run_gate(  # noqa: PLR0913  # one parameter per option
    this: GateRun,
    *,
    directory: str,
    fresh: bool,
    jobs: int | None,
    seconds: float | None,
    cluster: str | None,
    first: bool,
    quiet: bool,
    verbose: bool,
) -> tuple[RunEnd, JournalContent]:
    """Does it; returns how it ended, and what the journal says then.

    Raises:
        JournalError: where the journal holds another run that is not finished.
        UsageError: for a kernel that cannot be loaded.
    """
    from attncheck.gate.plan import priority
    from attncheck.records.record import FAILED_STATUSES
    from attncheck.workers.journal import Journal
    from attncheck.workers.pool import Cluster, run_units
    from attncheck.workers.units import Shard

    if not this.choices.isolated:
        click.echo("attncheck: --in-process: the kernel can end or alter the judge.", err=True)
    before = existing_journal(directory, fresh=fresh)
    resume = _goes_on(before, this, directory) if before is not None else not fresh
    usage: list[str] = []

    def stop(done: Done) -> bool:
        if "usage" in done.facts:
            usage.append(str(done.facts["usage"]))
            return True
        if not first or journal.content.units[done.unit].commit:  # another commit's fails nothing
            return False
        return any(answer.record.status in FAILED_STATUSES for answer in done.answers)

    units = [unit for unit in this.units if not (resume and _is_replayed(unit, before))]
    with Journal.open(Path(directory) / JOURNAL, this.head, resume=resume) as journal:
        with gate_progress(quiet=quiet, verbose=verbose) as told:
            how: dict[str, Any] = {
                "work": "attncheck.gate.gate_worker:work",
                "options": this.choices.options(),
                "journal": journal,
                "seconds": seconds,
                "stop": stop,
                "told": told,
                "priority": priority,
                "mine": Shard.parse(this.shard).has,
            }
            workers = (
                worker_places(jobs, this.device)
                if cluster is None
                else Cluster(address=cluster, device=this.device, most=jobs)
            )
            ended = run_units(units, workers=workers, **how)
        journal.end(ended.why)
    if usage:
        raise UsageError(usage[0])
    return ended, journal.content


def _goes_on(before: JournalContent, this: GateRun, directory: str) -> bool:
    """Whether the journal that is there is resumed; of a run that is finished it is forgotten.

    So is one whose kernels were others: their answers say nothing of those that are here.
    """
    there, here = before.head, this.head
    differs = {key for key in {*there, *here} if there.get(key) != here.get(key)}
    if not before.unfinished:
        return False
    if differs - _OF_THE_FILES or ("seed" in differs and "sources" not in differs):
        return True  # the journal says what is another
    path = Path(directory) / JOURNAL
    if "sources" in differs:
        click.echo(f"attncheck: the kernel has changed since {path}: all is asked anew.", err=True)
        return False
    from attncheck.gate.sources import changed_source as changed

    if what := changed(before):
        click.echo(f"attncheck: {one_line(what)} since {path}: all is asked anew.", err=True)
        return False
    known = f"{len(before.results)} of {len(before.results) + len(before.unfinished)}"
    click.echo(f"attncheck: goes on with {path}, {known} done (--fresh begins anew).", err=True)
    return True


def _is_replayed(unit: Any, before: JournalContent | None) -> bool:
    """Whether a failure of before is of this very run."""
    if unit.kind != "ask" or before is None or unit.id in before.units:
        return False
    records = (a.record for done in before.results.values() for a in done.answers)
    case = unit.case
    return any(record.case == case for record in records)


_FEWEST, _LEAST = 10, 0.05  # results, and the share of all, from which the rest is estimated


class _Count:
    """What has been heard so far."""

    def __init__(self) -> None:
        self.failed = 0
        self.stage = "starting"
        self._known: dict[str, str] = {}  # kind of each unit, by its id
        self._over: set[str] = set()
        self._took: dict[str, list[float]] = {}
        self._most = 1

    def hear(self, event: RunEvent) -> list[Answer]:
        """Counts; the failures that are new."""
        self._learn(event)
        if event.unit.commit:  # of another commit nothing fails
            return []
        if event.kind == "begun":
            self.stage = "smaller failures" if event.unit.kind == "shrink" else event.unit.stage
        answers = event.done.answers if event.done else ()
        wrong = [a for a in answers if a.record.status in FAILED_STATUSES and not a.smallest_of]
        self.failed += len(wrong)
        return wrong if event.kind == "done" else []

    def left(self, event: RunEvent) -> float | None:
        """Seconds that the known rest takes, each unit as long as those of its stage have taken.

        Of a stage that has not begun, as long as all have. None as long as too little is done.
        """
        took = [seconds for each in self._took.values() for seconds in each]
        if len(took) < max(_FEWEST, event.known * _LEAST):
            return None
        rest = Counter(kind for id_, kind in self._known.items() if id_ not in self._over)
        if not rest:
            return 0.0
        work = sum(fmean(self._took.get(kind, took)) * count for kind, count in rest.items())
        # Some of those are another shard's, and some nobody has told us of.
        return work / rest.total() * (event.known - event.finished) / self._most

    def _learn(self, event: RunEvent) -> None:
        unit, done = event.unit, event.done
        self._known[unit.id] = _kind(unit)
        self._most = max(self._most, event.running)
        if done is None:
            return
        self._over.add(unit.id)
        for each in done.units:
            self._known.setdefault(each.id, _kind(each))
        if event.kind == "done" and unit.kind != "describe":
            self._took.setdefault(_kind(unit), []).append(done.seconds)

    def line(self, event: RunEvent) -> str:
        """``bounds 120/243, 2 failed, about 35 s left``."""
        said = [f"{self.stage} {event.finished}/{event.known}"]
        said += [f"{self.failed} failed"] if self.failed else []
        left = self.left(event)
        said += [time_left(left)] if left is not None else []
        return ", ".join(said)


def _kind(unit: Unit) -> str:
    """Units of one kind take about as long."""
    return unit.stage if unit.kind == "ask" else f"{unit.kind} {unit.stage}"


@contextmanager
def gate_progress(*, quiet: bool, verbose: bool) -> Iterator[Callable[[RunEvent], None]]:
    """Yields what hears of every event; everything goes to standard error.

    Args:
        quiet: Nothing is shown.
        verbose: Every failure is shown as it is found, in a line.
    """
    count = _Count()

    def hear(event: RunEvent) -> list[str]:
        return [_failure(answer) for answer in count.hear(event)]

    with run_progress(hear, count.line, quiet=quiet, verbose=verbose) as told:
        yield told


def _failure(answer: Answer) -> str:
    from attncheck.core.sanitize_text import one_line, shortened

    record = answer.record
    reason = record.reason or (record.judgement.reason if record.judgement else "")
    question = str(record.case.get("question", ""))
    said = f"{record.kernel} {answer.stage} {question} {record.variant}: {record.status}: {reason}"
    return shortened(one_line(said))


_INTERRUPTED = 130
# Options that are files: a report may be read elsewhere.
_FILES = {"--baseline"}


def load_baseline(file: str | None) -> tuple[str, Baseline] | None:
    """Its name and what it says; raises UsageError for a file that is none."""
    if file is None:
        return None
    from attncheck.records.baseline_entries import read_baseline

    return Path(file).name, read_baseline(Path(file))


def finish_gate(
    interrupts: Interrupts,
    ended: RunEnd,
    content: JournalContent,
    *,
    directory: str,
    fmt: str,
    baseline: tuple[str, Baseline] | None,
    policy: Mapping[str, Any],
) -> int:
    """Writes the files, shows the summary; returns the exit code."""
    from attncheck.reporting.gate_verdict import Policy, gate_exit_code
    from attncheck.reporting.rendering import show, write_gate

    report = _reported(content, baseline)
    scripts = {} if ended.why == "interrupted" else failure_scripts(report)
    with interrupts.writing(directory):
        write_gate(report, directory, scripts)
    with standard_output():
        show(report, fmt)
    if ended.why:
        answered = f"{ended.finished} of {ended.finished + ended.left}"
        click.echo(f"attncheck: {ended.why} at {answered}: the same command goes on.", err=True)
    if ended.why == "interrupted" and ended.at_once:
        return _INTERRUPTED
    return gate_exit_code(report, Policy(**policy))


def _reported(content: JournalContent, baseline: tuple[str, Baseline] | None) -> GateReport:
    from attncheck.gate.gate_report import build_report

    return build_report(
        content, command=typed_gate_command(content.head.get("kernels", ())), baseline=baseline
    )


def typed_gate_command(kernels: Iterable[str]) -> str:
    """The command line, with files without their folders."""
    command = typed_command(files=_FILES)
    for kernel in kernels:
        file, colons, name = str(kernel).partition("::")
        if colons:
            shown = f"{Path(file).name}{colons}{name}"
            command = command.replace(shlex.quote(str(kernel)), shlex.quote(shown))
    return command


FAILURES = "reports/failures"
"""Where failures are kept, and attncheck repro looks for them."""

_SCRIPTS, _SECONDS_of_gate_scripts = 5, 120


def failure_scripts(report: GateReport) -> dict[str, str]:
    """Standalone scripts of the worst failures, each written by a process of its own."""
    from attncheck.reporting.gate_verdict import failure_groups

    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for one in failure_groups(report)[:_SCRIPTS]:
            if not one.shown.failure or one.shown.record.status not in {"fail", "error"}:
                continue
            path = Path(folder) / f"{one.id}.py"
            words = [sys.executable, "-m", "attncheck", "repro", one.id, "--script", str(path)]
            try:
                subprocess.run(  # noqa: S603  # our own
                    [*words, "--reports", str(Path(FAILURES).parent)],
                    capture_output=True,
                    check=False,
                    stdin=subprocess.DEVNULL,
                    timeout=_SECONDS_of_gate_scripts,
                )
                found[one.id] = path.read_text(encoding="utf-8")
            except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
                continue  # of attncheck's own kernels there is none
    return found
