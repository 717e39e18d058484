"""``attncheck oracles``: how far is the truth itself from the exact result?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from attncheck.cli.as_typed import as_typed
from attncheck.cli.interrupts import Interrupts
from attncheck.cli.standard_output import Verb, standard_output

if TYPE_CHECKING:
    from attncheck.oracle_record import OracleReport

__all__ = ["oracles"]

FAILED = 1
DEFAULT_SHAPE = "1x2/1x24x8"
LEAST_DIGITS, MOST_DIGITS = 17, 1000
"""fp64 numbers have 17 decimal digits; beyond a thousand nobody waits."""


@click.command(cls=Verb)
@click.option(
    "--distribution",
    "distributions",
    multiple=True,
    metavar="NAME",
    help="Of the inputs (repeatable; default: all).",
)
@click.option(
    "--variant",
    "variants",
    multiple=True,
    metavar="NAME",
    help="A variant of `attncheck list`, or sharp: every score times 16 (repeatable; default: "
    "full, causal, sharp and softmax).",
)
@click.option(
    "--dtype",
    default="bf16",
    show_default=True,
    metavar="NAME",
    help="Of the inputs; the oracles compute in fp64.",
)
@click.option(
    "--shape",
    default=DEFAULT_SHAPE,
    show_default=True,
    metavar="BxHxLxD",
    help="As for `attncheck rmse`; small, since many digits are slow.",
)
@click.option(
    "--digits",
    type=click.IntRange(LEAST_DIGITS, MOST_DIGITS),
    default=50,
    show_default=True,
    help="Decimal digits of the exact side.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Which draw of the inputs.",
)
@click.option(
    "--format",
    "fmt",
    default="table",
    show_default=True,
    metavar="FORMAT",
    help="Of standard output: table, json or md.",
)
@click.option(
    "--out", "directory", metavar="DIR", help="Folder for oracles.json and oracles.md, if any."
)
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
@click.make_pass_decorator(Interrupts, ensure=True)
def oracles(  # noqa: PLR0913  # one parameter per option
    interrupts: Interrupts,
    /,
    *,
    distributions: tuple[str, ...],
    variants: tuple[str, ...],
    dtype: str,
    shape: str,
    digits: int,
    seed: int,
    fmt: str,
    directory: str | None,
    quiet: bool,
) -> int:
    """Measure each fp64 oracle's distance from the exact result, computed in many digits.

    The oracles are the naive, safe and online softmax, both FlashAttention recurrences, and the
    one that kernels are compared with. The naive one overflows where its definition must.

    Exit code 1 when another than the naive one is not finite where the exact result is, or when the
    recurrences, all run in so many digits, agree to fewer than all but ten of them.
    """
    from attncheck.cli.progress import progress
    from attncheck.errors import UnknownName
    from attncheck.examine.oracle_survey import survey
    from attncheck.reporting import files, oracle_pages
    from attncheck.runner.oracle_plan import oracle_plan

    interrupts.check()  # the imports above take a while, and may have swallowed one
    if fmt not in oracle_pages.FORMATS:
        raise UnknownName("format", fmt, oracle_pages.FORMATS)
    cells = oracle_plan(
        variants=variants, distributions=distributions, dtype=dtype, shape=shape, seed=seed
    )
    if directory is not None:
        files.check_writable(directory, "oracles")
    with progress(len(cells), quiet=quiet) as advance:

        def done(what: str) -> None:
            interrupts.check()
            advance(what)

        named = [(cell.variant, cell.problem) for cell in cells]
        report = survey(named, digits=digits, command=as_typed(), done=done)
    if directory is not None:
        texts = {f"oracles.{s}": oracle_pages.render(report, s) for s in ("json", "md")}
        with interrupts.writing(directory):
            files.write_texts(texts, directory)
    with standard_output():
        oracle_pages.show(report, fmt)
    return _exit_code(report)


def _exit_code(report: OracleReport) -> int:
    """1 where one that must not is not finite, wrong in a row without keys, or they disagree."""
    faults = [
        record
        for record in report.records
        if (record.rows.nonfinite and record.oracle not in report.may_overflow)
        or record.rows.dead_wrong
    ]
    agreed = all(agreement.holds(report.must_agree) for agreement in report.agreements)
    return FAILED if faults or not agreed else 0
