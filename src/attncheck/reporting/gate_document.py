"""The page of a gate: counts, what changed, failures worst first, and what was not looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from attncheck.core.judgement import share_text
from attncheck.core.sanitize_text import one_line, shortened
from attncheck.records.failure_causes import without_numbers
from attncheck.records.problem_summary import problem_of
from attncheck.records.record import Status
from attncheck.records.run_reports import (
    STAGES,
    STANDINGS,
    Answer,
    BaselineStanding,
    Change,
    GateReport,
    Stage,
)
from attncheck.reporting import diagnosis_text, number_text, record_text
from attncheck.reporting.document import (
    Block,
    Card,
    Cell,
    Document,
    Look,
    Note,
    Section,
    Table,
    columns,
    count_cell,
    row,
)
from attncheck.reporting.gate_charts import charts, heat_map, results_table
from attncheck.reporting.gate_verdict import (
    FailureGroup,
    alike_changes,
    failure_groups,
    gate_verdict,
    questions,
    status_sides,
    untested_kernels,
)

MOST_ON_TERMINAL = 5  # failures that a terminal shows in full
MOST_ON_PAGE = 50  # failures that the page of HTML shows

_MOST_REASONS = 5
_MOST_CHANGES = 20
_MOST_NAMED = 3
_MOST_IDS = 200
_MOST_ROWS = 1000  # of a table on a page
_LARGEST_SCRIPT = 2**18  # characters of one that a page shows; a larger one lies beside it
_LARGEST_SCRIPTS = 2**22  # of all together
_STANDING_LOOKS: dict[BaselineStanding, Look] = {"better": "notable", "worse": "bad"}
_READING = (
    "odd: warn, inconclusive, flaky, or the oracle disagrees; work: time in kernel, oracle and "
    "judge."
)
_METHOD = (
    "Every answer is compared with the exact result, which is computed in fp64 with a proven "
    "error; the bound is what rounding can explain at most, derived from the kernel's declared "
    "arithmetic and never from a tolerance. attncheck repro ID asks one question again."
)


def gate_document(
    report: GateReport, *, most: int = MOST_ON_TERMINAL, where: str = "--out has all of them"
) -> Document:
    """``report`` for a terminal or a summary.

    Args:
        where: Where the others are.
    """
    sections = (
        *_causes(report),
        _counts(report),
        *_warnings(report),
        *_baseline(report),
        *_failures(report, most, where),
        *_not_covered(report),
    )
    return Document(
        title="attncheck gate",
        verdict=gate_verdict(report),
        command=report.command,
        facts=(*_run_facts(report), *(" · ".join(filter(None, k)) for k in report.kernels.items())),
        sections=sections,
    )


def gate_page(report: GateReport, scripts: Mapping[str, str] | None = None) -> Document:
    """``report`` as a page of its own: the failures first, with drawings and scripts.

    Args:
        scripts: The text of a standalone script by the id of its failure.
    """
    verdict = gate_verdict(report)
    arithmetics = (a.record.judgement.arithmetic for a in report.answers if a.record.judgement)
    profiles = (profile for profile in dict.fromkeys(arithmetics) if profile)
    provenance = (*_environment_lines(report), *(f"judged as {profile}" for profile in profiles))
    return Document(
        title="attncheck gate",
        verdict=verdict,
        counters=tuple(_counters(report)),
        command=report.command,
        # Environments stand at the end of a page, and at the head of a terminal.
        facts=tuple(_run_facts(report))[:1],
        # By what is the same throughout nobody can choose.
        filters={k: v for k, v in _facets(questions(report)).items() if v[1:]},
        sections=(
            *_causes(report),
            *_failures(report, MOST_ON_PAGE, "gate.json has all of them", scripts or {}),
            _counts(report, reading=True),
            *_warnings(report),
            *_kernel_sections(report),
            *_baseline(report),
            *_not_covered(report, refusals=False),
            *_refused(report),
            *_every_answer(report),
            Section(
                "How it was made", (*map(Note, provenance), Note(_METHOD)), name="How it was made"
            ),
        ),
    )


def failure_card(report: GateReport, group: FailureGroup, *, drawn: bool = False) -> Card:
    """A failure in full: what was asked, what is wrong, and how to see it again.

    Args:
        drawn: Whether a map of the errors is drawn; else facts show it in signs.
    """
    answer = group.shown
    record = answer.record
    environment = report.environments.get(record.environment)
    device = "" if environment is None else "cpu" if environment.device == "cpu" else "cuda"
    test = answer.test or group.answer.test
    facts = diagnosis_text.failure_facts(record, kernel=record.kernel, device=device, test=test)
    if group.smallest is not None:
        facts.append(("shrunk", f"from {problem_of(group.answer.record).full_line}"))
    # Two stages may ask the same case: it has one id.
    ids = list(dict.fromkeys(one.failure or one.record.case_id for one in group.others))
    if ids:
        cut = ", …" if len(ids) > _MOST_NAMED else ""
        more = f"{len(group.others):,} more: {', '.join(ids[:_MOST_NAMED])}{cut}"
        facts.append(("like it", more))
    # A shrunk problem is often too small for a map: the one before it then shows the pattern.
    error_map = None
    if drawn:
        error_map = heat_map(record) or heat_map(group.answer.record, before_shrinking=True)
    return Card(
        kernel=record.kernel,
        heading=diagnosis_text.failure_heading(record),
        meaning=record_text.rule_text(record),
        facts=tuple((name, one_line(text)) for name, text in facts),
        map=error_map,
        command=diagnosis_text.repro_command(group.id),
        others=", ".join(ids[:_MOST_IDS]) + (", …" if ids[_MOST_IDS:] else ""),
        other_count=len(ids),
        facets=_facets([group.answer, *group.others]),
    )


def not_covered(report: GateReport, *, refusals: bool = True) -> Iterator[str]:
    """Cases that were not looked at, and why, a line each; without ``refusals`` of kernels' own."""
    yield from (f"the gate itself: {line}" for line in report.harness)
    if report.unfinished:
        why = f": {report.unfinished_because.rstrip('.')}" if report.unfinished_because else ""
        unasked = f"{number_text.plural(report.unfinished, 'question')} not asked"
        yield f"{unasked}{why}. Run the same command again to go on."
        for kernel, stages in report.missing.items():
            counts = [f"{count:,} of {stage}" for stage, count in stages.items()]
            yield f"not asked of {kernel}: {', '.join(counts) or 'anything at all'}"
    yield from (f"{kernel} is absent: {reason}" for kernel, reason in report.absent.items())
    # A kernel without an answer must not pass for one without a failure.
    for kernel in untested_kernels(report):
        if kernel not in report.absent:
            yield f"{kernel} is untested: no answer says anything of it"
    left = [stage for stage in STAGES if stage not in report.stages]
    if left:
        yield f"not part of this run: {', '.join(left)}"
    if report.shard:
        yield f"this is part {report.shard} of a run that was shared out"
    if refusals:
        yield from record_text.refusal_lines(answer.record for answer in questions(report))


def _refusals(report: GateReport) -> Counter[tuple[str, str]]:
    """Questions by the kernel that does not take them, and why."""
    return record_text.refusal_counts(answer.record for answer in questions(report))


def _run_facts(report: GateReport) -> Iterator[str]:
    """Date, duration and speed of the run; then its environment."""
    parts = [f"tier {report.tier}", report.started, number_text.duration(report.seconds).strip()]
    parts += [*_pace(report), *([f"part {report.shard}"] if report.shard else [])]
    yield " · ".join(parts)
    yield from _environment_lines(report)


def _pace(report: GateReport) -> Iterator[str]:
    """``2.6 questions a second`` and ``61 % of the work in compilers``, as far as known."""
    # A refusal takes no time: counted, it would make the gate look faster.
    answers = [a for a in questions(report) if a.record.status != "unsupported"]
    work = sum(answer.seconds for answer in answers)
    compiling = sum(answer.compiling for answer in answers)
    if answers and report.seconds > 0:
        yield f"{len(answers) / report.seconds:.2g} questions a second"
    if compiling:
        yield f"{100 * compiling / work:.0f} % of the work in compilers"


def _environment_lines(report: GateReport) -> Iterator[str]:
    for environment in report.environments.values():
        repairs = ", ".join(environment.interpreter)
        repaired = f" · Triton's interpreter, repaired: {repairs}" if repairs else ""
        yield record_text.environment_facts(environment) + repaired


def _stage_counts(report: GateReport) -> dict[tuple[str, Stage], list[Answer]]:
    """Answers by kernel and stage, kernels as asked for."""
    groups: dict[tuple[str, Stage], list[Answer]] = {}
    for answer in questions(report):
        groups.setdefault((answer.record.kernel, answer.stage), []).append(answer)
    order = {name: i for i, name in enumerate(report.kernels)}
    keys = sorted(groups, key=lambda key: (order.get(key[0], len(order)), STAGES.index(key[1])))
    return {key: groups[key] for key in keys}


def _sum(status: Counter[Status], statuses: Iterable[Status]) -> int:
    return sum(status[one] for one in statuses)


def _counts(report: GateReport, *, reading: bool = False) -> Section:
    names = ("asked", "passed", "failed", "odd", "not supported", "work")
    failing, doubtful = status_sides(report)
    rows = []
    for (kernel, stage), answers in _stage_counts(report).items():
        status = Counter(answer.record.status for answer in answers)
        cells = (
            count_cell(status.total() - status["unsupported"]),
            count_cell(status["pass"]),
            count_cell(_sum(status, failing), "bad"),
            count_cell(_sum(status, doubtful), "notable"),
            count_cell(status["unsupported"]),
            Cell(number_text.duration(sum(answer.seconds for answer in answers))),
        )
        facets = {"kernel": (shortened(kernel),), "stage": (stage,)}
        rows.append(row(kernel, stage, *cells, facets=facets))
    table = Table(columns(("kernel", "stage"), names, cut=1), tuple(rows))
    blocks: tuple[Block, ...] = (table, Note(_READING)) if reading else (table,)
    return Section("by kernel and stage", blocks if rows else (), name="Counts")


def _warnings(report: GateReport) -> list[Section]:
    """What is odd and fails nothing: the first of each kind, and how many; most frequent first.

    A kind is of one kernel and question, and of one reason but for the numbers in it.
    """
    _, doubtful = status_sides(report)
    groups: dict[tuple[str, str, str], list[str]] = {}
    for answer in questions(report):
        record = answer.record
        if record.status == "warn" and record.status in doubtful and record.judgement:
            reason = record.judgement.reason
            key = record.kernel, str(record.case.get("question")), without_numbers(reason)
            groups.setdefault(key, []).append(reason)
    notes = [
        Note(
            f"{kernel} {question}{f' ({len(reasons)} times)' if reasons[1:] else ''}: {reasons[0]}"
        )
        for (kernel, question, _), reasons in sorted(
            groups.items(), key=lambda group: len(group[1]), reverse=True
        )
    ]
    if len(notes) > _MOST_REASONS:
        others = number_text.plural(len(notes) - _MOST_REASONS, "other kind")
        notes[_MOST_REASONS:] = [Note(f"and {others}")]
    return [Section("warnings", tuple(notes), name="Warnings")] if notes else []


def _counters(report: GateReport) -> Iterator[tuple[str, int, Look]]:
    """Head of the page; what there is none of is left out, but for what was asked."""
    status = Counter(answer.record.status for answer in questions(report))
    failing, doubtful = status_sides(report)
    yield "asked", status.total() - status["unsupported"], "plain"
    worse = sum(change.standing == "worse" for change in report.changes)
    counters: tuple[tuple[str, int, Look], ...] = (
        ("failed", _sum(status, failing), "bad"),
        ("odd", _sum(status, doubtful), "notable"),
        ("passed", status["pass"], "good"),
        ("regressed", worse, "bad"),
        ("not supported", status["unsupported"], "plain"),
        ("left to ask", report.unfinished, "notable"),
        ("harness errors", len(report.harness), "bad"),
    )
    yield from (counter for counter in counters if counter[1])


def _baseline(report: GateReport) -> list[Section]:
    """Counts of each kernel's cases by change, then those that are worse or better."""
    if not report.changes:
        return []
    rows = []
    for kernel in dict.fromkeys(change.kernel for change in report.changes):
        count = Counter(c.standing for c in report.changes if c.kernel == kernel)
        cells = (count_cell(count[one], _STANDING_LOOKS.get(one, "plain")) for one in STANDINGS)
        rows.append(row(kernel, *cells))
    # What is within rounding or identical asks for nothing: it is counted alone.
    shown = alike_changes(c for s in ("worse", "better") for c in report.changes if c.standing == s)
    blocks: list[Block] = [Table(columns(["kernel"], STANDINGS, cut=1), tuple(rows))]
    blocks += [_change(change, cases) for change, cases in shown[:_MOST_CHANGES]]
    more = len(shown) - _MOST_CHANGES
    blocks += [Note(f"and {more:,} more")] if more > 0 else []
    title = f"compared with the baseline {report.baseline}"
    return [Section(title, tuple(blocks), name="Baseline")]


def _change(change: Change, cases: str) -> Note:
    look: Look = "bad" if change.standing == "worse" else "notable"
    return Note(f"{change.standing}: {cases}: {change.reason}", look)


def _causes(report: GateReport) -> list[Section]:
    groups = failure_groups(report)
    shown = [
        (g.cause, g.shown.record, diagnosis_text.repro_command(g.id)) for g in groups if g.cause
    ]
    return [diagnosis_text.causes_section(shown)] if shown else []


def _failures(
    report: GateReport, most: int, where: str, scripts: Mapping[str, str] | None = None
) -> list[Section]:
    groups = failure_groups(report)
    if not groups:
        return []
    cards: list[Block] = []
    left = _LARGEST_SCRIPTS
    for group in groups[:most]:
        script = (scripts or {}).get(group.id, "")
        card = failure_card(report, group, drawn=scripts is not None)
        if script:
            # A script may hold its inputs: the page must stay small enough to open.
            fits = len(script) <= min(left, _LARGEST_SCRIPT)
            left -= len(script) if fits else 0
            file = f"repro/{group.id}.py"
            card = replace(card, script=script if fits else "", script_file=file)
        cards.append(card)
    more = len(groups) - len(cards)
    if more:
        cards.append(Note(f"and {number_text.plural(more, 'more kind')} of failure: {where}."))
    return [Section("failures, worst first", tuple(cards), name="Failures")]


def _not_covered(report: GateReport, *, refusals: bool = True) -> list[Section]:
    notes = tuple(Note(line) for line in not_covered(report, refusals=refusals))
    return [Section("not covered", notes, name="Not covered")] if notes else []


def _refused(report: GateReport) -> list[Section]:
    """What kernels do not take, folded: it is long, and nothing is wrong with it."""
    reasons = _refusals(report).most_common()
    rows = tuple(
        row(reason, f"{count:,}", kernel, facets={"kernel": (kernel,)})
        for (kernel, reason), count in reasons[:_MOST_ROWS]
    )
    headings = (*columns(["reason"], ["questions"]), *columns(["kernel"]))
    title = f"not supported: {number_text.plural(_refusals(report).total(), 'question')}"
    section = Section(title, (Table(headings, rows),), name="Not supported", folded=True)
    return [section] if rows else []


def _every_answer(report: GateReport) -> list[Section]:
    """What was asked, question by question, folded: failures first, what was refused left out."""
    failing, doubtful = status_sides(report)
    answers = [a for a in questions(report) if a.record.status != "unsupported"]

    def place(answer: Answer) -> int:
        status = answer.record.status
        return 0 if status in failing else 1 if status in doubtful else 2

    rows = []
    for answer in sorted(answers, key=place)[:_MOST_ROWS]:
        record = answer.record
        share = record.judgement.out_over_bound if record.judgement else None
        cells = (
            problem_of(record).full_line,
            Cell(record.status, ("bad", "notable", "plain")[place(answer)]),
            number_text.NOTHING if share is None else share_text(share),
            str(record.case.get("question", "")),
            answer.stage,
            Cell(record.kernel, "dim"),
        )
        rows.append(row(*cells, facets=_facets([answer])))
    left = columns(["problem", "verdict"], ["÷ bound"])
    table = Table((*left, *columns(["question", "stage", "kernel"])), tuple(rows))
    blocks: list[Block] = [table]
    more = len(answers) - len(rows)
    blocks += [Note(f"and {more:,} more: gate.json has all of them")] if more > 0 else []
    title = f"every question: {len(answers):,}"
    return [Section(title, tuple(blocks), name="Every question", folded=True)] if rows else []


def _facets(answers: Iterable[Answer]) -> dict[str, tuple[str, ...]]:
    """Kernels, dtypes, stages and statuses of answers, each in the order in which it comes."""
    values: dict[str, dict[str, None]] = {}
    for answer in answers:
        record = answer.record
        dtype = problem_of(record).dtype
        for name, value in zip(
            ("kernel", "dtype", "stage", "status"),
            (record.kernel, dtype, answer.stage, record.status),
            strict=True,
        ):
            values.setdefault(name, {})[shortened(value)] = None
    return {name: tuple(those) for name, those in values.items()}


def _kernel_sections(report: GateReport) -> Iterator[Section]:
    # Those asked for first, in their order; then any that only answers name.
    answered = (answer.record.kernel for answer in report.answers)
    for name in dict.fromkeys([*report.kernels, *answered]):
        summary = report.kernels.get(name, "")
        blocks: list[Block] = [Note(summary)] if summary else []
        table = results_table(report, name)
        if table.rows:
            blocks += [table, Note("✓ all passed, ✗ failed, ! odd, – not supported")]
        curves = charts(report, name)
        if curves:
            joined = (
                "A line joins problems that differ in lengths, heads, batch and seed alone, the "
                "largest of each length; both axes are logarithmic."
            )
            blocks += [*curves, Note(joined)]
        yield Section(name, tuple(blocks), name=name, facets={"kernel": (shortened(name),)})
