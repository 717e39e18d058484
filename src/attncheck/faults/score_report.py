"""Build a FaultReport from a journal."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import msgspec

from attncheck.faults.catalogue import CONTROLS, FAULTS, HOSTS
from attncheck.faults.fault_selection import FILE, FaultSelection, new_score
from attncheck.records.fault_scores import (
    SCORED,
    ControlScore,
    FaultReport,
    FaultScore,
    MutantReport,
    MutantScore,
    Total,
)
from attncheck.records.record import Environment
from attncheck.workers.journal_format import JournalContent
from attncheck.workers.units import Unit, UnitResult

_DIAGNOSED = 3  # best explanations among which a diagnosis should name the fault


def fault_report(
    content: JournalContent, selection: FaultSelection, *, command: str
) -> FaultReport:
    """Return the report of the journal's results on ``selection``."""
    head = content.head
    scored: dict[str, FaultScore | ControlScore] = {}
    environments: dict[str, Environment] = {}
    for unit in selection.units:
        done = content.results.get(unit.id)
        if done is not None:
            score = score_of(unit, done)
            scored[unit.kernel] = score
            if score.environment and "environment" in done.facts:
                where = msgspec.convert(done.facts["environment"], Environment)
                environments[score.environment] = where
    scores = [score for score in scored.values() if isinstance(score, FaultScore)]
    controls = [score for score in scored.values() if isinstance(score, ControlScore)]
    # In the catalogue's order, and not in that of the workers' results.
    scores = sorted([*scores, *selection.settled], key=_sort_key)
    waiting = len(selection.units) - len(scored)
    return FaultReport(
        command=command,
        tier=str(head.get("tier", "")),
        device=str(head.get("device", "")),
        started=str(head.get("started", "")),
        seconds=round(content.seconds, 1),
        environments=environments,
        unfinished=waiting,
        unfinished_because=(content.why or "not all was asked") if waiting else "",
        scores=tuple(scores),
        controls=(*controls, *selection.controls),
        totals=tuple(totals(scores)),
    )


def mutant_report(
    content: JournalContent, units: Sequence[Unit], *, tool: str, command: str
) -> MutantReport:
    """Return the report of the journal's results on mutants, by kernel and line."""
    scores, environments = [], {}
    for unit in units:
        done = content.results.get(unit.id)
        if done is None:
            continue
        facts = done.facts.get("score")
        if facts is None:
            name, _, _ = unit.kernel.rpartition("@")
            kernel, operator, line = name.split(":")[:3]
            facts = {"mutant": name, "kernel": kernel, "operator": operator, "line": int(line)}
            facts |= {"diff": "", "tool": tool, "outcome": "harness", "reason": done.harness}
        scores.append(msgspec.convert(facts, MutantScore))
        if "environment" in done.facts:
            where = msgspec.convert(done.facts["environment"], Environment)
            environments[done.facts["key"]] = where
    caught = Counter(score.questions for score in scores if score.outcome == "caught")
    curve = itertools.accumulate(caught[k] for k in range(1, max(caught, default=0) + 1))
    waiting = len(units) - len(scores)
    return MutantReport(
        command=command,
        tool=tool,
        started=str(content.head.get("started", "")),
        seconds=round(content.seconds, 1),
        environments=environments,
        unfinished=waiting,
        unfinished_because=(content.why or "not all was asked") if waiting else "",
        scores=tuple(sorted(scores, key=lambda score: (score.kernel, score.line, score.mutant))),
        curve=tuple(curve),
    )


def totals(scores: Iterable[FaultScore]) -> Iterator[Total]:
    """Yield the total of each host, then of each of its categories, in the order of ``scores``."""
    hosts: dict[str, list[FaultScore]] = {}
    for score in scores:
        if score.host:  # Faults that are planted nowhere count for no host.
            hosts.setdefault(score.host, []).append(score)
    for host, of_host in hosts.items():
        yield _total(host, "", of_host)
        for category in dict.fromkeys(score.category for score in of_host):
            yield _total(host, category, [s for s in of_host if s.category == category])


def _total(host: str, category: str, scores: Sequence[FaultScore]) -> Total:
    count = Counter(score.outcome for score in scores)
    caught = [score for score in scores if score.outcome == "caught"]
    discrete = [score for score in caught if score.discrete]
    peers = Counter(peer.rule for score in scores for peer in score.peers if peer.caught)
    rules = dict.fromkeys(peer.rule for score in scores for peer in score.peers)
    scored = sum(count[outcome] for outcome in SCORED)
    return Total(
        host=host,
        category=category,
        caught=count["caught"],
        missed=count["missed"],
        equivalent=count["equivalent"],
        unscored=len(scores) - scored - count["equivalent"],
        seconds=median(score.seconds for score in caught) if caught else None,
        problems=median(score.problems for score in caught) if caught else None,
        named_first=sum(score.rank == 1 for score in discrete),
        named_third=sum(0 < score.rank <= _DIAGNOSED for score in discrete),
        diagnosed=len(discrete),
        peers={rule: peers[rule] for rule in rules},
    )


def score_of(unit: Unit, done: UnitResult) -> FaultScore | ControlScore:
    """Return the score in a result; for a unit without one, a score with the reason."""
    if "score" in done.facts:
        if done.facts.get("kind") == "control":
            return msgspec.convert(done.facts["score"], ControlScore)
        return msgspec.convert(done.facts["score"], FaultScore)
    name, _, host = unit.kernel.rpartition("@")
    facts: dict[str, Any] = {
        "host": host,
        "device": unit.device,
        "dtype": unit.dtype,
        "tier": unit.tier,
        "outcome": "harness",
        "reason": done.harness or "it has no score",
    }
    entry = FAULTS.get(name) or CONTROLS.get(name)
    return new_score(entry, **facts) if entry else FaultScore(fault=name, category="own", **facts)


def _sort_key(score: FaultScore) -> tuple[int, int]:
    """Return a sort key: host, then place in the catalogue; faults planted nowhere come last."""
    hosts: Mapping[str, int] = {host: place for place, host in enumerate((*HOSTS, FILE))}
    ids = list(FAULTS)
    place = ids.index(score.fault) if score.fault in FAULTS else len(ids)
    return hosts.get(score.host, len(hosts)), place
