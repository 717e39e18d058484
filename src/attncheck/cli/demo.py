"""``attncheck demo``: a wrong kernel that passes the usual test, caught, shrunk and named."""

from __future__ import annotations

import os
import textwrap
import time
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attncheck.cli.interrupts import Interrupts
from attncheck.cli.options import device_option, quiet_option
from attncheck.cli.standard_output import Verb, standard_output

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from attncheck.capabilities.subject import Subject
    from attncheck.cli.demo_search import Found
    from attncheck.records.record import Record

__all__ = ["KERNEL", "MENDED", "PLANTED", "demo", "source"]

KERNEL = "attncheck.demo.flash_attention:attention"
"""The kernel, as every command names it."""

PLANTED = "EVEN=key.shape[2] % 32 == 0"
"""What is wrong in its source."""

MENDED = "EVEN=key.shape[2] % TILE == 0"
"""What would be right there."""

NOT_CAUGHT = 3

_FILE = "flash_attention.py"
_WIDTH = 80
_USUAL = 1e-2  # the tolerance of many a kernel's own tests, which is here to be looked at
_LEFT_OUT = ("  kernel ", "  wrong ", "  judged as ")  # of the diagnosis: `attncheck repro` has it
_SHAPES = ((256, 256, False), (256, 256, True), (1000, 1000, False), (100, 300, False))

_STORY = {
    "head": (
        "A FlashAttention in Triton, {lines} lines, as its author might have left it; to read it: "
        "attncheck demo --kernel-file {file}"
    ),
    "usual": (
        "1. The usual test: randn in fp16, and torch.allclose with torch's own, atol={usual:g}"
    ),
    "search": (
        "2. attncheck: an exact probe, on problems that Hypothesis draws where kernels break, and "
        "shrinks"
    ),
    "no extra": (
        "2. attncheck: an exact probe at the edges of tiles. (pip install "
        "'attncheck[properties]' draws problems with Hypothesis, and shrinks them.)"
    ),
    "why": (
        "3. What we planted, in line {number}: {planted}. Its tile was 32 keys once, and is 64 "
        "now: of 32, 96, 160 … keys the last tile is half empty, its padding is not hidden, and "
        "enters the row sum with score 0. {mended} mends it."
    ),
}


@click.command(cls=Verb)
@device_option("Where it runs (default: cuda where there is a GPU, else in Triton's interpreter).")
@click.option("--kernel-file", metavar="FILE", help="Write the wrong kernel there, and stop.")
@quiet_option
@click.make_pass_decorator(Interrupts, ensure=True)
def demo(
    interrupts: Interrupts, /, *, device: str | None, kernel_file: str | None, quiet: bool
) -> int:
    """See a wrong kernel caught: it passes the usual test, and fails in one minute.

    Exit code 0 when the fault was found, as it should be; 3 when it was not.
    """
    if kernel_file is not None:
        return _copy(Path(kernel_file))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in attncheck check
    from attncheck.core.files import check_names
    from attncheck.subjects.load import load_subject
    from attncheck.verify.environment import default_device, prepare, require_device

    interrupts.check()  # the imports above take a while, and may have swallowed one
    start = time.monotonic()
    device = device or default_device()
    require_device(device)
    prepare(device)  # before Triton is imported
    check_names(_folder(), ["a.json"], what="failures", instead="working directory")
    _say(_STORY["head"].format(lines=len(source().splitlines()), file=_FILE), gap=False)
    _say(_STORY["usual"].format(usual=_USUAL))
    _say_lines(_usual_test(device))
    interrupts.check()
    found = _find(load_subject(KERNEL), device, quiet=quiet)
    interrupts.check()
    if found is None:
        _say("Nothing was found. That is a fault of attncheck: please report it.")
        return NOT_CAUGHT
    _tell(found, device)
    _say(f"Caught in {time.monotonic() - start:.0f} s.", gap=False)
    return 0


def source() -> str:
    """The text of the wrong kernel."""
    return resources.files("attncheck.demo").joinpath(_FILE).read_text(encoding="utf-8")


def _copy(path: Path) -> int:
    from attncheck.core.files import write_texts

    write_texts({path.name: source()}, path.parent, what="the kernel", instead="--kernel-file")
    _say(f"Written to {path}. Next: attncheck check {path}::attention", gap=False)
    return 0


def _folder() -> Path:
    from attncheck.records.failures import FAILURE_FOLDER

    return Path("reports") / FAILURE_FOLDER


def _usual_test(device: str) -> Iterator[str]:
    """What the test that its author has says of a few shapes; nothing is made up."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from attncheck.core.source_files import load_module_member

    kernel: Callable[..., tuple[torch.Tensor, ...]] = load_module_member(KERNEL, "the demo")
    torch.manual_seed(0)
    for rows, keys, causal in _SHAPES:
        q, k, v = (torch.randn(1, 1, n, 64, device=device).half() for n in (rows, keys, keys))
        out = kernel(q, k, v, is_causal=causal)[0]
        exact = scaled_dot_product_attention(q, k, v, is_causal=causal)
        passes = torch.allclose(out, exact, atol=_USUAL)
        off = (out.float() - exact.float()).abs().max().item()
        verdict, mask = "passes" if passes else "FAILS", "causal" if causal else "full"
        shape = f"{rows:>4} queries, {keys:>4} keys, {mask:<6}"
        yield f"   {verdict}  {shape}  off by {off:.1e} at most"


def _find(subject: Subject, device: str, *, quiet: bool) -> Found | None:
    from attncheck.cli.demo_search import at_edges, drawn

    try:
        import hypothesis  # noqa: F401  # whether it is here
        import pytest  # noqa: F401  # the suite's
    except ImportError:
        _say(_STORY["no extra"])
        return at_edges(subject, device)
    _say(_STORY["search"])
    if not quiet:
        click.echo("   drawing …", err=True)
    return drawn(KERNEL, subject, device) or at_edges(subject, device)


def _tell(found: Found, device: str) -> None:
    from attncheck.diagnose.reproduce import new_failure
    from attncheck.records.failures import keep_failure
    from attncheck.records.problem_summary import problem_of
    from attncheck.reporting.diagnosis_text import kept_failure_text

    kept = new_failure(found.smallest, kernel=KERNEL, device=device)
    keep_failure(kept)
    if found.after:
        told = [f"   problem {found.before} fails: {problem_of(found.first).full_line}"]
        told += [f"   the smallest that does, after {found.after} more:"]
    else:
        told = [f"   problem {found.before} fails:"]
    _say_lines([*told, ""])
    said = [line for line in kept_failure_text(kept).splitlines() if not line.startswith(_LEFT_OUT)]
    _say_lines([part for line in said for part in _wrapped(line, " " * 13)])
    script = _script(found.smallest, kept.id, device)
    _say(f"Without attncheck: python {script}", gap=False)
    lines = source().splitlines()
    number = next(count for count, line in enumerate(lines, 1) if PLANTED in line)
    _say(_STORY["why"].format(number=number, planted=PLANTED, mended=MENDED))


def _script(record: Record, identifier: str, device: str) -> Path:
    """Written beside the failure; where it lies."""
    from attncheck.core.files import write_texts
    from attncheck.inputs.problem import Case
    from attncheck.records.problem_summary import problem_of
    from attncheck.standalone.standalone_script import render_script
    from attncheck.subjects.load import load_subject
    from attncheck.verify.question_fit import question_summary

    path = _folder() / f"{identifier}.py"
    case = Case.from_json(record.case)
    facts = {
        "kernel": f"{KERNEL} on {device}",
        "problem": problem_of(record).full_line,
        "asks": question_summary(case.question),
    }
    text = render_script(
        load_subject(KERNEL),
        case,
        record,
        kernel=KERNEL,
        convention="",
        device=device,
        facts=facts,
        path=path,
    )
    write_texts({path.name: text}, path.parent, what="the script", instead="working directory")
    return path


def _wrapped(text: str, further: str) -> list[str]:
    """Lines of 80 columns; the first keeps the space that it begins with."""
    return textwrap.wrap(text, _WIDTH, subsequent_indent=further, break_on_hyphens=False)


def _say(text: str, *, gap: bool = True) -> None:
    _say_lines(
        [*([""] if gap else []), *_wrapped(text, "   " if text[:2].strip(".").isdigit() else "")]
    )


def _say_lines(lines: Iterator[str] | list[str]) -> None:
    """Each as it comes: somebody is reading."""
    import sys

    from attncheck.reporting.terminal import print_text

    for line in lines:
        with standard_output():
            print_text(f"{line}\n", sys.stdout)
