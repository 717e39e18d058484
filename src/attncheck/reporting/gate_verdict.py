"""A gate's verdict: what failed, worst first, and the exit code that it deserves."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attncheck.core.judgement import Rule
from attncheck.records.record import FAILED_STATUSES
from attncheck.reporting.gradients import gradient_shares

if TYPE_CHECKING:
    from collections.abc import Iterable

    from attncheck.records.record import Record, Status
    from attncheck.records.run_reports import Answer, Change, GateReport

__all__ = [
    "FAILED",
    "INCOMPLETE",
    "ODD",
    "PASSED",
    "UNTESTED",
    "Failing",
    "Policy",
    "exit_code",
    "failing",
    "failing_statuses",
    "policy_of",
    "questions",
    "sentence",
    "sides",
    "untested",
    "verdict",
]

PASSED, FAILED, INCOMPLETE, UNTESTED = 0, 1, 3, 5
"""Exit codes."""

_RULES: tuple[str, ...] = Rule.__args__  # type: ignore[attr-defined]  # a Literal has them
_LONGEST_COMMAND = 10_000  # characters: shlex takes the square of the time
# The worst first: a process that is lost says more of a kernel than any number.
_ORDER: tuple[Status, ...] = (
    *("crash", "timeout", "oom", "fail", "error", "flaky", "oracle disagrees", "inconclusive"),
    *("warn", "unsupported", "pass"),
)
ODD: tuple[Status, ...] = ("flaky", "oracle disagrees", "inconclusive", "warn")
"""Those that are no pass, and fail no kernel by themselves."""
_IN_DOUBT: frozenset[Status] = frozenset({"warn", "inconclusive"})
_TESTED: frozenset[Status] = frozenset(
    {"pass", "warn", "fail", "flaky", "error", "crash", "timeout", "oom"}
)
"""Those that say something of a kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What fails a gate besides what is wrong.

    Attributes:
        strict: Whether ``warn`` and ``inconclusive`` do.
        strict_baseline: Whether a case that is better than its baseline does, or gone: it is to be
            accepted.
        flaky: Answers that may be flaky.
    """

    strict: bool = False
    strict_baseline: bool = False
    flaky: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing:
    """Answers of one kernel that are wrong in the same way.

    Attributes:
        answer: The one to look at first.
        smallest: The same failure on the smallest Case that has it; None where none was looked for.
        others: The rest.
    """

    answer: Answer
    smallest: Answer | None = None
    others: tuple[Answer, ...] = ()

    @property
    def shown(self) -> Answer:
        """What a reader is shown: the smallest there is."""
        return self.smallest or self.answer

    @property
    def id(self) -> str:
        """What ``attncheck repro`` is asked for; empty where nothing is kept."""
        return self.shown.failure or self.answer.failure or self.shown.record.case_id


def policy_of(report: GateReport) -> Policy:
    """What the command line of ``report`` asked for."""
    typed = report.command[:_LONGEST_COMMAND]
    try:
        words = shlex.split(typed)
    except ValueError:  # it is foreign, and may be cut in the middle of a quoted word
        words = typed.split()
    allowed = 0
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, _, value = word.partition("=")
        number = value or following
        if name == "--flaky" and number.isascii() and number.isdigit():
            allowed = int(number[:9])
    return Policy(
        strict="--strict" in words, strict_baseline="--strict-baseline" in words, flaky=allowed
    )


def exit_code(
    report: GateReport, *, strict: bool = False, strict_baseline: bool = False, flaky: int = 0
) -> int:
    """The exit code: 0 passed, 1 a check failed, 3 incomplete or infrastructure, 5 nothing tested.

    One kernel of which nothing was tested is enough for 5.

    Args:
        report: What was found.
        strict: Whether ``warn`` and ``inconclusive`` fail too.
        strict_baseline: Whether a case that is better than its baseline, or gone, fails too.
        flaky: How many answers may be flaky.
    """
    policy = Policy(strict=strict, strict_baseline=strict_baseline, flaky=flaky)
    statuses = Counter(answer.record.status for answer in questions(report))
    if _fails(report, statuses, policy):
        return FAILED
    if report.harness or report.unfinished or statuses["oracle disagrees"]:
        return INCOMPLETE
    return UNTESTED if untested(report) or not _TESTED & statuses.keys() else PASSED


def untested(report: GateReport) -> tuple[str, ...]:
    """Kernels of which nothing was tested: they are absent, take nothing, or nobody could tell.

    None of a part of a run, or of one that is not finished: the rest may say something of them.
    """
    if report.shard or report.unfinished:
        return ()
    asked = questions(report)
    tested = {a.record.kernel for a in asked if a.record.status in _TESTED}
    return tuple(kernel for kernel in (report.kernels | report.absent) if kernel not in tested)


def verdict(report: GateReport, code: int) -> str:
    """The exit code ``code`` in a word."""
    if code == UNTESTED:
        some = any(answer.record.status in _TESTED for answer in questions(report))
        return "NOT ALL TESTED" if some else "NOTHING TESTED"
    return {PASSED: "PASS", FAILED: "FAIL", INCOMPLETE: "INCOMPLETE"}[code]


def questions(report: GateReport) -> tuple[Answer, ...]:
    """The answers to what was planned: not those that shrinking found."""
    return tuple(answer for answer in report.answers if not answer.smallest_of)


def failing(report: GateReport, policy: Policy) -> tuple[Failing, ...]:
    """What fails, worst first: alike answers of one kernel as one."""
    asked = questions(report)
    wrong = failing_statuses(asked, policy)
    smallest: dict[tuple[str, str], Answer] = {}
    for answer in report.answers:
        if answer.smallest_of:
            smallest.setdefault((answer.record.kernel, answer.smallest_of), answer)
    groups: dict[tuple[str, ...], list[Answer]] = {}
    for answer in asked:
        if answer.record.status in wrong:
            groups.setdefault(_kind(answer.record), []).append(answer)
    found = [_failing(answers, smallest) for answers in groups.values()]
    return tuple(sorted(found, key=lambda one: _rank(one.answer.record)))


def sentence(report: GateReport, policy: Policy) -> str:
    """The verdict in one line."""
    asked = questions(report)
    count = Counter(answer.record.status for answer in asked)
    answered = sum(count.values()) - count["unsupported"]
    failed = sum(count[status] for status in failing_statuses(asked, policy))
    regressed = len(_regressed(report.changes, policy))
    code = exit_code(
        report, strict=policy.strict, strict_baseline=policy.strict_baseline, flaky=policy.flaky
    )
    asked_now = f"{answered:,} question{'' if answered == 1 else 's'}"
    said = [f"{failed:,} of {asked_now} failed" if failed else asked_now]
    said += [f"{regressed:,} not as the baseline"] if regressed else []
    said += [f"{report.unfinished:,} not asked"] if report.unfinished else []
    said += [
        f"{count[s]:,} {s}" for s in ODD if count[s] and s not in failing_statuses(asked, policy)
    ]
    said += [f"{count['unsupported']:,} not taken"] if count["unsupported"] else []
    left = len(untested(report))
    said += [f"{left:,} kernel{'' if left == 1 else 's'} untested"] if left else []
    said += [f"{len(report.harness):,} of the gate itself"] if report.harness else []
    return f"{verdict(report, code)}  {', '.join(said)}"


def _fails(report: GateReport, statuses: Counter[Status], policy: Policy) -> bool:
    wrong = FAILED_STATUSES | (_IN_DOUBT if policy.strict else set())
    return (
        any(statuses[status] for status in wrong)
        or statuses["flaky"] > policy.flaky
        or bool(_regressed(report.changes, policy))
    )


def _regressed(changes: Iterable[Change], policy: Policy) -> list[Change]:
    bad = {"worse", "better", "gone"} if policy.strict_baseline else {"worse"}
    return [change for change in changes if change.standing in bad]


def failing_statuses(asked: Iterable[Answer], policy: Policy) -> frozenset[Status]:
    """Those that fail under ``policy``."""
    flaky = sum(answer.record.status == "flaky" for answer in asked) > policy.flaky
    return (
        FAILED_STATUSES | (_IN_DOUBT if policy.strict else set()) | ({"flaky"} if flaky else set())
    )


def sides(report: GateReport) -> tuple[frozenset[Status], frozenset[Status]]:
    """Statuses that fail ``report``, and those that are odd without failing it."""
    wrong = failing_statuses(questions(report), policy_of(report))
    return wrong, frozenset(ODD) - wrong


def _kind(record: Record) -> tuple[str, ...]:
    rule = record.judgement.rule if record.judgement else ""
    return record.kernel, record.status, rule, str(record.case.get("question", ""))


def _failing(answers: list[Answer], smallest: dict[tuple[str, str], Answer]) -> Failing:
    """The worst of ``answers`` of which a smallest Case is known, or the worst of all."""

    def found(answer: Answer) -> Answer | None:
        return smallest.get((answer.record.kernel, answer.record.case_id))

    first, *others = sorted(answers, key=lambda one: (found(one) is None, _rank(one.record)))
    return Failing(answer=first, smallest=found(first), others=tuple(others))


def _rank(record: Record) -> tuple[int, int, float]:
    found = record.judgement
    place = _ORDER.index(record.status)
    if found is None:
        return place, len(_RULES), 0.0
    shares = (found.out_over_bound, found.lse_over_bound, *gradient_shares(record).values())
    sizes = [math.inf if math.isnan(share or 0.0) else share or 0.0 for share in shares]
    return place, _RULES.index(found.rule), -max(sizes)
