"""The page of mutants: how many were caught and named, how soon, and each that was missed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median

from attncheck.core.grouping import group_by
from attncheck.records.fault_scores import MutantReport, MutantScore, NameWorth
from attncheck.reporting import number_text
from attncheck.reporting.document import (
    Cell,
    Column,
    Document,
    Note,
    Row,
    Section,
    columns,
    count_cell,
    row,
    table_section,
)
from attncheck.reporting.score_documents import run_facts

_STEPS = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)  # questions at points of the curve


def mutant_document(report: MutantReport) -> Document:
    """Return a page of scores by kernel and operator, the curve, and lists of mutants."""
    scores = report.scores
    rules = list(dict.fromkeys(rule for score in scores for rule in score.peers))
    sections = [
        _totals("By kernel", "kernel", scores, rules, lambda score: score.kernel),
        _totals("By operator", "operator", scores, rules, lambda score: score.operator),
        _curve(report),
    ]
    outcomes = group_by(scores, lambda score: score.outcome)
    missed = group_by(outcomes.get("missed", []), lambda score: score.identical)
    same = "Missed, with the same bits on all of a reference set: presumed equivalent"
    for title, mutants in (
        ("Missed", missed.get(False)),
        (same, missed.get(True)),
        ("Named wrongly, with certainty", [score for score in scores if score.named == "wrong"]),
        ("Equivalent, with the reason", outcomes.get("equivalent")),
        ("Unscored", outcomes.get("harness")),
    ):
        sections += [_mutant_list(title, mutants)] if mutants else []
    notes = [
        (
            "scored: caught or missed. Those that raise on the plainest problem (stillborn) and "
            "those that are argued to be equivalent count for neither side."
        ),
        (
            "Other projects' rules see every comparison of the check, not only those up to the "
            "first failure. named: of those caught that give wrong numbers, how many a diagnosis "
            "names: by a fault model that the table beside the kernels has for that line, or by "
            "asking again (proven). family: by its kind, or a neighbour of its kind. wrong: "
            "another name or kind, with certainty. What the table does not decide is not judged."
        ),
    ]
    if report.unfinished:
        notes.append(f"{report.unfinished} have no score: {report.unfinished_because}.")
    return Document(
        title="Mutants",
        command=report.command,
        facts=run_facts(report, report.tool),
        sections=tuple(sections),
        notes=tuple(notes),
        closing=(Note(_sentence(scores), "plain"),),
    )


def _totals(
    title: str,
    what: str,
    scores: Sequence[MutantScore],
    rules: Sequence[str],
    key: Callable[[MutantScore], str],
) -> Section:
    groups = (*group_by(scores, key).items(), ("all", scores))
    rows = (_total(name, each, rules) for name, each in groups)
    rare = ("same bits", "equivalent", "stillborn")
    headings = (
        *columns([what], ("mutants", "caught", "missed"), cut=1),
        *(Column(name, spare=1) for name in rare),
        *(Column(name, spare=2) for name in ("median s", "questions")),
        *(Column(rule, spare=3) for rule in rules),
        Column("named"),
        Column("proven", spare=1),
        *map(Column, ("family", "wrong")),
    )
    return table_section(title, headings, rows)


def _total(name: str, scores: Sequence[MutantScore], rules: Sequence[str]) -> Row:
    count = Counter(score.outcome for score in scores)
    scored = [score for score in scores if score.outcome in {"caught", "missed"}]
    caught = [score for score in scored if score.outcome == "caught"]
    named = Counter(score.named for score in caught)
    judged = _judged_count(named)
    # A mutant that another rule never saw does not count as missed by it.
    ruled = [score for score in scored if score.peers]
    nothing = number_text.NOTHING
    return row(
        name,
        str(len(scores)),
        Cell(f"{len(caught)}/{len(scored)}", "good" if len(caught) == len(scored) else "plain"),
        count_cell(count["missed"]),
        count_cell(sum(score.identical for score in scored)),
        count_cell(count["equivalent"]),
        count_cell(count["stillborn"]),
        f"{median(score.seconds for score in caught):.1f}" if caught else nothing,
        f"{median(score.questions for score in caught):g}" if caught else nothing,
        *(f"{sum(s.peers.get(rule, False) for s in ruled)}/{len(ruled)}" for rule in rules),
        f"{named['right'] + named['proven']}/{judged}" if judged else nothing,
        count_cell(named["proven"]),
        count_cell(named["family"] + named["neighbour"]),
        Cell(str(named["wrong"]), "bad" if named["wrong"] else "dim"),
    )


def _judged_count(named: Counter[NameWorth]) -> int:
    return sum(number for worth, number in named.items() if worth not in {"", "unjudged"})


def _curve(report: MutantReport) -> Section:
    scored = sum(score.outcome in {"caught", "missed"} for score in report.scores)
    steps = [step for step in _STEPS if step < len(report.curve)] + [len(report.curve)]
    rows = (
        row(str(step), f"{report.curve[step - 1]}/{scored}")
        for step in steps
        if step and report.curve
    )
    return table_section("How soon", columns((), ("within the first questions", "caught")), rows)


def _mutant_list(title: str, scores: Sequence[MutantScore]) -> Section:
    headings = (Column("mutant", words=True), Column("says", words=True, cut=True))
    rows = (
        Row(
            (Cell(score.mutant, code=True), Cell(_mutant_text(score))),
            tuple(Note(line, "notable", whole=True) for line in score.diff.splitlines()),
        )
        for score in scores
    )
    return table_section(title, headings, rows)


def _mutant_text(score: MutantScore) -> str:
    if score.named == "wrong":
        return f"{', '.join(score.models[: score.certain]) or score.kind}; it is {score.family}"
    return score.reason or f"{score.questions} questions"


def _sentence(scores: Sequence[MutantScore]) -> str:
    count = Counter(score.outcome for score in scores)
    scored = count["caught"] + count["missed"]
    if not scored:
        return "no mutant was scored."
    parts = [f"{count['caught']} of {scored} mutants caught"]
    alike = sum(score.identical for score in scores if score.outcome == "missed")
    parts += [f"{alike} of the {count['missed']} missed give the same bits"] if alike else []
    named = Counter(score.named for score in scores)
    judged, kind = _judged_count(named), named["family"] + named["neighbour"]
    parts += [f"{named['right'] + named['proven']} of {judged} named"] if judged else []
    parts += [f"{kind} by their kind"] if kind else []
    parts += [f"{named['wrong']} wrongly named with certainty"] if named["wrong"] else []
    parts += [f"{count['harness']} could not be scored"] if count["harness"] else []
    return f"{', '.join(parts)}."
