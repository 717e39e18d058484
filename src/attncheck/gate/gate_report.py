"""Make the report of a gate from its journal, also of one that is unfinished."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import msgspec
from msgspec.structs import replace

from attncheck.records import baseline_comparison
from attncheck.records.baseline_comparison import measurements, merge_changes
from attncheck.records.baseline_entries import Baseline
from attncheck.records.problem_summary import problem_of
from attncheck.records.record import Environment
from attncheck.records.run_reports import STAGES, Answer, Change, FailureCause, GateReport, Stage
from attncheck.reporting.gate_verdict import failing_statuses, failure_groups, policy_of, questions
from attncheck.workers.journal_format import JournalContent
from attncheck.workers.units import Shard, Unit


def command_line(head: Mapping[str, Any]) -> str:
    """Return a command line that runs the plan of a journal's header."""
    words = ["attncheck", "gate", *map(str, head.get("kernels", ()))]
    for name in ("tier", "device", "convention"):
        words += [f"--{name}", str(head[name])] if head.get(name) else []
    for name, option in (("dtypes", "--dtype"), ("stages", "--stage")):
        chosen = [word for word in str(head.get(name, "")).split(",") if word]
        # All stages are the default, and are not listed.
        if name != "stages" or tuple(chosen) != STAGES:
            words += [word for each in chosen for word in (option, each)]
    for name in ("against", "seed", "shard"):
        words += [f"--{name}", str(head[name])] if head.get(name) else []
    return shlex.join(words)


def build_report(
    content: JournalContent,
    *,
    command: str = "",
    baseline: tuple[str, Baseline] | None = None,
) -> GateReport:
    """Return the GateReport of a journal.

    Args:
        command: The command line, without paths; by default that of the journal.
        baseline: Name and content of a baseline file to compare with. Answers of another commit's
            kernels are in the journal itself.
    """
    head, described = content.head, list(_descriptions(content))
    kernels = {str(f["name"]): str(f.get("summary", "")) for f in described}
    environments, answers = _environments(content), _answers(content, tuple(kernels))
    missing = content.unanswered
    report = GateReport(
        command=command or str(head.get("typed") or "") or command_line(head),
        tier=str(head.get("tier", "")),
        started=str(head.get("started", "")),
        seconds=round(content.seconds, 1),
        shard=str(head.get("shard", "")),
        environments=environments,
        kernels=kernels,
        absent={str(f["name"]): str(f["absent"]) for f in described if f.get("absent")},
        stages=_stages(head),
        planned=_planned_questions(content, head),
        unfinished=len(missing),
        unfinished_because=_reason_for_missing(content, missing),
        missing=_missing(missing, described),
        harness=tuple(done.harness for done in content.results.values() if done.harness),
        **_comparisons(content, answers, environments, baseline, complete=not missing),
        answers=answers,
    )
    report = replace(report, changes=tuple(_allowed_changes(report)))
    return replace(report, causes=tuple(_causes(report)))


def _reason_for_missing(content: JournalContent, missing: Sequence[Unit]) -> str:
    reason = (content.why or "not all was asked") if missing else ""
    unchosen = any(unit.draws_stages for unit in missing)
    return f"{reason}, before the questions of bounds were chosen" if unchosen else reason


def _missing(
    units: Iterable[Unit], described: Iterable[Mapping[str, Any]]
) -> dict[str, dict[Stage, int]]:
    """Count units without an answer by kernel and stage, except those of another commit."""
    names = {str(facts.get("kernel")): str(facts["name"]) for facts in described}
    missing: dict[str, dict[Stage, int]] = {}
    for unit in units:
        if not unit.commit:
            file, mark, function = unit.kernel.rpartition("::")
            name = names.get(unit.kernel, f"{PurePath(file).name}{mark}{function}")
            stages = missing.setdefault(name, {})
            if unit.kind != "describe":
                stages[unit.stage] = stages.get(unit.stage, 0) + 1
    return missing


def _causes(report: GateReport) -> Iterator[FailureCause]:
    for group in failure_groups(report):
        if group.cause is not None:
            yield FailureCause(
                kernel=group.cause.kernel,
                cause=group.cause.cause,
                known=group.cause.known,
                model=group.cause.model,
                case_ids=tuple(one.record.case_id for one in (group.answer, *group.others)),
                smallest=problem_of(group.shown.record).full_line,
                failure=group.id,
            )


def _allowed_changes(report: GateReport) -> Iterator[Change]:
    """Yield the changes; a worse but flaky case becomes within rounding if --flaky allows it."""
    flaky = {
        (record.kernel, record.case_id)
        for record in measurements(report.answers)
        if record.status == "flaky"
    }
    # If flaky answers fail the gate, none of their changes is excused.
    if "flaky" in failing_statuses(questions(report), policy_of(report)):
        flaky = set()
    for one in report.changes:
        allowed = one.standing == "worse" and (one.kernel, one.case_id) in flaky
        reason = f"{one.reason}: --flaky allows it"
        yield replace(one, standing="within rounding", reason=reason) if allowed else one


def _comparisons(
    content: JournalContent,
    answers: tuple[Answer, ...],
    environments: dict[str, Environment],
    baseline: tuple[str, Baseline] | None,
    *,
    complete: bool,
) -> dict[str, Any]:
    """Return the report's comparison with a baseline and another commit."""
    head = content.head
    names, changes = [], []
    if baseline is not None:
        names.append(baseline[0])
        # Cases of the baseline that are missing in a shard may be in other shards.
        is_whole = complete and not head.get("shard")
        changes.append(
            baseline_comparison.compare_runs(
                baseline[1],
                answers,
                environments,
                complete=is_whole,
                dtypes=[name for name in str(head.get("dtypes", "")).split(",") if name],
            )
        )
    if head.get("against"):
        names.append(f"commit {str(head['against'])[:12]}")
        changes.append(_changes_since_commit(content, answers, environments))
    return {"baseline": " and ".join(names), "changes": merge_changes(names, changes)}


def _changes_since_commit(
    content: JournalContent, answers: tuple[Answer, ...], environments: dict[str, Environment]
) -> tuple[Change, ...]:
    """Compare with the answers of another commit's kernels, which are used nowhere else.

    Cases that have not been asked of that commit yet are left out.
    """
    local_names = {str(f["kernel"]): str(f["name"]) for f in _descriptions(content)}
    before: list[Answer] = []
    missing: dict[str, str] = {}
    compared: set[str] = set()
    for id_, done in content.results.items():
        unit = content.units[id_]
        if unit.commit:
            compared.add(replace(unit, commit="").id)
            here = local_names.get(unit.kernel, unit.kernel)
            before += [replace(a, record=replace(a.record, kernel=here)) for a in done.answers]
            missing.update({here: str(done.facts["missing"])} if "missing" in done.facts else {})
    after = [answer for answer in answers if answer.unit in compared]
    changes = baseline_comparison.compare_answers(before, after, environments)
    return tuple(
        replace(change, reason=missing[change.kernel])
        if change.standing == "new" and change.kernel in missing
        else change
        for change in changes
    )


def _stages(head: Mapping[str, Any]) -> tuple[Stage, ...]:
    names = str(head.get("stages", "")).split(",")
    return tuple(stage for stage in STAGES if stage in names) or STAGES


def _descriptions(content: JournalContent) -> Iterator[dict[str, Any]]:
    for done in content.results.values():
        if "name" in done.facts:
            yield done.facts


def _environments(content: JournalContent) -> dict[str, Environment]:
    # Workers on several machines may have several environments.
    facts = (done.facts for done in content.results.values() if "environment" in done.facts)
    environments = [msgspec.convert(each["environment"], Environment) for each in facts]
    return {each.id: each for each in environments}


def _planned_questions(content: JournalContent, head: Mapping[str, Any]) -> dict[Stage, int]:
    """Count the questions of each stage; a ``draw`` unit without a result counts as one."""
    planned: dict[Stage, int] = {}
    shard = Shard.parse(str(head.get("shard", "")))
    for unit in content.units.values():
        undrawn = unit.kind == "draw" and unit.id not in content.results
        if (unit.kind == "ask" or undrawn) and not unit.commit and shard.has(unit):
            planned[unit.stage] = planned.get(unit.stage, 0) + 1
    return {stage: planned[stage] for stage in STAGES if stage in planned}


def _answers(content: JournalContent, kernels: tuple[str, ...]) -> tuple[Answer, ...]:
    """Return the answers, except another commit's, ordered by stage, kernel and plan."""
    order = {id_: number for number, id_ in enumerate(content.units)}

    def sort_key(answer: Answer) -> tuple[int, int, int, str]:
        kernel = answer.record.kernel
        # Answers of a kernel that was never described come last.
        kernel_index = kernels.index(kernel) if kernel in kernels else len(kernels)
        stage = STAGES.index(answer.stage)
        return stage, kernel_index, order.get(answer.unit, len(order)), answer.record.case_id

    others = {id_ for id_, unit in content.units.items() if unit.commit}
    here = (done for id_, done in content.results.items() if id_ not in others)
    answers = (each for done in here for each in done.answers)
    return tuple(sorted(answers, key=sort_key))
