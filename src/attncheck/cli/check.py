"""``attncheck check``: is this kernel right? The quickest way to a verdict."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec.structs import replace

from attncheck.cli import verb
from attncheck.cli.long_runs import TRIALS, progress
from attncheck.cli.options import few_threads, start_worker, typed_command
from attncheck.cli.standard_output import interrupts, standard_output
from attncheck.core.errors import AttncheckError, UnknownName, UsageError, require_known
from attncheck.core.source_files import load_member
from attncheck.records.failure_causes import gives_no_out
from attncheck.records.json_reports import load_report
from attncheck.records.record import DEFAULT_DTYPE, FAILED_STATUSES, Record, Report
from attncheck.reporting.exit_codes import check_exit_code
from attncheck.workers.process import Died, HeldOutput

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.cases.check_cases import CheckCase
    from attncheck.subjects.capabilities.subject import Subject
    from attncheck.subjects.terms import Terms
    from attncheck.verify.calls_ahead import CallsAhead
    from attncheck.verify.kernel_hosts import KernelHost
    from attncheck.verify.kernel_messages import RemoteError

_MOST_SEARCHES = 4  # searches for a cause among all fault models, each of which takes a second
_SECONDS_BETWEEN_LOOKS = 0.3  # between checks of --watch for changed files
_FLEX_SHAPE = "2x4/2x128x64"  # default --shape of --flex


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """Options of ``attncheck check``, as typed; ``check`` fills in kernel, device and questions."""

    spec: str = verb.argument("SPEC", required=False)
    convention: str = verb.option(
        "--convention",
        "NAME",
        "How the kernel is called: sdpa (like F.scaled_dot_product_attention), flash_attn (like "
        "flash_attn_func), varlen (like flash_attn_varlen_func), flex (like flex_attention), "
        "paged (like flash_attn_with_kvcache on pages) or native (a Subject). Default: the one "
        "that its signature shows.",
        "",
    )
    dtypes: tuple[str, ...] = verb.dtypes(DEFAULT_DTYPE)
    head_dims: tuple[int, ...] = verb.several(
        "--head-dim",
        "N",
        "A head_dim that the kernel has to support (repeatable; default: 64, 80, 96 and 128).",
        type=click.IntRange(1, 256),
    )
    names: tuple[str, ...] = verb.several(
        "--question", "NAME", "Ask only this question, by its name in the report (repeatable)."
    )
    recording: str | None = verb.option(
        "--inputs",
        "FILE",
        "Repeat only the calls that attncheck.capture() or attncheck model recorded (safetensors).",
    )
    flex: str | None = verb.option(
        "--flex",
        "MOD",
        "Test only attention with this FlexAttention mask or score mod, FILE.py::NAME or "
        "module:NAME, in each dtype, forward and backward (default of SPEC: torch's "
        "flex_attention).",
    )
    shapes: tuple[str, ...] = verb.several(
        "--shape",
        "BxHxLxD",
        f"Sizes for --flex, written as for attncheck rmse (repeatable; default: {_FLEX_SHAPE}).",
    )
    last_failed: bool = verb.flag(
        "--last-failed",
        "Ask only the questions that failed in this kernel's last report; all if none did.",
    )
    watch: bool = verb.flag(
        "--watch", "Check again whenever a Python file in the kernel's folder has changed."
    )
    device: str = verb.device("Where the kernel runs")
    timeout: float | None = verb.timeout()
    in_process: bool = verb.in_process()
    fmt: str = verb.fmt()
    directory: str = verb.out("check.json and check.md")
    quiet: bool = verb.flag(
        "-q --quiet", "Print only the verdict, cause and problem; show no progress."
    )
    verbose: bool = verb.flag("-v --verbose", "Print every question, and the worst in full.")

    @property
    def own_questions(self) -> bool:
        """Return whether the check's own questions are asked, not recorded calls or a mod."""
        return self.recording is None and self.flex is None


@verb.command
def check(options: CheckOptions) -> int:
    """Check one kernel with 60 to 90 problems that are known to expose faults.

    SPEC is FILE.py::NAME, package.module:NAME, FOLDER::NAME of the kernels hub, or a kernel of
    `attncheck list`. NAME is a Subject, or a function of query, key and value that returns out, or
    (out, LSE), and is called by one of the conventions below. It runs in a process of its own:
    whatever ends this process, or changes its settings, is reported and spoils no other result.

    Exit code 1 when an error is larger than rounding explains, when the kernel raised, or when no
    question could have shown a whole class of faults; 5 when the kernel supports none of the
    problems.
    """
    few_threads(small=options.own_questions)
    options = dataclasses.replace(options, spec=_kernel_spec(options))
    if options.watch:
        return _watch(options.spec)
    if options.last_failed:
        options = dataclasses.replace(options, names=_failed_names(options))
    held = HeldOutput()
    # At the latest when the verb ends, whether by an error or an interrupt.
    click.get_current_context().call_on_close(partial(held.show, passed=False))
    echo = options.verbose or held
    worker = start_worker(options.spec, in_process=options.in_process, echo=echo)
    with interrupts.importing():
        from attncheck.reporting import rendering
        from attncheck.reporting.check_document import check_document, check_summary
        from attncheck.verify.calls_ahead import CallsAhead, processes_ahead
        from attncheck.verify.environment import prepare, usable_device
        from attncheck.verify.isolated import Deadlines
        from attncheck.verify.kernel_hosts import open_kernel
        from attncheck.verify.kernel_messages import RemoteError
        from attncheck.verify.verify import assemble_report
    rendering.check_format(options.fmt)
    options = dataclasses.replace(options, device=usable_device(options.device))
    questions, mods = _questions_and_mods(options)
    # Processes ahead draw their own inputs, so they cannot use a recording or mods.
    not_ahead = options.in_process or mods
    host_options: dict[str, Any] = {"convention": options.convention, "device": options.device}
    processes = 0 if not_ahead else processes_ahead(options.spec, options.device)
    ahead = CallsAhead(options.spec, processes=processes, **host_options)
    click.get_current_context().call_on_close(ahead.close)
    prepare(options.device)  # before the file's own Triton functions are decorated
    report_facts: dict[str, Any] = {
        "device": options.device,
        "command": typed_command(arguments=[options.spec]),
    }
    host = None
    try:
        host = open_kernel(
            options.spec,
            isolated=False if options.in_process else None,
            deadlines=Deadlines.of(options.timeout),
            worker=worker,
            mods=mods,
            **host_options,
        )
        with closing(host):
            rendering.check_writable(options.directory, "check")
            report = assemble_report([host.subject], (), **report_facts)
            report = _check_kernel(options, report, host, questions, ahead)
    except (Died, RemoteError) as error:  # while loading, in a trial, or between two questions
        selection = [one for one in questions if one.name in options.names] or questions
        report = assemble_report((), (), **report_facts)
        report = _death_report(report, error, options.spec, selection, loading=host is None)
    with interrupts.writing(options.directory):
        rendering.write_report(
            report, options.directory, "check", formats=("json", "md"), document=check_document
        )
    code = check_exit_code(report)
    held.show(passed=code == 0)
    page = check_document
    if options.fmt == "table":
        typed = shlex.join(["attncheck", *sys.argv[1:]])
        page = partial(check_summary, command=typed, quiet=options.quiet, verbose=options.verbose)
    with standard_output():
        rendering.show(report, options.fmt, document=page)
    return code


def _check_kernel(
    options: CheckOptions,
    report: Report,
    host: KernelHost,
    questions: list[CheckCase],
    ahead: CallsAhead,
) -> Report:
    """Return the Report with every Record, of questions that a plain function is found to support.

    Options typed by the user count as claimed by the function.
    """
    from attncheck.verify.claims import (
        CLAIM_TRIALS,
        claimed_questions,
        hold_to_claims,
        subject_questions,
    )
    from attncheck.verify.kernel_hosts import executor_of
    from attncheck.verify.question_fit import taken_problem

    device = options.device
    typed: dict[str, Any] = {"dtypes": options.dtypes, "head_dims": options.head_dims}
    claim_options: dict[str, Any] = {**typed, "names": options.names}
    if not options.own_questions:
        claim_options["problems"] = [question.case.problem for question in questions]
    with progress(TRIALS, CLAIM_TRIALS, quiet=options.quiet) as advance:
        claims = hold_to_claims(
            host,
            kernel=options.spec,
            device=device,
            advance=advance,
            expect=ahead.expect,
            asks_beyond=True,
            **claim_options,
        )
    subject = host.subject
    if claims is not None and claims.timeout:  # do not wait for a timeout a second time
        raise Died("timeout", claims.timeout)
    if claims is not None:
        # The kernel's summary depends on the convention that was found.
        report = replace(report, kernels={subject.name: subject.summary})

    def select(names: tuple[str, ...]) -> list[CheckCase]:
        if not options.own_questions:  # only the recording's calls, or the mod's problems
            return questions
        if claims is None:
            return subject_questions(subject, questions, device=device, names=names, **typed)
        return claimed_questions(claims, subject, device=device, names=names, **typed)

    selection = _existing_questions(select, options)
    if claims is not None and (lines := tuple(claims.lines())):
        deviation = claims.deviation() or msgspec.UNSET
        report = replace(report, claims={subject.name: lines}, deviation=deviation)
    terms = None if claims is None else replace(claims.terms(**claim_options), table=None)
    executor = executor_of(subject)
    problems = (taken_problem(subject, one.case.problem, executor, device) for one in selection)
    ahead.expect([problem for problem in problems if problem is not None], terms)
    report = _ask_questions(report, subject, selection, options)
    return _add_diagnoses(report, subject, terms, device)


def _existing_questions(
    select: Callable[[tuple[str, ...]], list[CheckCase]], options: CheckOptions
) -> list[CheckCase]:
    """Return the questions named in ``options``; all if one of --last-failed no longer exists.

    Raise UsageError for an unknown name of --question.
    """
    questions = select(options.names)
    names = {one.name for one in questions}
    missing = next((name for name in options.names if name not in names), None)
    if missing is None:
        return questions
    message = f"{options.spec} has no question {missing!r}"
    if not options.last_failed:
        raise UsageError(f"{message}: leave --question out to see all.")
    click.echo(f"attncheck: {message} any more: every question is asked.", err=True)
    return select(())


def _failed_names(options: CheckOptions) -> tuple[str, ...]:
    """Return the questions that failed in the kernel's last report, among the named ones if any."""
    spec, names = options.spec, options.names
    failed: list[str] = []
    try:
        records = load_report(Path(options.directory) / "check.json", Report).records
    except UsageError:  # there is no report, or one of another version
        fact = f"there is no report of {spec} in {options.directory!r}"
    else:
        fact = f"nothing of {spec} failed last time"
        bad = (one for one in records if one.status in {*FAILED_STATUSES, "flaky"})
        # A record names its kernel without the folder; one that died while loading, as typed.
        failed = [one.variant for one in bad if one.kernel in {spec, Path(spec).name}]
    remaining = tuple(dict.fromkeys(name for name in failed if name in (names or failed)))
    if not remaining:
        click.echo(f"attncheck: {fact}: every question is asked.", err=True)
    return remaining or names


def _watch(spec: str) -> int:
    """Run the rest of the command line now, and again whenever a Python file has changed.

    Failed questions are asked first, and all questions once those pass; only an interrupt ends it.
    """
    folder = Path(spec.partition("::")[0]).parent
    if "::" not in spec or not folder.is_dir():
        raise UsageError(f"--watch watches a file: kernel {spec!r} must be FILE.py::NAME.")
    words = [word for word in sys.argv[1:] if word not in {"--watch", "--last-failed"}]
    program = [sys.executable, "-m", "attncheck", *words]
    interrupts.message = f"no longer watching {spec}."
    failed = False
    while True:
        before = _modification_times(folder)
        code = 0
        for more in (["--last-failed"], [])[not failed :]:
            # In its own process group, so that only this process gets an interrupt and reports it.
            with standard_output():
                words = [*program, *more]
                run = subprocess.run(words, check=False, stdout=sys.stdout, process_group=0)  # noqa: S603  # ourselves
            code = run.returncode
            if code not in {0, 5}:  # a question that it refuses now no longer fails
                break
        interrupts.check()
        failed = code == 1
        click.echo(f"attncheck: watching {folder}/*.py; Ctrl-C ends it.", err=True)
        while _modification_times(folder) == before:
            time.sleep(_SECONDS_BETWEEN_LOOKS)


def _modification_times(folder: Path) -> dict[str, int]:
    """Return the modification time of each Python file in ``folder``, which a kernel may import."""
    times = {}
    for path in folder.glob("*.py"):
        with suppress(OSError):  # an editor may just be replacing it
            times[path.name] = path.stat().st_mtime_ns
    return times


def _kernel_spec(options: CheckOptions) -> str:
    """Return the kernel that is asked; raise UsageError for options that contradict each other."""
    if options.flex is not None and options.recording is not None:
        raise UsageError("--flex and --inputs each say what to ask: leave one out.")
    if options.shapes and options.flex is None:
        raise UsageError("--shape is of --flex: the questions of a check have their own.")
    if options.spec is None and options.flex is None:
        raise UsageError("Missing argument 'SPEC'.")
    return "flex" if options.spec is None else options.spec


def _questions_and_mods(options: CheckOptions) -> tuple[list[CheckCase], dict[str, str]]:
    """Return the questions, and the files that a kernel's process must load for their Problems.

    Raise UnknownName for a name that no question has.
    """
    from attncheck.verify.environment import prepare

    if options.own_questions:
        return _questions(options), {}
    prepare(options.device)  # torch's tracer imports Triton
    questions, mods = (_flex_questions if options.recording is None else _call_questions)(options)
    names = options.names
    require_known("question", names, {question.name for question in questions})
    return [one for one in questions if one.name in (names or (one.name,))], mods


def _call_questions(options: CheckOptions) -> tuple[list[CheckCase], dict[str, str]]:
    """Return questions of a recording's calls, and the file that a kernel's process must load."""
    from attncheck.cases.check_cases import CheckCase
    from attncheck.cases.variants import recorded_cells
    from attncheck.inputs.problem import Case

    file = str(options.recording)
    questions = [
        CheckCase(name=cell.variant, summary=f"call of {file}", case=Case(problem=cell.problem))
        for cell in recorded_cells(file, options.dtypes, options.device)
    ]
    return questions, {"recording": file}


def _flex_questions(options: CheckOptions) -> tuple[list[CheckCase], dict[str, str]]:
    """Return questions with the mod of --flex, and the file that a kernel's process must load."""
    from importlib.util import find_spec

    from attncheck.cases.check_cases import CheckCase
    from attncheck.cases.variants import own_variant, plan_cells
    from attncheck.inputs.problem import Case
    from attncheck.mods.mod_files import kind_of_mod
    from attncheck.verify.kernel_hosts import try_mods

    mod = str(options.flex)
    if "::" not in mod:
        module, _, name = mod.partition(":")
        module_file = Path(*module.split(".")).with_suffix(".py")
        spec = None if module_file.is_file() or "." in module or not module else find_spec(module)
        origin = str(module_file) if module_file.is_file() else spec and spec.origin
        if not origin or not name:
            raise UsageError(f"mod {mod!r} is neither FILE.py::NAME nor MODULE:NAME.")
        mod = f"{origin}::{name}"
    trial = start_worker(mod, in_process=False, echo=False)
    assert trial is not None, "a file's name is no kernel's"
    try_mods({"file": mod.partition("::")[0]}, trial, device=options.device)
    kind = kind_of_mod(load_member(mod, f"mod {mod!r}"))
    if kind is None:
        raise UsageError(f"{mod!r} is no mask (b, h, q_idx, kv_idx) and no score mod (score, …).")
    own = own_variant(*((mod, None) if kind == "mask" else (None, mod)))
    questions = [
        CheckCase(
            name="-".join((cell.problem.dtype, shape, "backward" if backward else "forward")),
            summary=f"{kind} {own.name}",
            case=Case(problem=cell.problem),
        )
        for shape in options.shapes or (_FLEX_SHAPE,)
        for backward in (False, True)
        for cell in plan_cells(
            dtypes=options.dtypes or ("fp32", "fp16", "bf16"),
            variants=(),
            own=own,
            shapes=(shape,),
            distributions=("normal",),
            seed=0,
            backward=backward,
            device=options.device,
        )
    ]
    return questions, {"mask" if kind == "mask" else "score": mod}


def _questions(options: CheckOptions) -> list[CheckCase]:
    """Return the check cases, dtype by dtype; raise UnknownName for an unknown question."""
    from attncheck.cases.check_cases import call_cases, check_cases
    from attncheck.verify.claims import NOT_CLAIMED

    dtypes, dims = options.dtypes or (DEFAULT_DTYPE,), options.head_dims
    # These come first, while the kernel's process is new: later it may be changed.
    questions = call_cases(dtypes[0], dims)
    questions += [one for dtype in dict.fromkeys(dtypes) for one in check_cases(dtype, dims)]
    all_names = {question.name for question in questions}
    for name in options.names:
        # Questions on a kernel's axes, or beyond its claims, exist only once these are known.
        aspect = name.removeprefix("decode-").partition("-")[0]
        if name not in all_names and aspect not in {"crossed", "alone", "lengths", *NOT_CLAIMED}:
            raise UnknownName("question", name, all_names)
    return questions


def _ask_questions(
    report: Report,
    subject: Subject,
    questions: list[CheckCase],
    options: CheckOptions,
) -> Report:
    """Return the Report with a Record for every question.

    After a timeout, too many deaths or a dozen answers without an out, no more are asked.
    """
    from attncheck.verify.deaths import DEATHS, MOST_DEATHS
    from attncheck.verify.verify import iter_records

    cases = [(question.name, question.case) for question in questions]
    records: list[Record] = []
    deaths = 0
    with progress("question", len(questions), quiet=options.quiet) as advance:
        key = next(iter(report.environments))
        answers = iter_records([subject], cases, device=options.device, environment_key=key)
        for question, record in zip(questions, answers, strict=True):
            if question.unclaimed is not None:
                record = replace(record, unclaimed=question.unclaimed)  # noqa: PLW2901  # the one to show
            advance(record.variant)
            # A kernel that writes beside its tensors may crash, or change any later answer.
            wild = record.judgement is not None and record.judgement.rule == "memory"
            deaths += wild or record.status in DEATHS
            records.append(record)
            # Further questions could take as long, and the verdict does not need them.
            if record.status == "timeout" or deaths >= MOST_DEATHS or gives_no_out(records):
                break
    not_asked = _not_asked(len(questions) - len(records))
    return replace(report, records=tuple(records), incomplete=not_asked)


def _death_report(
    report: Report, error: Died | RemoteError, spec: str, cases: list[CheckCase], *, loading: bool
) -> Report:
    """Return the report of a kernel whose process died, with a failure of the first question."""
    from attncheck.verify.deaths import death_record

    record = death_record(
        error,
        cases[0].case,
        kernel=spec,
        variant=cases[0].name,
        environment=next(iter(report.environments)),
        loading=loading,
    )
    not_asked = _not_asked(len(cases) - 1)
    return replace(report, kernels={spec: ""}, records=(record,), incomplete=not_asked)


def _not_asked(count: int) -> str:
    return f"{count} more were not asked" if count else ""


def _add_diagnoses(report: Report, subject: Subject, terms: Terms | None, device: str) -> Report:
    """Return ``report`` with diagnoses of the failed Records.

    Args:
        terms: Terms on which a plain function takes every problem.
    """
    from attncheck.diagnose.diagnosis import CauseSearch
    from attncheck.reporting.check_document import worst_record
    from attncheck.verify.kernel_hosts import on_terms

    search = CauseSearch(_MOST_SEARCHES)
    for one in report.records:
        search.note(one)
    records = [*report.records]
    # Within its claims first, since wrong answers beyond them would refute every cause there.
    for beyond in (False, True):
        places = [i for i, one in enumerate(records) if _is_beyond(one) == beyond]
        part = [records[i] for i in places]
        worst = worst_record(part)
        if worst is None:
            continue
        try:
            if beyond:
                if terms is None:
                    break
                subject = on_terms(subject, terms)
            # Start with the worst failure, which tells most.
            diagnosed = search.diagnose_all(part, subject, device=device, first=worst)
        except AttncheckError:  # the kernel's process is gone: the verdict stands without a cause
            break
        for i, one in zip(places, diagnosed, strict=True):
            records[i] = one
    return replace(report, records=tuple(records))


def _is_beyond(record: Record) -> bool:
    """Return whether ``record`` is a failure beyond the kernel's claims."""
    return record.status in FAILED_STATUSES and bool(record.unclaimed)
