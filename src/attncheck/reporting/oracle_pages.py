"""An OracleReport → table, Markdown, JSON."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attncheck.core.sanitize_text import shortened
from attncheck.records.problem_summary import problem_of
from attncheck.records.survey_reports import ORACLE_SCHEMA, OracleReport
from attncheck.reporting import figures, struct_json
from attncheck.reporting.by_format import FORMATS, Page, paged
from attncheck.reporting.cells import Cell
from attncheck.reporting.sheet import Line, Sheet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.records.survey_reports import Agreement, Distance, OracleRecord, Rows

__all__ = ["FORMATS", "load", "render", "show"]


_LEAST_SHOWN = 0.01
_UNITS = {
    "out": "out in units of 2^-53 Σ p|v|",
    "lse": "LSE in units of 2^-53 max(1, |LSE|)",
}
_UNITS_OF_SOFTMAX = _UNITS | {"out": "out in units of 2^-53 p"}


def load(text: str) -> OracleReport:
    """The report that ``render(report, "json")`` wrote; raises UsageError for anything else."""
    report = struct_json.read(text, OracleReport, ORACLE_SCHEMA)
    for record in report.records:
        problem_of(record)
    return report


def _above(report: OracleReport) -> Iterator[str]:
    yield shortened(report.command)
    env = report.environment
    facts = [env.device, env.machine, f"torch {env.torch}", f"Python {env.python}"]
    backend = "Python's integers" if report.backend == "python" else report.backend
    yield " · ".join([*facts, f"attncheck {env.attncheck}", f"mpmath {report.mpmath} on {backend}"])


def _below(report: OracleReport) -> Iterator[str]:
    yield (
        f"Largest error of each fp64 oracle against the {report.reference} one in "
        f"{report.digits} digits; 0: the very same numbers."
    )
    yield "2^-53 is half the distance from 1 to the next fp64 number: one rounding is at most 1."
    yield (
        f"{report.digits} digits: how far the recurrences themselves are apart when all are run "
        "in that many digits."
    )
    broken = [record for record in report.records if record.rows.nonfinite]
    if broken:
        yield (
            "overflow, 0/0: NaN or infinite where the exact result is finite, as it must be "
            "without the row's maximum subtracted."
        )


def _sheets(report: OracleReport) -> Iterator[Sheet]:
    agreements = {a.case_id: a for a in report.agreements}
    for title, cases in _grouped(report).items():
        units = _UNITS_OF_SOFTMAX if title.startswith("softmax ") else _UNITS
        for what, unit in units.items():
            names = [record.oracle for record in next(iter(cases.values()))]
            last = [f"{report.digits} digits"] if what == "out" else []
            sheet = Sheet(f"{title} · {unit}", ("distribution", *names, *last))
            for case_id, records in cases.items():
                line = _line(what, records)
                if last:
                    line = _with_agreement(line, records, agreements.get(case_id), report)
                sheet.lines.append(line)
            yield sheet


def _grouped(report: OracleReport) -> dict[str, dict[str, list[OracleRecord]]]:
    """Records by variant and shape, and in each by Case, in the order of the plan."""
    groups: dict[str, dict[str, list[OracleRecord]]] = {}
    for record in report.records:
        cases = groups.setdefault(f"{record.variant} · {problem_of(record).line}", {})
        cases.setdefault(record.case_id, []).append(record)
    return groups


def _line(what: str, records: list[OracleRecord]) -> Line:
    cells = [_cell(r.out if what == "out" else r.lse, r.rows) for r in records]
    return Line((Cell(records[0].distribution), *cells))


def _with_agreement(
    line: Line, records: list[OracleRecord], agreement: Agreement | None, report: OracleReport
) -> Line:
    """``line`` with its last column, and everything that is remarked on the Case."""
    remarks = [_remark(record) for record in records if _broken(record.rows)]
    if agreement is None:
        return Line((*line.cells, Cell(figures.NOTHING, "dim")), tuple(remarks))
    holds = agreement.holds(report.must_agree)
    if not holds:
        remarks.append(_disagreement(agreement, report))
    cell = Cell(_apart(agreement), "dim" if holds else "bad")
    return Line((*line.cells, cell), tuple(remarks))


def _broken(rows: Rows) -> bool:
    return bool(rows.nonfinite or rows.dead_wrong)


def _cell(distance: Distance, rows: Rows) -> Cell:
    if not distance.nonfinite:
        return Cell(figures.NOTHING if distance.units is None else _units(distance.units))
    if rows.overflowed:
        return Cell("overflow", "bad")
    return Cell("0/0" if rows.vanished else "not finite", "bad")


def _units(units: float) -> str:
    """Two decimals; of what is not 0 never ``0.00``."""
    if units == 0:
        return "0"
    if units < _LEAST_SHOWN:
        return f"<{_LEAST_SHOWN}"
    return f"{units:.2f}" if units < 1000 else f"{units:.2e}"


def _apart(agreement: Agreement) -> str:
    if agreement.infinite:
        return "infinite"
    return "0" if agreement.log10 is None else f"1e{math.ceil(agreement.log10):+03d}"


def _disagreement(agreement: Agreement, report: OracleReport) -> str:
    """``in 50 digits flash2 and safe agree to fewer than 40``."""
    where, reference = f"in {report.digits} digits", report.reference
    if agreement.infinite:
        count = agreement.infinite
        numbers = "1 number is" if count == 1 else f"{count} numbers are"
        who = f"{agreement.furthest}'s" + (" among them" if count > 1 else "")
        return f"{where} {numbers} infinitely far from {reference}'s: {who}"
    return f"{where} {agreement.furthest} and {reference} agree to fewer than {report.must_agree}"


def _remark(record: OracleRecord) -> str:
    """``naive: overflows in 37 of 48 rows; at most 1.2 in the others``."""
    rows, facts = record.rows, []
    other = rows.nonfinite - rows.overflowed - rows.vanished
    said = {"overflows in": rows.overflowed, "is 0/0 in": rows.vanished, "is not finite in": other}
    facts += [f"{what} {count} of {rows.total} rows" for what, count in said.items() if count]
    if rows.dead_wrong:
        facts.append(f"is wrong in {rows.dead_wrong} rows that see no key")
    rest = record.out.units
    others = f"; at most {_units(rest)} units elsewhere" if rest is not None else ""
    return f"{record.oracle} {', '.join(facts)}{others}"


_PAGE: Page[OracleReport] = paged(
    "Distance of the fp64 oracles from the exact result",
    _above,
    lambda report, _: _sheets(report),
    _below,
)
render, show = _PAGE.render, _PAGE.show
