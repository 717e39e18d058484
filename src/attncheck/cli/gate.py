"""``attncheck gate``: all checks that a change of a kernel needs, with one exit code."""

from __future__ import annotations

import secrets
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from attncheck.cli import verb
from attncheck.cli.bench import BenchOptions, time_kernels
from attncheck.cli.long_runs import (
    JOURNAL,
    existing_journal,
    print_run_end,
    resumable,
    run_with_journal,
    started_now,
    time_left,
    worker_places,
)
from attncheck.cli.options import few_threads, typed_command
from attncheck.cli.standard_output import interrupts, standard_output
from attncheck.core.errors import UsageError, parse_seconds
from attncheck.core.files import check_names
from attncheck.core.sanitize_text import one_line, shortened
from attncheck.records.baseline_entries import Baseline, read_baseline
from attncheck.records.failure_causes import MOST_WITHOUT_OUT, gives_no_out
from attncheck.records.record import FAILED_STATUSES, Record, reason_of
from attncheck.records.run_reports import Answer, GateReport
from attncheck.reporting.gate_verdict import Policy, failure_groups, gate_exit_code
from attncheck.workers.journal_format import JournalContent
from attncheck.workers.pool import RunEnd, RunEvent
from attncheck.workers.units import Shard, Unit, UnitResult
from attncheck.workers.worker_pool import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.gate.other_commit import CommitTree
    from attncheck.gate.planning import Choices

FAILURES = "reports/failures"  # the folder of kept failures, where attncheck repro looks for them

_PER_RUN = {"seed", "started", "typed"}  # keys of a journal's header that are no part of the plan
_SCRIPTS, _SCRIPT_SECONDS = 5, 120  # number of scripts, and seconds that each may take
_FEWEST, _LEAST = 10, 0.05  # results, and their share of all units, needed to estimate the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOptions:
    """Options of ``attncheck gate``, as typed."""

    kernels: tuple[str, ...] = verb.argument("[KERNEL]…", nargs=-1)
    tier: str | None = verb.option(
        "--tier",
        "NAME",
        "How thoroughly to test: smoke, pr or nightly (default: smoke on a cpu, pr on cuda).",
    )
    device: str | None = verb.device("Where kernels run")
    dtypes: tuple[str, ...] = verb.dtypes("all that a kernel takes")
    convention: str = verb.convention(
        "the first that fits, or as configured", "How the kernels are called"
    )
    stages: tuple[str, ...] = verb.several(
        "--stage",
        "NAME",
        "Run only this stage: contract, probes, bounds, properties, memory, determinism or "
        "baseline (repeatable; default: all).",
    )
    skipped: tuple[str, ...] = verb.several("--skip", "NAME", "Leave this stage out (repeatable).")
    exitfirst: bool = verb.flag("-x --exitfirst", "Stop at the first failure.")
    jobs: int | None = verb.jobs("kernels")
    timeout: float | None = verb.timeout()
    max_time: str | None = verb.max_time("; the same command resumes it")
    seed: int | None = verb.option(
        "--seed",
        "N",
        "Seed of the random inputs (default: a new one each time in tier nightly, else always "
        "the same).",
        type=click.IntRange(0, 10**18),
    )
    shard: str = verb.option("--shard", "I/N", "Run only the I-th of N parts.", "")
    changed_since: str | None = verb.option(
        "--changed-since",
        "REF",
        "Test only kernels whose sources have changed since git commit REF.",
    )
    against: str | None = verb.option(
        "--against",
        "REF",
        "Test the kernels as of git commit REF too; fail where they have become worse.",
    )
    baseline: str | None = verb.option(
        "--baseline",
        "FILE",
        "Fail where a kernel is worse than in this file of `attncheck baseline`.",
    )
    strict: bool = verb.flag("--strict", "Fail for warnings and inconclusive answers too.")
    strict_baseline: bool = verb.flag(
        "--strict-baseline", "Fail for cases that are better than in the baseline, or gone, too."
    )
    flaky: int = verb.option(
        "--flaky",
        "N",
        "Allow up to N answers that differ between runs.",
        0,
        type=click.IntRange(min=0),
    )
    sanitizer: bool = verb.flag(
        "--sanitizer",
        "Run a few small problems under NVIDIA's compute-sanitizer too, where it is installed.",
    )
    timed: bool = verb.flag(
        "--bench",
        "Finally time the kernels as attncheck bench does: fail where one is wrong, or slower "
        "than as of --against.",
    )
    cluster: str | None = verb.option(
        "--cluster", "ADDRESS", "Ray cluster to run on: auto, local, or an address."
    )
    fresh: bool = verb.fresh()
    in_process: bool = verb.in_process()
    fmt: str = verb.fmt("table, json, csv, md, html, junit, sarif or github")
    directory: str = verb.out("the journal and the reports", "reports/gate")
    quiet: bool = verb.quiet()
    verbose: bool = verb.flag("-v --verbose", "Print each failure in a line as it is found.")


class GateRun(NamedTuple):
    """One run of the gate."""

    choices: Choices
    head: dict[str, Any]  # the header of its journal
    units: list[Unit]  # the units of work to begin with


@verb.command
def gate(options: GateOptions) -> int:
    """Run all tests that a changed kernel needs: is every answer right, and repeatable?

    KERNEL is FILE.py::NAME, package.module:NAME, a kernel of `attncheck list`, or a name of
    [tool.attncheck.kernels] (default: all of those). Each runs in a process of its own. A run that
    was stopped resumes.

    Exit code 1 when a check failed, 3 when not everything was tested or the gate itself failed, 5
    when nothing was tested, 130 when it was interrupted.
    """
    few_threads(small=False)
    with interrupts.importing():
        from attncheck.reporting.rendering import GATE_FORMATS, check_format
    check_format(options.fmt, GATE_FORMATS)
    parse_seconds(options.max_time, "--max-time")
    file = Path(options.baseline) if options.baseline is not None else None
    baseline = (file.name, read_baseline(file)) if file else None
    kernels = _kernels_of(options.kernels)
    if options.changed_since is not None:
        from attncheck.gate.sources import changed_kernels

        # Without a changed kernel there is nothing to judge, and the gate passes.
        kernels = changed_kernels(kernels, options.changed_since)
        if not kernels:
            unchanged = f"no kernel has changed since {options.changed_since}"
            click.echo(f"attncheck: {unchanged}.", err=True)
            return 0
    check_names(options.directory, [JOURNAL, "gate.json"])
    # The files of the other commit exist until the end of this block.
    with _other_commit(options, kernels) as tree:
        run = plan_run(options, kernels, tree=tree, baseline=baseline[1] if baseline else None)
        end, content = run_gate(run, options)
    code = _finish(options, end, content, baseline)
    # A failed gate matters more than times, and an interrupted one must end at once.
    return code or _time(options, kernels) if options.timed and not end.why else code


def _time(options: GateOptions, kernels: tuple[str, ...]) -> int:
    """Time the kernels, with no workers running; write that report and return its exit code."""
    from attncheck.reporting import exit_codes, rendering
    from attncheck.reporting.bench_document import bench_counts

    bench_options = BenchOptions(
        kernels=kernels,
        dtypes=options.dtypes,
        against=options.against,
        device=options.device,
        timeout=options.timeout,
        in_process=options.in_process,
        fmt="json",  # standard output has the gate's report
        quiet=options.quiet,
    )
    try:
        report, _ = time_kernels(bench_options, dict.fromkeys(kernels))
    except UsageError as error:  # for example an interpreted kernel; the gate itself is done
        click.echo(f"attncheck: --bench: {one_line(str(error))}", err=True)
        return exit_codes.INCOMPLETE
    with interrupts.writing(options.directory):
        rendering.write_report(report, options.directory, "bench")
    click.echo(f"attncheck: bench: {bench_counts(report)}", err=True)
    return exit_codes.exit_code(report)


def plan_run(
    options: GateOptions,
    kernels: tuple[str, ...],
    *,
    tree: CommitTree | None = None,
    baseline: Baseline | None = None,
) -> GateRun:
    """Return the plan of a run; raise UsageError for options that cannot be met.

    With a ``baseline`` or a ``tree`` the plan must have the stage baseline, which compares them.
    """
    # Hypothesis and pytest are extras of the package, which most commands do not need.
    if missing := [name for name in ("hypothesis", "pytest") if find_spec(name) is None]:
        raise UsageError(f"a gate needs {missing[0]}: pip install 'attncheck[properties]'.")
    from attncheck.cases.tier import default_tier, tier_named
    from attncheck.gate.plan import describe_units, replay_units
    from attncheck.gate.planning import BaselineCases, Choices, parse_stages
    from attncheck.gate.sources import source_fingerprint
    from attncheck.subjects.conventions.declarations import convention_named
    from attncheck.verify.environment import usable_device

    # Report a misspelt name here, not in every worker.
    if options.convention:
        convention_named(options.convention)
    shard = str(Shard.parse(options.shard))
    device = usable_device(options.device)
    tier = tier_named(options.tier or default_tier(device))
    # A random tier draws other problems in each run, unless a seed is given.
    draws_anew = tier.random and options.seed is None
    if shard and draws_anew:
        raise UsageError(
            f"--shard {shard}: each run of tier {tier.name} draws other numbers: "
            "give all parts the same --seed N."
        )
    choices = Choices(
        tier=tier,
        seed=options.seed or 0,
        stages=parse_stages(options.stages, options.skipped),
        dtypes=options.dtypes,
        isolated=not options.in_process,
        timeout=options.timeout or 0.0,
        failures=str(Path(FAILURES).absolute()),
        sanitizer=options.sanitizer,
        tree=tree,
        baseline_cases=BaselineCases.of(baseline) if baseline else None,
    )
    if (baseline or tree) and "baseline" not in choices.stages:
        raise UsageError(
            "--baseline and --against compare what the stage 'baseline' measures: it is left out."
        )
    if options.sanitizer and "memory" not in choices.stages:
        raise UsageError("--sanitizer is part of the stage 'memory': it is left out.")
    sources = source_fingerprint(kernels, (options.directory, str(Path(FAILURES).parent)))
    head = {
        "kernels": list(kernels),
        "device": device,
        "convention": options.convention,
        **choices.plan(),
        "sources": sources,
        "shard": shard,
        "started": started_now(),
        "typed": typed_command(files={"--baseline"}, arguments=kernels),
    }
    # A resumed run keeps the seed of its first part, or its units would differ.
    if draws_anew:
        head["seed"] = _seed_of(head, existing_journal(options.directory, fresh=options.fresh))
        choices = replace(choices, seed=head["seed"])
    common = {"device": device, "tier": tier.name, "convention": options.convention}
    units = describe_units(kernels, **common)
    if not shard:  # a shard cannot replay: other parts may not have this machine's failures
        units += replay_units(
            kernels, FAILURES, stages=choices.stages, dtypes=choices.dtypes, **common
        )
    return GateRun(choices, head, units)


def run_gate(run: GateRun, options: GateOptions) -> tuple[RunEnd, JournalContent]:
    """Run the plan; return how it ended, and the content of the journal.

    Raises:
        JournalError: if the journal holds another, unfinished run.
        UsageError: if a kernel cannot be loaded.
    """
    from attncheck.gate.plan import kernel_key, priority

    if not run.choices.isolated:
        click.echo("attncheck: --in-process: the kernel can end or alter the judge.", err=True)
    before, resume = resumable(options.directory, run.head, _change_since, fresh=options.fresh)
    units = [unit for unit in run.units if not (resume and _is_replayed(unit, before))]
    usage_errors: list[str] = []
    first_records: dict[str, list[Record]] = {name: [] for name in run.head["kernels"]}

    # Called for each finished unit; returns whether to stop the run.
    def stop(unit: Unit, done: UnitResult) -> bool:
        if "usage" in done.facts:
            usage_errors.append(str(done.facts["usage"]))
            return True
        if unit.commit:  # another commit's answers cannot fail the gate
            return False
        records = [answer.record for answer in done.answers]
        if options.exitfirst and any(record.status in FAILED_STATUSES for record in records):
            return True
        first = first_records[unit.kernel]
        # The first ones settle it, so that no further ones are kept.
        first += [one for one in records if one.status != "unsupported"][
            : MOST_WITHOUT_OUT - len(first)
        ]
        return all(map(gives_no_out, first_records.values()))

    device = run.head["device"]
    workers: Any = worker_places(options.jobs, device)
    if options.cluster is not None:
        workers = Cluster(address=options.cluster, device=device, most=options.jobs)
    ended = run_with_journal(
        units,
        run.head,
        GateProgress(),
        directory=options.directory,
        resume=resume,
        quiet=options.quiet,
        verbose=options.verbose,
        work="attncheck.gate.gate_worker:work",
        options=run.choices.options() | _preload_options(run),
        seconds=parse_seconds(options.max_time, "--max-time"),
        stop=stop,
        priority=priority,
        product=kernel_key,
        mine=Shard.parse(run.head["shard"]).has,
        workers=workers,
    )
    if usage_errors:
        raise UsageError(usage_errors[0])
    return ended


def _preload_options(run: GateRun) -> dict[str, Any]:
    """Return the option that has workers load a single kernel on a GPU during planning."""
    if run.head["device"] == "cpu" or len(run.head["kernels"]) > 1:
        return {}
    unit = next(unit for unit in run.units if unit.kind == "describe")
    return {"ahead": msgspec.json.encode(unit).decode()}


def _change_since(before: JournalContent, differs: set[str]) -> str | None:
    """Return the change of sources since a run, "" for none; None if it was another run."""
    # With equal sources and another seed it is another run, not a changed kernel.
    if differs - _PER_RUN - {"sources"} or ("seed" in differs and "sources" not in differs):
        return None
    from attncheck.gate.sources import changed_source

    return "the kernel has changed" if "sources" in differs else changed_source(before)


@contextmanager
def _other_commit(options: GateOptions, kernels: tuple[str, ...]) -> Iterator[CommitTree | None]:
    """Yield the files of the commit --against, deleted after the block; None without --against.

    Raises:
        UsageError: if the commit does not exist, or a kernel is not part of a commit.
    """
    if options.against is None:
        yield None
        return
    from attncheck.gate.other_commit import commit_tree

    if options.cluster is not None:
        raise UsageError("--against has the files of the commit here alone: leave --cluster out.")
    with commit_tree(options.against) as tree:
        # Check now, so that a kernel outside the commit is reported at once.
        for kernel in kernels:
            tree.kernel(kernel)
        yield tree


def _kernels_of(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the typed kernels, each once, or without any the kernels of the configuration.

    No kernel is imported.

    Raises:
        UsageError: if there is no kernel, or one is unknown.
    """
    from attncheck.subjects.capabilities.configuration import read_configuration
    from attncheck.subjects.hub_kernels import is_hub_folder
    from attncheck.subjects.load import is_reference, kernel_names, unknown_kernel

    if not words:
        configured = tuple(read_configuration().kernels)
        if not configured:
            raise UsageError(
                "no kernel is named: give one, or name yours in [tool.attncheck.kernels] "
                "(attncheck init)."
            )
        return configured
    for kernel in words:
        file, colons, _ = kernel.partition("::")
        # Report a missing file here in one line, since each worker would fail to import it.
        if colons and not Path(file).is_file() and not is_hub_folder(file):
            raise UsageError(f"kernel {kernel!r}: there is no file {file!r}.")
        if not is_reference(kernel) and kernel not in kernel_names():
            raise unknown_kernel(kernel)
    return tuple(dict.fromkeys(words))


def _seed_of(head: dict[str, Any], journal: JournalContent | None) -> int:
    """Return the seed of the journal if it is of the same plan, else a random one."""
    if journal is not None:
        plan = {k: v for k, v in journal.head.items() if k not in _PER_RUN}
        if plan == {k: v for k, v in head.items() if k not in _PER_RUN}:
            return int(journal.head.get("seed", 0))
    # Few digits, so that it is easily typed after --seed.
    return secrets.randbelow(10**6)


def _is_replayed(unit: Any, before: JournalContent | None) -> bool:
    """Return whether a replayed failure comes from the run of the journal ``before`` itself."""
    if unit.kind != "ask" or before is None or unit.id in before.units:
        return False
    records = (a.record for done in before.results.values() for a in done.answers)
    case = unit.case
    return any(record.case == case for record in records)


class GateProgress:
    """The progress of a gate, counted from its events."""

    def __init__(self) -> None:
        self.failed = 0
        self.stage = "starting"
        self._known: dict[str, str] = {}  # kind of each unit, by its id
        self._finished_ids: set[str] = set()
        self._durations: dict[str, list[float]] = {}
        self._most = 1

    def hear(self, event: RunEvent) -> list[str]:
        """Count an event; return its new failures, a line each."""
        self._learn(event)
        if event.unit.commit:  # another commit's answers cannot fail the gate
            return []
        if event.kind == "begun":
            self.stage = "smaller failures" if event.unit.kind == "shrink" else event.unit.stage
        answers = event.done.answers if event.done else ()
        # A smaller case of a known failure is not a new failure.
        wrong = [a for a in answers if a.record.status in FAILED_STATUSES and not a.smallest_of]
        self.failed += len(wrong)
        return [_failure_line(answer) for answer in wrong] if event.kind == "done" else []

    def seconds_left(self, event: RunEvent) -> float | None:
        """Return the estimated seconds of the remaining known units; None before enough are done.

        A unit is estimated by the mean of its kind, or of all units if none of its kind is done.
        """
        times = [seconds for each in self._durations.values() for seconds in each]
        if len(times) < max(_FEWEST, event.known * _LEAST):
            return None
        rest = Counter(kind for id_, kind in self._known.items() if id_ not in self._finished_ids)
        if not rest:
            return 0.0
        if "draw bounds" in rest:  # how many questions will follow is not known yet
            return None
        work = sum(fmean(self._durations.get(kind, times)) * count for kind, count in rest.items())
        # Scaled to the run's own count, as some units are another shard's and some not known here.
        return work / rest.total() * (event.known - event.finished) / self._most

    def _learn(self, event: RunEvent) -> None:
        unit, done = event.unit, event.done
        self._known[unit.id] = _kind(unit)
        self._most = max(self._most, event.running)
        if done is None:
            return
        self._finished_ids.add(unit.id)
        for each in done.units:
            self._known.setdefault(each.id, _kind(each))
        # Describing a kernel imports it, which takes another time than questions.
        if event.kind == "done" and unit.kind != "describe":
            self._durations.setdefault(_kind(unit), []).append(done.seconds)

    def line(self, event: RunEvent) -> str:
        """Return ``bounds 120/243, 2 failed, about 35 s left``."""
        parts = [f"{self.stage} {event.finished}/{event.known}"]
        parts += [f"{self.failed} failed"] if self.failed else []
        left = self.seconds_left(event)
        parts += [time_left(left)] if left is not None else []
        return ", ".join(parts)


def _kind(unit: Unit) -> str:
    """Return the kind of a unit; units of a kind take about the same time."""
    return unit.stage if unit.kind == "ask" else f"{unit.kind} {unit.stage}"


def _failure_line(answer: Answer) -> str:
    record = answer.record
    question = str(record.case.get("question", ""))
    heading = f"{record.kernel} {answer.stage} {question} {record.variant}: {record.status}: "
    return shortened(one_line(heading + reason_of(record)))


def _finish(
    options: GateOptions,
    end: RunEnd,
    content: JournalContent,
    baseline: tuple[str, Baseline] | None,
) -> int:
    """Write the files and show the summary; return the exit code."""
    from attncheck.gate.gate_report import build_report
    from attncheck.reporting.rendering import show, write_gate

    command = typed_command(files={"--baseline"}, arguments=content.head["kernels"])
    report = build_report(content, command=command, baseline=baseline)
    # An interrupted run must end soon, and scripts take seconds each.
    scripts = {} if end.why == "interrupted" else _failure_scripts(report, options.directory)
    with interrupts.writing(options.directory):
        write_gate(report, options.directory, scripts)
    with standard_output():
        show(report, options.fmt)
    policy = Policy(
        strict=options.strict, strict_baseline=options.strict_baseline, flaky=options.flaky
    )
    return print_run_end(end, gate_exit_code(report, policy))


def _failure_scripts(report: GateReport, directory: str) -> dict[str, str]:
    """Return standalone scripts of the worst failures, each written by its own process."""
    scripts: dict[str, str] = {}
    # A script finds its kernel relative to its own path, so the temporary folder is as deep as the
    # final one. If the folder cannot be written to, writing the report will raise.
    with (
        suppress(OSError),
        tempfile.TemporaryDirectory(dir=directory, prefix=".scripts-") as folder,
    ):
        for group in failure_groups(report)[:_SCRIPTS]:
            # The script of a kernel that crashes or hangs would do so too.
            if not group.shown.failure or group.shown.record.status not in {"fail", "error"}:
                continue
            path = Path(folder) / f"{group.id}.py"
            # Its own process, since writing a script imports the kernel's file.
            words = [sys.executable, "-m", "attncheck", "repro", group.id, "--script", str(path)]
            try:
                subprocess.run(  # noqa: S603  # attncheck itself
                    [*words, "--reports", str(Path(FAILURES).parent)],
                    capture_output=True,
                    check=False,
                    stdin=subprocess.DEVNULL,
                    timeout=_SCRIPT_SECONDS,
                )
                scripts[group.id] = path.read_text(encoding="utf-8")
            except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
                continue  # attncheck's own kernels have no scripts
    return scripts
