"""``attncheck faults``: does the suite see the faults that real kernels had?"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from attncheck.cli import verb
from attncheck.cli.long_runs import (
    JOURNAL,
    print_run_end,
    progress,
    resumable,
    run_with_journal,
    started_now,
    time_left,
    usable_cores,
    worker_places,
)
from attncheck.cli.options import few_threads, typed_command
from attncheck.cli.standard_output import interrupts, show_report, standard_output
from attncheck.core.errors import UsageError, parse_seconds, require_known
from attncheck.core.files import check_names, write_texts
from attncheck.core.formats import MEASURED_DTYPES
from attncheck.core.sanitize_text import one_line, shortened
from attncheck.records.fault_scores import (
    FaultSensitivity,
    OwnTestsReport,
    OwnTestsScore,
    SensitivityReport,
)
from attncheck.workers.journal_format import JournalContent
from attncheck.workers.pool import RunEvent
from attncheck.workers.worker_pool import WorkerPlace

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.faults.catalogue import HostName
    from attncheck.faults.fault_selection import FaultSelection
    from attncheck.faults.user_suite import UserSuite

_MUTANTS_TABLE = "examples/strangers/mutants.toml"
_MOST_RUNS = 4  # runs of pytest at the same time, without --jobs
_PER_RUN = frozenset({"started", "typed"})  # header keys that are no part of the plan


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultOptions:
    """Options of ``attncheck faults``, as typed."""

    host: str = verb.option(
        "--host", "NAME", "Kernels in which faults are planted: triton, ideal or all.", "all"
    )
    names: tuple[str, ...] = verb.several("--fault", "ID", "Plant only this fault (repeatable).")
    categories: tuple[str, ...] = verb.several(
        "--category", "NAME", "Plant only faults of this category (repeatable)."
    )
    tier: str | None = verb.option(
        "--tier",
        "NAME",
        "How thoroughly the gate tests: smoke, pr or nightly (default: smoke on a cpu, pr on "
        "cuda).",
    )
    device: str | None = verb.device("Where kernels run")
    file: str | None = verb.option(
        "--kernel-file",
        "FILE.py",
        'Test wrong kernels of your own: those of FAULTS = {"id": kernel, …} in the file, else '
        "all its public functions and Subjects.",
    )
    command: str | None = verb.option(
        "--pytest",
        "ARGS",
        'Measure how many faults your own tests find: the arguments of pytest, such as "tests/ '
        '-k attn". They run once with a right kernel in place of your function, then once with '
        "each fault.",
    )
    replace: str | None = verb.option(
        "--replace", "package.module:NAME", "With --pytest: the function that your tests call."
    )
    convention: str = verb.convention(
        "as its signature shows", "With --pytest: how the function is called"
    )
    kernels: tuple[str, ...] = verb.argument("[KERNEL]…", nargs=-1)
    mutants: bool = verb.flag(
        "--mutants",
        "Test mutants: copies of the file of each KERNEL, FILE.py::NAME, with one small change "
        f"each (default: the kernels that {_MUTANTS_TABLE} names).",
    )
    tool: str | None = verb.option(
        "--tool",
        "NAME",
        "With --mutants: what tests them: check (default), or a gate of tier smoke or pr.",
    )
    most: int | None = verb.option(
        "--max-mutants",
        "N",
        "With --mutants: test at most N, spread evenly; the same ones each time.",
        type=click.IntRange(1),
    )
    small: bool = verb.flag(
        "--sensitivity",
        "Measure the smallest faults that are found: of the softmax scale, of one weight, of "
        "too few bits.",
    )
    dtypes: tuple[str, ...] = verb.several(
        "--dtype", "NAME", "With --sensitivity: measure only this dtype (repeatable)."
    )
    jobs: int | None = verb.jobs("faults")
    json_file: str | None = verb.option("--json", "FILE", "Write the report as JSON.")
    md_file: str | None = verb.option("--md", "FILE", "Write the report as Markdown.")
    controls: bool | None = verb.option(
        "--controls/--no-controls",
        "",
        "Test harmless changes too, which must pass (default: unless a fault or category is "
        "named).",
    )
    listed: bool = verb.flag("--list", "Print the faults, and run none.")
    fresh: bool = verb.fresh()
    max_time: str | None = verb.max_time("; the same command resumes it")
    directory: str = verb.out("the journal", "reports/faults")
    quiet: bool = verb.quiet()
    verbose: bool = verb.flag("-v --verbose", "Print each result in a line as it is known.")

    @property
    def outputs(self) -> list[tuple[Path, str]]:
        """Return the files to write, each with its format."""
        typed = ((self.json_file, "json"), (self.md_file, "md"))
        return [(Path(file), fmt) for file, fmt in typed if file]

    @property
    def typed(self) -> str:
        """Return the command line, for a report."""
        return typed_command(files={"--kernel-file", "--json", "--md"})


@verb.command
def faults(options: FaultOptions) -> int:
    """Measure how many planted bugs the gate finds.

    The bugs are those of real kernels. Each is planted in a copy of a kernel of attncheck, which is
    tested as by `attncheck gate`, up to the first failure. A run that was stopped resumes.

    Exit code 1 when a fault was missed or a harmless change failed, 3 when not everything could be
    scored, 5 when nothing was, 130 when it was interrupted.
    """
    few_threads(small=False)

    interrupts.check()  # imports take a while, and may have swallowed an interrupt
    # A run takes hours, so check first that its report can be written.
    for path, _ in options.outputs:
        check_names(path.parent, [path.name], instead="file")
    if options.command is None and (options.replace is not None or options.convention):
        raise UsageError("--replace and --convention say what --pytest tests: give it too.")
    if not options.mutants and (options.kernels or options.tool or options.most):
        raise UsageError("KERNEL, --tool and --max-mutants say what --mutants scores: give it too.")
    if options.dtypes and not options.small:
        raise UsageError("--dtype says in what --sensitivity asks: give it too.")
    # Before the modes below, since --list accepts the options of all of them.
    if options.mutants:
        return _score_mutants(options)
    if options.listed:
        return _list(options)
    if options.command is not None:
        return _score_own_tests(options)
    if options.small:
        return _measure_sensitivities(options)
    return _score_gate(options)


def _list(options: FaultOptions) -> int:
    """Show the chosen faults, and run none; return the exit code."""
    from attncheck.faults.catalogue import CONTROLS, FAULTS

    selection = _selection(options, *_device_and_tier(options))
    with standard_output():
        for kernel in dict.fromkeys(kernel.rpartition("@")[0] for kernel in selection.names):
            one: Any = FAULTS.get(kernel) or CONTROLS.get(kernel)
            places = " and ".join(one.hosts) or "nowhere" if one else "file"
            category = FAULTS[kernel].category if kernel in FAULTS else "control" if one else "own"
            click.echo(f"{kernel} ({category}; {places}): {one.summary if one else kernel}")
    return 0


def _device_and_tier(options: FaultOptions) -> tuple[str, str]:
    """Return device and tier, typed or default; raise UsageError if unavailable."""
    from attncheck.cases.tier import default_tier, tier_named
    from attncheck.verify.environment import usable_device

    device = usable_device(options.device)
    return device, tier_named(options.tier or default_tier(device)).name


def _kernel_file(options: FaultOptions) -> Path | None:
    return Path(options.file).absolute() if options.file else None


def _selection(options: FaultOptions, device: str, tier: str) -> FaultSelection:
    """Return the chosen faults and controls.

    Raises:
        UsageError: if options contradict each other.
        UnknownName: if there is no such host, fault or category.
    """
    from attncheck.faults.catalogue import HOSTS
    from attncheck.faults.fault_selection import select_faults, select_from_file
    from attncheck.verify.environment import prepare

    hosts = dict.fromkeys((*HOSTS, "all"))
    require_known("host", [options.host], hosts)
    # Hosts and categories are the catalogue's, and unknown in another file.
    if file := _kernel_file(options):
        if options.categories or options.controls or options.host != "all":
            raise UsageError(
                "--kernel-file brings faults of its own: leave --host, --category and --controls "
                "out."
            )
        prepare(device)  # whether Triton is interpreted is decided as the file is imported
        return select_from_file(file, names=options.names, device=device, tier=tier)
    # Controls belong to the whole score, and are left out if faults are chosen.
    is_chosen = options.names or options.categories
    return select_faults(
        hosts=HOSTS if options.host == "all" else (options.host,),
        names=options.names,
        categories=options.categories,
        controls=not is_chosen if options.controls is None else options.controls,
        device=device,
        tier=tier,
    )


# Scoring the gate on planted faults


def _score_gate(options: FaultOptions) -> int:
    """Score the chosen faults, write and show the report; return the exit code."""
    from attncheck.faults.score_report import fault_report

    device, tier = _device_and_tier(options)
    selection, file = _selection(options, device, tier), _kernel_file(options)
    head = planted_header(selection, device=device, tier=tier, file=file)
    return _run_and_score(
        options,
        selection,
        head,
        lambda content: fault_report(content, selection, command=options.typed),
        work="attncheck.faults.scoring:FaultScorer",
        options={"file": head["file"]},
        workers=worker_places(options.jobs, device),
    )


def planted_header(
    selection: FaultSelection, *, device: str, tier: str, file: Path | None
) -> dict[str, Any]:
    """Return what makes two runs the same, for the journal's header."""
    from attncheck.faults.fault_selection import source_digest

    return {
        "faults": list(selection.names),
        "device": device,
        "tier": tier,
        "file": str(file) if file else "",
        "sources": source_digest(file),
    }


# Mutants of a user's kernels


def _score_mutants(options: FaultOptions) -> int:
    """Score the chosen mutants, or list them; return the exit code.

    Raises:
        UsageError: if there is no kernel, or none whose file can be changed.
        UnknownName: if there is no such tool.
    """
    from attncheck.faults.fault_selection import FaultSelection, source_digest
    from attncheck.faults.mutant_scoring import TOOLS, kernels_of_table, mutant_units
    from attncheck.faults.score_report import mutant_report

    tool = options.tool or TOOLS[0]
    require_known("tool", (tool,), TOOLS)
    if options.device == "cuda":
        raise UsageError("--mutants forks a process for each: it runs on a cpu alone.")
    os.environ.setdefault("TRITON_INTERPRET", "1")
    specs = list(options.kernels) or kernels_of_table(Path(_MUTANTS_TABLE))
    units = mutant_units(specs, tool=tool, most=options.most, names=options.names)
    if options.listed:
        with standard_output():
            for unit in units:
                click.echo(unit.kernel.rpartition("@")[0])
        return 0
    files = dict.fromkeys(Path(spec.partition("::")[0]).absolute() for spec in specs)
    head = {
        "faults": [unit.kernel for unit in units],
        "tier": tool,
        "sources": " ".join(map(source_digest, files)),
    }
    return _run_and_score(
        options,
        FaultSelection(units=tuple(units)),
        head,
        lambda content: mutant_report(content, units, tool=tool, command=options.typed),
        work="attncheck.faults.mutant_scoring:MutantScorer",
        options={},
        workers=worker_places(options.jobs, "cpu"),
    )


# A user's own tests, run with faulty kernels in place of the tested function


def _score_own_tests(options: FaultOptions) -> int:
    """Score the tests, write and show the report; return the exit code.

    Raises:
        UsageError: if no function is named, or the suite cannot be scored.
        UnknownName: if there is no such fault or category.
    """
    from attncheck.faults.fault_selection import select_faults
    from attncheck.faults.user_suite import UserSuite, check_scorable

    assert options.command is not None, "who calls this has one"
    if options.replace is None:
        raise UsageError("--pytest needs --replace package.module:name, the function it tests.")
    suite = UserSuite(
        command=options.command, replace=options.replace, convention=options.convention
    )
    host: HostName = "triton" if options.host == "triton" else "ideal"
    selection = select_faults(
        hosts=(host,),
        names=options.names,
        categories=options.categories,
        controls=False,
        device="cuda",  # leave out no fault: the suite has to provide its device
        tier="",
    )
    if not selection.units:
        raise UsageError(f"none of these faults is planted in {host}: nothing is to be scored.")
    names = [unit.kernel.rpartition("@")[0] for unit in selection.units]
    head = own_tests_header(suite, selection)
    suite_options = {"command": suite.command, "replace": suite.replace}
    return _run_and_score(
        options,
        selection,
        head,
        lambda content: _own_tests_report(content, selection, suite, command=options.typed),
        work="attncheck.faults.user_suite:suite_work",
        options=suite_options | {"convention": suite.convention, "folder": str(suite.folder)},
        workers=[WorkerPlace()] * (options.jobs or min(usable_cores(), _MOST_RUNS)),
        check=lambda: check_scorable(suite, names, host),
    )


def own_tests_header(suite: UserSuite, selection: FaultSelection) -> dict[str, Any]:
    """Return what makes two runs the same, for the journal's header."""
    from attncheck.faults.fault_selection import source_digest
    from attncheck.faults.user_suite import project_digest

    return {
        "pytest": suite.command,
        "replace": suite.replace,
        "convention": suite.convention,
        "folder": str(suite.folder),
        "faults": list(selection.names),
        "sources": f"{source_digest(None)} {project_digest(suite)}",
    }


def _own_tests_report(
    content: JournalContent, selection: FaultSelection, suite: UserSuite, *, command: str
) -> OwnTestsReport:
    """Return the report of the journal's scores, in the order of the catalogue."""
    from attncheck.faults.catalogue import fault_named

    scores: list[OwnTestsScore] = []
    for unit in selection.units:
        done = content.results.get(unit.id)
        # A fault without a result, after an interrupt or --max-time, counts as unfinished below.
        if done is None:
            continue
        if "score" in done.facts:
            scores.append(msgspec.convert(done.facts["score"], OwnTestsScore))
            continue
        name, _, host = unit.kernel.rpartition("@")
        category = getattr(fault_named(name), "category", "control")
        status: Any = {"status": "not scored", "reason": done.harness}
        scores.append(OwnTestsScore(fault=name, category=category, host=host, **status))
    return OwnTestsReport(
        command=command,
        pytest=suite.command,
        replace=suite.replace,
        unfinished=len(selection.units) - len(scores),
        unfinished_because=content.why,
        scores=tuple(scores),
    )


# Sensitivity: the smallest fault that is seen


def _measure_sensitivities(options: FaultOptions) -> int:
    """Measure the smallest size of each continuous fault that is seen, in each dtype.

    Raise UnknownName if there is no such fault, dtype or tier.
    """
    from attncheck.faults.continuous_faults import CONTINUOUS_FAULTS, continuous_fault_named
    from attncheck.faults.sensitivity import measure_sensitivity
    from attncheck.gate.planning import Choices

    device, tier = _device_and_tier(options)
    measure = partial(measure_sensitivity, tier=tier, device=device)
    names = [continuous_fault_named(name).id for name in options.names] or list(CONTINUOUS_FAULTS)
    dtypes = Choices.of_tier(tier, dtypes=tuple(options.dtypes or MEASURED_DTYPES)).dtypes
    pairs = [(name, dtype) for dtype in dtypes for name in names]
    results: dict[tuple[str, str], FaultSensitivity] = {}
    jobs = min(options.jobs or (usable_cores() if device == "cpu" else 1), len(pairs))
    # Not forked, since a forked child of a process that has used CUDA cannot use CUDA.
    spawn = multiprocessing.get_context("spawn")
    with (
        progress("fault", len(pairs), quiet=options.quiet) as advance,
        ProcessPoolExecutor(jobs, mp_context=spawn) as pool,
    ):
        running = {pool.submit(measure, *each): each for each in pairs}
        for future in as_completed(running):
            # In order of completion; the report restores the order of the plan.
            results[running[future]] = future.result()
            advance(" ".join(running[future]))
    report = SensitivityReport(command=options.typed, seen=tuple(results[each] for each in pairs))
    return _write_and_show(report, options)


# Shared by all modes


def _run_and_score(
    typed: FaultOptions,
    selection: FaultSelection,
    plan: dict[str, Any],
    report: Callable[[JournalContent], msgspec.Struct],
    **run_options: Any,
) -> int:
    """Run the selected units, write and show the journal's report; return the exit code.

    Args:
        plan: What makes two runs the same, for the journal's header.

    Raises:
        UsageError: if --max-time or the folder is invalid.
        JournalError: if the journal holds another, unfinished run.
    """
    from attncheck.faults.fault_selection import priority

    seconds = parse_seconds(typed.max_time, "--max-time")
    check_names(typed.directory, [JOURNAL])
    head = {**plan, "started": started_now(), "typed": typed.typed}
    _, resume = resumable(typed.directory, head, _change_since, fresh=typed.fresh)
    end, content = run_with_journal(
        selection.units,
        head,
        FaultProgress(),
        directory=typed.directory,
        resume=resume,
        quiet=typed.quiet,
        verbose=typed.verbose,
        seconds=seconds,
        priority=priority,
        **run_options,
    )
    return print_run_end(end, _write_and_show(report(content), typed))


def _change_since(_: JournalContent, differs: set[str]) -> str | None:
    """Return the change of sources since a run, "" for none; None if it was another run."""
    if differs - _PER_RUN - {"sources"}:
        return None
    return "sources have changed" if "sources" in differs else ""


class FaultProgress:
    """The progress of ``attncheck faults``, counted from its events."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()

    def hear(self, event: RunEvent) -> list[str]:
        """Count an event; return a line for a new score."""
        if event.done is None:
            return []
        # Without a score the harness failed, which is counted and does not end the run.
        score = event.done.facts.get("score") or {"outcome": "harness"}
        # A gate's score has an outcome, one of own tests a status.
        outcome = str(score.get("outcome") or score["status"])
        self.outcomes[outcome] += 1
        if event.kind != "done":
            return []
        first = (score.get("caught") or {}).get("first") or {}
        by = f" by {first['stage']} {first['question']}" if first else ""
        if score.get("first"):  # only a mutant's score has it
            by = f" by {score['first']} after {score['questions']}, {score['seconds']:.1f} s"
        counts = f" after {score['problems']} problems, {score['seconds']:.1f} s" if first else ""
        reason = f": {score['reason']}" if score.get("reason") else ""
        return [shortened(one_line(f"{event.unit.kernel}: {outcome}{by}{counts}{reason}"))]

    def line(self, event: RunEvent) -> str:
        """Return ``faults 12/95, 11 caught, 1 missed, about 35 s left``."""
        parts = [f"faults {event.finished}/{event.known}"]
        parts += [f"{count} {outcome}" for outcome, count in self.outcomes.items()]
        parts += [time_left(event.seconds_left)] if event.seconds_left is not None else []
        return ", ".join(parts)


def _write_and_show(report: msgspec.Struct, options: FaultOptions) -> int:
    """Write each file in its format, then show the table; return the report's exit code."""
    from attncheck.reporting import rendering

    for path, fmt in options.outputs:
        with interrupts.writing(str(path.parent)):
            write_texts({path.name: rendering.render(report, fmt)}, path.parent, instead="file")
    return show_report(report)
