"""A Report in the order it is read, for the table and the Markdown alike."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attncheck.records.problem_summary import ProblemSummary, problem_of
from attncheck.reporting.blind_spots import insensitive, visible
from attncheck.reporting.gradients import (
    ERRORS,
    HOW_TO_READ_GRADIENTS,
    SHARES,
    gradients_of,
    keys_of,
)
from attncheck.reporting.rows import DAGGER, HEADINGS, Row, row
from attncheck.reporting.verdicts import JUDGED, STATUSES, footnote

if TYPE_CHECKING:
    from attncheck.records.record import Environment, Record, Report, Status

__all__ = ["HOW_TO_READ", "Block", "Content", "Note", "Section", "content", "environment_facts"]

HOW_TO_READ = (
    "verdict: whether every error is rounding; why not stands below.",
    "err/bound, LSE/bound: largest error ÷ its bound; above 1 is proof of a fault.",
    "RMSE, max error, bias (mean error): of out against exact fp64. LSE error: max.",
    "×floor: RMSE ÷ that of the exact result rounded to the output format; least 1.",
    "×ideal: RMSE ÷ that of the ideal kernel, at the row's tiles if known, or 128×64.",
    "inputs: RMSE that rounding the inputs alone causes; part of no other column.",
)
_TF32 = "tf32: tensor cores truncate, the ideal kernel rounds to nearest: 3× is ordinary."
_INTERPRETED = f"{DAGGER} interpreted on the CPU: says nothing about a GPU."


@dataclass(frozen=True, slots=True)
class Note:
    """A reason, said once however many rows it holds for."""

    number: int
    status: Status
    reason: str


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one variant and head arrangement (empty for softmax)."""

    variant: str
    heads: str
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Section:
    """Blocks of one dtype, shape, distribution and seed, forward or backward, as its title says.

    ``visible`` says how small a fault its problems would have shown.
    """

    title: tuple[str, ...]
    blocks: list[Block] = field(default_factory=list)
    visible: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What every page says; all strings may hold foreign text.

    Attributes:
        command: The command line.
        environments: One line each.
        columns: Keys of the columns that have something to show.
        sections: Rows, grouped.
        notes: Reasons by number.
        absent: Kernels that can run nothing here, with the reason.
        profiles: The arithmetics by which kernels were judged, one line each.
        insensitive: Classes of fault that no problem would have shown.
        counts: How many cells ended how.
        reading: How to read the columns.
    """

    command: str
    environments: tuple[str, ...]
    columns: tuple[str, ...]
    sections: tuple[Section, ...]
    notes: tuple[Note, ...]
    absent: tuple[tuple[str, str], ...]
    profiles: tuple[str, ...]
    insensitive: str
    counts: str
    reading: tuple[str, ...]


def content(report: Report) -> Content:
    """``report`` in reading order: sections and blocks as planned, kernels as asked for."""
    letters = _letters(report)
    notes: dict[tuple[str, str], Note] = {}
    sections = _sections(report, letters, notes)
    hidden = (SHARES.keys() | ERRORS.keys()) - keys_of(report.records)
    hidden |= {"environment"} if len(letters) <= 1 else set()
    return Content(
        command=report.command,
        environments=tuple(_environment_lines(report, letters)),
        columns=tuple(key for key in HEADINGS if key not in hidden),
        sections=sections,
        notes=tuple(notes.values()),
        absent=tuple(report.absent.items()),
        profiles=tuple(_profiles(report)),
        insensitive=_insensitive(report),
        counts=_counts(report),
        reading=_reading(report),
    )


def _reading(report: Report) -> tuple[str, ...]:
    measured = [record for record in report.records if record.status in JUDGED]
    lines: tuple[str, ...] = HOW_TO_READ
    if any(map(gradients_of, measured)):
        lines += HOW_TO_READ_GRADIENTS
    if any(problem_of(record).dtype == "tf32" for record in measured):
        lines += (_TF32,)
    if any(record.interpreted for record in measured):
        lines += (_INTERPRETED,)
    return lines


def _sections(
    report: Report, letters: dict[str, str], notes: dict[tuple[str, str], Note]
) -> tuple[Section, ...]:
    order = {name: i for i, name in enumerate(report.kernels)}
    sections = []
    for title, blocks in _grouped(report).items():
        everything = [record for records in blocks.values() for record in records]
        section = Section(title, visible=visible(everything))
        for (variant, heads), records in blocks.items():
            records.sort(key=lambda record: order.get(record.kernel, len(order)))
            rows = [_row(record, letters, notes) for record in records]
            section.blocks.append(Block(variant, heads, rows))
        sections.append(section)
    return tuple(sections)


def _grouped(report: Report) -> dict[tuple[str, ...], dict[tuple[str, str], list[Record]]]:
    """Records by section and block, each opened by its first record: the plan's order."""
    groups: dict[tuple[str, ...], dict[tuple[str, str], list[Record]]] = {}
    for record in report.records:
        problem = problem_of(record)
        blocks = groups.setdefault(_title(problem), {})
        heads = f"{record.heads} {problem.head_counts}" if record.heads else ""
        blocks.setdefault((record.variant, heads), []).append(record)
    return groups


def _row(record: Record, letters: dict[str, str], notes: dict[tuple[str, str], Note]) -> Row:
    return row(
        record,
        note=_note(record, notes),
        environment=letters[record.environment],
    )


def _title(problem: ProblemSummary) -> tuple[str, ...]:
    parts = (problem.dtype, problem.shape, problem.distribution, f"seed {problem.seed}")
    return (*parts, problem.backward_too) if problem.backward_too else parts


def _note(record: Record, notes: dict[tuple[str, str], Note]) -> int:
    """Number of the footnote with the record's reason; 0 where it needs none."""
    reason = footnote(record)
    if not reason:
        return 0
    note = Note(len(notes) + 1, record.status, reason)
    return notes.setdefault((record.status, reason), note).number


def _letters(report: Report) -> dict[str, str]:
    return {
        key: chr(ord("A") + i % 26) * (i // 26 + 1) for i, key in enumerate(report.environments)
    }


def _environment_lines(report: Report, letters: dict[str, str]) -> list[str]:
    lines = []
    interpreted = {record.environment for record in report.records if record.interpreted}
    for key, environment in report.environments.items():
        letter = f"{letters[key]}: " if len(letters) > 1 else ""
        lines.append(letter + " · ".join(environment_facts(environment)))
        if environment.interpreter and key in interpreted:
            repairs = ", ".join(environment.interpreter)
            lines.append(f"{letter}kernels interpreted on the CPU, repaired: {repairs}")
    return lines


def environment_facts(environment: Environment) -> list[str]:
    """Device and versions, a few words each."""
    capability = f" ({environment.capability})" if environment.capability else ""
    facts = [f"{environment.device}{capability}", environment.machine]
    versions = {
        "torch": environment.torch,
        "triton": environment.triton or "missing",
        "CUDA": environment.cuda,
        "Python": environment.python,
        "attncheck": environment.attncheck,
    }
    return facts + [f"{name} {version}" for name, version in versions.items() if version]


def _profiles(report: Report) -> list[str]:
    """``bf16: …`` where one arithmetic is assumed of all kernels, else with their names."""
    users: dict[str, dict[str, dict[str, None]]] = {}
    for record in report.records:
        if record.judgement:
            kernels = users.setdefault(problem_of(record).dtype, {})
            kernels.setdefault(record.judgement.arithmetic, {})[record.kernel] = None
    lines = []
    for dtype, profiles in users.items():
        for profile, kernels_of_it in profiles.items():
            who = f" of {', '.join(kernels_of_it)}" if len(profiles) > 1 else ""
            lines.append(f"{dtype}{who}: {profile}")
    return lines


def _insensitive(report: Report) -> str:
    classes = insensitive(report.records)
    return f"insensitive: nothing here would have shown {' or '.join(classes)}" if classes else ""


def _counts(report: Report) -> str:
    count = Counter(record.status for record in report.records)
    total = len(report.records)
    said = [f"{count[s]} {_plural(s, count[s])}" for s in STATUSES if count[s]]
    cells = f"{total} {_plural('cell', total)}"
    return f"{cells}: {', '.join(said)}." if said else f"{cells}."


def _plural(word: str, count: int) -> str:
    return f"{word}s" if word in {"cell", "error"} and count != 1 else word
