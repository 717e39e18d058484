"""A gate's verdict: what failed, worst first, and the exit code that it deserves."""

from __future__ import annotations

import itertools
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
"""Those that are no pass, and fail no kernel by themselves."""

_CASES_NAMED = 3
_LONGEST_COMMAND = 10_000  # characters: shlex takes the square of the time
# The worst first: a process that is lost says more of a kernel than any number.
_ORDER: tuple[Status, ...] = (
    *("crash", "timeout", "oom", "fail", "error", "flaky", "oracle disagrees", "inconclusive"),
    *("warn", "unsupported", "pass"),
)
_STRICT: frozenset[Status] = frozenset({"warn", "inconclusive"})
_TESTED: frozenset[Status] = frozenset(
    {"pass", "warn", "fail", "flaky", "error", "crash", "timeout", "oom"}
)
"""Those that say something of a kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Conditions that fail a gate besides what is wrong."""

    strict: bool = False  # whether ``warn`` and ``inconclusive`` do
    # Whether a case that is better than its baseline does, or gone: it is to be accepted.
    strict_baseline: bool = False
    flaky: int = 0  # answers that may be flaky


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureGroup:
    """Answers of one kernel that are wrong for the same cause, as far as is known."""

    answer: Answer  # the one to look at first
    # What is known of it; None of an answer that is looked at alone.
    cause: CauseGroup | None = None
    # The same failure on the smallest Case that has it; None where none was looked for.
    smallest: Answer | None = None
    others: tuple[Answer, ...] = ()  # the rest

    @property
    def shown(self) -> Answer:
        """The Record that a reader is shown: the smallest there is."""
        return self.smallest or self.answer

    @property
    def id(self) -> str:
        """The argument of ``attncheck repro``; the Case's id where nothing is kept."""
        return self.shown.failure or self.answer.failure or self.shown.record.case_id


def policy_of(report: GateReport) -> Policy:
    """Conditions that the command line of ``report`` set."""
    typed = report.command[:_LONGEST_COMMAND]
    try:
        words = shlex.split(typed)
    except ValueError:  # it is foreign, and may be cut in the middle of a quoted word
        words = typed.split()
    flaky = 0
    for word, following in itertools.pairwise([*words, ""]):
        name, _, value = word.partition("=")
        number = value or following
        if name == "--flaky" and number.isascii() and number.isdigit():
            flaky = int(number[:9])
    return Policy(
        strict="--strict" in words, strict_baseline="--strict-baseline" in words, flaky=flaky
    )


def gate_exit_code(report: GateReport, policy: Policy | None = None) -> int:
    """The exit code: 0 passed, 1 a check failed, 3 incomplete or infrastructure, 5 nothing tested.

    One kernel of which nothing was tested is enough for 5. The policy is that of the report's
    command line unless another is given.
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
    """Kernels of which nothing was tested: they are absent, take nothing, or nobody could tell.

    None of a part of a run, or of one that is not finished: the rest may say something of them.
    """
    if report.shard or report.unfinished:  # it is too early to say
        return ()
    tested = {a.record.kernel for a in questions(report) if a.record.status in _TESTED}
    return tuple(kernel for kernel in (report.kernels | report.absent) if kernel not in tested)


def gate_verdict(report: GateReport) -> Verdict:
    """The verdict by the report's own policy: a word, then what failed and what is missing."""
    policy = policy_of(report)
    answers = questions(report)
    failing = failing_statuses(answers, policy)
    count = Counter(answer.record.status for answer in answers)
    failed = sum(count[status] for status in failing)
    number = plural(count.total() - count["unsupported"], "question")
    changed, untested = len(failing_changes(report, policy)), len(untested_kernels(report))
    parts = {
        f"{changed:,} not as the baseline": changed,
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


def questions(report: GateReport) -> tuple[Answer, ...]:
    """The answers to what was planned: not those that shrinking found."""
    return tuple(answer for answer in report.answers if not answer.smallest_of)


def failing_changes(report: GateReport, policy: Policy) -> tuple[Change, ...]:
    """Cases whose change from the baseline fails under ``policy``."""
    standings = {"worse", "better", "gone"} if policy.strict_baseline else {"worse"}
    return tuple(change for change in report.changes if change.standing in standings)


def alike_changes(changes: Iterable[Change]) -> list[tuple[Change, str]]:
    """Return the first of each kernel's changes of one reason, and which cases they are of.

    A fault that one changed line makes shows in most cases of a baseline, in the same words.
    """
    alike: dict[tuple[str, str, str], list[Change]] = {}
    for change in changes:
        key = (change.standing, change.kernel, change.reason)
        alike.setdefault(key, []).append(change)
    return [(group[0], _cases_text(group)) for group in alike.values()]


def _cases_text(changes: Sequence[Change]) -> str:
    ids = [change.case_id for change in changes]
    if not ids[1:]:
        return f"{changes[0].kernel} {ids[0]}"
    cut = ", …" if ids[_CASES_NAMED:] else ""
    return f"{len(ids):,} cases of {changes[0].kernel} ({', '.join(ids[:_CASES_NAMED])}{cut})"


def failing_statuses(answers: Iterable[Answer], policy: Policy) -> frozenset[Status]:
    """Those that fail under ``policy``."""
    flaky = sum(answer.record.status == "flaky" for answer in answers) > policy.flaky
    return FAILED_STATUSES | (_STRICT if policy.strict else set()) | ({"flaky"} if flaky else set())


def status_sides(report: GateReport) -> tuple[frozenset[Status], frozenset[Status]]:
    """Statuses that fail ``report``, and those that are doubtful without failing it."""
    failing = failing_statuses(questions(report), policy_of(report))
    return failing, frozenset(DOUBTFUL) - failing


def failure_groups(report: GateReport) -> tuple[FailureGroup, ...]:
    """Failures by their cause, worst first: of one status known ones, then the most frequent."""
    answers = questions(report)
    failing = failing_statuses(answers, policy_of(report))
    # By kernel too: another kernel may have shrunk the same Case to something else.
    smallest: dict[tuple[str, str], list[Answer]] = {}
    for answer in report.answers:
        if answer.smallest_of:
            smallest.setdefault((answer.record.kernel, answer.smallest_of), []).append(answer)
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

        # The smallest Case of all; of equals the worst answer.
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
