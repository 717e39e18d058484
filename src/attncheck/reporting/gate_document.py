"""The page of a gate: counts, changes, failures (the worst first), and what was not covered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from attncheck.core.grouping import group_by
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
    failure_groups,
    gate_verdict,
    group_changes,
    questions,
    status_sides,
    untested_kernels,
)

MOST_ON_TERMINAL = 5  # failures that a terminal shows in full
MOST_ON_PAGE = 50  # failures that the page of HTML shows

_MOST_REASONS = 5  # kinds of warnings that are listed
_MOST_CHANGES = 20  # changes from the baseline that are listed
_MOST_NAMED = 3  # ids of similar failures among the facts of a failure
_MOST_IDS = 200  # ids of similar failures on a card
_MOST_ROWS = 1000  # rows of a table on a page
_LARGEST_SCRIPT = 2**18  # characters of a script that a page shows; larger ones are files beside it
_LARGEST_SCRIPTS = 2**22  # characters of all scripts that a page shows together
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
    report: GateReport,
    *,
    most: int = MOST_ON_TERMINAL,
    where: str = "--out has all of them",
    failures_first: bool = False,
) -> Document:
    """Return the page of ``report`` for a terminal or a summary.

    Args:
        where: Where the failures beyond the first ``most`` are.
        failures_first: Whether the failures precede the counts. A terminal shows the end of a page
            first, and a summary its beginning.
    """
    counts, failures = (_counts(report), *_warnings(report)), _failures(report, most, where)
    changes = _baseline(report)
    sections = (
        *_causes(report),
        *((*failures, *changes, *counts) if failures_first else (*counts, *changes, *failures)),
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
    """Return the page of ``report`` for HTML: the failures first, with drawings and scripts.

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
        # Unlike on a terminal, environments stand at the end of the page.
        facts=tuple(_run_facts(report))[:1],
        # A facet with only one value is no filter.
        filters={k: v for k, v in _facets(questions(report)).items() if v[1:]},
        sections=(
            *_causes(report),
            *_failures(report, MOST_ON_PAGE, "gate.json has all of them", scripts or {}),
            _counts(report, reading=True),
            *_warnings(report),
            *_kernel_sections(report),
            *_baseline(report),
            *_not_covered(report, refusals=False),
            *_unsupported_section(report),
            *_every_answer(report),
            Section(
                "How it was made", (*map(Note, provenance), Note(_METHOD)), name="How it was made"
            ),
        ),
    )


def failure_card(report: GateReport, group: FailureGroup, *, drawn: bool = False) -> Card:
    """Return a failure in full: the question, what is wrong, and how to reproduce it.

    Args:
        drawn: Whether a map of the errors is drawn; else facts show it in characters.
    """
    answer = group.shown
    record = answer.record
    environment = report.environments.get(record.environment)
    device = "" if environment is None else "cpu" if environment.device == "cpu" else "cuda"
    test = answer.test or group.answer.test
    facts = diagnosis_text.failure_facts(record, kernel=record.kernel, device=device, test=test)
    if group.smallest is not None:
        facts.append(("shrunk", f"from {problem_of(group.answer.record).full_line}"))
    # Two stages may ask the same case, which has one id.
    ids = list(dict.fromkeys(one.failure or one.record.case_id for one in group.others))
    if ids:
        cut = ", …" if len(ids) > _MOST_NAMED else ""
        more = f"{len(group.others):,} more: {', '.join(ids[:_MOST_NAMED])}{cut}"
        facts.append(("like it", more))
    # A shrunk problem is often too small for a map; the problem before shrinking then has one.
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
    """Yield what the gate did not cover and why; ``refusals`` adds questions not supported."""
    yield from (f"the gate itself: {line}" for line in report.harness)
    if report.unfinished:
        why = f": {report.unfinished_because.rstrip('.')}" if report.unfinished_because else ""
        unasked = f"{number_text.plural(report.unfinished, 'question')} not asked"
        yield f"{unasked}{why}. Run the same command again to go on."
        for kernel, stages in report.missing.items():
            counts = [f"{count:,} of {stage}" for stage, count in stages.items()]
            yield f"not asked of {kernel}: {', '.join(counts) or 'anything at all'}"
    yield from (f"{kernel} is absent: {reason}" for kernel, reason in report.absent.items())
    # A kernel without any answer must not look like one without failures.
    for kernel in untested_kernels(report):
        if kernel not in report.absent:
            yield f"{kernel} is untested: no answer says anything of it"
    missing_stages = [stage for stage in STAGES if stage not in report.stages]
    if missing_stages:
        yield f"not part of this run: {', '.join(missing_stages)}"
    if report.shard:
        yield f"this is part {report.shard} of a run that was shared out"
    if refusals:
        yield from record_text.refusal_lines(answer.record for answer in questions(report))


def _run_facts(report: GateReport) -> Iterator[str]:
    """Yield a line of the tier, date, duration and speed of the run; then its environments."""
    parts = [f"tier {report.tier}", report.started, number_text.duration(report.seconds).strip()]
    parts += [*_pace(report), *([f"part {report.shard}"] if report.shard else [])]
    yield " · ".join(parts)
    yield from _environment_lines(report)


def _pace(report: GateReport) -> Iterator[str]:
    """Yield ``2.6 questions a second`` and ``61 % of the work in compilers``, as far as known."""
    # Refusals take no time; counting them would make the gate look faster.
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
    """Return answers by kernel and stage, in the order of the report's kernels and of STAGES."""
    order = {name: i for i, name in enumerate(report.kernels)}

    def place(answer: Answer) -> tuple[int, int]:
        return order.get(answer.record.kernel, len(order)), STAGES.index(answer.stage)

    ordered = sorted(questions(report), key=place)
    return group_by(ordered, lambda answer: (answer.record.kernel, answer.stage))


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
    """Return warnings that fail nothing: the first of each kind and its count, most frequent first.

    Warnings of a kind have the same kernel, question and reason, except for numbers in the reason.
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
    """Yield the counters at the head of the page; zeros are left out, except of ``asked``."""
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
    """Return each kernel's numbers of cases by standing, then the worse and better cases."""
    if not report.changes:
        return []
    rows = []
    # Only a run with --dtype leaves cases out.
    found = {change.standing for change in report.changes}
    standings = [one for one in STANDINGS if one != "not asked" or one in found]
    for kernel in dict.fromkeys(change.kernel for change in report.changes):
        count = Counter(c.standing for c in report.changes if c.kernel == kernel)
        cells = (count_cell(count[one], _STANDING_LOOKS.get(one, "plain")) for one in standings)
        rows.append(row(kernel, *cells))
    # Cases of other standings need no action and are only counted.
    shown = group_changes(c for s in ("worse", "better") for c in report.changes if c.standing == s)
    blocks: list[Block] = [Table(columns(["kernel"], standings, cut=1), tuple(rows))]
    blocks += [
        Note(f"{one.standing}: {cases}: {one.reason}", _STANDING_LOOKS[one.standing])
        for one, cases in shown[:_MOST_CHANGES]
    ]
    more = len(shown) - _MOST_CHANGES
    blocks += [Note(f"and {more:,} more")] if more > 0 else []
    title = f"compared with the baseline {report.baseline}"
    return [Section(title, tuple(blocks), name="Baseline")]


def _causes(report: GateReport) -> list[Section]:
    groups = failure_groups(report)
    causes = [
        (g.cause, g.shown.record, diagnosis_text.repro_command(g.id)) for g in groups if g.cause
    ]
    return [diagnosis_text.causes_section(causes)] if causes else []


def _failures(
    report: GateReport, most: int, where: str, scripts: Mapping[str, str] | None = None
) -> list[Section]:
    groups = failure_groups(report)
    if not groups:
        return []
    cards: list[Block] = []
    remaining = _LARGEST_SCRIPTS
    for group in groups[:most]:
        script = (scripts or {}).get(group.id, "")
        card = failure_card(report, group, drawn=scripts is not None)
        if script:
            # A script may contain its inputs, and the page must stay small enough to open.
            fits = len(script) <= min(remaining, _LARGEST_SCRIPT)
            remaining -= len(script) if fits else 0
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


def _unsupported_section(report: GateReport) -> list[Section]:
    """Return the unsupported questions, folded since the list is long and shows no failure."""
    refusals = record_text.refusal_counts(answer.record for answer in questions(report))
    rows = tuple(
        row(reason, f"{count:,}", kernel, facets={"kernel": (kernel,)})
        for (kernel, reason), count in refusals.most_common(_MOST_ROWS)
    )
    headings = (*columns(["reason"], ["questions"]), *columns(["kernel"]))
    title = f"not supported: {number_text.plural(refusals.total(), 'question')}"
    section = Section(title, (Table(headings, rows),), name="Not supported", folded=True)
    return [section] if rows else []


def _every_answer(report: GateReport) -> list[Section]:
    """Return all supported questions, failures first; folded."""
    failing, doubtful = status_sides(report)
    answers = [a for a in questions(report) if a.record.status != "unsupported"]

    def severity(answer: Answer) -> int:
        status = answer.record.status
        return 0 if status in failing else 1 if status in doubtful else 2

    rows = []
    for answer in sorted(answers, key=severity)[:_MOST_ROWS]:
        record = answer.record
        share = record_text.largest_share(record_text.bound_shares(record).values())
        cells = (
            problem_of(record).full_line,
            Cell(record.status, ("bad", "notable", "plain")[severity(answer)]),
            number_text.NOTHING if share is None else share_text(share),
            str(record.case.get("question", "")),
            answer.stage,
            Cell(record.kernel, "dim"),
        )
        rows.append(row(*cells, facets=_facets([answer])))
    left_columns = columns(["problem", "verdict"], ["÷ bound"])
    table = Table((*left_columns, *columns(["question", "stage", "kernel"])), tuple(rows))
    blocks: list[Block] = [table]
    more = len(answers) - len(rows)
    blocks += [Note(f"and {more:,} more: gate.json has all of them")] if more > 0 else []
    title = f"every question: {len(answers):,}"
    return [Section(title, tuple(blocks), name="Every question", folded=True)] if rows else []


def _facets(answers: Iterable[Answer]) -> dict[str, tuple[str, ...]]:
    """Return kernels, dtypes, stages and statuses of answers, in order of first appearance."""
    values: dict[str, dict[str, None]] = {}
    for answer in answers:
        record = answer.record
        facets = {"kernel": record.kernel, "dtype": problem_of(record).dtype}
        for name, value in (facets | {"stage": answer.stage, "status": record.status}).items():
            values.setdefault(name, {})[shortened(value)] = None
    return {name: tuple(distinct) for name, distinct in values.items()}


def _kernel_sections(report: GateReport) -> Iterator[Section]:
    # First the report's kernels in their order, then any that occur only in answers.
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
