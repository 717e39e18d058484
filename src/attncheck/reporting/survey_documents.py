"""Pages of surveys: oracles, their certificates, mods, block masks, a kernel's arithmetic."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeVar

from attncheck.core.grouping import group_by
from attncheck.records import survey_reports
from attncheck.records.problem_summary import problem_of
from attncheck.records.survey_reports import EMPTY, FIELDS, FULL, PARTIAL, TRUTH
from attncheck.reporting import number_text
from attncheck.reporting.document import (
    DASH,
    Cell,
    Column,
    Document,
    Look,
    Note,
    Picture,
    Row,
    Section,
    Table,
    columns,
    row,
    table_section,
)
from attncheck.reporting.record_text import environment_facts

C = TypeVar("C", "survey_reports.OracleRecord", "survey_reports.Certificate")

_LONGEST_EXPRESSION = 72  # characters that a page shows; the JSON has all
_LONGEST_BACKEND = 28


def _by_case(records: Iterable[C]) -> dict[str, dict[str, list[C]]]:
    """Return records by variant and shape, and within these by Case, in the order of the plan."""
    alike = group_by(records, lambda record: f"{record.variant} · {problem_of(record).line}")
    return {title: group_by(each, lambda record: record.case_id) for title, each in alike.items()}


# Distances of the float64 oracles from a result in many digits

_UNITS = {
    "out": "out in units of 2^-53 Σ p|v|",
    "lse": "LSE in units of 2^-53 max(1, |LSE|)",
}
_UNITS_OF_SOFTMAX = _UNITS | {"out": "out in units of 2^-53 p"}
_LEAST_UNITS = 0.01  # smaller distances are shown as <0.01


def oracle_document(report: survey_reports.OracleReport) -> Document:
    """Return a page of the distance of each float64 oracle from the exact result, by case."""
    agreements = {agreement.case_id: agreement for agreement in report.agreements}
    sections = []
    for title, cases in _by_case(report.records).items():
        names = [record.oracle for record in next(iter(cases.values()))]
        # A softmax has no V: its outputs are the weights themselves.
        units = _UNITS_OF_SOFTMAX if title.startswith("softmax ") else _UNITS
        for tensor, unit in units.items():
            with_agreement = tensor == "out"
            last = [f"{report.digits} digits"] if with_agreement else []
            headings = columns(["distribution"], [*names, *last])
            rows = []
            for case_id, records in cases.items():
                cells = [_distance(getattr(record, tensor), record.rows) for record in records]
                remarks: list[str] = []
                if with_agreement:
                    agreement = agreements.get(case_id)
                    cells.append(_apart(agreement, report))
                    remarks = list(_oracle_remarks(records, agreement, report))
                rows.append(row(records[0].distribution, *cells, remarks=remarks))
            sections.append(table_section(f"{title} · {unit}", headings, rows))
    backend = "Python's integers" if report.backend == "python" else report.backend
    notes = [
        (
            f"Largest error of each fp64 oracle against the {report.reference} one in "
            f"{report.digits} digits; 0: the very same numbers."
        ),
        "2^-53 is half the distance from 1 to the next fp64 number: one rounding is at most 1.",
        (
            f"{report.digits} digits: how far the recurrences themselves are apart when all are "
            "run in that many digits."
        ),
    ]
    if any(record.rows.nonfinite for record in report.records):
        notes.append(
            "overflow, 0/0: NaN or infinite where the exact result is finite, as it must be "
            "without the row's maximum subtracted."
        )
    mpmath = f"{report.mpmath} on {backend}"
    return Document(
        title="Distance of the fp64 oracles from the exact result",
        command=report.command,
        facts=(environment_facts(report.environment, mpmath=mpmath),),
        sections=tuple(sections),
        notes=tuple(notes),
    )


def _distance(distance: survey_reports.Distance, rows: survey_reports.Rows) -> Cell:
    # If some numbers are not finite, the row's remark has the largest error of the others.
    if not distance.nonfinite:
        return DASH if distance.units is None else Cell(_units(distance.units))
    if rows.overflowed:
        return Cell("overflow", "bad")
    return Cell("0/0" if rows.vanished else "not finite", "bad")


def _units(units: float) -> str:
    """Return ``units`` with two decimals, but never ``0.00`` for a number that is not 0."""
    if units == 0:
        return "0"
    if units < _LEAST_UNITS:  # 0.00 would claim that the numbers are equal
        return f"<{_LEAST_UNITS}"
    return f"{units:.2f}" if units < 1000 else f"{units:.2e}"


def _apart(agreement: survey_reports.Agreement | None, report: survey_reports.OracleReport) -> Cell:
    """Return the largest distance between the recurrences in many digits."""
    if agreement is None:
        return DASH
    text = "infinite" if agreement.infinite else "0"
    if not agreement.infinite and agreement.log10 is not None:
        text = f"1e{math.ceil(agreement.log10):+03d}"
    return Cell(text, "dim" if agreement.holds(report.must_agree) else "bad")


def _oracle_remarks(
    records: list[survey_reports.OracleRecord],
    agreement: survey_reports.Agreement | None,
    report: survey_reports.OracleReport,
) -> Iterator[str]:
    """Yield ``naive overflows in 37 of 48 rows; at most 1.20 units elsewhere``, disagreements."""
    for record in records:
        rows = record.rows
        other = rows.nonfinite - rows.overflowed - rows.vanished
        counts = {
            "overflows in": rows.overflowed,
            "is 0/0 in": rows.vanished,
            "is not finite in": other,
        }
        facts = [f"{what} {n} of {rows.total} rows" for what, n in counts.items() if n]
        if rows.dead_wrong:
            facts.append(f"is wrong in {rows.dead_wrong} rows that see no key")
        # An oracle that overflows in some rows may still be accurate in the others.
        rest = record.out.units
        elsewhere = f"; at most {_units(rest)} units elsewhere" if rest is not None else ""
        if facts:
            yield f"{record.oracle} {', '.join(facts)}{elsewhere}"
    if agreement is None or agreement.holds(report.must_agree):
        return
    where, reference = f"in {report.digits} digits", report.reference
    furthest, count = agreement.furthest, agreement.infinite
    # Finite distances have a size; infinite ones can only be counted.
    if not count:
        yield f"{where} {furthest} and {reference} agree to fewer than {report.must_agree}"
        return
    numbers = "1 number is" if count == 1 else f"{count} numbers are"
    owner = f"{furthest}'s" + (" among them" if count > 1 else "")
    yield f"{where} {numbers} infinitely far from {reference}'s: {owner}"


# Errors of the oracles, proven in ball arithmetic

_PARTS = {"out": "out", "lse": "LSE"}


def certificate_document(report: survey_reports.CertificateReport) -> Document:
    """Return a page of the oracles' proven errors, beside the judge's allowances for a kernel."""
    sections = []
    for title, cases in _by_case(report.records).items():
        names = [record.oracle for record in next(iter(cases.values()))]
        others = [name for name in names if name != TRUTH]
        numbers = ("error", "allowance", "share", "a priori", *others)
        headings = columns(["distribution"], numbers)
        for part, name in _PARTS.items():
            rows = [_proven_row(part, case, others, report.limit) for case in cases.values()]
            sections.append(table_section(f"{title} · {name}", headings, rows))
    balls = f"{report.flint}, balls of {report.bits} bits"
    allowances = (
        f"allowance of a kernel in {dtype}: {profile}"
        for dtype, profile in report.arithmetics.items()
    )
    notes = [
        (
            "error: a proof that the truth, what kernels are compared with, is no further from the "
            "exact result, where it is the largest part of the allowance."
        ),
        f"share: error ÷ allowance; above {_percent(report.limit)} the judge would call a verdict "
        "inconclusive."
        + (" Under the name of each other oracle its own." if len(report.oracles) > 1 else ""),
        (
            "a priori: largest error ÷ what the judge assumes of the truth without a proof; never "
            "above 1."
        ),
    ]
    parts = [part for record in report.truths for part in (record.out, record.lse)]
    shares = [part.share for part in parts if part.share is not None]
    if shares:
        notes.append(f"Largest share of the truth: {number_text.scientific(max(shares))}.")
    return Document(
        title="Proven errors of the fp64 oracles",
        command=report.command,
        facts=(environment_facts(report.environment, **{"python-flint": balls}), *allowances),
        sections=tuple(sections),
        notes=tuple(notes),
    )


def _proven_row(
    part: str, records: list[survey_reports.Certificate], others: list[str], limit: float
) -> Row:
    proven: dict[str, survey_reports.ProvenError] = {
        record.oracle: getattr(record, part) for record in records
    }
    truth = proven.get(TRUTH)
    # A certificate of only other oracles leaves the truth's cells empty.
    cells = [DASH] * 4
    if truth is not None:
        beyond = truth.a_priori is not None and truth.a_priori > 1
        cells = [_scientific(truth.error), _scientific(truth.allowance), _share(truth, limit)]
        cells.append(_scientific(truth.a_priori, "bad" if beyond else "plain"))
    cells += [_share(proven.get(name), limit) for name in others]
    remarks = (text for record in records for text in _proof_remarks(record, part, limit))
    return row(records[0].distribution, *cells, remarks=remarks)


def _scientific(number: float | None, look: Look = "plain") -> Cell:
    return DASH if number is None else Cell(number_text.scientific(number), look)


def _share(proven: survey_reports.ProvenError | None, limit: float) -> Cell:
    if proven is None or proven.share is None:
        return Cell(number_text.NOTHING, "bad" if proven and proven.unproven else "dim")
    return _scientific(proven.share, "bad" if proven.share > limit or proven.unproven else "plain")


def _proof_remarks(record: survey_reports.Certificate, part: str, limit: float) -> Iterator[str]:
    """Yield remarks such as ``truth: nothing is proven of 4 of 192 numbers``."""
    proven: survey_reports.ProvenError = getattr(record, part)
    total = proven.elements + proven.unproven + proven.unbounded
    if proven.unproven:
        yield f"{record.oracle}: nothing is proven of {proven.unproven} of {total} numbers"
    # The judge assumes something only of the truth; other oracles are shown for comparison.
    if record.oracle != TRUTH:
        return
    if proven.share is not None and proven.share > limit:
        yield (
            f"the truth's error may be more than {_percent(limit)} of the allowance: a verdict "
            "here is inconclusive"
        )
    if proven.a_priori is not None and proven.a_priori > 1:
        yield "the truth's error may be more than is assumed of it: that bound is in doubt"
    if proven.unbounded:
        yield f"{proven.unbounded} of {total} numbers have no allowance"
    if part == "out" and record.proven_rows < record.rows:
        yield f"{record.proven_rows} of {record.rows} rows were examined"


def _percent(part: float) -> str:
    return f"{100 * part:g} %"


# Masks and score mods on every backend

_ANSWERS: dict[str, Cell] = {
    "equal": Cell("equal"),
    "different": Cell("different", "bad"),
    "unknown": Cell("unknown", "notable"),
    "error": Cell("error", "bad"),
    "unsupported": DASH,
}


def mod_document(report: survey_reports.ModReport) -> Document:
    """Return a page of each backend's results on a file's mods, a row for each mod."""
    headings = (
        Column("mod", words=True, cut=True),
        Column("kind", words=True),
        Column("expression", words=True, cut=True),
        *(Column(_truncate(name, _LONGEST_BACKEND), words=True) for name in report.backends),
    )
    rows = []
    for record in report.records:
        answers = {name: record.answers[name] for name in report.backends}
        expression = _truncate(record.expression, _LONGEST_EXPRESSION)
        cells = (_ANSWERS[answer.status] for answer in answers.values())
        remarks = (
            f"{name}: {answer.detail}"
            for name, answer in answers.items()
            if answer.status in {"different", "unknown", "error"}
        )
        kind = Cell(record.kind, "dim")
        rows.append(row(record.name, kind, expression, *cells, remarks=remarks))
    table = Table(headings, tuple(rows), keys=3)
    count = Counter[str](a.status for record in report.records for a in record.answers.values())
    counts = ", ".join(f"{count[status]} {status}" for status in _ANSWERS if count[status])
    mods = number_text.plural(len(report.records), "mod")
    absences = [f"{number_text.NOTHING} {line}" for line in _absences(report)]
    equal = "equal: as the callable says, at every place. Whole expressions: --format json."
    return Document(
        title="Masks and score mods on every backend",
        command=report.command,
        facts=(environment_facts(report.environment, mpmath=report.mpmath),),
        sections=(Section(f"{report.file} · {report.shape}", (table,)),),
        notes=(*absences, equal),
        closing=(Note(f"{mods}: {counts or 'no backend was asked'}.", "plain"),),
    )


def _absences(report: survey_reports.ModReport) -> Iterator[str]:
    """Yield a line for each reason: backends (and mods, if not all) that do not support a mod."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for record in report.records:
        for backend, answer in record.answers.items():
            if answer.status == "unsupported":
                # Grouped by reason, since a backend without score mods refuses every one.
                names = reasons.setdefault(answer.detail, {}).setdefault(backend, [])
                names.append(record.name)
    for reason, backends in reasons.items():
        where = (
            backend if len(names) == len(report.records) else f"{backend} of {', '.join(names)}"
            for backend, names in backends.items()
        )
        yield f"{'; '.join(where)}: {reason}"


def _truncate(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1].rstrip() + "…"


# Tiles of a mask

_SIGNS = {EMPTY: "·", PARTIAL: "▒", FULL: "█"}


def block_document(report: survey_reports.BlockReport) -> Document:
    """Return a page of a mask's tiles, counted by size, with pictures for records with a map."""
    names = ("tiles", "empty", "partial", "full", "sparsity", "ideal speed-up")
    headings = columns(["tile"], names)
    rows = []
    for record in report.records:
        speedup = number_text.NOTHING if record.speedup is None else f"{record.speedup:.2f}×"
        counts = (record.total, record.empty, record.partial, record.full)
        rows.append(row(_tile(record), *map(str, counts), f"{record.sparsity:.1%}", speedup))
    ranges = f"B{report.batch} H{report.heads} Q{report.query} K{report.kv}"
    legend = f"{_SIGNS[EMPTY]} empty, {_SIGNS[PARTIAL]} partial, {_SIGNS[FULL]} full"
    # Wrapping a row of tiles would change the picture.
    note = "{shown} of {all} key blocks are shown: larger tiles, or --map --json, show all."
    pictures = []
    for record in report.records:
        lines = tuple("".join(_SIGNS[kind] for kind in tiles) for tiles in record.map)
        picture = Picture(f"{_tile(record)}, b 0, h 0: {legend}", lines, note)
        pictures += [Section("", (picture,))] if lines else []
    return Document(
        title="Tiles of a mask",
        command=report.command,
        sections=(table_section(f"{report.name} · {ranges}", headings, rows), *pictures),
        notes=(
            "Partial: the mask is applied; at a ragged edge also where all is visible.",
            "Ideal speed-up: all tiles ÷ those that are not empty.",
        ),
    )


def _tile(record: survey_reports.BlockRecord) -> str:
    return f"{record.block_query}×{record.block_kv}"


# The arithmetic of a kernel

_VERDICT_LOOKS: dict[survey_reports.ReadingVerdict, Look] = {
    "agrees": "good",
    "finer": "good",
    "differs": "bad",
    "not declared": "plain",
    "not seen": "dim",
}


def fingerprint_document(report: survey_reports.FingerprintReport) -> Document:
    """Return a page of a kernel's measured arithmetic, beside the arithmetic that it declares."""
    declared = (
        f"declared in {record.dtype}: {record.arithmetic}"
        for record in report.records
        if record.arithmetic
    )
    fields = "; ".join(f"{field}: {what}" for field, what in FIELDS.items())
    finer = "finer: less error than is declared, so that bounds hold."
    return Document(
        title="The arithmetic of a kernel",
        command=report.command,
        facts=(report.kernel, environment_facts(report.environment), *declared),
        sections=tuple(map(_readings, report.records)),
        notes=(f"{fields}.", finer),
    )


def _readings(record: survey_reports.DtypeFingerprint) -> Section:
    if not record.calls:
        # Nothing was called, so every reading has the same reason.
        return Section(f"{record.dtype} · not asked: {record.readings[0].reason}", ())
    rows = (
        row(
            reading.field,
            reading.read or number_text.NOTHING,
            reading.declared or number_text.NOTHING,
            Cell(reading.standing, _VERDICT_LOOKS[reading.standing]),
            remarks=[reading.reason],
        )
        for reading in record.readings
    )
    headings = columns(["field", "read", "declared", ""], cut=3)
    return table_section(f"{record.dtype} · {record.calls} calls", headings, rows)
