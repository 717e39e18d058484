"""``attncheck repro``: ask a kernel the question of a failure again."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attncheck.cli import verb
from attncheck.cli.options import few_threads, start_worker
from attncheck.cli.standard_output import interrupts, standard_output
from attncheck.core.errors import UsageError, recorded_file
from attncheck.core.files import write_texts
from attncheck.core.sanitize_text import one_line
from attncheck.records.failures import Reproduction, find_reproduction
from attncheck.records.problem_summary import problem_of
from attncheck.records.record import FAILED_STATUSES, Record
from attncheck.reporting.exit_codes import record_exit_code
from attncheck.workers.process import Died

if TYPE_CHECKING:
    from attncheck.inputs.problem import Case
    from attncheck.subjects.capabilities.subject import Subject
    from attncheck.verify.kernel_hosts import KernelHost


@verb.command
def repro(
    *,
    wanted: str = verb.argument("ID|FILE"),
    kernel: str | None = verb.option(
        "--kernel",
        "SPEC",
        "Test this kernel: a name, FILE.py::NAME or package.module:NAME (default: the one that "
        "failed).",
    ),
    convention: str = verb.convention("as it was, or the one that fits"),
    device: str | None = verb.device("Where the kernel runs", "where it did"),
    timeout: float | None = verb.timeout(),
    in_process: bool = verb.in_process(),
    recording: str | None = verb.option(
        "--inputs",
        "FILE",
        "Recording from which the Case has its inputs (default: the one of that name beside "
        "the failure).",
    ),
    reports: str = verb.option(
        "--reports", "DIR", "Folder in which an ID is looked up.", "reports"
    ),
    script: str | None = verb.option(
        "--script",
        "FILE",
        "Write a Python script that shows the failure without attncheck: it needs only torch "
        "and the kernel.",
    ),
    plots: tuple[str, ...] = verb.plots("Draw where the error is"),
) -> int:
    """Repeat a failure of a kernel, and explain what is wrong with its answer.

    ID is that of a failure that the properties saved, or the case_id of a record in a report. FILE
    holds a failure, a Case or a Problem as JSON; a Problem is compared with exact attention.

    Exit code 0 when the answer is right, 1 when it is wrong or the kernel raises, 5 when the kernel
    does not support the problem.
    """
    few_threads(small=False)
    from attncheck.reporting.image_files import check_plots

    check_plots(plots)
    original = find_reproduction(wanted, reports, kernel or "")
    spec, convention = kernel or original.kernel, convention or original.convention
    worker = start_worker(spec, in_process=in_process) if spec else None
    with interrupts.importing():
        from attncheck.diagnose.reproduce import run_again
        from attncheck.verify.claims import hold_to_convention
        from attncheck.verify.deaths import death_record
        from attncheck.verify.environment import prepare
    device = _device(device, original)
    mods = _load_recording(recording, original)
    case = _case(original, device)
    prepare(device)  # before the file's own Triton functions are decorated
    host_options: dict[str, Any] = {"convention": convention, "device": device}
    try:
        isolated = False if in_process else None
        run: dict[str, Any] = {"isolated": isolated, "seconds": timeout, "worker": worker}
        host = _open(spec, original, mods=mods, **run, **host_options)
    except Died as error:
        record = death_record(error, case, kernel=spec)
    else:
        with closing(host):
            # Fix only the convention, since a diagnosis asks problems beyond the claims.
            binding = hold_to_convention(host, kernel=spec, device=device)
            host_options["convention"] = binding or convention
            record = run_again(host.subject, case, device=device)
            if script is not None and record.status != "unsupported":
                write_script(Path(script), host.subject, case, record, kernel=spec, **host_options)
    interrupts.check()
    _show(record, original, kernel=spec, device=device)
    _draw(record, plots, kernel=f"{spec} on {device}")
    return record_exit_code(record.status)


def _case(original: Reproduction, device: str) -> Case:
    """Return the Case; raise UsageError, in one line with the file's name, if it is invalid."""
    from attncheck.inputs.problem import Case, check_size
    from attncheck.verify.question_fit import question_named

    try:
        case = Case.from_json(original.case)
        question_named(case.question)
        check_size(case.problem, device)
    except UsageError as error:
        raise UsageError(f"{one_line(str(original.source))}: {one_line(str(error))}") from None
    return case


def _load_recording(typed: str | None, original: Reproduction) -> dict[str, str]:
    """Load the Case's recording, if any; return its file, for the kernel's process to load."""
    from attncheck.inputs import recording_file

    problem = original.case.get("problem")
    name = problem.get("distribution") if isinstance(problem, dict) else None
    file = recorded_file(name) if isinstance(name, str) else None
    if typed is None and file is not None and (nearby := original.source.parent / file).is_file():
        typed = str(nearby)
    if typed is None:
        return {}
    recording_file.load(typed)
    return {"recording": typed}


def _device(typed: str | None, original: Reproduction) -> str:
    """Return the device; raise UsageError if it is not available."""
    from attncheck.verify.environment import default_device, require_device

    device = typed or original.device or default_device()
    try:
        require_device(device)
    except UsageError as error:
        if typed:
            raise
        why = str(error).partition(". ")[0]
        raise UsageError(f"it was asked on {device!r}: {why}; add --device cpu.") from None
    return device


def _open(kernel: str, original: Reproduction, *, seconds: float | None, **how: Any) -> KernelHost:
    """Open the kernel; raise UsageError if there is none, with a hint how to name another."""
    from attncheck.verify.isolated import Deadlines
    from attncheck.verify.kernel_hosts import open_kernel

    if not kernel:
        raise UsageError(f"{original.source} names no kernel: add --kernel SPEC.")
    try:
        return open_kernel(kernel, deadlines=Deadlines.of(seconds), **how)
    except UsageError as error:
        if kernel != original.kernel:
            raise
        hint = "if it is elsewhere now, name it with --kernel"
        raise UsageError(f"{str(error).rstrip('.')}; {hint}.") from error


def write_script(  # all facts of a script
    path: Path,
    subject: Subject,
    case: Case,
    record: Record,
    *,
    kernel: str,
    convention: str,
    device: str,
    instead: str = "--script",
) -> None:
    """Write a script to ``path`` that asks the same question without attncheck.

    Raise UsageError if it cannot be written; ``instead`` names what the user should change.
    """
    from attncheck.diagnose.standalone_script import render_script
    from attncheck.verify.question_fit import question_named

    facts = {
        "kernel": f"{kernel} on {device}",
        "problem": problem_of(record).full_line,
        "asks": question_named(case.question).summary,
    }
    text = render_script(
        subject,
        case,
        record,
        kernel=kernel,
        convention=convention,
        device=device,
        facts={name: one_line(fact) for name, fact in facts.items()},
        path=path,
    )
    write_texts({path.name: text}, path.parent, what="the script", instead=instead)


def _draw(record: Record, plots: tuple[str, ...], *, kernel: str) -> None:
    """Draw the places of the error; print a line if these are not known."""
    if not plots:
        return
    from attncheck.reporting.image_files import is_mapped, write_plots

    if is_mapped(record):
        write_plots(record, plots, kernel=kernel)
    else:
        click.echo("attncheck: nothing is known of where an error is: no plot is drawn.", err=True)


_HOLDS_NOW = (
    "It failed when it was kept: the kernel has been mended since, or its answer depends on the "
    "calls before it."
)


def _show(record: Record, original: Reproduction, *, kernel: str, device: str) -> None:
    from attncheck.reporting.diagnosis_text import diagnosis_text
    from attncheck.reporting.terminal import print_text
    from attncheck.verify.question_fit import question_named

    text = diagnosis_text(
        record,
        kernel=kernel,
        device=device,
        question_summary=question_named(str(record.case["question"])).summary,
        test=original.test,
    )
    is_same_test = original.test and kernel == original.kernel
    if is_same_test and record.status not in FAILED_STATUSES | {"unsupported"}:
        text += f"\n{_HOLDS_NOW}"
    with standard_output():
        print_text(f"{text}\n", sys.stdout)
