"""Faults on the judge's side, as other projects' test suites had them.

They are planted in attncheck itself, by a test for each; ``noticed_by`` is what of attncheck shows
that a right kernel is blamed, a wrong one excused, or a question never asked.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["JUDGE_FAULTS", "JudgeFault"]

_TESTS = "tests/faults/test_judge_side.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeFault:
    """A fault of who judges.

    Attributes:
        id: Words with hyphens.
        summary: What is wrong, in one line.
        noticed_by: What prevents or shows it.
        test: ``FILE::NAME`` of the test that plants it.
    """

    id: str
    summary: str
    noticed_by: str
    test: str


def _fault(name: str, summary: str, noticed_by: str) -> JudgeFault:
    test = f"{_TESTS}::test_{name.replace('-', '_')}"
    return JudgeFault(id=name, summary=summary, noticed_by=noticed_by, test=test)


JUDGE_FAULTS: tuple[JudgeFault, ...] = (
    _fault(
        "a-tolerance-that-cannot-fail",
        "an allowance so large that no error is beyond it",
        "the blind spot of every pass, which grows with the allowance; and probes, whose answers "
        "are whole numbers",
    ),
    _fault(
        "nan-is-close",
        "a comparison that says close where the difference is NaN",
        "two rules that do not know each other: what is not finite fails before anything is "
        "compared, and a share of NaN is beyond any bound",
    ),
    _fault(
        "an-oracle-with-the-kernels-mask",
        "oracle and kernel share a mask that is not the one that was asked for",
        "relations that know a mask by its name and never call it",
    ),
    _fault(
        "a-low-precision-oracle",
        "the truth is rounded to the kernel's own dtype, or to fp32",
        "a second oracle, asked before a kernel is failed: the oracles disagree",
    ),
    _fault(
        "a-cache-of-zeros",
        "free pages and free slots of a cache hold zeros, which add nothing to a wrong sum",
        "they hold NaN, so that one such key read is a row that is not finite",
    ),
    _fault(
        "a-parameter-silently-off",
        "a value of an axis is in the table and in no problem",
        "each value of each axis is looked for in the problem that is made of it",
    ),
    _fault(
        "a-seed-that-hides-half",
        "one seed for all, with which what fails every other time passes",
        "a seed for each question, and a case that carries its own",
    ),
    _fault(
        "a-backward-oracle-that-blames",
        "the exact gradients are wrong",
        "a second backward, of another recurrence, asked before a kernel is failed",
    ),
    _fault(
        "a-gradient-with-other-strides",
        "the loss's gradient is laid out otherwise than it is said to be",
        "the relation of strides lays it out in several ways, each with the same numbers",
    ),
)
"""Each with its test."""
