"""``attncheck demo``: a wrong kernel that passes the usual test, caught, shrunk and named."""

from __future__ import annotations

import os
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attncheck.cli import verb
from attncheck.cli.options import few_threads
from attncheck.cli.repro import write_script
from attncheck.cli.standard_output import interrupts, standard_output
from attncheck.core.files import check_names, write_texts
from attncheck.core.source_files import load_module_member
from attncheck.records.failures import FAILURE_FOLDER, keep_failure
from attncheck.records.problem_summary import problem_of
from attncheck.records.record import Record
from attncheck.reporting.exit_codes import INCOMPLETE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from attncheck.inputs.problem import Case
    from attncheck.subjects.capabilities.subject import Subject
    from attncheck.suite.under_test import UnderTest

KERNEL = "attncheck.demo.flash_attention:attention"  # the kernel's name in every command

PLANTED = "EVEN=key.shape[2] % 32 == 0"  # the mistake in its source

MENDED = "EVEN=key.shape[2] % TILE == 0"  # the correct text in its place


_FILE = "flash_attention.py"
_FOLDER = Path("reports") / FAILURE_FOLDER
_WIDTH = 80
_USUAL = 1e-2  # the absolute tolerance of the usual test, as in many kernels' own tests
_LEFT_OUT = ("  kernel ", "  wrong ", "  judged as ")  # lines of a diagnosis that are not shown
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
        "now: the padding of a half-empty last tile is not hidden, and enters the row sum. "
        "{mended} mends it."
    ),
}


@verb.command
def demo(
    *,
    device: str | None = verb.device(
        "Where the wrong kernel runs", f"{verb.GPU}, else in Triton's interpreter"
    ),
    kernel_file: str | None = verb.option(
        "--kernel-file", "FILE", "Write the wrong kernel to FILE, and stop."
    ),
    quiet: bool = verb.quiet(),
) -> int:
    """Show how a wrong kernel that passes the usual test is found within a minute.

    Exit code 0 when the fault was found, as it should be; 3 when it was not.
    """
    if kernel_file is not None:
        path = Path(kernel_file)
        write_texts({path.name: source()}, path.parent, what="the kernel", instead="--kernel-file")
        _say(f"Written to {path}. Next: attncheck check {path}::attention", gap=False)
        return 0
    few_threads(small=True)
    with interrupts.importing():
        from attncheck.subjects.load import load_subject
        from attncheck.verify.environment import prepare, usable_device
    start = time.monotonic()
    device = usable_device(device)
    prepare(device)  # before Triton is imported
    check_names(_FOLDER, ["a.json"], what="failures", instead="working directory")
    _say(_STORY["head"].format(lines=len(source().splitlines()), file=_FILE), gap=False)
    _say(_STORY["usual"].format(usual=_USUAL))
    _say_lines(_usual_test(device))
    interrupts.check()
    failure = _find(load_subject(KERNEL), device, quiet=quiet)
    interrupts.check()
    if failure is None:
        _say("Nothing was found. That is a fault of attncheck: please report it.")
        return INCOMPLETE
    _tell(failure, device)
    _say(f"Caught in {time.monotonic() - start:.0f} s.", gap=False)
    return 0


def source() -> str:
    """Return the source of the wrong kernel."""
    return resources.files("attncheck.demo").joinpath(_FILE).read_text(encoding="utf-8")


def _usual_test(device: str) -> Iterator[str]:
    """Run an author's usual test on a few shapes; yield a line on each result."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

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


def _find(subject: Subject, device: str, *, quiet: bool) -> DemoFailure | None:
    try:
        import hypothesis  # noqa: F401  # tests whether it is installed
        import pytest  # noqa: F401  # needed by the suite
    except ImportError:
        _say(_STORY["no extra"])
        return search_tile_edges(subject, device)
    _say(_STORY["search"])
    if not quiet:
        click.echo("   drawing …", err=True)
    return search_with_hypothesis(KERNEL, subject, device) or search_tile_edges(subject, device)


def _tell(failure: DemoFailure, device: str) -> None:
    from attncheck.diagnose.reproduce import new_failure
    from attncheck.inputs.problem import Case
    from attncheck.reporting.diagnosis_text import kept_failure_text
    from attncheck.subjects.load import load_subject

    kept = new_failure(failure.smallest, kernel=KERNEL, device=device)
    keep_failure(kept)
    if failure.after:
        introduction = [f"   problem {failure.before} fails: {problem_of(failure.first).full_line}"]
        introduction += [f"   the smallest that does, after {failure.after} more:"]
    else:
        introduction = [f"   problem {failure.before} fails:"]
    _say_lines([*introduction, ""])
    text = [line for line in kept_failure_text(kept).splitlines() if not line.startswith(_LEFT_OUT)]
    _say_lines([part for line in text for part in _wrap(line, " " * 13)])
    script = _FOLDER / f"{kept.id}.py"
    case = Case.from_json(failure.smallest.case)
    subject = load_subject(KERNEL)
    options = {"kernel": KERNEL, "convention": "", "device": device, "instead": "working directory"}
    write_script(script, subject, case, failure.smallest, **options)
    _say(f"Without attncheck: python {script}", gap=False)
    lines = source().splitlines()
    number = next(count for count, line in enumerate(lines, 1) if PLANTED in line)
    _say(_STORY["why"].format(number=number, planted=PLANTED, mended=MENDED))


def _wrap(text: str, further: str) -> list[str]:
    """Return lines of 80 columns; the first keeps its leading spaces."""
    return textwrap.wrap(text, _WIDTH, subsequent_indent=further, break_on_hyphens=False)


def _say(text: str, *, gap: bool = True) -> None:
    _say_lines(
        [*([""] if gap else []), *_wrap(text, "   " if text[:2].strip(".").isdigit() else "")]
    )


def _say_lines(lines: Iterator[str] | list[str]) -> None:
    """Print each line as it comes, for a reader who is waiting."""
    from attncheck.reporting.terminal import print_text

    for line in lines:
        with standard_output():
            print_text(f"{line}\n", sys.stdout)


DTYPE = "fp16"  # the kernel's dtype; Triton's interpreter handles fp16 without repairs

_QUESTION = "decode"  # an exact probe, whose verdict names the keys that a row has counted
_TILES = (16, 32, 64, 128)
_MOST = 150  # problems that are drawn at most
_LONGEST = 90  # longest drawn length: up to here only 32 fails, so shrinking finds no other length


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFailure:
    """A wrong answer, and the search that found it."""

    first: Record  # the first answer that was wrong
    smallest: Record  # the answer to the smallest Case that still fails
    before: int  # problems answered up to and including the first wrong one
    after: int  # problems answered to shrink it


def search_with_hypothesis(
    name: str, subject: Subject, device: str, most: int = _MOST
) -> DemoFailure | None:
    """Return the failure that Hypothesis finds and shrinks; None if it finds nothing.

    Args:
        most: Number of problems that are drawn if none fails.

    Raises:
        ImportError: if Hypothesis or pytest, which the suite needs, is not installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Otherwise Hypothesis would leave a folder behind.
        os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", folder)
        return _search(name, subject, device, most)


def search_tile_edges(subject: Subject, device: str) -> DemoFailure | None:
    """Return the failure at the shortest failing length next to a tile edge; None if all pass."""
    from attncheck.inputs.problem import Case, Problem
    from attncheck.verify.run_case import run_case

    lengths = sorted({tile + step for tile in _TILES for step in (-1, 0, 1)})
    for count, length in enumerate(lengths, 1):
        problem = Problem(query=1, kv=length, head_dim=16, heads=1, dtype=DTYPE)
        case = Case(problem=problem, question=_QUESTION, parameters={"round": 0})
        record = run_case(subject, case, device=device)
        if record.status in {"fail", "error"}:
            return DemoFailure(first=record, smallest=record, before=count, after=0)
    return None


def _search(name: str, subject: Subject, device: str, most: int) -> DemoFailure | None:
    from attncheck.cases.tier import TIERS
    from attncheck.suite import pytest_options
    from attncheck.suite.property_spec import PropertySpec, cases
    from attncheck.suite.search import search_cases
    from attncheck.suite.under_test import UnderTest
    from attncheck.suite.wrong_answers import WrongAnswer

    pytest_options.register()
    tier = replace(
        TIERS["smoke"],
        examples=most,
        examples_interpreted=most,
        examples_gpu=most,
        longest=_LONGEST,
        longest_gpu=_LONGEST,
        most_heads=2,
        repeats_gpu=1,
    )
    kernel = UnderTest(name, subject, device, dtype=DTYPE, family="full", tier=tier)
    spec = PropertySpec(questions=(_QUESTION,), families=("full",), shapes={}, problems={})
    first: list[tuple[Record, int]] = []

    def count_keys(kernel: UnderTest, case: Case) -> None:
        try:
            kernel.must_hold(case)
        except WrongAnswer as wrong:
            first.append((wrong.record, kernel.tally.total))
            raise
        kernel.share = 0.0  # only draw, without climbing towards the largest rounding error

    try:
        search_cases(count_keys, kernel, cases(kernel, spec))
    except WrongAnswer as wrong:
        record, before = first[0]
        after = kernel.tally.total - before
        return DemoFailure(first=record, smallest=wrong.record, before=before, after=after)
    return None
