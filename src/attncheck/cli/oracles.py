"""``attncheck oracles``: how far are the fp64 oracles themselves from the exact result?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import click

from attncheck.cli import verb
from attncheck.cli.long_runs import progress
from attncheck.cli.options import typed_command
from attncheck.cli.standard_output import interrupts, show_report
from attncheck.core.errors import UsageError
from attncheck.records.survey_reports import CertificateReport, OracleReport

DEFAULT_SHAPE, CERTIFIED_SHAPE = "1x2/1x24x8", "1x2/1x64x64"
DEFAULT_DTYPE, CERTIFIED_DTYPE = "bf16", "fp32"
DEFAULT_DIGITS = 50
LEAST_DIGITS, MOST_DIGITS = 17, 1000
"""fp64 numbers have 17 decimal digits; more than a thousand would take too long."""


@verb.command
def oracles(
    *,
    distributions: tuple[str, ...] = verb.several(
        "--distribution", "NAME", "Distribution of the inputs (repeatable; default: all)."
    ),
    variants: tuple[str, ...] = verb.several(
        "--variant",
        "NAME",
        "A variant of `attncheck list`, or sharp: every score times 16 (repeatable; default: "
        "full, causal, sharp and softmax; with --certify alibi and softcap too).",
    ),
    certify: bool = verb.flag(
        "--certify",
        "Prove the errors in Arb's ball arithmetic, and show what a kernel is allowed (needs "
        "python-flint: attncheck[exact]).",
    ),
    dtype: str | None = verb.option(
        "--dtype",
        "NAME",
        f"Dtype of the inputs; the oracles compute in fp64 (default: {DEFAULT_DTYPE}; with "
        f"--certify {CERTIFIED_DTYPE}, which has the smallest bounds).",
    ),
    shape: str | None = verb.option(
        "--shape",
        "BxHxLxD",
        "Sizes, written as for `attncheck rmse`; small, since many digits are slow (default: "
        f"{DEFAULT_SHAPE}; with --certify {CERTIFIED_SHAPE}).",
    ),
    digits: int | None = verb.option(
        "--digits",
        "",
        f"Decimal digits of the exact result (default: {DEFAULT_DIGITS}); not with --certify.",
        type=click.IntRange(LEAST_DIGITS, MOST_DIGITS),
    ),
    seed: int = verb.seed(),
    fmt: str = verb.fmt(),
    directory: str | None = verb.option(
        "--out",
        "DIR",
        "Folder for oracles.json and oracles.md, or certificates.json and .md, if any.",
    ),
    quiet: bool = verb.quiet(),
) -> int:
    """Measure each fp64 oracle's distance from the exact result, computed in many digits.

    The oracles are the naive, safe and online softmax, both FlashAttention recurrences, splits
    merged by LSE, and the one that kernels are compared with. The naive one overflows where its
    definition must.

    Exit code 1 when an oracle other than the naive one is not finite where the exact result is, or
    when the recurrences, run in N digits (--digits), agree to fewer than N - 10 digits.

    With --certify the errors are proven in ball arithmetic. Exit code 1 when the error of the
    oracle that kernels are compared with is not proven to be at most a hundredth of what a kernel
    is allowed.
    """
    from attncheck.cases.variants import CERTIFIED_VARIANTS, ORACLE_VARIANTS, oracle_plan
    from attncheck.reporting import rendering

    # If --digits were ignored, the proof would seem to have that many digits.
    if certify and digits is not None:
        raise UsageError(f"--digits {digits} has no meaning with --certify: balls have bits.")
    survey: Callable[..., OracleReport | CertificateReport]
    with interrupts.importing():
        if certify:
            from attncheck.surveys.oracle_certificates import certify_oracles

            name, survey = "certificates", certify_oracles
        else:
            from attncheck.surveys.oracle_survey import survey_oracles

            name, survey = "oracles", partial(survey_oracles, digits=digits or DEFAULT_DIGITS)
    rendering.check_format(fmt)
    cells = oracle_plan(
        variants=variants,
        distributions=distributions,
        dtype=dtype or (CERTIFIED_DTYPE if certify else DEFAULT_DTYPE),
        shape=shape or (CERTIFIED_SHAPE if certify else DEFAULT_SHAPE),
        seed=seed,
        default=CERTIFIED_VARIANTS if certify else ORACLE_VARIANTS,
    )
    if directory is not None:
        # Check now, since the survey takes minutes and its report would be lost.
        rendering.check_writable(directory, name)
    with progress("cell", len(cells), quiet=quiet) as advance:
        named_problems = [(cell.variant, cell.problem) for cell in cells]
        report = survey(named_problems, command=typed_command(), done=advance)
    if directory is not None:
        with interrupts.writing(directory):
            # No CSV, since a cell has several oracles and a row of a CSV only one.
            rendering.write_report(report, directory, name, formats=("json", "md"))
    return show_report(report, fmt)
