"""``attncheck repro``: a failure, asked again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attncheck.cli.interrupts import Interrupts
from attncheck.cli.options import device_option
from attncheck.cli.standard_output import Verb, standard_output

if TYPE_CHECKING:
    from attncheck.problem import Case
    from attncheck.record import Record, Status
    from attncheck.reporting.failures import Found
    from attncheck.subjects.contract import Subject

__all__ = ["repro"]

_EXIT_CODES: dict[Status, int] = {
    "pass": 0,
    "warn": 0,
    "inconclusive": 0,
    "fail": 1,
    "error": 1,
    "crash": 1,
    "timeout": 1,
    "oom": 1,
    "flaky": 1,
    "oracle disagrees": 3,
    "unsupported": 5,
}


@click.command(cls=Verb)
@click.argument("wanted", metavar="ID|FILE")
@click.option(
    "--kernel",
    metavar="SPEC",
    help="Ask this kernel: a name, FILE.py::NAME or package.module:NAME (default: the one that "
    "failed).",
)
@click.option(
    "--convention",
    metavar="NAME",
    help="How the kernel is called (default: as it was, or the one that fits).",
)
@device_option("Where the kernel runs (default: where it did).")
@click.option(
    "--reports",
    default="reports",
    show_default=True,
    metavar="DIR",
    help="Folder in which an ID is looked up.",
)
@click.option(
    "--script",
    metavar="FILE",
    help="Write a Python script that asks the same without attncheck: it needs torch and the "
    "kernel alone.",
)
@click.option(
    "--plot",
    "plots",
    multiple=True,
    metavar="FILE",
    help="Draw where the error is, to FILE.png or FILE.svg (repeatable; needs attncheck[plot]).",
)
@click.make_pass_decorator(Interrupts, ensure=True)
def repro(  # one parameter per option
    interrupts: Interrupts,
    /,
    *,
    wanted: str,
    kernel: str | None,
    convention: str | None,
    device: str | None,
    reports: str,
    script: str | None,
    plots: tuple[str, ...],
) -> int:
    """Ask a kernel the very same question again, and say what is wrong with its answer.

    ID stands for a failure that the properties kept, or for a record of a report (its case_id).
    FILE holds a failure, a Case or a Problem as JSON; a Problem is compared with exact attention.

    Exit code 0 when the answer is right, 1 when it is wrong or the kernel raises, 5 when the kernel
    does not take the problem.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in attncheck check
    from attncheck.reporting.failures import find
    from attncheck.reporting.plot import check_plots

    check_plots(plots)
    found = find(wanted, reports, kernel or "")
    from attncheck.examine.environment import prepare
    from attncheck.examine.reproduce import again

    interrupts.check()  # the imports above take a while, and may have swallowed one
    case = _case(found)
    device = _device(device, found)
    prepare(device)  # before the file's own Triton functions are decorated
    spec, convention = kernel or found.kernel, convention or found.convention
    subject = _loaded(spec, convention, found)
    record = again(subject, case, device=device)
    if script is not None and record.status != "unsupported":
        _write(script, subject, case, record, kernel=spec, convention=convention, device=device)
    interrupts.check()
    _show(record, found, kernel=spec, device=device)
    _draw(record, plots, kernel=f"{spec} on {device}")
    return _EXIT_CODES[record.status]


def _case(found: Found) -> Case:
    """Raises UsageError for what is no Case, in one line that says which file has it."""
    from attncheck.errors import UsageError
    from attncheck.examine.questions import check_question
    from attncheck.inert import one_line
    from attncheck.problem import Case

    try:
        case = Case.from_json(found.case)
        check_question(case.question)
    except UsageError as error:
        raise UsageError(f"{one_line(str(found.source))}: {one_line(str(error))}") from None
    return case


def _device(typed: str | None, found: Found) -> str:
    """Raises UsageError for a device that is not here."""
    from attncheck.errors import UsageError
    from attncheck.examine.environment import default_device, require_device

    device = typed or found.device or default_device()
    try:
        require_device(device)
    except UsageError as error:
        if typed:
            raise
        why = str(error).partition(". ")[0]
        raise UsageError(f"it was asked on {device!r}: {why}; add --device cpu.") from None
    return device


def _loaded(kernel: str, convention: str, found: Found) -> Subject:
    """Raises UsageError for a kernel that is not there, with how to name another."""
    from attncheck.errors import UsageError
    from attncheck.subjects.load import load

    if not kernel:
        raise UsageError(f"{found.source} names no kernel: add --kernel SPEC.")
    try:
        return load(kernel, convention or None)
    except UsageError as error:
        if kernel != found.kernel:
            raise
        hint = "if it is elsewhere now, name it with --kernel"
        raise UsageError(f"{str(error).rstrip('.')}; {hint}.") from error


def _write(  # who is asked what
    file: str,
    subject: Subject,
    case: Case,
    record: Record,
    *,
    kernel: str,
    convention: str,
    device: str,
) -> None:
    from attncheck.examine.questions import summary
    from attncheck.inert import one_line
    from attncheck.reporting.asked import asked
    from attncheck.reporting.diagnosis import problem_line
    from attncheck.reporting.files import write_texts
    from attncheck.runner.standalone import script

    path = Path(file)
    facts = {
        "kernel": f"{kernel} on {device}",
        "problem": problem_line(asked(record)),
        "asks": summary(case.question),
    }
    text = script(
        subject,
        case,
        record,
        kernel=kernel,
        convention=convention,
        device=device,
        facts={name: one_line(fact) for name, fact in facts.items()},
        path=path,
    )
    write_texts({path.name: text}, path.parent, what="the script", instead="--script")


def _draw(record: Record, plots: tuple[str, ...], *, kernel: str) -> None:
    """Where the error is; of what is right, or wrong everywhere alike, that there is no picture."""
    if not plots:
        return
    from attncheck.reporting.error_figure import is_mapped
    from attncheck.reporting.plot import write_error_plots

    if is_mapped(record):
        write_error_plots(record, plots, kernel=kernel)
    else:
        click.echo("attncheck: nothing is known of where an error is: no plot is drawn.", err=True)


_HOLDS_NOW = (
    "It failed when it was kept: the kernel has been mended since, or its answer depends on the "
    "calls before it."
)


def _show(record: Record, found: Found, *, kernel: str, device: str) -> None:
    import sys

    from attncheck.examine.questions import summary
    from attncheck.record import WRONG
    from attncheck.reporting import screen
    from attncheck.reporting.diagnosis import diagnosis

    said = diagnosis(
        record,
        kernel=kernel,
        device=device,
        question_summary=summary(str(record.case["question"])),
        test=found.test,
    )
    same = found.test and kernel == found.kernel
    if same and record.status not in WRONG | {"unsupported"}:
        said += f"\n{_HOLDS_NOW}"
    with standard_output():
        screen.put(f"{said}\n", sys.stdout)
