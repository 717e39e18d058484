"""The two reports of ``attncheck oracles``: what is measured in many digits, and what is proven."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attncheck.inputs.problem import Problem
    from attncheck.records.survey_reports import CertificateReport, OracleReport

__all__ = ["Kind", "certified", "measured"]


@dataclass(frozen=True, slots=True)
class Kind:
    """A report, how it is made and how it is shown.

    Attributes:
        name: Of its files.
        make: Variants and Problems, the command line, and what is told of each → the report.
        render: The report in a format, as text.
        show: The report in a format, on standard output.
        failed: Whether it says that an oracle is not to be trusted.
    """

    name: str
    make: Callable[[Sequence[tuple[str, Problem]], str, Callable[[str], None]], Any]
    render: Callable[[Any, str], str]
    show: Callable[[Any, str], None]
    failed: Callable[[Any], bool]


def measured(digits: int) -> Kind:
    """Distances from the exact result in so many digits."""
    from attncheck.reporting import oracle_pages
    from attncheck.surveys.oracle_survey import survey_oracles

    return Kind(
        name="oracles",
        make=lambda named, command, done: survey_oracles(
            named, digits=digits, command=command, done=done
        ),
        render=oracle_pages.render,
        show=oracle_pages.show,
        failed=_measured_wrong,
    )


def certified() -> Kind:
    """Proven errors; raises UsageError where python-flint is not installed."""
    from attncheck.reporting import certificate_pages
    from attncheck.surveys.oracle_certificates import certify_oracles

    return Kind(
        name="certificates",
        make=lambda named, command, done: certify_oracles(named, command=command, done=done),
        render=certificate_pages.render,
        show=certificate_pages.show,
        failed=_not_proven,
    )


def _measured_wrong(report: OracleReport) -> bool:
    """One that must not is not finite, wrong in a row without keys, or they disagree."""
    faults = [
        record
        for record in report.records
        if (record.rows.nonfinite and record.oracle not in report.may_overflow)
        or record.rows.dead_wrong
    ]
    agreed = all(agreement.holds(report.must_agree) for agreement in report.agreements)
    return bool(faults) or not agreed


def _not_proven(report: CertificateReport) -> bool:
    """The truth's error may be too much of an allowance, or more than is assumed of it."""
    return not all(r.holds(report.limit) and r.within_a_priori for r in report.truths)
