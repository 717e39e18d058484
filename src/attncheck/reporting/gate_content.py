"""What the pages of a gate say, in words and numbers, whatever they look like."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attncheck.core.sanitize_text import one_line
from attncheck.records.problem_summary import problem_of
from attncheck.records.run_reports import STAGES
from attncheck.reporting import figures
from attncheck.reporting.cells import Cell
from attncheck.reporting.content import environment_facts
from attncheck.reporting.diagnosis_text import diagnosis_text, problem_line, repro_command
from attncheck.reporting.gate_verdict import policy_of, questions, sentence, sides, untested
from attncheck.reporting.sheet import Line, Sheet

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from attncheck.records.record import Environment, Status
    from attncheck.records.run_reports import Answer, Change, GateReport, Stage
    from attncheck.reporting.gate_verdict import Failing

__all__ = [
    "StageCount",
    "above",
    "baseline_sheet",
    "changes_shown",
    "device_of",
    "diagnosis_lines",
    "environment_lines",
    "like_it",
    "missing",
    "stage_counts",
    "stage_sheet",
    "title",
]

_MOST_REASONS = 5
_MOST_CHANGES = 20
_MOST_NAMED = 3
_STANDINGS = ("identical", "within rounding", "better", "worse", "new", "gone")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCount:
    """What one kernel answered in one stage.

    Attributes:
        kernel, stage: Which.
        planned: Questions that there are.
        status: How many answers have each status.
        seconds: All of them together took.
    """

    kernel: str
    stage: Stage
    status: Counter[Status]
    seconds: float

    @property
    def asked(self) -> int:
        """Answers, but for refusals."""
        return self.status.total() - self.status["unsupported"]

    def of(self, statuses: Iterable[Status]) -> int:
        """How many have one of ``statuses``."""
        return sum(self.status[status] for status in statuses)


def title(report: GateReport) -> str:
    """The verdict in one line."""
    return sentence(report, policy_of(report))


def above(report: GateReport) -> Iterator[str]:
    """The command, then when, how long and where."""
    yield report.command
    part = f" · part {report.shard}" if report.shard else ""
    took = figures.duration(report.seconds).strip()
    yield f"tier {report.tier} · {report.started} · {took}{_pace(report)}{part}"
    yield from environment_lines(report)
    for name, summary in report.kernels.items():
        yield f"{name} · {summary}" if summary else name


def _pace(report: GateReport) -> str:
    """`` · 2.6 questions a second · 61 % of the work in compilers``; empty of what is not known."""
    asked = [a for a in questions(report) if a.record.status != "unsupported"]
    work = sum(answer.seconds for answer in asked)
    compiling = sum(answer.compiling for answer in asked)
    said = f" · {len(asked) / report.seconds:.2g} questions a second" if report.seconds > 0 else ""
    said += f" · {100 * compiling / work:.0f} % of the work in compilers" if compiling else ""
    return said if asked else ""


def environment_lines(report: GateReport) -> Iterator[str]:
    """Each environment in one line."""
    for environment in report.environments.values():
        yield " · ".join(_environment(environment))


def _environment(environment: Environment) -> list[str]:
    repaired = ", ".join(environment.interpreter)
    facts = environment_facts(environment)
    return [*facts, f"Triton's interpreter, repaired: {repaired}"] if repaired else facts


def stage_counts(report: GateReport) -> tuple[StageCount, ...]:
    """A line a kernel and stage, kernels as asked for."""
    order = {name: i for i, name in enumerate(report.kernels)}
    groups: dict[tuple[str, Stage], list[Answer]] = {}
    for answer in questions(report):
        groups.setdefault((answer.record.kernel, answer.stage), []).append(answer)
    keys = sorted(groups, key=lambda key: (order.get(key[0], len(order)), STAGES.index(key[1])))
    return tuple(
        StageCount(
            kernel=kernel,
            stage=stage,
            status=Counter(answer.record.status for answer in groups[kernel, stage]),
            seconds=sum(answer.seconds for answer in groups[kernel, stage]),
        )
        for kernel, stage in keys
    )


def stage_sheet(report: GateReport) -> Sheet:
    """The counts as a table."""
    columns = ("kernel", "stage", "asked", "passed", "failed", "odd", "not taken", "work")
    sheet = Sheet("by kernel and stage", columns, words=2)
    failed, doubtful = sides(report)
    for count in stage_counts(report):
        bad, odd = count.of(failed), count.of(doubtful)
        numbers = (
            _number(count.asked),
            _number(count.status["pass"]),
            _number(bad, Cell(f"{bad:,}", "bad")),
            _number(odd, Cell(f"{odd:,}", "notable")),
            _number(count.status["unsupported"]),
            Cell(figures.duration(count.seconds)),
        )
        sheet.lines.append(Line((Cell(count.kernel), Cell(count.stage), *numbers)))
    return sheet


def _number(count: int, cell: Cell | None = None) -> Cell:
    return cell or Cell(f"{count:,}") if count else Cell(figures.NOTHING, "dim")


def baseline_sheet(report: GateReport) -> Sheet | None:
    """How many cases of each kernel stand how beside the baseline; None without one."""
    if not report.changes:
        return None
    sheet = Sheet(f"beside the baseline {report.baseline}", ("kernel", *_STANDINGS))
    for kernel in dict.fromkeys(change.kernel for change in report.changes):
        count = Counter(c.standing for c in report.changes if c.kernel == kernel)
        cells = [_number(count["identical"]), _number(count["within rounding"])]
        cells += [_number(count["better"], Cell(f"{count['better']:,}", "notable"))]
        cells += [_number(count["worse"], Cell(f"{count['worse']:,}", "bad"))]
        cells += [_number(count["new"]), _number(count["gone"])]
        sheet.lines.append(Line((Cell(kernel), *cells)))
    return sheet


def changes_shown(report: GateReport) -> tuple[list[Change], int]:
    """Changes for the worse, then for the better, of which the first are shown; how many more."""
    told = [c for standing in ("worse", "better") for c in report.changes if c.standing == standing]
    return told[:_MOST_CHANGES], len(told[_MOST_CHANGES:])


def device_of(report: GateReport, answer: Answer) -> str:
    """``cpu`` or ``cuda``; empty where the environment is not known."""
    environment = report.environments.get(answer.record.environment)
    if environment is None:
        return ""
    return "cpu" if environment.device == "cpu" else "cuda"


def diagnosis_lines(report: GateReport, failing: Failing) -> list[str]:
    """A failure in full: what was asked, what is wrong, and how to see it again."""
    shown = failing.shown
    text = diagnosis_text(
        shown.record,
        kernel=shown.record.kernel,
        device=device_of(report, shown),
        test=shown.test or failing.answer.test,
    )
    lines = text.split("\n")
    if failing.smallest is not None:
        original = problem_line(problem_of(failing.answer.record))
        lines.append(f"  shrunk     from {one_line(original)}")
    more = like_it(failing)
    lines += [f"  like it    {more}"] if more else []
    return [*lines, f"Reproduce: {one_line(repro_command(failing.id))}"]


def like_it(failing: Failing) -> str:
    """``12 more: ID, ID, ID, …``; empty where it is the only one."""
    others = failing.others
    if not others:
        return ""
    named = [one.failure or one.record.case_id for one in others[:_MOST_NAMED]]
    cut = ", …" if len(others) > _MOST_NAMED else ""
    return f"{len(others):,} more: {one_line(', '.join(named))}{cut}"


def missing(report: GateReport) -> Iterator[str]:
    """What was not looked at, and why, a line each."""
    yield from (f"the gate itself: {line}" for line in report.harness)
    if report.unfinished:
        why = f": {report.unfinished_because.rstrip('.')}" if report.unfinished_because else ""
        yield f"{report.unfinished:,} questions were not asked{why}. The same command goes on."
    yield from (f"{kernel} is absent: {reason}" for kernel, reason in report.absent.items())
    for kernel in untested(report):
        if kernel not in report.absent:
            yield f"{kernel} is untested: no answer says anything of it"
    left = [stage for stage in STAGES if stage not in report.stages]
    if left:
        yield f"not part of this run: {', '.join(left)}"
    if report.shard:
        yield f"this is part {report.shard} of a run that was shared out"
    reasons = Counter(
        (answer.record.kernel, answer.record.reason or "no reason given")
        for answer in questions(report)
        if answer.record.status == "unsupported"
    )
    for (kernel, reason), count in reasons.most_common(_MOST_REASONS):
        yield f"{kernel} takes {count:,} of the questions not: {reason}"
    if len(reasons) > _MOST_REASONS:
        rest = sum(count for _, count in reasons.most_common()[_MOST_REASONS:])
        yield f"and {rest:,} more are not taken, for {len(reasons) - _MOST_REASONS:,} other reasons"
