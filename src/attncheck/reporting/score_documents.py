"""Pages of scores: planted faults, a user's own tests, sensitivity, properties, baselines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from attncheck.core.grouping import group_by
from attncheck.records import fault_scores, run_reports
from attncheck.records.fault_scores import ATTNCHECK_RULE, SCORED
from attncheck.records.record import FAILED_STATUSES
from attncheck.reporting import number_text
from attncheck.reporting.document import (
    DASH,
    Cell,
    Column,
    Document,
    Look,
    Note,
    Row,
    Section,
    columns,
    count_cell,
    row,
    table_section,
)
from attncheck.reporting.record_text import environment_facts

# Scores of the gate on planted faults

_FAULT_LOOKS: dict[fault_scores.FaultOutcome, Look] = {
    "caught": "good",
    "missed": "bad",
    "harness": "bad",
}
_CONTROL_LOOKS: dict[str, Look] = {"clean": "good", "flagged": "bad", "harness": "bad"}
_SHORT_RULES = {"allclose(1e-2)": "allclose", "1.1× mean": "mean"}


def fault_document(report: fault_scores.FaultReport) -> Document:
    """Return the page of a fault report: by host, category and fault; then controls."""
    sections = []
    hosts = group_by(report.scores, lambda score: score.host)
    nowhere = hosts.pop("", [])
    for host, scores in hosts.items():
        sections.append(_totals(host, [total for total in report.totals if total.host == host]))
        # A fault that leaves every bit unchanged cannot be caught, so these are listed apart.
        sections.append(_fault_by_fault(host, [s for s in scores if s.outcome != "equivalent"]))
        if equivalent := [score for score in scores if score.outcome == "equivalent"]:
            sections.append(_reasons(f"{host}: no fault in this host", equivalent))
    sections += [_controls(report.controls)] if report.controls else []
    sections += [_reasons("Planted nowhere", nowhere)] if nowhere else []
    notes = []
    if any(score.peers for score in report.scores):
        notes.append(
            "Under another project's rule: after how many of the plain problems it refuses the "
            "kernel too; 0/n where it does on none of n. Those where it refuses the right kernel "
            "as well do not count."
        )
    if any(score.diagnosis for score in report.scores):
        notes.append("named: at which place the diagnosis names this fault.")
    if report.unfinished:
        notes.append(f"{report.unfinished} have no score: {report.unfinished_because}.")
    return Document(
        title="Planted faults",
        command=report.command,
        facts=run_facts(report, f"tier {report.tier}", f"on {report.device}"),
        sections=tuple(sections),
        notes=tuple(notes),
        closing=(Note(_score_sentence(report), "plain"),),
    )


def run_facts(
    report: fault_scores.FaultReport | fault_scores.MutantReport, *how: str
) -> tuple[str, ...]:
    """Return the environments of a run, a line each; then ``how``, its start and its duration."""
    took = number_text.duration(report.seconds).strip() if report.seconds else ""
    run = " · ".join(filter(None, [*how, report.started, took]))
    return (*map(environment_facts, report.environments.values()), run)


def _totals(host: str, totals: Sequence[fault_scores.Total]) -> Section:
    rules = list(dict.fromkeys(rule for total in totals for rule in total.peers))
    heads = [_SHORT_RULES.get(rule, rule) for rule in rules]
    numbers = ("caught", "missed", "median s", "problems", *heads, "named 1st", "≤ 3rd")
    rows = []
    # The total of the host, which has no category, goes below its categories.
    for one in sorted(totals, key=lambda each: not each.category):
        scored = one.caught + one.missed
        named_counts = (one.named_first, one.named_third)
        # Shown only beside the total, since the categories would repeat it.
        unscored = f"{one.unscored} not scored" if one.unscored and not one.category else ""
        cells = (
            one.category or "all",
            Cell(f"{one.caught}/{scored}", "plain" if one.caught < scored else "good"),
            Cell(str(one.missed), "bad" if one.missed else "dim"),
            None if one.seconds is None else f"{one.seconds:.1f}",
            None if one.problems is None else f"{one.problems:g}",
            *(Cell(f"{one.peers.get(rule, 0)}/{scored}", "dim") for rule in rules),
            *(f"{number}/{one.diagnosed}" if one.diagnosed else None for number in named_counts),
        )
        rows.append(row(*cells, remarks=[unscored]))
    return table_section(f"{host}: score by category", columns(["category"], numbers, cut=1), rows)


def _fault_by_fault(host: str, scores: Sequence[fault_scores.FaultScore]) -> Section:
    rules = list(dict.fromkeys(peer.rule for score in scores for peer in score.peers))
    numbers = ("problems", "s", *(_SHORT_RULES.get(rule, rule) for rule in rules), "named")
    headings = (
        Column("fault", words=True, cut=True),
        Column("category", words=True, spare=1),
        *columns(["outcome", "by", "smallest"], numbers, cut=3),
    )
    rows = (_fault(score, rules) for score in scores)
    return table_section(f"{host}: fault by fault", headings, rows)


def _fault(score: fault_scores.FaultScore, rules: list[str]) -> Row:
    detection, peers = score.caught, {each.rule: each for each in score.peers}
    smallest = (detection.shrunk or detection.first) if detection else None
    rank = str(score.rank) if score.rank else Cell("no", "notable")
    first = detection.first if detection else None
    remarks = [score.reason]
    if score.outcome == "missed":
        passed = f"{score.problems} problems, and every answer was right"
        remarks.append(f"{score.summary or score.fault}: {passed}")
    if smallest:
        rule = f" ({smallest.rule})" if smallest.rule else ""
        remarks.append(f"{smallest.status}{rule}: {smallest.reason}")
    if score.diagnosis:
        best = score.diagnosis[0]
        remarks.append(f"diagnosis: {best.sentence or best.model}")
    return row(
        score.fault,
        Cell(score.category, "dim"),
        Cell(score.outcome, _FAULT_LOOKS.get(score.outcome, "dim")),
        f"{first.stage} {first.question}" if first else None,
        Cell(smallest.problem, "dim") if smallest else None,
        *_cost(score, scored=score.outcome in SCORED),
        *(_peer(peers.get(rule)) for rule in rules),
        rank if score.diagnosis else None,
        remarks=remarks,
    )


def _cost(
    score: fault_scores.FaultScore | fault_scores.ControlScore, *, scored: bool
) -> tuple[Cell, Cell]:
    """Return the cells of the problems and seconds that a score took; dashes if not scored."""
    if not scored:
        return DASH, DASH
    return Cell(str(score.problems)), Cell(f"{score.seconds:.1f}")


def _peer(verdict: fault_scores.PeerVerdict | None) -> Cell:
    if verdict is None or not verdict.problems:
        return DASH
    if verdict.caught:
        return Cell(str(verdict.problems))
    # Problems on which the rule refuses a right kernel too are no evidence about the fault.
    return Cell(f"0/{verdict.problems - verdict.alarms}", "notable")


def _reasons(title: str, scores: Sequence[fault_scores.FaultScore]) -> Section:
    rows = (row(score.fault, Cell(score.reason, "dim")) for score in scores)
    return table_section(title, columns(["fault", "why"], cut=2), rows)


def _controls(controls: Sequence[fault_scores.ControlScore]) -> Section:
    rows = []
    for score in controls:
        outcome = Cell(score.outcome, _CONTROL_LOOKS.get(score.outcome, "dim"))
        cost = _cost(score, scored=score.outcome in {"clean", "flagged"})
        flagged = (
            f"{one.stage} {one.question}: {one.status} on {one.problem}: {one.reason}"
            for one in score.flagged
        )
        remarks = (score.reason, *flagged)
        rows.append(row(score.control, score.host, outcome, *cost, remarks=remarks))
    headings = columns(["control", "host", "outcome"], ["problems", "s"], cut=1)
    return table_section("Controls: changes that leave a kernel right", headings, rows)


def _score_sentence(report: fault_scores.FaultReport) -> str:
    outcomes = Counter(score.outcome for score in report.scores)
    controls = Counter(score.outcome for score in report.controls)
    scored = outcomes["caught"] + outcomes["missed"]
    parts = [f"{outcomes['caught']} of {scored} faults caught"] if scored else []
    broken = outcomes["harness"] + controls["harness"]
    # Always mentioned: a failing harness scores fewer faults, which would look better.
    parts += [f"{broken} could not be scored"] if broken else []
    scored_controls = controls["clean"] + controls["flagged"]
    parts += (
        [f"{controls['flagged']} of {scored_controls} controls flagged"] if scored_controls else []
    )
    return f"{', '.join(parts if scored else ['no fault was scored', *parts])}."


# A user's own tests on planted faults

_TEST_LOOKS: dict[str, Look] = {"caught": "good", "missed": "bad", "not scored": "bad"}


def own_tests_document(report: fault_scores.OwnTestsReport) -> Document:
    """Return the page of the scores of a user's own tests on the planted faults."""
    categories = group_by(report.scores, lambda score: score.category)
    # Last the total, below the categories that it adds up.
    totals = [_by_status(*one) for one in (*categories.items(), ("all", report.scores))]
    statuses = ("caught", "missed", "not shown", "not reached", "not scored")
    rows = (
        row(
            score.fault,
            Cell(score.category, "dim"),
            Cell(score.status, _TEST_LOOKS.get(score.status, "dim")),
            Cell(score.tests[0], "dim") if score.tests else None,
            f"{score.seconds:.1f}",
            remarks=[score.reason],
        )
        for score in report.scores
    )
    headings = columns(["fault", "category", "status", "failed first"], ["s"], cut=4)
    count = Counter(score.status for score in report.scores)
    scored = count["caught"] + count["missed"]
    notes = [
        (
            "not shown: in no call of these tests does the fault change a bit of the result. "
            "not reached: no call came to the faulty kernel."
        )
    ]
    if report.unfinished:
        notes.append(f"{report.unfinished} have no score: {report.unfinished_because}.")
    sentence = f"{count['caught']} of {scored} faults that show are caught by these tests."
    return Document(
        title="Your tests on planted faults",
        command=report.command,
        facts=(f"pytest {report.pytest}, {report.replace} replaced",),
        sections=(
            table_section("Score by category", columns(["category"], statuses, cut=1), totals),
            table_section("Fault by fault", headings, rows),
        ),
        notes=tuple(notes),
        closing=(Note(sentence, "plain"),),
    )


def _by_status(name: str, scores: Sequence[fault_scores.OwnTestsScore]) -> Row:
    count = Counter[str](score.status for score in scores)
    scored = count["caught"] + count["missed"]
    caught: Look = "good" if scored == count["caught"] else "plain"
    looks: dict[str, Look] = {kind: "bad" for kind in ("missed", "not scored") if count[kind]}
    kinds = ("missed", "not shown", "not reached", "not scored")
    others = (Cell(str(count[kind]), looks.get(kind, "dim")) for kind in kinds)
    return row(name, Cell(f"{count['caught']}/{scored}", caught), *others)


# Sensitivity: the smallest faults that are seen


def sensitivity_document(report: fault_scores.SensitivityReport) -> Document:
    """Return a page of the smallest size of each fault that is seen, by dtype and rule."""
    sections = []
    for dtype, faults in group_by(report.seen, lambda one: one.dtype).items():
        rules = list(dict.fromkeys(rule for one in faults for rule in one.rules))
        headings = columns(["smallest fault seen", "in"], [*rules, "s"], cut=1)
        rows = [_sensitivity(one, rules) for one in faults]
        sections.append(table_section(dtype, headings, rows))
    notes = [
        (
            "ε: the smallest error seen, in steps of a quarter of an octave. bits: the most that "
            "are still seen to be too few. none: not even the largest is seen."
        )
    ]
    notes += [
        f"attncheck asks {one.questions} questions; the rules are asked of the {one.plain} "
        "plain ones among them, but for those on which they refuse a right kernel."
        # The counts are the same for every fault of a run, so the first is enough.
        for one in report.seen[:1]
    ]
    return Document(
        title="The smallest faults seen",
        command=report.command,
        facts=tuple(dict.fromkeys(f"tier {one.tier} on {one.device}" for one in report.seen)),
        sections=tuple(sections),
        notes=tuple(notes),
    )


def _sensitivity(one: fault_scores.FaultSensitivity, rules: Sequence[str]) -> Row:
    sizes = (_size(one.rules.get(rule), one.unit) for rule in rules)
    # The gate always has an entry, since the other rules are compared with it.
    question = one.rules[ATTNCHECK_RULE].question
    remark = f"by {question}" if question else ""
    return row(one.summary, Cell(one.unit, "dim"), *sizes, f"{one.seconds:.0f}", remarks=[remark])


def _size(smallest: fault_scores.SmallestFault | None, unit: str) -> Cell:
    if smallest is None:
        return DASH
    if smallest.size is None:
        return Cell("none", "bad")
    return Cell(f"{smallest.size:.0f}" if unit == "bits" else number_text.scientific(smallest.size))


# The property suite

_STATUSES = ("warn", "inconclusive", "fail", "error")
_COUNTED = {"error": FAILED_STATUSES - {"fail"}}  # headings that count several statuses


def property_document(report: run_reports.PropertyReport) -> Document:
    """Return a page of the property suite's results by kernel, dtype, mask family and file."""
    sections = [
        _counted_by(report, "kernel", lambda one: one.kernel),
        _counted_by(report, "dtype", lambda one: one.dtype),
        _counted_by(report, "mask family", lambda one: one.family),
        _counted_by(report, "file", lambda one: one.file),
    ]
    for kind, title in (("known", "known failures"), ("failed", "failures")):
        outcomes = [one for one in report.outcomes if one.outcome == kind]
        sections += [_failures_of(title, outcomes)] if outcomes else []
    shared = "" if report.processes == 1 else f", {report.processes} processes"
    speed = rate(total(report.outcomes), report.seconds)
    kinds = Counter(one.outcome for one in report.outcomes)
    counts = ", ".join(
        f"{kinds[kind]:,} {kind}" for kind in ("passed", "known", "failed", "skipped")
    )
    return Document(
        title="Properties",
        command=report.command,
        facts=(
            environment_facts(report.environment),
            f"tier {report.tier}{shared}: {speed}",
        ),
        sections=tuple(sections),
        notes=(
            (
                "A problem is one Case that was answered, however many runs of the kernel it "
                "takes; work is the time in kernel, oracle and judge, of all processes together."
            ),
            (
                "warn and inconclusive are no proof of a fault. known: fails as it is known to, "
                "with a reason; skipped: the kernel takes none of those problems."
            ),
            *_unsupported_lines(report),
        ),
        closing=(Note(f"{len(report.outcomes):,} tests: {counts}", "plain"),),
    )


def total(outcomes: Iterable[run_reports.PropertyOutcome]) -> run_reports.Tally:
    """Return the sum of the tallies of ``outcomes``."""
    tally = run_reports.Tally()
    for outcome in outcomes:
        tally.add(outcome.tally)
    return tally


def rate(tally: run_reports.Tally, seconds: float) -> str:
    """Return ``2,345 problems in 61 s (38 a second), 12 % of the work compiling``."""
    speed = f" ({tally.total / seconds:.3g} a second)" if seconds > 0 and tally.total else ""
    share = (
        f", {tally.compiling / tally.seconds:.0%} of the work compiling" if tally.seconds else ""
    )
    took = f"{seconds:,.0f}" if seconds >= 1000 else f"{seconds:.3g}"
    return f"{number_text.plural(tally.total, 'problem')} in {took} s{speed}{share}"


def _counted_by(
    report: run_reports.PropertyReport, name: str, key: Callable[[run_reports.PropertyOutcome], str]
) -> Section:
    numbers = ("tests", "problems", *_STATUSES, "known", "failed", "skipped", "work")
    rows = []
    for group, outcomes in group_by(report.outcomes, key).items():
        work = total(outcomes)
        kinds = Counter(one.outcome for one in outcomes)
        statuses = [
            sum(work.problems.get(each, 0) for each in _COUNTED.get(status, {status}))
            for status in _STATUSES
        ]
        ends = [kinds[kind] for kind in ("known", "failed", "skipped")]
        cells = map(count_cell, [len(outcomes), work.total, *statuses, *ends])
        took = number_text.duration(work.seconds)
        rows.append(row(group or number_text.NOTHING, *cells, took))
    return table_section(f"by {name}", columns([name], numbers, cut=1), rows)


def _failures_of(title: str, outcomes: list[run_reports.PropertyOutcome]) -> Section:
    """Return a section with a row of dtypes and families for each kernel, test and reason."""
    # A broken kernel fails in the same way in every dtype, which makes one row, not forty.
    groups = group_by(outcomes, lambda one: (one.kernel, one.test, one.reason))
    rows = []
    for (kernel, test, reason), several in groups.items():
        dtypes = ", ".join(dict.fromkeys(one.dtype for one in several))
        families = ", ".join(dict.fromkeys(one.family for one in several))
        rows.append(row(kernel, test, dtypes, families, remarks=[reason]))
    headings = columns(["kernel", "test", "dtypes", "mask families"], cut=4)
    return table_section(title, headings, rows)


def _unsupported_lines(report: run_reports.PropertyReport) -> Iterator[str]:
    """Yield a line for each kernel, such as ``mine does not support fp64: …``."""
    for kernel, dtypes in report.untaken.items():
        # Grouped by reason, since a kernel mostly lacks several dtypes for the same one.
        reasons = group_by(dtypes, dtypes.__getitem__)
        causes = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
        yield f"{kernel} does not support {causes}"


# Cases compared with their baseline

_STANDING_LOOKS: dict[run_reports.BaselineStanding, Look] = {
    "worse": "bad",
    "better": "good",
    "gone": "notable",
    "new": "plain",
    "not asked": "dim",
    "within rounding": "dim",
    "identical": "dim",
}
_MOST = 50  # cases shown of a standing that needs no action; the JSON has all


def baseline_document(report: run_reports.BaselineComparison) -> Document:
    """Return the page of each case's change since the baseline, the worst standings first."""
    sections = []
    alike = group_by(report.changes, lambda change: change.standing)
    for standing in ("identical", "not asked"):  # counted above, with nothing else to show
        alike.pop(standing, None)
    for standing in (one for one in _STANDING_LOOKS if one in alike):
        changes = alike[standing]
        # Every worse or better case is shown, but only the first of thousands of new ones.
        most = len(changes) if standing in {"worse", "better"} else _MOST
        more = f" (the first {most} of {len(changes):,})" if most < len(changes) else ""
        words = ["kernel", "case", "problem", "standing"]
        headings = columns(words, ["RMSE before", "now", "now ÷ before"], cut=3)
        rows = [_change(change, report) for change in changes[:most]]
        sections.append(table_section(f"{standing}{more}", headings, rows))
    notes = (
        (
            "identical: the same bits. within rounding: other bits, and errors no larger than "
            "another order of the same roundings explains. worse: larger, or judged worse."
        ),
        "new: the baseline has no such case on this architecture. gone: it was not asked now.",
    )
    return Document(
        title="Compared with the baseline",
        command=report.command,
        facts=(f"compared with {report.baseline}: {tally(report.changes)}",),
        sections=tuple(sections),
        notes=notes,
    )


def tally(changes: Iterable[run_reports.Change]) -> str:
    """Return ``1 worse, 2 better, 31 identical``, without standings that no case has."""
    counts = Counter(change.standing for change in changes)
    parts = [f"{counts[standing]:,} {standing}" for standing in _STANDING_LOOKS if counts[standing]]
    return ", ".join(parts) or "nothing to compare"


def _change(change: run_reports.Change, report: run_reports.BaselineComparison) -> Row:
    numbers = (
        None if value is None else number_text.scientific(value)
        for value in (change.before, change.after)
    )
    # A new case has no value before, and a gone case none after.
    has_both = change.before is not None and change.after is not None
    return row(
        change.kernel,
        change.case_id,
        report.problems.get(change.case_id, ""),
        Cell(change.standing, _STANDING_LOOKS[change.standing]),
        *numbers,
        number_text.ratio(change.after or 0.0, change.before or 0.0) if has_both else None,
        remarks=[change.reason],
    )
