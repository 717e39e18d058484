"""The page of ``attncheck rmse``: each kernel's errors, cell by cell, and how to read them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from msgspec.structs import replace as replace_struct

from attncheck.core.grouping import group_by
from attncheck.core.judgement import share_text
from attncheck.core.tensor_names import GRADIENTS, TensorName
from attncheck.records.problem_summary import ProblemSummary, problem_of
from attncheck.records.record import GradientErrors, OutErrors, Record, Report, gradients_of
from attncheck.reporting import number_text, record_text
from attncheck.reporting.document import (
    DASH,
    Cell,
    Column,
    Document,
    LiveRows,
    Look,
    Note,
    Row,
    Section,
    Table,
)

HOW_TO_READ = (
    "verdict: whether every error is rounding; why not stands below.",
    "err/bound, LSE/bound: largest error ÷ its bound; above 1 is proof of a fault.",
    "RMSE, max error, bias (mean error): of out against exact fp64. LSE error: max.",
    "×floor: RMSE ÷ that of the exact result rounded to the output format; least 1.",
    "×ideal: RMSE ÷ that of the ideal kernel, at the row's tiles if known, or 128×64.",
    "inputs: RMSE that rounding the inputs alone causes; part of no other column.",
)
_OF_GRADIENTS = (
    "dQ, dK, dV: RMSE of each gradient; ×ideal and /bound as of out, and the bound is",
    "given the kernel's own out and LSE. time: of forward and backward together.",
)
_TF32 = "tf32: tensor cores truncate, the ideal kernel rounds to nearest: 3× is ordinary."
_DAGGER = "†"
_INTERPRETED = f"{_DAGGER} interpreted on the CPU: says nothing about a GPU."

_HEADINGS: dict[TensorName, str] = {"dq": "dQ", "dk": "dK", "dv": "dV"}
_SHARES = {f"{name}_share": f"{_HEADINGS.get(name, name)}/bound" for name in GRADIENTS}
_ERRORS = {
    f"{name}_{part}": f"{_HEADINGS.get(name, name)} {heading}"
    for name in GRADIENTS
    for part, heading in (("rmse", "RMSE"), ("ideal", "×ideal"))
}
COLUMNS = {
    "verdict": "verdict",
    "share": "err/bound",
    "lse_share": "LSE/bound",
    **_SHARES,
    "rmse": "RMSE",
    "floor": "×floor",
    "ideal": "×ideal",
    "inputs": "inputs",
    "max": "max error",
    "at": "at b,h,q,d",
    "bias": "bias",
    "lse": "LSE error",
    **_ERRORS,
    "time": "time",
    "environment": "env",
}
"""Headings by key, in reading order; gradients and environment are shown only if needed."""

# Columns that a narrow terminal leaves out, in this order. RMSE of gradients stays longest, since
# the verdict says whether gradients are right, and a footnote which of them is not.
_SPARED: tuple[tuple[str, ...], ...] = (
    *(("at",), ("bias",), ("inputs",), ("max",), ("lse",), ("time",), ("floor",), ("lse_share",)),
    ("environment",),
    tuple(_SHARES),
    ("dsink_ideal", "dsink_rmse", "dcaptured_ideal", "dcaptured_rmse"),
    ("dq_ideal", "dk_ideal", "dv_ideal"),
)
_SPARED_FOR_GRADIENTS = (("ideal",), ("share",))  # left out next, if there are gradients
_NOTABLE, _BAD = 2.0, 10.0  # ×ideal from which a number is coloured; the judge uses neither
_LONGEST_KERNEL = 28
_MOST_ARITHMETICS = 2  # arithmetics of one kernel that a brief page lists
_VERDICT, _NUMBER = 12, 8  # characters of ``inconclusive`` and of 1.53e-03
_LEAST = {
    **dict.fromkeys(("RMSE", "inputs", "LSE error", "time"), _NUMBER),
    **dict.fromkeys(("max error", "bias"), _NUMBER + 1),
    "at b,h,q,d": 12,
}
"""Least width in characters of the columns of rows shown one by one, by heading."""


def measurement_document(report: Report) -> Document:
    """Return the page of ``report``: sections and blocks as planned, kernels as asked for.

    What a kernel does not support has no row: a line below says it once for all such cells.
    """
    shown = _shown_columns(report)
    notes: dict[tuple[str, str], int] = {}
    letters = environment_letters(report)
    sections = tuple(
        section
        for title, blocks in _group_records(report).items()
        if (section := _section(title, blocks, report, shown, notes, letters)).blocks
    )
    return replace(
        _closing(report, notes, sections),
        command=report.command,
        facts=environment_lines(report),
    )


def _closing(
    report: Report, notes: dict[tuple[str, str], int], sections: tuple[Section, ...]
) -> Document:
    """Return the page from its ``sections`` on: reasons of rows not passed, how to read it."""
    below = record_text.reason_sections(
        notes, report.claims, report.absent, _unsupported(report.records)
    )
    missed = " or ".join(record_text.missed_faults(report.records))
    insensitive = f"insensitive: nothing here would have shown {missed}"
    return Document(
        title="Distance from exact attention",
        sections=(*sections, *below),
        notes=(
            *(f"judged as {line}" for line in profiles(report.records)),
            *_reading(report),
        ),
        closing=(
            *([Note(insensitive, "notable")] if missed else []),
            Note(_counts(report), "plain"),
            *([Note(f"Incomplete: {report.incomplete}.", "bad")] if report.incomplete else []),
        ),
    )


def _unsupported(records: Sequence[Record]) -> Iterator[str]:
    """Yield ``flex does not support alibi, softcap with GQA 4/2: …`` for each set of cells."""
    lines: dict[str, list[str]] = {}
    refused = [record for record in records if record.status == "unsupported"]
    by_reason = group_by(refused, lambda record: (record.kernel, record_text.footnote(record)))
    for (kernel, reason), alike in by_reason.items():
        own = [record for record in records if record.kernel == kernel]
        by_heads: dict[str, list[str]] = {}
        count = 0
        for variant, cells in group_by(alike, lambda record: record.variant).items():
            of_variant = [record for record in own if record.variant == variant]
            heads = {_block(record)[1]: None for record in cells}
            count += sum(_block(record)[1] in heads for record in of_variant)
            all_heads = {_block(record)[1] for record in of_variant} == set(heads)
            by_heads.setdefault("" if all_heads else " and ".join(heads), []).append(variant)
        text = "; ".join(
            f"{', '.join(variants)} with {heads}" if heads else ", ".join(variants)
            for heads, variants in by_heads.items()
        )
        part = f" in {len(alike)} of {count} cells" if len(alike) < count else ""
        lines.setdefault(f"not support {text}{part}: {reason}", []).append(kernel)
    for text, kernels in lines.items():
        yield f"{', '.join(kernels)} {'do' if len(kernels) > 1 else 'does'} {text}"


class RowsAsMeasured(LiveRows):
    """The page of a Report whose Records come one by one."""

    def __init__(self, report: Report) -> None:
        self.head = Document(title="", command=report.command, facts=environment_lines(report))
        self.tables: dict[Any, Table] = {}
        self._report = report
        self._notes: dict[tuple[str, str], int] = {}
        self._before: tuple[str, tuple[Column, ...], tuple[str, ...]] = "", (), ()

    def row(self, record: Record) -> tuple[Section, bool] | None:
        """Return a section of ``record`` alone; None if it is not supported."""
        if record.status == "unsupported":
            return None
        report = replace_struct(self._report, records=(record,))
        ((title, blocks),) = _group_records(report).items()
        letters = environment_letters(report)
        shown = _shown_columns(report)
        section = _section(title, blocks, report, shown, self._notes, letters)
        (table, *_) = section.blocks
        assert isinstance(table, Table)
        # The widths of later rows are not known yet.
        kernels = min(max(map(len, self._report.kernels)), _LONGEST_KERNEL)
        least = {"kernel": kernels, "verdict": _VERDICT} | dict.fromkeys(_ERRORS.values(), _NUMBER)
        columns = tuple(
            replace(column, least=least.get(column.heading, _LEAST.get(column.heading, 0)))
            for column in table.columns
        )
        (row,) = table.rows
        old_title, old_columns, old_group = self._before
        # A row without numbers does not show which columns the others have.
        new = title != old_title or (record.status in record_text.JUDGED and columns != old_columns)
        columns = columns if new else old_columns
        self._before = title, columns, row.group
        row = replace(row, group=row.group if new or row.group != old_group else ())
        table = replace(table, columns=columns, rows=(row,))
        self.tables[columns] = table
        return Section(title, (table,)), new

    def closing(self, report: Report) -> Document:
        """Return the faults that the problems would have shown, and the rest of the page."""
        grouped, notes = _group_records(report), []
        for title, blocks in grouped.items():
            visible = record_text.visible_faults(
                [one for records in blocks.values() for one in records]
            )
            if visible:
                where = f"{title}: " if len(grouped) > 1 else ""
                notes.append(Note(f"{where}{visible}"))
        return _closing(report, self._notes, (Section("", tuple(notes)),) if notes else ())


def environment_letters(report: Report) -> dict[str, str]:
    """Return a letter for each environment, ``A`` for the first."""
    return {
        key: chr(ord("A") + i % 26) * (i // 26 + 1) for i, key in enumerate(report.environments)
    }


def environment_lines(report: Report) -> tuple[str, ...]:
    """Return a line for each environment, with its letter if there are several."""
    lines = []
    interpreted = {record.environment for record in report.records if record.interpreted}
    for key, letter in environment_letters(report).items():
        environment = report.environments[key]
        prefix = f"{letter}: " if len(report.environments) > 1 else ""
        lines.append(prefix + record_text.environment_facts(environment))
        if environment.interpreter and key in interpreted:
            repairs = ", ".join(environment.interpreter)
            lines.append(f"{prefix}kernels interpreted on the CPU, repaired: {repairs}")
    return tuple(lines)


def profiles(records: Iterable[Record], *, brief: bool = False) -> Iterator[str]:
    """Yield ``bf16: …`` if all kernels have one assumed arithmetic, else lines with their names.

    If ``brief``, several other arithmetics of one kernel are counted, not listed.
    """
    users: dict[str, dict[str, dict[str, None]]] = {}
    for record in records:
        if record.judgement and record.judgement.arithmetic:  # empty if no arithmetic is assumed
            kernels = users.setdefault(problem_of(record).dtype, {})
            kernels.setdefault(record.judgement.arithmetic, {})[record.kernel] = None
    for dtype, arithmetics in users.items():
        all_kernels = {kernel for by_kernel in arithmetics.values() for kernel in by_kernel}
        first: tuple[str, ...] = ()
        if brief and len(all_kernels) == 1 and len(arithmetics) > _MOST_ARITHMETICS:
            others = f"in other questions in {len(arithmetics) - 1} other ways (-v lists them)"
            yield f"{dtype}: {next(iter(arithmetics))}; {others}"
            continue
        for arithmetic, users_of_it in arithmetics.items():
            parts = tuple(arithmetic.split("; "))
            if len(all_kernels) == 1 and first:
                # A kernel's backward does more than its forward: show only what differs.
                others = "; ".join(part for part in parts if part not in first)
                yield f"{dtype} in other questions: {others or arithmetic}"
                continue
            first = parts
            owners = f" of {', '.join(users_of_it)}" if len(all_kernels) > 1 else ""
            owners = owners if len(arithmetics) > 1 else ""
            yield f"{dtype}{owners}: {arithmetic}"


def _shown_columns(report: Report) -> tuple[tuple[str, Column], ...]:
    """Return the keys and columns that the records have data for."""
    tensors = {name for record in report.records for name in gradients_of(record)}
    used = {f"{name}_{part}" for name in tensors for part in ("share", "rmse", "ideal")}
    hidden = (_SHARES.keys() | _ERRORS.keys()) - used
    hidden |= {"environment"} if len(report.environments) <= 1 else set()
    left_out_order = _SPARED + (_SPARED_FOR_GRADIENTS if tensors else ())
    rank = {key: i for i, keys in enumerate(left_out_order, 1) for key in keys}
    return tuple(
        (key, Column(heading, words=key == "verdict", spare=rank.get(key, 0)))
        for key, heading in COLUMNS.items()
        if key not in hidden
    )


def _group_records(report: Report) -> dict[str, dict[tuple[str, str], list[Record]]]:
    """Return records by section and block, in order of first appearance, which is the plan's."""
    sections = group_by(report.records, lambda record: _title(problem_of(record)))
    return {title: group_by(records, _block) for title, records in sections.items()}


def _block(record: Record) -> tuple[str, str]:
    heads = f"{record.heads} {problem_of(record).head_counts}" if record.heads else ""
    return record.variant, heads


def _title(problem: ProblemSummary) -> str:
    parts = [problem.dtype, problem.shape, problem.distribution, f"seed {problem.seed}"]
    return " · ".join([*parts, problem.backward_too] if problem.backward_too else parts)


def _section(  # notes and letters are shared by all sections of a page
    title: str,
    blocks: dict[tuple[str, str], list[Record]],
    report: Report,
    shown: tuple[tuple[str, Column], ...],
    notes: dict[tuple[str, str], int],
    letters: dict[str, str],
) -> Section:
    order = {name: i for i, name in enumerate(report.kernels)}
    rows = []
    for group, records in blocks.items():
        for record in sorted(records, key=lambda one: order.get(one.kernel, len(order))):
            if record.status == "unsupported":
                continue
            status = record_text.status_cell(record, record_text.footnote(record), notes)
            kernel = Cell(record.kernel, code=True)
            if record.status not in record_text.JUDGED:
                rows.append(Row((kernel, status), group=group))
                continue
            cells = {"verdict": status, "environment": Cell(letters[record.environment], "dim")}
            cells |= _cells(record)
            numbers = tuple(cells.get(key, DASH) for key, _ in shown)
            remarks = (*_remarks(record), *record_text.verdict_remarks(record.judgement))
            rows.append(Row((kernel, *numbers), remarks, group))
    kernel_column = Column("kernel", words=True, cut=True, most=_LONGEST_KERNEL)
    columns = (kernel_column, *(column for _, column in shown))
    visible = record_text.visible_faults([one for records in blocks.values() for one in records])
    if not rows:
        return Section("", ())
    table = Table(columns, tuple(rows), groups=("variant", "heads"))
    return Section(title, (table, Note(visible)) if visible else (table,))


def _cells(record: Record) -> dict[str, Cell]:
    """Return by key those cells of a judged record that have something to show."""
    # If no row sees a key, nothing is compared, and a 0 would look like a perfect kernel.
    lse = record.lse
    cells = _out_cells(record.out) if record.out is not None and record.out.elements else {}
    # Without a place of the largest error nothing was compared, for example if no row sees a key.
    if lse is not None and lse.max_at is not None:
        cells["lse"] = _error(lse.max_error)
    for name, share in record_text.bound_shares(record).items():
        cells["share" if name == "out" else f"{name}_share"] = share_cell(share)
    for name, errors in gradients_of(record).items():
        if errors.elements:
            cells[f"{name}_rmse"] = _error(errors.rmse)
            cells[f"{name}_ideal"] = _over_ideal(errors)
    return cells | {"time": _time(record)}


def _out_cells(out: OutErrors) -> dict[str, Cell]:
    sound: Look = "plain" if math.isfinite(out.rmse) else "bad"
    return {
        "rmse": _error(out.rmse),
        "floor": Cell(number_text.ratio(out.rmse, out.floor_rmse), sound),
        "ideal": _over_ideal(out),
        "inputs": Cell(number_text.scientific(out.input_rmse), "dim"),
        "max": _error(out.max_error),
        "at": Cell(number_text.place(out.max_at), "dim"),
        "bias": _error(out.bias, signed=True),
    }


def share_cell(share: float | None) -> Cell:
    """Return the cell of an error ÷ its bound; it looks bad above 1."""
    if share is None:
        return DASH
    return Cell(share_text(share), "plain" if share <= 1 else "bad")


def _error(number: float, *, signed: bool = False) -> Cell:
    look: Look = "plain" if math.isfinite(number) else "bad"
    return Cell(number_text.scientific(number, signed=signed), look)


def _over_ideal(errors: OutErrors | GradientErrors) -> Cell:
    text = number_text.ratio(errors.rmse, errors.ideal_rmse)
    value = number_text.quotient(errors.rmse, errors.ideal_rmse)
    if value is None:
        # An error where the ideal kernel is exact is worse than any ratio.
        return Cell(text, "plain" if errors.rmse == 0 else "bad")
    if not value < _BAD:
        return Cell(text, "bad")
    return Cell(text, "notable" if value >= _NOTABLE else "plain")


def _time(record: Record) -> Cell:
    text = number_text.duration(record.seconds)
    if text == number_text.NOTHING:
        return Cell(text, "dim")
    if not record.interpreted:
        return Cell(text)
    # The mark goes after the unit, before the spaces that align units.
    return Cell((text.rstrip() + _DAGGER).ljust(len(text) + 1), "dim")


def _remarks(record: Record) -> Iterator[Note]:
    """Yield remarks on wrong values that the numbers alone would hide."""
    out, lse = record.out, record.lse
    if out and out.elements == 0:
        yield Note("nothing to compare: no row sees a key", "bad")
    broken = [f"{out.nonfinite} of {out.elements} elements of out"] if out and out.nonfinite else []
    broken += [f"LSE of {lse.nonfinite} rows"] if lse and lse.nonfinite else []
    broken += [
        f"{errors.nonfinite} of {errors.elements} elements of {name}"
        for name, errors in gradients_of(record).items()
        if errors.nonfinite
    ]
    if broken:
        yield Note(f"NaN or infinite: {', '.join(broken)}", "bad")
    dead = []
    if out and out.dead_rows_wrong:
        dead.append(f"out is not 0 in {out.dead_rows_wrong} of {out.dead_rows}")
    if lse and lse.dead_rows_wrong:
        dead.append(f"LSE is not −inf in {lse.dead_rows_wrong}")
    if dead:
        yield Note(f"rows that see no key: {', '.join(dead)}", "bad")


def _reading(report: Report) -> Iterator[str]:
    measured = [record for record in report.records if record.status in record_text.JUDGED]
    if measured:
        yield from HOW_TO_READ
    if any(map(gradients_of, measured)):
        yield from _OF_GRADIENTS
    if any(problem_of(record).dtype == "tf32" for record in measured):
        yield _TF32
    if any(record.interpreted for record in measured):
        yield _INTERPRETED


def _counts(report: Report) -> str:
    count = Counter(record.status for record in report.records)
    statuses = (status for status in record_text.STATUS_LOOKS if count[status])
    counts = ", ".join(
        number_text.plural(count[s], s) if s == "error" else f"{count[s]} {s}" for s in statuses
    )
    cells = number_text.plural(len(report.records), "cell")
    return f"{cells}: {counts}." if counts else f"{cells}."
