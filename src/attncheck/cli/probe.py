"""``attncheck probe``: find what a kernel supports, and propose the table of its capabilities."""

from __future__ import annotations

import json
import re
import sys
from itertools import groupby
from typing import TYPE_CHECKING

import click
import msgspec

from attncheck.cli import verb
from attncheck.cli.long_runs import TRIALS, progress
from attncheck.cli.options import few_threads, open_host, start_worker
from attncheck.cli.standard_output import interrupts, standard_output
from attncheck.reporting.document import (
    Cell,
    Column,
    Document,
    Look,
    Note,
    Section,
    Table,
    columns,
    row,
)
from attncheck.reporting.exit_codes import PASSED, UNTESTED

if TYPE_CHECKING:
    from attncheck.subjects.capabilities.subject import Subject
    from attncheck.subjects.load import Entry
    from attncheck.verify.capability_detection import DetectedCapabilities

RIGHT = "the one with which it is right"  # help text of --convention

_QUESTIONS = 70  # approximate number of questions of a probe, for the progress bar


@verb.command
def probe(
    *,
    spec: str = verb.argument("SPEC"),
    convention: str = verb.convention(RIGHT),
    device: str | None = verb.device("Where the kernel runs", verb.GPU),
    timeout: float | None = verb.timeout(),
    as_json: bool = verb.as_json(),
    quiet: bool = verb.quiet(),
) -> int:
    """Find out by tiny problems what a kernel supports, and propose its table.

    SPEC is FILE.py::NAME, package.module:NAME, or a name of `attncheck list`. For each dtype,
    head_dim, mask, score mod and shape it shows whether the kernel is right, refuses it, raises or
    is wrong. Nothing is written: `attncheck init` does that.

    Exit code 0, whatever is found; 5 when the kernel supports nothing.
    """
    from attncheck.reporting.terminal import document_lines, print_lines, print_text
    from attncheck.subjects.capabilities.capability_table import render_table
    from attncheck.subjects.capabilities.configuration import default_path, entry_from, table_header
    from attncheck.verify.proposed_table import propose_table

    arguments = (convention, device, timeout)
    device, kernel, detected = run_probe(spec, *arguments, quiet=quiet)
    name, table = name_of(spec), ""
    if detected.base is not None:
        path = default_path()
        proposal, comments = propose_table(detected, entry_from(kernel.entry, path))
        table = render_table(proposal, table_header(path, name), comments)
    with standard_output():
        if as_json:
            click.echo(json.dumps(_as_json(name, device, detected, table), indent=2))
        else:
            page = _document(spec, detected, device)
            print_lines(lambda width: document_lines(page, width), sys.stdout)
            if table:
                print_text(f"\n{table}", sys.stdout)
    return PASSED if detected.base is not None else UNTESTED


def run_probe(
    spec: str,
    convention: str,
    device: str | None,
    timeout: float | None,
    *,
    quiet: bool,
) -> tuple[str, Entry, DetectedCapabilities]:
    """Return the device, the kernel and its detected capabilities; raise UsageError on failure."""
    few_threads(small=True)
    worker = start_worker(spec, in_process=False)
    from attncheck.subjects.conventions.convention import ConventionOptions
    from attncheck.subjects.terms import Terms
    from attncheck.verify.capability_detection import detect_capabilities
    from attncheck.verify.environment import prepare, usable_device
    from attncheck.verify.kernel_hosts import on_terms

    interrupts.check()
    device = usable_device(device)
    prepare(device)
    host_options = {"convention": convention, "device": device}
    with open_host(spec, worker, seconds=timeout, **host_options) as host:
        kernel, subject = host.entry(), host.subject

        def subject_on_terms(name: str, options: ConventionOptions) -> Subject:
            values = {each: getattr(options, each) for each in kernel.options}
            return on_terms(subject, Terms(convention=name, **values))

        with progress(TRIALS, _QUESTIONS, quiet=quiet) as advance:
            detected = detect_capabilities(
                subject_on_terms,
                (convention,) if convention else kernel.conventions,
                ConventionOptions(**kernel.options),  # type: ignore[arg-type]  # it checks them
                device=device,
                advance=advance,
                executor=host.executor,
            )
    return device, kernel, detected


def name_of(spec: str) -> str:
    """Return the default name of the kernel's table: that of the function."""
    from attncheck.subjects.capabilities import named_kernels

    if spec in named_kernels.BUILTIN:
        return f"my-{spec}"
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", spec.rpartition(":")[2]).strip("-")
    return name or "kernel"


def _as_json(
    name: str, device: str, detected: DetectedCapabilities, table: str
) -> dict[str, object]:
    return {
        "kernel": name,
        "device": device,
        "convention": detected.convention,
        "problem": str(detected.base) if detected.base else None,
        "tried": msgspec.to_builtins(detected.tried),
        "table": table,
    }


_PROMISE_WORDS = {"takes": "keeps", "wrong": "breaks"}
_LOOKS: dict[str, Look] = {"takes": "good", "refuses": "dim", "raises": "notable", "wrong": "bad"}


def _document(name: str, detected: DetectedCapabilities, device: str) -> Document:
    """Return the page of a kernel's trials, with a row for each aspect and verdict."""
    from attncheck.verify.proposed_table import group_results, is_capability

    rows = []
    for aspect, trials in groupby(detected.tried, key=lambda one: one.aspect):
        for i, group in enumerate(group_results(trials)):
            verdict = group[0].verdict
            word = _PROMISE_WORDS.get(verdict, verdict) if aspect == "promises" else verdict
            names = ", ".join(dict.fromkeys(one.what for one in group))
            what = ": ".join(part for part in (names, group[0].reason) if part)
            look = _LOOKS[verdict]
            rows.append(row("" if i else aspect, Cell(word, look), Cell(what, look)))
    headings = (*columns(["aspect", "verdict"]), Column("what", words=True, wrap=True))
    convention = f" · {detected.convention} convention" if detected.base is not None else ""
    verdicts = [one.verdict for one in filter(is_capability, detected.tried)]
    wrong = verdicts.count("wrong")
    sentence = f"{verdicts.count('takes')} taken, {wrong} wrong"
    if wrong:
        sentence += (
            ": what is wrong stays in the table, so that checks fail until the kernel is mended, "
            "refuses it with a ValueError, or you take it out"
        )
    if detected.base is None:
        sentence = "the kernel takes nothing that was tried"
    return Document(
        title="attncheck probe",
        facts=(f"{name} · {device}{convention}",),
        sections=(
            Section(
                f"changes of {detected.base}" if detected.base is not None else "",
                (Table(headings, tuple(rows)),) if rows else (),
            ),
        ),
        closing=(Note(f"{sentence[0].upper()}{sentence[1:]}.", "plain"),),
    )
