"""``attncheck check``: is this kernel right? The shortest road to a verdict."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attncheck.cli import verb
from attncheck.cli.options import few_threads, start_worker, typed_command
from attncheck.cli.standard_output import Interrupts, standard_output
from attncheck.core.errors import parse_seconds, require_known

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.cases.check_cases import CheckCase
    from attncheck.diagnose.diagnosis import CauseSearch
    from attncheck.records.record import Record, Report
    from attncheck.subjects.capabilities.subject import Subject
    from attncheck.subjects.terms import Terms
    from attncheck.verify.calls_ahead import CallsAhead
    from attncheck.verify.kernel_hosts import KernelHost
    from attncheck.verify.kernel_messages import RemoteError
    from attncheck.workers.process import Died

_MOST_SEARCHES = 4  # of a cause among all models, each of which takes a second
_SECONDS_BETWEEN_LOOKS = 0.3
_FLEX_SHAPE = "2x4/2x128x64"


@verb.command
def check(
    interrupts: Interrupts,
    *,
    spec: str | None = verb.argument("SPEC", required=False),
    convention: str | None = verb.option(
        "--convention",
        "NAME",
        "How the kernel is called: sdpa (like F.scaled_dot_product_attention), flash_attn (like "
        "flash_attn_func), varlen (like flash_attn_varlen_func), flex (like flex_attention), "
        "paged (like flash_attn_with_kvcache on pages) or native (a Subject). Default: the one "
        "that its signature shows.",
    ),
    dtypes: tuple[str, ...] = verb.several(
        "--dtype", "NAME", "fp32, tf32, fp16, bf16, e4m3 or e5m2 (repeatable; default: bf16)."
    ),
    head_dims: tuple[int, ...] = verb.several(
        "--head-dim",
        "N",
        "A head_dim that the kernel takes (repeatable; default: 64, 80, 96 and 128).",
        type=click.IntRange(1, 256),
    ),
    names: tuple[str, ...] = verb.several(
        "--question", "NAME", "Ask this one alone, by the name it has in the report (repeatable)."
    ),
    recording: str | None = verb.option(
        "--inputs",
        "FILE",
        "Ask the calls that attncheck.capture() or attncheck model recorded (safetensors), and "
        "nothing else.",
    ),
    flex: str | None = verb.option(
        "--flex",
        "MOD",
        "Ask attention with this FlexAttention mask or score mod, FILE.py::NAME or module:NAME, in "
        "each dtype, forward and backward; SPEC is torch's flex_attention where it is left out.",
    ),
    shapes: tuple[str, ...] = verb.several(
        "--shape",
        "BxHxLxD",
        f"Of --flex, as in attncheck rmse (repeatable; default: {_FLEX_SHAPE}).",
    ),
    last_failed: bool = verb.flag(
        "--last-failed",
        "Ask what failed in the last report of this kernel alone; all where nothing did.",
    ),
    watch: bool = verb.flag(
        "--watch", "Ask again whenever a file beside the kernel's has changed."
    ),
    device: str | None = verb.device(
        "Where the kernel runs (default: cuda where there is a GPU; on a cpu Triton kernels are "
        "interpreted)."
    ),
    timeout: str | None = verb.timeout(),
    in_process: bool = verb.in_process(),
    fmt: str = verb.fmt(),
    directory: str = verb.out("check.json and check.md"),
    quiet: bool = verb.flag("-q --quiet", "Verdict, cause and problem alone; no progress."),
    verbose: bool = verb.flag("-v --verbose", "Every question, and the worst in full."),
) -> int:
    """Ask one kernel what wrong kernels answer wrongly: exact probes, then a dozen problems.

    SPEC is FILE.py::NAME, package.module:NAME, FOLDER::NAME of the kernels hub, or a kernel of
    `attncheck list`. NAME is a function of query, key and value in a known convention that gives
    out, or (out, LSE), or a Subject. It runs in a process of its own: what ends or changes that is
    told, and changes no verdict.

    Exit code 1 when an answer is more than rounding away or the kernel raised, or when no question
    would have noticed a whole class of fault; 5 when it takes none.
    """
    few_threads(small=recording is None and flex is None)
    spec = _asked_kernel(spec, flex, recording, shapes)
    if watch:
        return _watched(interrupts, spec)
    deadline = parse_seconds(timeout, "--timeout")
    if last_failed:
        names = _failed_names(spec, directory, names)
    worker = start_worker(spec, in_process=in_process)
    from attncheck.reporting import rendering
    from attncheck.reporting.check_document import check_document, check_summary
    from attncheck.reporting.exit_codes import check_exit_code
    from attncheck.verify.calls_ahead import CallsAhead, processes_ahead
    from attncheck.verify.environment import prepare, usable_device
    from attncheck.verify.kernel_hosts import open_kernel
    from attncheck.verify.kernel_messages import RemoteError
    from attncheck.verify.remote_kernel import Deadlines
    from attncheck.verify.verify import assemble_report
    from attncheck.workers.process import Died

    interrupts.check()  # the imports above take a while, and may have swallowed one
    rendering.check_format(fmt)
    device = usable_device(device)
    options: dict[str, Any] = {"dtypes": dtypes, "head_dims": head_dims, "names": names}
    questions, mods = _asked(recording, flex, dtypes, head_dims, shapes, names, device)
    if mods:
        options["problems"] = [question.case.problem for question in questions]
    # Those processes draw what they are asked: they have no recording, and no mods.
    count = 0 if in_process or mods else processes_ahead(spec, device)
    ahead = CallsAhead(spec, convention=convention or "", device=device, processes=count)
    click.get_current_context().call_on_close(ahead.close)
    prepare(device)  # before the file's own Triton functions are decorated
    command = typed_command(argument=spec)
    host = None
    try:
        host = open_kernel(
            spec,
            convention=convention or "",
            device=device,
            isolated=False if in_process else None,
            deadlines=Deadlines.of(deadline),
            worker=worker,
            mods=mods,
        )
        with closing(host):
            rendering.check_writable(directory, "check")
            report = assemble_report([host.subject], (), device=device, command=command)
            report = _checked(
                interrupts,
                report,
                host,
                questions,
                options,
                ahead=ahead,
                spec=spec,
                device=device,
                quiet=quiet,
                last_failed=last_failed,
            )
    except (Died, RemoteError) as error:  # as it was loaded, or tried, or between two questions
        asked = [one for one in questions if not names or one.name in names] or questions
        report = assemble_report((), (), device=device, command=command)
        report = _death_report(report, error, spec, asked, loading=host is None)
    with interrupts.writing(directory):
        rendering.write_report(
            report, directory, "check", formats=("json", "md"), document=check_document
        )
    page = check_document
    if fmt == "table":
        typed = shlex.join(["attncheck", *sys.argv[1:]])
        page = partial(check_summary, command=typed, quiet=quiet, verbose=verbose)
    with standard_output():
        rendering.show(report, fmt, document=page)
    return check_exit_code(report)


def _checked(
    interrupts: Interrupts,
    report: Report,
    host: KernelHost,
    questions: list[CheckCase],
    options: dict[str, Any],
    *,
    ahead: CallsAhead,
    spec: str,
    device: str,
    quiet: bool,
    last_failed: bool,
) -> Report:
    """The Report with every Record, within what a plain function is found to take.

    Options are what was asked for by name, which a function is taken to claim.
    """
    from msgspec.structs import replace

    from attncheck.cli.long_runs import progress
    from attncheck.verify.claims import (
        CLAIM_TRIALS,
        claimed_questions,
        hold_to_claims,
        subject_questions,
    )
    from attncheck.verify.kernel_hosts import executor_of
    from attncheck.verify.kernel_messages import RemoteError
    from attncheck.verify.question_fit import taken_problem
    from attncheck.workers.process import Died

    with progress(CLAIM_TRIALS, quiet=quiet, check=interrupts.check) as advance:
        claims = hold_to_claims(
            host,
            kernel=spec,
            device=device,
            advance=advance,
            expect=ahead.expect,
            asks_beyond=True,
            **options,
        )
    subject = host.subject
    if claims is not None and claims.timeout:  # nobody waits for it once more
        raise Died("timeout", claims.timeout)
    if claims is not None:
        # By another convention it says other things of itself.
        report = replace(report, kernels={subject.name: subject.summary})

    def chosen(names: tuple[str, ...]) -> list[CheckCase]:
        if "problems" in options:  # a recording's calls, and nothing beside them
            return questions
        how: dict[str, Any] = {"device": device, **options, "names": names}
        if claims is None:
            return subject_questions(subject, questions, **how)
        return claimed_questions(claims, subject, **how)

    asked = _known(chosen, options["names"], spec, last_failed)
    if claims is not None and (lines := tuple(claims.lines())):
        report = replace(report, claims={subject.name: lines})
    terms = None if claims is None else replace(claims.terms(**options), table=None)
    executor = executor_of(subject)
    forms = (taken_problem(subject, one.case.problem, executor, device) for one in asked)
    ahead.expect([problem for problem in forms if problem is not None], terms)
    report = _answered(interrupts, report, subject, asked, device, quiet=quiet)
    with suppress(Died, RemoteError):  # what is wrong is known without its cause
        report = _explained(report, subject, terms, device)
    return report


def _known(
    chosen: Callable[[tuple[str, ...]], list[CheckCase]],
    names: tuple[str, ...],
    spec: str,
    last_failed: bool,  # noqa: FBT001  # as the option is
) -> list[CheckCase]:
    """Questions of these names; all where one of the last report is none any more.

    Raises UsageError for another name that is none.
    """
    from attncheck.core.errors import UsageError

    asked = chosen(names)
    gone = next((name for name in names if name not in {one.name for one in asked}), None)
    if gone is None:
        return asked
    says = f"{spec} has no question {gone!r}"
    if not last_failed:
        raise UsageError(f"{says}: leave --question out to see all.")
    click.echo(f"attncheck: {says} any more: every question is asked.", err=True)
    return chosen(())


def _failed_names(spec: str, directory: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Questions that failed in the kernel's last report, of ``names`` where there are any."""
    from attncheck.core.errors import UsageError
    from attncheck.records.json_reports import load_report
    from attncheck.records.record import FAILED_STATUSES, Report

    path = Path(directory) / "check.json"
    failed: list[str] = []
    try:
        records = load_report(path, Report).records
    except UsageError:  # none is there, or another version's
        fact = f"there is no report of {spec} in {directory!r}"
    else:
        fact = f"nothing of {spec} failed last time"
        bad = (one for one in records if one.status in {*FAILED_STATUSES, "flaky"})
        # A kernel is called by its file; one that died before it was, as it was typed.
        failed = [one.variant for one in bad if one.kernel in {spec, Path(spec).name}]
    left = tuple(dict.fromkeys(name for name in failed if name in (names or failed)))
    if not left:
        click.echo(f"attncheck: {fact}: every question is asked.", err=True)
    return left or names


def _watched(interrupts: Interrupts, spec: str) -> int:
    """Run the rest of the command line now, and again whenever a Python file has changed.

    What failed is asked first, and all once that passes; ends by an interrupt alone.
    """
    from attncheck.core.errors import UsageError

    folder = Path(spec.partition("::")[0]).parent
    if "::" not in spec or not folder.is_dir():
        raise UsageError(f"--watch watches a file: kernel {spec!r} must be FILE.py::NAME.")
    words = [word for word in sys.argv[1:] if word not in {"--watch", "--last-failed"}]
    program = [sys.executable, "-m", "attncheck", *words]
    interrupts.message = f"no longer watching {spec}."
    failed = False
    while True:
        before = _changes(folder)
        code = 0
        for more in (["--last-failed"], [])[not failed :]:
            # A group of its own: an interrupt is ours, and ends it without a line of its own.
            with standard_output():
                words = [*program, *more]
                run = subprocess.run(words, check=False, stdout=sys.stdout, process_group=0)  # noqa: S603  # ourselves
            code = run.returncode
            if code not in {0, 5}:  # what it refuses now fails no more
                break
        interrupts.check()
        failed = code == 1
        click.echo(f"attncheck: watching {folder}/*.py; Ctrl-C ends it.", err=True)
        while _changes(folder) == before:
            time.sleep(_SECONDS_BETWEEN_LOOKS)


def _changes(folder: Path) -> dict[str, int]:
    """When each Python file of ``folder`` was last written: a kernel imports those beside it."""
    times = {}
    for path in folder.glob("*.py"):
        with suppress(OSError):  # an editor may just be replacing it
            times[path.name] = path.stat().st_mtime_ns
    return times


def _asked_kernel(
    spec: str | None, flex: str | None, recording: str | None, shapes: tuple[str, ...]
) -> str:
    """The kernel that is asked; raises UsageError for options that say nothing together."""
    from attncheck.core.errors import UsageError

    if flex is not None and recording is not None:
        raise UsageError("--flex and --inputs each say what to ask: leave one out.")
    if shapes and flex is None:
        raise UsageError("--shape is of --flex: the questions of a check have their own.")
    if spec is None and flex is None:
        raise UsageError("Missing argument 'SPEC'.")
    return "flex" if spec is None else spec


def _asked(
    recording: str | None,
    flex: str | None,
    dtypes: tuple[str, ...],
    head_dims: tuple[int, ...],
    shapes: tuple[str, ...],
    names: tuple[str, ...],
    device: str,
) -> tuple[list[CheckCase], dict[str, str]]:
    """The questions, and what a kernel's process must load to know their Problems.

    Raises UnknownName for a name that no question has.
    """
    from attncheck.verify.environment import prepare

    if recording is None and flex is None:
        return _questions(dtypes, head_dims, names), {}
    prepare(device)  # torch's tracer imports Triton
    found = (
        _recorded(recording, dtypes, device) if recording else _flexed(flex, dtypes, shapes, device)
    )
    questions, mods = found
    require_known("question", names, {question.name for question in questions})
    return [one for one in questions if one.name in (names or (one.name,))], mods


def _recorded(
    file: str, dtypes: tuple[str, ...], device: str
) -> tuple[list[CheckCase], dict[str, str]]:
    """A recording's calls, and what a kernel's process needs to know them."""
    from attncheck.cases.check_cases import CheckCase
    from attncheck.cases.variants import recorded_cells
    from attncheck.inputs.problem import Case

    questions = [
        CheckCase(name=cell.variant, summary=f"call of {file}", case=Case(problem=cell.problem))
        for cell in recorded_cells(file, dtypes, device)
    ]
    return questions, {"recording": file}


def _flexed(
    mod: str | None, dtypes: tuple[str, ...], shapes: tuple[str, ...], device: str
) -> tuple[list[CheckCase], dict[str, str]]:
    """Problems with somebody's mask or score mod, and what a kernel's process needs to know it."""
    from importlib.util import find_spec

    from attncheck.cases.check_cases import CheckCase
    from attncheck.cases.variants import own_variant, plan_cells
    from attncheck.core.errors import UsageError
    from attncheck.core.source_files import load_member
    from attncheck.inputs.problem import Case
    from attncheck.mods.mod_files import kind_of_mod
    from attncheck.verify.kernel_hosts import try_mods

    assert mod is not None, "else nothing says what to ask"
    if "::" not in mod:
        module, _, name = mod.partition(":")
        here = Path(*module.split(".")).with_suffix(".py")
        found = None if here.is_file() or "." in module or not module else find_spec(module)
        origin = str(here) if here.is_file() else found and found.origin
        if not origin or not name:
            raise UsageError(f"mod {mod!r} is neither FILE.py::NAME nor MODULE:NAME.")
        mod = f"{origin}::{name}"
    trial = start_worker(mod, in_process=False, echo=False)
    assert trial is not None, "a file's name is no kernel's"
    try_mods({"file": mod.partition("::")[0]}, trial, device=device)
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
        for shape in shapes or (_FLEX_SHAPE,)
        for backward in (False, True)
        for cell in plan_cells(
            dtypes=dtypes or ("fp32", "fp16", "bf16"),
            variants=(),
            own=own,
            shapes=(shape,),
            distributions=("normal",),
            seed=0,
            backward=backward,
            device=device,
        )
    ]
    return questions, {"mask" if kind == "mask" else "score": mod}


def _questions(
    dtypes: tuple[str, ...], head_dims: tuple[int, ...], names: tuple[str, ...]
) -> list[CheckCase]:
    """The check cases, dtype by dtype; raises UnknownName for a name that none of them has."""
    from attncheck.cases.check_cases import call_cases, check_cases
    from attncheck.core.errors import UnknownName
    from attncheck.verify.claims import NOT_CLAIMED

    dtypes = dtypes or ("bf16",)
    # First, as long as the kernel's process is new: later ones may already be changed.
    questions = call_cases(dtypes[0], head_dims)
    questions += [one for dtype in dict.fromkeys(dtypes) for one in check_cases(dtype, head_dims)]
    known = {question.name for question in questions}
    for name in names:
        # What is asked of the axes that a kernel takes, or beyond its claims, is known only then.
        aspect = name.removeprefix("decode-").partition("-")[0]
        if name not in known and aspect not in {"crossed", "alone", "lengths", *NOT_CLAIMED}:
            raise UnknownName("question", name, known)
    return questions


def _answered(
    interrupts: Interrupts,
    report: Report,
    subject: Subject,
    questions: list[CheckCase],
    device: str,
    *,
    quiet: bool,
) -> Report:
    """The Report with every Record."""
    from msgspec.structs import replace

    from attncheck.cli.long_runs import progress
    from attncheck.verify.deaths import DEATHS, MOST_DEATHS
    from attncheck.verify.verify import iter_records

    cases = [(question.name, question.case) for question in questions]
    records: list[Record] = []
    deaths = 0
    with progress(len(questions), quiet=quiet) as advance:
        key = next(iter(report.environments))
        answers = iter_records([subject], cases, device=device, environment_key=key)
        for question, record in zip(questions, answers, strict=True):
            if question.unclaimed is not None:
                record = replace(record, unclaimed=question.unclaimed)  # noqa: PLW2901  # the one to show
            interrupts.check()
            advance(record.variant)
            # What writes beside its tensors may end its process, or change any later answer.
            wild = record.judgement is not None and record.judgement.rule == "memory"
            deaths += wild or record.status in DEATHS
            records.append(record)
            # Each further one would take as long, or start another process: no verdict needs it.
            if record.status == "timeout" or deaths >= MOST_DEATHS:
                break
    left = _not_asked(len(questions) - len(records))
    return replace(report, records=tuple(records), incomplete=left)


def _death_report(
    report: Report, error: Died | RemoteError, spec: str, asked: list[CheckCase], *, loading: bool
) -> Report:
    """Report of a kernel that was asked nothing, since its process died: the first one fails."""
    from msgspec.structs import replace

    from attncheck.verify.deaths import death_record

    record = death_record(
        error,
        asked[0].case,
        kernel=spec,
        variant=asked[0].name,
        environment=next(iter(report.environments)),
        loading=loading,
    )
    left = _not_asked(len(asked) - 1)
    return replace(report, kernels={spec: ""}, records=(record,), incomplete=left)


def _not_asked(count: int) -> str:
    return f"{count} more were not asked" if count else ""


def _explained(report: Report, subject: Subject, terms: Terms | None, device: str) -> Report:
    """With what may be wrong in the Records that failed.

    Args:
        terms: On which a plain function takes anything.
    """
    from attncheck.diagnose.diagnosis import CauseSearch
    from attncheck.verify.kernel_hosts import on_terms

    search = CauseSearch(_MOST_SEARCHES)
    for one in report.records:
        search.note(one)
    # Within its claims first: what is wrong beyond them would refute each cause of that.
    report = _diagnosed(report, search, subject, device)
    if terms is not None and any(map(_is_beyond, report.records)):
        report = _diagnosed(report, search, on_terms(subject, terms), device, beyond=True)
    return report


def _is_beyond(record: Record) -> bool:
    """Return whether it fails beyond what the kernel claims."""
    from attncheck.records.record import FAILED_STATUSES

    return record.status in FAILED_STATUSES and bool(record.unclaimed)


def _diagnosed(
    report: Report, search: CauseSearch, subject: Subject, device: str, *, beyond: bool = False
) -> Report:
    """With what may be wrong in the Records that failed within its claims, or ``beyond`` them."""
    from msgspec.structs import replace

    from attncheck.reporting.check_document import worst_record

    records = [*report.records]
    places = [i for i, one in enumerate(records) if _is_beyond(one) == beyond]
    some = [records[i] for i in places]
    worst = worst_record(replace(report, records=tuple(some)))
    if worst is None:
        return report
    # The one that says most first.
    diagnosed = search.diagnose_all(some, subject, device=device, first=worst)
    for i, one in zip(places, diagnosed, strict=True):
        records[i] = one
    return replace(report, records=tuple(records))
