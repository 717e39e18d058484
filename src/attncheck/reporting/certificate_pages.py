"""A CertificateReport → table, Markdown, JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.core.sanitize_text import shortened
from attncheck.records.problem_summary import problem_of
from attncheck.records.survey_reports import CERTIFICATE_SCHEMA, TRUTH, CertificateReport
from attncheck.reporting import figures, struct_json
from attncheck.reporting.by_format import FORMATS, Page, paged
from attncheck.reporting.cells import Cell
from attncheck.reporting.sheet import Line, Sheet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.records.survey_reports import Certificate, ProvenError
    from attncheck.reporting.cells import Look

__all__ = ["FORMATS", "load", "render", "show"]

_OWN = ("error", "allowance", "share", "a priori")
_PARTS = {"out": "out", "lse": "LSE"}


def load(text: str) -> CertificateReport:
    """The report that ``render(report, "json")`` wrote; raises UsageError for anything else."""
    report = struct_json.read(text, CertificateReport, CERTIFICATE_SCHEMA)
    for record in report.records:
        problem_of(record)
    return report


def _above(report: CertificateReport) -> Iterator[str]:
    yield shortened(report.command)
    env = report.environment
    facts = [env.device, env.machine, f"torch {env.torch}", f"Python {env.python}"]
    balls = f"python-flint {report.flint}, balls of {report.bits} bits"
    yield " · ".join([*facts, f"attncheck {env.attncheck}", balls])
    for dtype, profile in report.arithmetics.items():
        yield f"allowance of a kernel in {dtype}: {profile}"


def _below(report: CertificateReport) -> Iterator[str]:
    yield (
        "error: a proof that the truth, what kernels are compared with, is no further from the "
        "exact result, where it is the largest part of the allowance."
    )
    share = (
        f"share: error ÷ allowance; above {_percent(report.limit)} the judge would call a verdict "
        "inconclusive."
    )
    others = " Under the name of each other oracle its own." if len(report.oracles) > 1 else ""
    yield share + others
    yield (
        "a priori: largest error ÷ what the judge assumes of the truth without a proof; never "
        "above 1."
    )
    worst = max((share for record in report.truths for share in _shares(record)), default=None)
    if worst is not None:
        yield f"Largest share of the truth: {figures.scientific(worst)}."


def _shares(record: Certificate) -> list[float]:
    return [part.share for part in (record.out, record.lse) if part.share is not None]


def _sheets(report: CertificateReport) -> Iterator[Sheet]:
    for title, cases in _grouped(report).items():
        for part, name in _PARTS.items():
            names = [record.oracle for record in next(iter(cases.values()))]
            others = [name for name in names if name != TRUTH]
            sheet = Sheet(f"{title} · {name}", ("distribution", *_OWN, *others))
            for case in cases.values():
                sheet.lines.append(_line(part, case, others, report.limit))
            yield sheet


def _grouped(report: CertificateReport) -> dict[str, dict[str, list[Certificate]]]:
    """Records by variant and shape, and in each by Case, in the order of the plan."""
    groups: dict[str, dict[str, list[Certificate]]] = {}
    for record in report.records:
        cases = groups.setdefault(f"{record.variant} · {problem_of(record).line}", {})
        cases.setdefault(record.case_id, []).append(record)
    return groups


def _line(part: str, records: list[Certificate], others: list[str], limit: float) -> Line:
    proven: dict[str, ProvenError] = {record.oracle: getattr(record, part) for record in records}
    cells = [
        Cell(records[0].distribution),
        *_own(proven.get(TRUTH), limit),
        *(_share(proven.get(name), limit) for name in others),
    ]
    remarks = (text for record in records for text in _remarks(record, part, limit))
    return Line(tuple(cells), tuple(remarks))


def _own(proven: ProvenError | None, limit: float) -> list[Cell]:
    if proven is None:
        return [Cell(figures.NOTHING, "dim")] * len(_OWN)
    error, allowance = (
        Cell(figures.NOTHING if number is None else figures.scientific(number))
        for number in (proven.error, proven.allowance)
    )
    return [error, allowance, _share(proven, limit), _a_priori(proven)]


def _share(proven: ProvenError | None, limit: float) -> Cell:
    if proven is None or proven.share is None:
        return Cell(figures.NOTHING, "bad" if proven and proven.unproven else "dim")
    look: Look = "bad" if proven.share > limit or proven.unproven else "plain"
    return Cell(figures.scientific(proven.share), look)


def _a_priori(proven: ProvenError) -> Cell:
    if proven.a_priori is None:
        return Cell(figures.NOTHING, "dim")
    return Cell(figures.scientific(proven.a_priori), "bad" if proven.a_priori > 1 else "plain")


def _remarks(record: Certificate, part: str, limit: float) -> Iterator[str]:
    """``truth: nothing is proven of 4 of 192 numbers``."""
    proven: ProvenError = getattr(record, part)
    truth = record.oracle == TRUTH
    total = proven.elements + proven.unproven + proven.unbounded
    if proven.unproven:
        yield f"{record.oracle}: nothing is proven of {proven.unproven} of {total} numbers"
    if truth and proven.share is not None and proven.share > limit:
        yield (
            f"the truth's error may be more than {_percent(limit)} of the allowance: a verdict "
            "here is inconclusive"
        )
    if truth and proven.a_priori is not None and proven.a_priori > 1:
        yield "the truth's error may be more than is assumed of it: that bound is in doubt"
    if truth and proven.unbounded:
        yield f"{proven.unbounded} of {total} numbers have no allowance"
    if truth and part == "out" and record.proven_rows < record.rows:
        yield f"{record.proven_rows} of {record.rows} rows were examined"


def _percent(part: float) -> str:
    return f"{100 * part:g} %"


_PAGE: Page[CertificateReport] = paged(
    "Proven errors of the fp64 oracles", _above, lambda report, _: _sheets(report), _below
)
render, show = _PAGE.render, _PAGE.show
