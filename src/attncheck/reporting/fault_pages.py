"""A FaultReport → table, Markdown, JSON; and the exit code that it deserves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.core.sanitize_text import shortened
from attncheck.records.fault_scores import FAULT_SCHEMA, FaultReport
from attncheck.reporting import figures, struct_json
from attncheck.reporting.by_format import FORMATS, Page, paged
from attncheck.reporting.cells import Cell
from attncheck.reporting.sheet import Line, Sheet

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attncheck.records.fault_scores import (
        ControlScore,
        FaultOutcome,
        FaultScore,
        PeerVerdict,
        Total,
    )
    from attncheck.reporting.cells import Look

__all__ = ["FORMATS", "exit_code", "load", "render", "show"]

_PASSED, _FAILED, _UNFINISHED, _NOTHING = 0, 1, 3, 5

_LOOKS: dict[FaultOutcome, Look] = {"caught": "good", "missed": "bad", "harness": "bad"}
_CONTROLS: dict[str, Look] = {"clean": "good", "flagged": "bad", "harness": "bad"}
_SHORT = {"allclose(1e-2)": "allclose", "1.1× mean": "mean"}  # of rules, in a heading


def load(text: str) -> FaultReport:
    """The report that ``render(report, "json")`` wrote; raises UsageError for anything else."""
    return struct_json.read(text, FaultReport, FAULT_SCHEMA)


def exit_code(report: FaultReport) -> int:
    """0 where all is caught and no control flagged; 1 where not; 3 where not all has a score.

    And 5 where nothing was scored at all.
    """
    outcomes = [score.outcome for score in report.scores]
    controls = [score.outcome for score in report.controls]
    if "missed" in outcomes or "flagged" in controls:
        return _FAILED
    if report.unfinished or "harness" in (*outcomes, *controls):
        return _UNFINISHED
    return _PASSED if "caught" in outcomes or "clean" in controls else _NOTHING


def _above(report: FaultReport) -> Iterator[str]:
    yield shortened(report.command)
    for env in report.environments.values():
        facts = [env.device, f"torch {env.torch}", f"triton {env.triton or 'missing'}"]
        yield " · ".join([*facts, f"attncheck {env.attncheck}"])
    took = figures.duration(report.seconds).strip() if report.seconds else ""
    yield " · ".join(
        filter(None, [f"tier {report.tier}", f"on {report.device}", report.started, took])
    )


def _sheets(report: FaultReport, width: int | None) -> Iterator[Sheet]:
    wide = width is None
    hosts = dict.fromkeys(score.host for score in report.scores if score.host)
    for host in hosts:
        yield _totals(host, [total for total in report.totals if total.host == host])
        scores = [score for score in report.scores if score.host == host]
        yield _faults(host, [s for s in scores if s.outcome != "equivalent"], wide=wide)
        equivalent = [score for score in scores if score.outcome == "equivalent"]
        if equivalent:
            yield _reasons(f"{host}: no fault in this host", equivalent)
    if report.controls:
        yield _controlled(report.controls)
    nowhere = [score for score in report.scores if not score.host]
    if nowhere:
        yield _reasons("Planted nowhere", nowhere)


def _totals(host: str, totals: Sequence[Total]) -> Sheet:
    rules = list(dict.fromkeys(rule for total in totals for rule in total.peers))
    heads = [_SHORT.get(rule, rule) for rule in rules]
    columns = ("category", "caught", "missed", "median s", "problems", *heads, "named 1st", "≤ 3rd")
    lines = [_total(total, rules) for total in sorted(totals, key=lambda each: not each.category)]
    return Sheet(f"{host}: score by category", columns, words=1, cut=1, lines=lines)


def _total(total: Total, rules: list[str]) -> Line:
    scored = total.caught + total.missed
    cells = [
        Cell(total.category or "all"),
        Cell(f"{total.caught}/{scored}", "plain" if total.caught < scored else "good"),
        Cell(str(total.missed), "bad" if total.missed else "dim"),
        Cell(figures.NOTHING if total.seconds is None else f"{total.seconds:.1f}"),
        Cell(figures.NOTHING if total.problems is None else f"{total.problems:g}"),
        *(Cell(f"{total.peers.get(rule, 0)}/{scored}", "dim") for rule in rules),
        _of(total.named_first, total.diagnosed),
        _of(total.named_third, total.diagnosed),
    ]
    remarks = [f"{total.unscored} not scored"] if total.unscored and not total.category else []
    return Line(tuple(cells), tuple(remarks))


def _of(count: int, total: int) -> Cell:
    return Cell(f"{count}/{total}") if total else Cell(figures.NOTHING, "dim")


def _faults(host: str, scores: Sequence[FaultScore], *, wide: bool) -> Sheet:
    rules = list(dict.fromkeys(said.rule for score in scores for said in score.peers))
    heads = [_SHORT.get(rule, rule) for rule in rules]
    columns = ("fault", "outcome", "by", "smallest", "problems", "s", *heads, "named")
    if wide:
        columns = ("fault", "category", *columns[1:])
    lines = [_fault(score, rules, wide=wide) for score in scores]
    words = 5 if wide else 4
    return Sheet(f"{host}: fault by fault", columns, words=words, cut=words, lines=lines)


def _fault(score: FaultScore, rules: list[str], *, wide: bool) -> Line:
    caught, said = score.caught, {each.rule: each for each in score.peers}
    asked = score.outcome in {"caught", "missed"}
    first = caught.first if caught else None
    smallest = (caught.shrunk or caught.first) if caught else None
    cells = [
        Cell(score.fault),
        *([Cell(score.category, "dim")] if wide else []),
        Cell(score.outcome, _LOOKS.get(score.outcome, "dim")),
        Cell(f"{first.stage} {first.question}" if first else figures.NOTHING),
        Cell(smallest.problem if smallest else figures.NOTHING, "dim"),
        Cell(str(score.problems) if asked else figures.NOTHING),
        Cell(f"{score.seconds:.1f}" if asked else figures.NOTHING),
        *(_peer(said.get(rule)) for rule in rules),
        _rank(score),
    ]
    return Line(tuple(cells), tuple(_remarks(score, wide=wide)))


def _remarks(score: FaultScore, *, wide: bool) -> Iterator[str]:
    if score.reason:
        yield shortened(score.reason)
    if score.outcome == "missed":
        yield f"{score.summary or score.fault}: {score.problems} problems, and all were right"
    if wide and score.caught:
        found = score.caught.shrunk or score.caught.first
        rule = f" ({found.rule})" if found.rule else ""
        yield shortened(f"{found.status}{rule}: {found.reason}")
        if score.diagnosis:
            best = score.diagnosis[0]
            yield shortened(f"diagnosis: {best.sentence or best.model}")


def _peer(said: PeerVerdict | None) -> Cell:
    if said is None or not said.problems:
        return Cell(figures.NOTHING, "dim")
    asked = said.problems - said.alarms
    return Cell(str(said.problems)) if said.caught else Cell(f"0/{asked}", "notable")


def _rank(score: FaultScore) -> Cell:
    if not score.diagnosis:
        return Cell(figures.NOTHING, "dim")
    return Cell(str(score.rank)) if score.rank else Cell("no", "notable")


def _reasons(title: str, scores: Sequence[FaultScore]) -> Sheet:
    lines = [Line((Cell(score.fault), Cell(shortened(score.reason), "dim"))) for score in scores]
    return Sheet(title, ("fault", "why"), words=2, cut=2, lines=lines)


def _controlled(controls: Sequence[ControlScore]) -> Sheet:
    columns = ("control", "host", "outcome", "problems", "s")
    return Sheet(
        "Controls: changes that leave a kernel right",
        columns,
        words=3,
        cut=1,
        lines=[_control(score) for score in controls],
    )


def _control(score: ControlScore) -> Line:
    asked = score.outcome in {"clean", "flagged"}
    cells = (
        Cell(score.control),
        Cell(score.host),
        Cell(score.outcome, _CONTROLS.get(score.outcome, "dim")),
        Cell(str(score.problems) if asked else figures.NOTHING),
        Cell(f"{score.seconds:.1f}" if asked else figures.NOTHING),
    )
    remarks = [shortened(score.reason)] if score.reason else []
    remarks += [
        shortened(f"{one.stage} {one.question}: {one.status} on {one.problem}: {one.reason}")
        for one in score.flagged
    ]
    return Line(cells, tuple(remarks))


def _below(report: FaultReport) -> Iterator[str]:
    if any(score.peers for score in report.scores):
        yield (
            "Under another project's rule: after how many of the plain problems it refuses the "
            "kernel too; 0/n where it does on none of n. Those where it refuses the right kernel "
            "as well do not count."
        )
    if any(score.diagnosis for score in report.scores):
        yield "named: at which place the diagnosis names this fault."
    if report.unfinished:
        yield f"{report.unfinished} have no score: {report.unfinished_because}."
    yield _verdict(report)


def _verdict(report: FaultReport) -> str:
    count = {
        outcome: sum(score.outcome == outcome for score in report.scores)
        for outcome in ("caught", "missed", "harness")
    }
    scored = count["caught"] + count["missed"]
    said = [f"{count['caught']} of {scored} faults caught"] if scored else ["no fault was scored"]
    broken = count["harness"] + sum(score.outcome == "harness" for score in report.controls)
    said += [f"{broken} could not be scored"] if broken else []
    asked = [score for score in report.controls if score.outcome in {"clean", "flagged"}]
    flagged = sum(score.outcome == "flagged" for score in asked)
    said += [f"{flagged} of {len(asked)} controls flagged"] if asked else []
    return f"{', '.join(said)}."


_PAGE: Page[FaultReport] = paged("Planted faults", _above, _sheets, _below)
render, show = _PAGE.render, _PAGE.show
