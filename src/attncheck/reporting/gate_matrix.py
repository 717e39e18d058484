"""What one kernel was asked, by mask and score mod and by dtype: a cell says how it went."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attncheck.records.problem_summary import ProblemSummary, problem_of
from attncheck.reporting.gate_verdict import questions, sides

if TYPE_CHECKING:
    from attncheck.records.record import Status
    from attncheck.records.run_reports import GateReport

__all__ = ["Cell", "Matrix", "matrix"]

_ORDER = ("fp64", "fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2")  # the most exact first


@dataclass(frozen=True, slots=True)
class Cell:
    """How it went: a sign, a count, and the same in words.

    Attributes:
        look: ``good``, ``bad``, ``odd``, ``untaken`` or ``none``.
        sign: Says the look without colours.
        text: ``24``, or ``3 of 24``.
        words: For those who hear the page.
    """

    look: str
    sign: str
    text: str
    words: str


@dataclass(slots=True)
class Matrix:
    """Rows of masks and score mods, columns of dtypes."""

    columns: tuple[str, ...]
    rows: list[tuple[str, list[Cell]]] = field(default_factory=list)


def matrix(report: GateReport, kernel: str) -> Matrix:
    """Everything that ``kernel`` was asked."""
    counts: dict[str, dict[str, Counter[Status]]] = {}
    for answer in questions(report):
        if answer.record.kernel == kernel:
            problem = problem_of(answer.record)
            of_dtypes = counts.setdefault(_row(problem), {})
            of_dtypes.setdefault(problem.dtype, Counter())[answer.record.status] += 1
    found = {dtype for of_dtypes in counts.values() for dtype in of_dtypes}
    order = {name: i for i, name in enumerate(_ORDER)}
    columns = sorted(found, key=lambda name: (order.get(name, len(order)), name))
    made = Matrix(tuple(columns))
    bad, odd = sides(report)
    for row, of_dtypes in counts.items():
        made.rows.append(
            (row, [_cell(of_dtypes.get(dtype, Counter()), bad, odd) for dtype in columns])
        )
    return made


def _row(problem: ProblemSummary) -> str:
    if problem.operation == "softmax":
        return "softmax"
    mods = [str(problem.mask.get("name", "")), str(problem.score.get("name", ""))]
    extra = ["sink"] * problem.sink + ["paged"] * bool(problem.paging)
    extra += ["backward"] * problem.backward
    return " + ".join([mods[0], *(mod for mod in mods[1:] if mod not in {"none", ""}), *extra])


def _cell(count: Counter[Status], bad: frozenset[Status], doubtful: frozenset[Status]) -> Cell:
    total = count.total()
    if not total:
        return Cell("none", "", "", "not asked")
    answered = total - count["unsupported"]
    wrong = sum(count[status] for status in bad)
    odd = sum(count[status] for status in doubtful)
    if wrong:
        return Cell("bad", "✗", f"{wrong}/{answered}", f"{wrong} of {answered} failed")
    if odd:
        return Cell("odd", "!", f"{odd}/{answered}", f"{odd} of {answered} are odd")
    if answered:
        return Cell("good", "✓", str(answered), f"all {answered} passed")
    return Cell("untaken", "–", str(total), f"{total} not taken")
