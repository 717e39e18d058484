"""Exit codes of reports, except those of a gate, which are in ``gate_verdict``."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from attncheck.records.bench_report import BenchReport
from attncheck.records.fault_scores import (
    ATTNCHECK_RULE,
    FaultReport,
    MutantReport,
    OwnTestsReport,
    SensitivityReport,
)
from attncheck.records.model_report import ModelReport
from attncheck.records.record import FAILED_STATUSES, UNTRUSTED_STATUSES, Report, Status
from attncheck.records.survey_reports import (
    CertificateReport,
    FingerprintReport,
    ModReport,
    OracleReport,
)
from attncheck.reporting.check_document import check_outcome

if TYPE_CHECKING:
    import msgspec


PASSED, FAILED, USAGE, INCOMPLETE, UNTESTED, INTERRUPTED = 0, 1, 2, 3, 5, 130
"""Exit codes of the command line; 3 also where the infrastructure failed."""


def exit_code(report: msgspec.Struct) -> int:
    """Return the exit code of the command that made ``report``, of any kind except a gate's."""
    match report:
        case Report() | BenchReport() | ModelReport():
            code = _code_of_statuses(_statuses(report))
            cut = not isinstance(report, ModelReport) and report.incomplete
            code = INCOMPLETE if cut and code != FAILED else code
        case FaultReport() | MutantReport() | OwnTestsReport():
            code = _code_of_scores(report)
        case SensitivityReport():
            # The gate must see each fault at some size.
            unseen = any(one.rules[ATTNCHECK_RULE].size is None for one in report.seen)
            code = FAILED if unseen else PASSED
        case FingerprintReport():
            code = _code_of_fingerprint(report)
        case ModReport():
            answers = [answer for record in report.records for answer in record.answers.values()]
            code = FAILED if {a.status for a in answers} - {"equal", "unsupported"} else PASSED
        case OracleReport():
            code = _code_of_oracles(report)
        case CertificateReport():
            # The truth's error may exceed its share of an allowance, or the error assumed of it.
            proven = (r.holds(report.limit) and r.within_a_priori for r in report.truths)
            code = PASSED if all(proven) else FAILED
        case _:
            code = PASSED
    return code


def check_exit_code(report: Report) -> int:
    """Return the exit code of ``attncheck check``; if all questions pass, blind spots fail it."""
    codes = {"pass": PASSED, "fail": FAILED, "in doubt": INCOMPLETE, "untested": UNTESTED}
    return codes[check_outcome(report)]


def record_exit_code(status: Status) -> int:
    """Return the exit code of ``attncheck repro``."""
    return _code_of_statuses({status})


def _code_of_statuses(statuses: set[Status]) -> int:
    # A proof of a fault outweighs a doubt, and a doubt outweighs a pass.
    if statuses & FAILED_STATUSES or "flaky" in statuses:  # failing once is no pass
        return FAILED
    if statuses & UNTRUSTED_STATUSES:
        return INCOMPLETE
    return PASSED if statuses - {"unsupported"} else UNTESTED


def _statuses(report: Report | BenchReport | ModelReport) -> set[Status]:
    """Return the statuses of judged kernels; being slower than another commit counts as fail."""
    if isinstance(report, Report):
        return {record.status for record in report.records}
    if isinstance(report, ModelReport):
        return {record.status for record in report.records if not record.for_comparison}
    statuses = {row.record.status for cell in report.cells for row in cell.rows}
    return statuses | {"fail" for one in report.changes if one.finding == "slower"}


def _code_of_scores(report: FaultReport | MutantReport | OwnTestsReport) -> int:
    """Return 1 if a fault was missed or a control flagged, 3 if scores are missing, 5 for none."""
    if isinstance(report, OwnTestsReport):
        count = Counter[str](score.status for score in report.scores)
    else:
        count = Counter[str](score.outcome for score in report.scores)
    if isinstance(report, FaultReport):
        count += Counter(score.outcome for score in report.controls)
    if count["missed"] or count["flagged"]:
        return FAILED
    if report.unfinished or count["harness"] or count["not scored"]:
        return INCOMPLETE
    return PASSED if count["caught"] or count["clean"] else UNTESTED


def _code_of_fingerprint(report: FingerprintReport) -> int:
    """Return 1 if a reading differs from the declaration and is not finer."""
    if not any(record.calls for record in report.records):
        return UNTESTED
    readings = (reading for record in report.records for reading in record.readings)
    return FAILED if any(reading.standing == "differs" for reading in readings) else PASSED


def _code_of_oracles(report: OracleReport) -> int:
    """Return 1 for unexpected NaN or infinity, a wrong row without keys, or a disagreement."""
    wrong = any(
        (record.rows.nonfinite and record.oracle not in report.may_overflow)
        or record.rows.dead_wrong
        for record in report.records
    )
    agreed = all(agreement.holds(report.must_agree) for agreement in report.agreements)
    return PASSED if agreed and not wrong else FAILED
