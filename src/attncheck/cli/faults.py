"""``attncheck faults``: does the suite see the faults that real kernels had?"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from attncheck.cli.gate import JOURNAL, existing_journal, parse_seconds, worker_places
from attncheck.cli.options import device_option, quiet_option, typed_command
from attncheck.cli.progress import progress, run_progress, time_left
from attncheck.cli.standard_output import Interrupts, Verb, standard_output
from attncheck.core.errors import UsageError
from attncheck.core.sanitize_text import one_line, shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from attncheck.faults.fault import HostName
    from attncheck.faults.fault_selection import FaultSelection
    from attncheck.faults.user_suite import UserSuite
    from attncheck.records.fault_scores import FaultSensitivity, OwnTestsReport, SensitivityReport
    from attncheck.workers.journal_format import JournalContent
    from attncheck.workers.pool import Option, RunEnd, RunEvent
    from attncheck.workers.units import Unit
    from attncheck.workers.worker_pool import WorkerPlace

__all__ = [
    "FaultOptions",
    "device_and_tier",
    "faults",
    "faults_options",
    "faults_progress",
    "list_faults",
    "measure_sensitivities",
    "own_tests_header",
    "planted_header",
    "run_exit_code",
    "run_fault_units",
    "score_gate",
    "score_own_tests",
    "write_and_show",
]


F = TypeVar("F", bound="Callable[..., Any]")

_FILES = {"--kernel-file", "--json", "--md"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultOptions:
    """What was typed, by the names of the options below."""

    host: str
    names: tuple[str, ...]
    categories: tuple[str, ...]
    tier: str | None
    device: str | None
    file: str | None
    command: str | None
    replace: str | None
    convention: str
    small: bool
    dtypes: tuple[str, ...]
    jobs: int | None
    json_file: str | None
    md_file: str | None
    controls: bool | None
    listed: bool
    fresh: bool
    max_time: str | None
    directory: str
    quiet: bool
    verbose: bool

    @property
    def outputs(self) -> list[tuple[str, str]]:
        """Files that are asked for, each with its format."""
        named = ((self.json_file, "json"), (self.md_file, "md"))
        return [(file, fmt) for file, fmt in named if file]

    @property
    def typed(self) -> str:
        """The command line, for a report."""
        return typed_command(files=_FILES)


_WHICH = (
    click.option(
        "--host",
        default="all",
        show_default=True,
        metavar="NAME",
        help="In which kernel faults are planted: triton, ideal or all.",
    ),
    click.option(
        "--fault", "names", multiple=True, metavar="ID", help="Only this one (repeatable)."
    ),
    click.option(
        "--category",
        "categories",
        multiple=True,
        metavar="NAME",
        help="Only faults of this category (repeatable).",
    ),
    click.option(
        "--tier",
        metavar="NAME",
        help="How hard the gate asks: smoke, pr or nightly (default: smoke on a cpu, pr on cuda).",
    ),
    device_option(
        "Where kernels run (default: cuda where there is a GPU; on a cpu Triton kernels are "
        "interpreted)."
    ),
)
_OF_WHOM = (
    click.option(
        "--kernel-file",
        "file",
        metavar="FILE.py",
        help='Score on faults of your own: FAULTS = {"id": kernel, …} of the file, or its public '
        "functions and Subjects, each of which is wrong.",
    ),
    click.option(
        "--pytest",
        "command",
        metavar="ARGS",
        help='Score your own tests: what follows pytest, such as "tests/ -k attn". They run once '
        "with a right kernel in place of your function, then once with each fault.",
    ),
    click.option(
        "--replace",
        metavar="package.module:NAME",
        help="With --pytest: the function that they test.",
    ),
    click.option(
        "--convention",
        default="",
        metavar="NAME",
        help="With --pytest: how the function is called (default: what it shows).",
    ),
    click.option(
        "--sensitivity",
        "small",
        is_flag=True,
        help="How small a fault is still seen: of the softmax scale, of one weight, of few bits.",
    ),
    click.option(
        "--dtype",
        "dtypes",
        multiple=True,
        metavar="NAME",
        help="With --sensitivity: only in this dtype (repeatable).",
    ),
)
_RUN = (
    click.option(
        "--jobs",
        type=click.IntRange(1, 256),
        metavar="N",
        help="Faults at work at the same time (default: by cores and GPUs, at most 4 for each).",
    ),
    click.option("--json", "json_file", metavar="FILE", help="Write the report as JSON."),
    click.option("--md", "md_file", metavar="FILE", help="Write the report as Markdown."),
    click.option(
        "--controls/--no-controls",
        default=None,
        help="Whether changes that are no faults are asked too (default: where no fault or "
        "category is named).",
    ),
    click.option("--list", "listed", is_flag=True, help="Show the faults, and run none."),
    click.option("--fresh", is_flag=True, help="Forget an unfinished run, in place of going on."),
    click.option("--max-time", metavar="TIME", help="Stop then, such as 10m; resumable."),
    click.option(
        "--out",
        "directory",
        default="reports/faults",
        show_default=True,
        metavar="DIR",
        help="Folder for the journal.",
    ),
    quiet_option,
    click.option("-v", "--verbose", is_flag=True, help="Each score in a line as it is known."),
)


def faults_options(function: F) -> F:
    """All of them, in the order in which ``--help`` shows them."""
    return reduce(lambda made, option: option(made), reversed(_WHICH + _OF_WHOM + _RUN), function)


@click.command(cls=Verb)
@faults_options
@click.make_pass_decorator(Interrupts, ensure=True)
def faults(interrupts: Interrupts, /, **options: Any) -> int:
    """Score the gate: plant faults that real kernels had, and see which it catches.

    Each is planted in a copy of a kernel of ours, and asked everything that `attncheck gate` asks,
    up to the first wrong answer. A run that was stopped goes on where it was.

    Exit code 1 when a fault was missed or a control flagged, 3 when not everything could be scored,
    5 when nothing was, 130 when it was interrupted twice.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in attncheck check
    asked = FaultOptions(**options)
    interrupts.check()  # imports take a while, and may have swallowed one
    _check(asked)
    if asked.command is not None and not asked.listed:
        return score_own_tests(interrupts, asked)
    if asked.small:
        return measure_sensitivities(interrupts, asked)

    return list_faults(asked) if asked.listed else score_gate(interrupts, asked)


def _check(asked: FaultOptions) -> None:
    """Raises UsageError for files that cannot be written, and options that say nothing."""
    from attncheck.core.errors import UsageError
    from attncheck.core.files import check_names

    for each, _ in asked.outputs:
        check_names(Path(each).parent, [Path(each).name], instead="file")
    if asked.command is None and (asked.replace is not None or asked.convention):
        raise UsageError("--replace and --convention say what --pytest tests: give it too.")
    if asked.dtypes and not asked.small:
        raise UsageError("--dtype says in what --sensitivity asks: give it too.")


def score_gate(interrupts: Interrupts, asked: FaultOptions) -> int:
    """Scores what is chosen, writes and shows the report; returns the exit code.

    Raises:
        UsageError: for what is not known, or says nothing together.
    """
    from attncheck.faults.score_report import fault_report
    from attncheck.reporting import exit_codes

    device, tier = device_and_tier(asked)
    file = Path(asked.file).absolute() if asked.file else None
    these, typed = _chosen(asked, file, device, tier), asked.typed
    head = planted_header(these, device=device, tier=tier, file=file, typed=typed)
    ended, content = run_fault_units(
        asked,
        these.units,
        head,
        work="attncheck.faults.scoring:work",
        options={"file": head["file"]},
        lanes=worker_places(asked.jobs, device),
    )
    found = fault_report(content, these, command=typed)
    write_and_show(interrupts, found, asked.outputs)
    return run_exit_code(ended, exit_codes.exit_code(found))


def list_faults(asked: FaultOptions) -> int:
    """Shows what is chosen, and runs nothing; returns the exit code."""
    from attncheck.faults.catalogue import CONTROLS, FAULTS

    device, tier = device_and_tier(asked)
    these = _chosen(asked, Path(asked.file).absolute() if asked.file else None, device, tier)
    with standard_output():
        for kernel in dict.fromkeys(kernel.rpartition("@")[0] for kernel in these.names):
            one: Any = FAULTS.get(kernel) or CONTROLS.get(kernel)
            places = " and ".join(one.hosts) or "nowhere" if one else "file"
            category = FAULTS[kernel].category if kernel in FAULTS else "control" if one else "own"
            click.echo(f"{kernel} ({category}; {places}): {one.summary if one else kernel}")
    return 0


def device_and_tier(asked: FaultOptions) -> tuple[str, str]:
    """Device and tier, also where nobody says; raises UsageError for what is not there."""
    from attncheck.cases.tier import default_tier, gate_tier_named
    from attncheck.verify.environment import default_device, require_device

    device = asked.device or default_device()
    require_device(device)
    return device, gate_tier_named(asked.tier or default_tier(device)).name


def _chosen(asked: FaultOptions, file: Path | None, device: str, tier: str) -> FaultSelection:
    from attncheck.core.errors import UnknownName, UsageError
    from attncheck.faults.fault import HOSTS
    from attncheck.faults.fault_selection import select_faults, select_from_file
    from attncheck.verify.environment import prepare

    hosts = dict.fromkeys((*HOSTS, "all"))
    if asked.host not in hosts:
        raise UnknownName("host", asked.host, hosts)
    if file is not None:
        if asked.categories or asked.controls or asked.host != "all":
            raise UsageError(
                "--kernel-file brings faults of its own: leave --host, --category and --controls "
                "out."
            )
        prepare(device)  # whether Triton is interpreted is decided as the file is imported
        return select_from_file(file, names=asked.names, device=device, tier=tier)
    some = asked.names or asked.categories
    return select_faults(
        hosts=HOSTS if asked.host == "all" else (asked.host,),
        names=asked.names,
        categories=asked.categories,
        controls=not some if asked.controls is None else asked.controls,
        device=device,
        tier=tier,
    )


_MOST_RUNS = 4  # of pytest at a time, unless somebody asks for more


def score_own_tests(interrupts: Interrupts, asked: FaultOptions) -> int:
    """Scores the tests, writes and shows the report; returns the exit code.

    Raises:
        UsageError: where no function is named, or the suite cannot be scored.
        UnknownName: for a fault or category that there is not.
    """
    from attncheck.faults.user_suite import UserSuite, check_scorable
    from attncheck.reporting import exit_codes
    from attncheck.workers.worker_pool import WorkerPlace

    assert asked.command is not None, "who calls this has one"
    if asked.replace is None:
        raise UsageError("--pytest needs --replace package.module:name, the function it tests.")
    suite = UserSuite(command=asked.command, replace=asked.replace, convention=asked.convention)
    host: HostName = "triton" if asked.host == "triton" else "ideal"
    these = _chosen_of_faults_own(asked, host)
    names = [unit.kernel.rpartition("@")[0] for unit in these.units]
    ended, content = run_fault_units(
        asked,
        these.units,
        own_tests_header(suite, these, typed=asked.typed),
        work="attncheck.faults.user_suite:suite_work",
        options={
            "command": suite.command,
            "replace": suite.replace,
            "convention": suite.convention,
            "folder": str(suite.folder),
        },
        lanes=[WorkerPlace()] * (asked.jobs or _cores()),
        check=lambda: check_scorable(suite, names, host),
    )
    found = _report(content, these, suite, command=asked.typed)
    write_and_show(interrupts, found, asked.outputs)
    return run_exit_code(ended, exit_codes.exit_code(found))


def own_tests_header(suite: UserSuite, these: FaultSelection, *, typed: str) -> dict[str, Any]:
    """What the journal begins with: what makes two runs the same, and when the first began."""
    from attncheck.faults.fault_selection import source_digest
    from attncheck.faults.user_suite import project_digest

    return {
        "pytest": suite.command,
        "replace": suite.replace,
        "convention": suite.convention,
        "folder": str(suite.folder),
        "faults": list(these.names),
        "sources": f"{source_digest(None)} {project_digest(suite)}",
        "started": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "typed": typed,
    }


def _chosen_of_faults_own(asked: FaultOptions, host: HostName) -> FaultSelection:
    from attncheck.faults.fault_selection import select_faults

    these = select_faults(
        hosts=(host,),
        names=asked.names,
        categories=asked.categories,
        controls=False,
        device="cuda",  # what a fault needs is for the suite to have: nothing is left out
        tier="",
    )
    if not these.units:
        raise UsageError(f"none of these faults is planted in {host}: nothing is to be scored.")
    return these


def _report(
    content: JournalContent, these: FaultSelection, suite: UserSuite, *, command: str
) -> OwnTestsReport:
    """What the journal says of each fault, in the order of the catalogue."""
    from attncheck.faults.catalogue import fault_named
    from attncheck.records.fault_scores import OwnTestsReport, OwnTestsScore

    scores: list[OwnTestsScore] = []
    for unit in these.units:
        done = content.results.get(unit.id)
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
        unfinished=len(these.units) - len(scores),
        unfinished_because=content.why,
        scores=tuple(scores),
    )


def _cores() -> int:
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return min(there, _MOST_RUNS)


def measure_sensitivities(interrupts: Interrupts, asked: FaultOptions) -> int:
    """Measures, writes and shows the report; returns the exit code.

    Raises UnknownName for a fault, dtype or tier that there is not.
    """
    from attncheck.reporting import exit_codes

    device, tier = device_and_tier(asked)
    seen = _measured(asked, tier=tier, device=device)
    write_and_show(interrupts, seen, asked.outputs)
    return exit_codes.exit_code(seen)


def _measured(asked: FaultOptions, *, tier: str, device: str) -> SensitivityReport:
    """The smallest size of each continuous fault that is seen, in each dtype."""
    from attncheck.core.formats import DTYPES
    from attncheck.faults.continuous_faults import CONTINUOUS_FAULTS, continuous_fault_named
    from attncheck.gate.choices import Choices
    from attncheck.records.fault_scores import SensitivityReport

    faults = [continuous_fault_named(name).id for name in asked.names] or list(CONTINUOUS_FAULTS)
    every = [name for name, dtype in DTYPES.items() if dtype.measured]
    chosen = Choices.of({"tier": tier, "dtypes": ",".join(asked.dtypes or every)}).dtypes
    pairs = [(fault, dtype) for dtype in chosen for fault in faults]
    found: dict[tuple[str, str], FaultSensitivity] = {}
    workers = min(asked.jobs or _cores_of_faults_sensitivity(device), len(pairs))
    spawn = multiprocessing.get_context("spawn")
    with (
        progress(len(pairs), quiet=asked.quiet) as advance,
        ProcessPoolExecutor(workers, mp_context=spawn) as pool,
    ):
        running = {pool.submit(_one, *each, tier, device): each for each in pairs}
        for done in as_completed(running):
            found[running[done]] = done.result()
            advance(" ".join(running[done]))
    return SensitivityReport(command=asked.typed, seen=tuple(found[each] for each in pairs))


def _one(fault: str, dtype: str, tier: str, device: str) -> FaultSensitivity:
    """One piece of work, in a process of its own."""
    from attncheck.faults.sensitivity import measure_sensitivity

    return measure_sensitivity(fault, dtype, tier=tier, device=device)


def _cores_of_faults_sensitivity(device: str) -> int:
    if device != "cpu":
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


_INTERRUPTED = 130
_OF_A_RUN = frozenset({"started", "typed"})  # of a journal's header: no part of the plan


def planted_header(
    these: FaultSelection, *, device: str, tier: str, file: Path | None, typed: str
) -> dict[str, Any]:
    """What the journal begins with: what makes two runs the same, and when the first began."""
    from attncheck.faults.fault_selection import source_digest

    return {
        "faults": list(these.names),
        "device": device,
        "tier": tier,
        "file": str(file) if file else "",
        "sources": source_digest(file),
        "started": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "typed": typed,
    }


def run_fault_units(  # one run, said once
    asked: FaultOptions,
    units: Sequence[Unit],
    head: dict[str, Any],
    *,
    work: str,
    options: Mapping[str, Option],
    lanes: Sequence[WorkerPlace],
    check: Callable[[], None] = lambda: None,
) -> tuple[RunEnd, JournalContent]:
    """Does ``units``; returns how that ended, and what the journal says then.

    Args:
        asked: What was typed: where the journal is, how long, whether anew, what is told.
        units: What is to be done; what the journal has is not done again.
        head: What the journal begins with.
        work: Of the lanes, as ``pool.run`` has it.
        options: Likewise.
        lanes: Which there are.
        check: Raises UsageError where nothing can be scored; called once it is known that the
            journal is this run's.

    Raises:
        UsageError: for a time or a folder that cannot be.
        JournalError: where the journal holds another run that is not finished.
    """
    from attncheck.core.files import check_names
    from attncheck.faults.fault_selection import priority
    from attncheck.workers.journal import Journal
    from attncheck.workers.pool import run_units

    seconds = parse_seconds(asked.max_time, "--max-time")
    check_names(asked.directory, [JOURNAL])
    path = Path(asked.directory) / JOURNAL
    before = existing_journal(asked.directory, fresh=asked.fresh)
    resume = _goes_on(before, head, path) if before is not None else not asked.fresh
    with Journal.open(path, head, resume=resume) as journal:
        check()
        with faults_progress(quiet=asked.quiet, verbose=asked.verbose) as told:
            ended = run_units(
                units,
                work=work,
                options=options,
                journal=journal,
                workers=lanes,
                seconds=seconds,
                told=told,
                priority=priority,
            )
        journal.end(ended.why)
    if ended.why:
        answered = f"{ended.finished} of {ended.finished + ended.left}"
        click.echo(f"attncheck: {ended.why} at {answered}: the same command goes on.", err=True)
    return ended, journal.content


def run_exit_code(ended: RunEnd, code: int) -> int:
    """``code``, which is the report's, unless the run was interrupted twice."""
    return _INTERRUPTED if ended.why == "interrupted" and ended.at_once else code


def _goes_on(before: JournalContent, head: dict[str, Any], path: Path) -> bool:
    """Whether the journal that is there is resumed; of a run that is finished it is forgotten.

    So is one of another attncheck: its scores say nothing of the one that is here.
    """
    differs = {key for key in {*before.head, *head} if before.head.get(key) != head.get(key)}
    if not before.unfinished:
        return False
    if differs - _OF_A_RUN - {"sources"}:
        return True  # the journal says what is another
    if "sources" in differs:
        click.echo(f"attncheck: sources have changed since {path}: all is asked anew.", err=True)
        return False
    known = f"{len(before.results)} of {len(before.results) + len(before.unfinished)}"
    click.echo(f"attncheck: goes on with {path}, {known} done (--fresh begins anew).", err=True)
    return True


class _Count:
    """What has been heard so far."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()

    def hear(self, event: RunEvent) -> list[str]:
        """Counts; what is new, in a line."""
        if event.done is None:
            return []
        score = event.done.facts.get("score") or {"outcome": "harness"}
        self.outcomes[_outcome(score)] += 1
        return [_told(event.unit.kernel, score)] if event.kind == "done" else []

    def line(self, event: RunEvent) -> str:
        """``faults 12/95, 11 caught, 1 missed, about 35 s left``."""
        said = [f"faults {event.finished}/{event.known}"]
        said += [f"{count} {outcome}" for outcome, count in self.outcomes.items()]
        said += [time_left(event.left)] if event.left is not None else []
        return ", ".join(said)


@contextmanager
def faults_progress(*, quiet: bool, verbose: bool) -> Iterator[Callable[[RunEvent], None]]:
    """Yields what hears of every event; with ``verbose`` each score is shown, in a line."""
    count = _Count()
    with run_progress(count.hear, count.line, quiet=quiet, verbose=verbose) as told:
        yield told


def _outcome(score: dict[str, Any]) -> str:
    """Of a gate's score, or of somebody's own tests."""
    return str(score.get("outcome") or score["status"])


def _told(kernel: str, score: dict[str, Any]) -> str:
    first = (score.get("caught") or {}).get("first") or {}
    by = f" by {first['stage']} {first['question']}" if first else ""
    counts = f" after {score['problems']} problems, {score['seconds']:.1f} s" if first else ""
    reason = f": {score['reason']}" if score.get("reason") else ""
    return shortened(one_line(f"{kernel}: {_outcome(score)}{by}{counts}{reason}"))


def write_and_show(
    interrupts: Interrupts, report: msgspec.Struct, outputs: Sequence[tuple[str, str]]
) -> None:
    """Writes each file in its format, then shows the table.

    Args:
        interrupts: Of the verb.
        report: What was found.
        outputs: Files and their formats.
    """
    from attncheck.core.files import write_texts
    from attncheck.reporting import rendering

    for file, fmt in outputs:
        path = Path(file)
        with interrupts.writing(str(path.parent)):
            write_texts({path.name: rendering.render(report, fmt)}, path.parent, instead="file")
    with standard_output():
        rendering.show(report)
