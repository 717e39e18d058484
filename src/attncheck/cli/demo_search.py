"""How ``attncheck demo`` finds a fault: problems are drawn until one fails, and that is shrunk."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attncheck.capabilities.subject import Subject
    from attncheck.cases.tier import Tier
    from attncheck.inputs.problem import Case
    from attncheck.records.record import Record
    from attncheck.suite.under_test import UnderTest

__all__ = ["DTYPE", "Found", "at_edges", "drawn"]

DTYPE = "fp16"
"""In which the kernel is asked: Triton's interpreter has it right without repairs."""

_QUESTION = "decode"  # an exact probe, which tells in words which keys a row has counted
_TILES = (16, 32, 64, 128)
_MOST = 150  # problems that are drawn: every thirtieth would do
_LONGEST = 90  # where no second length fails, to which it would be shrunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A wrong answer, and the way to it.

    Attributes:
        first: The first answer that was wrong.
        smallest: The answer to the smallest Case that still fails.
        before: Problems that were answered until then, the first wrong one too.
        after: Those that it took to shrink it.
    """

    first: Record
    smallest: Record
    before: int
    after: int


def drawn(name: str, subject: Subject, device: str, most: int = _MOST) -> Found | None:
    """What Hypothesis finds and shrinks; None where it finds nothing.

    Args:
        name: What the kernel is asked for by.
        subject: The kernel.
        device: ``cpu`` or ``cuda``.
        most: Problems that are drawn, where none fails.

    Raises:
        ImportError: where Hypothesis or pytest, which the suite is made for, is not installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Else Hypothesis leaves a folder where somebody only wanted to look.
        os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", folder)
        return _searched(name, subject, device, most)


def at_edges(subject: Subject, device: str) -> Found | None:
    """The shortest of the lengths at the edges of tiles that fails, asked one after the other."""
    from attncheck.inputs.problem import Problem
    from attncheck.probes import cases
    from attncheck.verify.run_case import run_case

    lengths = sorted({tile + step for tile in _TILES for step in (-1, 0, 1)})
    for count, length in enumerate(lengths, 1):
        problem = Problem(query=1, kv=length, head_dim=16, heads=1, dtype=DTYPE)
        case: Case = cases(_QUESTION, problem)[0]
        record = run_case(subject, case, device=device)
        if record.status in {"fail", "error"}:
            return Found(first=record, smallest=record, before=count, after=0)
    return None


def _searched(name: str, subject: Subject, device: str, most: int) -> Found | None:
    from attncheck.suite import pytest_options
    from attncheck.suite.property_spec import PropertySpec, cases
    from attncheck.suite.search import search_cases
    from attncheck.suite.under_test import UnderTest
    from attncheck.suite.wrong_answers import WrongAnswer

    pytest_options.register()
    kernel = UnderTest(name, subject, device, dtype=DTYPE, family="full", tier=_tier(most))
    asked = PropertySpec(questions=(_QUESTION,), families=("full",), shapes={}, problems={})
    first: list[tuple[Record, int]] = []

    def count_keys(kernel: UnderTest, case: Case) -> None:
        try:
            kernel.must_hold(case)
        except WrongAnswer as wrong:
            first.append((wrong.record, kernel.tally.total))
            raise
        kernel.share = 0.0  # draw on, and do not climb to where rounding is largest

    try:
        search_cases(count_keys, kernel, cases(kernel, asked))
    except WrongAnswer as wrong:
        record, before = first[0]
        after = kernel.tally.total - before
        return Found(first=record, smallest=wrong.record, before=before, after=after)
    return None


def _tier(most: int) -> Tier:
    from attncheck.cases.tier import Tier

    return Tier(
        name="demo",
        examples=most,
        examples_interpreted=most,
        examples_gpu=most,
        longest=_LONGEST,
        longest_gpu=_LONGEST,
        most_heads=2,
        repeats_gpu=1,
        profile="attncheck-ci",
    )
