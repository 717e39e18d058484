"""A gate's verdict: its failures by cause, worst first, and its exit code."""

from __future__ import annotations

import itertools
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from attncheck.core.grouping import group_by
from attncheck.core.judgement import RULE_ORDER
from attncheck.records.failure_causes import CauseGroup, group_by_cause
from attncheck.records.problem_summary import problem_of
from attncheck.records.record import FAILED_STATUSES, Record, Status
from attncheck.records.run_reports import Answer, Change, GateReport
from attncheck.reporting.document import Look, Verdict
from attncheck.reporting.exit_codes import FAILED, INCOMPLETE, PASSED, UNTESTED
from attncheck.reporting.number_text import plural
from attncheck.reporting.record_text import gradient_shares

DOUBTFUL: tuple[Status, ...] = ("flaky", "oracle disagrees", "inconclusive", "warn")
"""Statuses that are no pass, and do not fail a kernel by themselves."""

_CASES_NAMED = 3
_LONGEST_COMMAND = 10_000  # characters that are parsed, since shlex takes quadratic time
# The worst first: the death of a process is worse than any wrong number.
_ORDER: tuple[Status, ...] = (
    *("crash", "timeout", "oom", "fail", "error", "flaky", "oracle disagrees", "inconclusive"),
    *("warn", "unsupported", "pass"),
)
_STRICT: frozenset[Status] = frozenset({"warn", "inconclusive"})
_TESTED: frozenset[Status] = frozenset(
    {"pass", "warn", "fail", "flaky", "error", "crash", "timeout", "oom"}
)
"""Statuses that show something about a kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Conditions that fail a gate besides failures."""

    strict: bool = False  # whether ``warn`` and ``inconclusive`` fail
    # Whether cases that are better than the baseline or gone fail, until they are accepted.
    strict_baseline: bool = False
    flaky: int = 0  # number of flaky answers that do not fail


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureGroup:
    """Answers of one kernel that are wrong for the same cause, as far as known."""

    answer: Answer  # the one to look at first
    # The common cause; None for an answer that was not grouped.
    cause: CauseGroup | None = None
    # The same failure on the smallest Case that has it; None if it was not shrunk.
    smallest: Answer | None = None
    others: tuple[Answer, ...] = ()  # the rest

    @property
    def shown(self) -> Answer:
        """Return the answer that readers see: the smallest there is."""
        return self.smallest or self.answer

    @property
    def id(self) -> str:
        """Return the argument of ``attncheck repro``; the Case's id if no failure is kept."""
        return self.shown.failure or self.answer.failure or self.shown.record.case_id


def policy_of(report: GateReport) -> Policy:
    """Return the policy that the command line of ``report`` set."""
    words = _command_words(report)
    flaky = 0
    for name, number in _options(words):
        if name == "--flaky" and number.isascii() and number.isdigit():
            flaky = int(number[:9])
    return Policy(
        strict="--strict" in words, strict_baseline="--strict-baseline" in words, flaky=flaky
    )


def chosen_dtypes(report: GateReport) -> tuple[str, ...]:
    """Return the dtypes that the command line of ``report`` chose; empty for all."""
    return tuple(value for name, value in _options(_command_words(report)) if name == "--dtype")


def _command_words(report: GateReport) -> list[str]:
    words = report.command.split()
    with suppress(ValueError):  # it may be malformed
        # In a longer one a quoted word may be taken for an option, but no option is missed.
        words = shlex.split(report.command) if len(report.command) <= _LONGEST_COMMAND else words
    return words


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each word as if it were an option, and its value: after ``=``, or the next word."""
    for word, following in itertools.pairwise([*words, ""]):
        name, _, value = word.partition("=")
        yield name, value or following


def gate_exit_code(report: GateReport, policy: Policy | None = None) -> int:
    """Return 0 if passed, 1 if a check failed, 3 if incomplete or broken, 5 if nothing was tested.

    One kernel without any test is enough for 5. The policy defaults to that of the report's
    command line.
    """
    policy = policy or policy_of(report)
    answers = questions(report)
    statuses = Counter(answer.record.status for answer in answers)
    failing = failing_statuses(answers, policy)
    if any(statuses[status] for status in failing) or failing_changes(report, policy):
        return FAILED
    if report.harness or report.unfinished or statuses["oracle disagrees"]:
        return INCOMPLETE
    return UNTESTED if untested_kernels(report) or not _TESTED & statuses.keys() else PASSED


def untested_kernels(report: GateReport) -> tuple[str, ...]:
    """Return kernels that were not tested: absent, supporting no question, or without any verdict.

    Return none for a part of a run or an unfinished one, since the rest may test them.
    """
    if report.shard or report.unfinished:  # too early to know
        return ()
    tested = {a.record.kernel for a in questions(report) if a.record.status in _TESTED}
    return tuple(kernel for kernel in (report.kernels | report.absent) if kernel not in tested)


def gate_verdict(report: GateReport) -> Verdict:
    """Return the verdict by the report's own policy: a word, then failures and what is missing."""
    policy = policy_of(report)
    answers = questions(report)
    failing = failing_statuses(answers, policy)
    count = Counter(answer.record.status for answer in answers)
    failed = sum(count[status] for status in failing)
    number = plural(count.total() - count["unsupported"], "question")
    changed, untested = len(failing_changes(report, policy)), len(untested_kernels(report))
    parts = {
        f"{changed:,} not as the baseline": changed,
        _compared_text(report): sum(one.standing == "not asked" for one in report.changes),
        f"{report.unfinished:,} not asked": report.unfinished,
        **{f"{count[s]:,} {s}": count[s] for s in DOUBTFUL if s not in failing},
        f"{count['unsupported']:,} not supported": count["unsupported"],
        f"{plural(untested, 'kernel')} untested": untested,
        f"{plural(len(report.harness), 'error')} of the gate itself": len(report.harness),
    }
    code = gate_exit_code(report, policy)
    words: dict[int, tuple[str, Look]] = {
        PASSED: ("PASS", "good"),
        FAILED: ("FAIL", "bad"),
        INCOMPLETE: ("INCOMPLETE", "notable"),
        UNTESTED: ("NOTHING TESTED", "notable"),
    }
    word, look = words[code]
    if code == UNTESTED and _TESTED & count.keys():
        word = "NOT ALL TESTED"
    first = f"{failed:,} of {number} failed" if failed else number
    return Verdict(word, ", ".join([first, *(text for text, n in parts.items() if n)]), look)


def _compared_text(report: GateReport) -> str:
    """Return ``1 of 12 baseline cases compared (--dtype leaves 11 out)``."""
    count = Counter(change.standing for change in report.changes)
    known = count.total() - count["new"]
    compared = known - count["gone"] - count["not asked"]
    cases = f"{compared:,} of {plural(known, 'baseline case')} compared"
    return f"{cases} (--dtype leaves {count['not asked']:,} out)"


def questions(report: GateReport) -> tuple[Answer, ...]:
    """Return the answers to planned questions, without those from shrinking."""
    return tuple(answer for answer in report.answers if not answer.smallest_of)


def failing_changes(report: GateReport, policy: Policy) -> tuple[Change, ...]:
    """Return the changes from the baseline that fail under ``policy``."""
    standings = {"worse", "better", "gone"} if policy.strict_baseline else {"worse"}
    return tuple(change for change in report.changes if change.standing in standings)


def group_changes(changes: Iterable[Change]) -> list[tuple[Change, str]]:
    """Return the first of each kernel's changes with one reason, and the cases of that reason.

    A single faulty line mostly changes many cases of a baseline for the same reason.
    """
    alike = group_by(changes, lambda one: (one.standing, one.kernel, one.reason))
    return [(group[0], _cases_text(group)) for group in alike.values()]


def _cases_text(changes: Sequence[Change]) -> str:
    ids = [change.case_id for change in changes]
    if not ids[1:]:
        return f"{changes[0].kernel} {ids[0]}"
    cut = ", …" if ids[_CASES_NAMED:] else ""
    return f"{len(ids):,} cases of {changes[0].kernel} ({', '.join(ids[:_CASES_NAMED])}{cut})"


def failing_statuses(answers: Iterable[Answer], policy: Policy) -> frozenset[Status]:
    """Return the statuses that fail under ``policy``."""
    flaky = sum(answer.record.status == "flaky" for answer in answers) > policy.flaky
    return FAILED_STATUSES | (_STRICT if policy.strict else set()) | ({"flaky"} if flaky else set())


def status_sides(report: GateReport) -> tuple[frozenset[Status], frozenset[Status]]:
    """Return the statuses that fail ``report``, and those that are doubtful without failing it."""
    failing = failing_statuses(questions(report), policy_of(report))
    return failing, frozenset(DOUBTFUL) - failing


def failure_groups(report: GateReport) -> tuple[FailureGroup, ...]:
    """Return failures by cause: the worst status first, then known causes, then frequent ones."""
    answers = questions(report)
    failing = failing_statuses(answers, policy_of(report))
    # By kernel too, since another kernel's failure of the same Case may shrink differently.
    shrunk_answers = (answer for answer in report.answers if answer.smallest_of)
    smallest = group_by(shrunk_answers, lambda one: (one.record.kernel, one.smallest_of))
    failed = [answer for answer in answers if answer.record.status in failing]
    groups = []
    smaller = {
        i: smallest.get((a.record.kernel, a.record.case_id), []) for i, a in enumerate(failed)
    }
    evidence = {i: [one.record for one in each] for i, each in smaller.items()}
    for cause in group_by_cause([answer.record for answer in failed], evidence):
        shrunk = {i: one for i in cause.members for one in smaller[i] if cause.has(one.record)}

        def place(i: int, shrunk: dict[int, Answer] = shrunk) -> tuple[int, tuple[int, int, float]]:
            return problem_of(shrunk.get(i, failed[i]).record).size, _rank(failed[i].record)

        # The smallest Case first, and the worst answer among equals.
        first, *others = sorted(cause.members, key=place)
        groups.append(
            FailureGroup(
                answer=failed[first],
                cause=cause,
                smallest=shrunk.get(first),
                others=tuple(failed[i] for i in others),
            )
        )

    def order(group: FailureGroup) -> tuple[int, bool, int, tuple[int, int, float]]:
        rank = min(_rank(one.record) for one in (group.answer, *group.others))
        unknown = group.cause is None or not group.cause.known
        return rank[0], unknown, -len(group.others), rank

    return tuple(sorted(groups, key=order))


def _rank(record: Record) -> tuple[int, int, float]:
    judgement = record.judgement
    place = _ORDER.index(record.status)
    if judgement is None:
        return place, len(RULE_ORDER), 0.0
    shares = [judgement.out_over_bound, judgement.lse_over_bound, *gradient_shares(record).values()]
    sizes = [math.inf if math.isnan(share or 0.0) else share or 0.0 for share in shares]
    return place, RULE_ORDER.index(judgement.rule), -max(sizes)
