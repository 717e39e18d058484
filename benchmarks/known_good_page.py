"""The page of ``known_good.py``: counts of cases, and every false alarm."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from attncheck.records.record import FAILED_STATUSES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["ALARMS", "page", "summary"]

ALARMS = frozenset({*FAILED_STATUSES, "flaky", "oracle disagrees"})
"""Statuses with which a gate does not pass."""

_STATUSES = ("pass", "warn", "inconclusive", "known", "alarm")
_MOST_LISTED = 50
_ABOUT = """Made by `benchmarks/known_good.py`. Right kernels are asked the questions of
`attncheck gate`, with other numbers for every seed, each kernel in a process of its own. A case is
one question to one kernel, counted once however often it was asked. *known* is a failure that
`properties/known_failures.toml` has, of a library and not of the judge. An alarm is any other
answer that would not let a gate pass: a failure, an error, a lost process, a flaky answer."""


def summary(tasks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return counts by kernel, stage, question and status, and every alarm of all tasks."""
    cases: dict[tuple[str, str], tuple[str, str, str]] = {}
    for one in tasks:
        for unit, stage, question, status in one["rows"]:
            shown = "alarm" if status in ALARMS else status
            before = cases.get((one["kernel"], unit))
            if before is None or shown == "alarm":
                cases[one["kernel"], unit] = stage, question, shown
    counted = Counter((_short(kernel), *case) for (kernel, _), case in cases.items())
    return {
        "environments": _once(one["environment"] for one in tasks),
        "tiers": sorted({one["tier"] for one in tasks}),
        "seeds": dict(Counter(_short(one["kernel"]) for one in tasks)),
        "answers": sum(len(one["rows"]) for one in tasks),
        "cases": sum(n for (*_, status), n in counted.items() if status != "unsupported"),
        "counts": [[*key, n] for key, n in sorted(counted.items())],
        "absent": {_short(one["kernel"]): one["absent"] for one in tasks if one.get("absent")},
        "harness": _once(error for one in tasks for error in one["harness"]),
        "alarms": [alarm for one in tasks for alarm in one["alarms"]],
    }


def page(totals: dict[str, Any]) -> str:
    """Return the page of a summary, as Markdown."""
    parts = ["# Known-good kernels: false alarms of the gate", _ABOUT]
    parts += [f"{env['device']}; torch {env['torch']}." for env in totals["environments"]]
    alarms = len(totals["alarms"])
    parts.append(
        f"**{totals['cases']:,} cases, {alarms} alarm{'' if alarms == 1 else 's'}.** "
        f"Tier {', '.join(totals['tiers'])}.{_bound(totals)}"
    )
    parts += ["## Kernels", _table("kernel", totals["counts"], 0, totals["seeds"])]
    parts += ["## Stages", _table("stage", totals["counts"], 1)]
    parts += ["## Questions", _table("question", totals["counts"], 2)]
    parts += ["## Alarms", "\n".join(_listed(totals["alarms"])) or "None."]
    if totals["harness"]:
        parts += ["## Of the gate itself", "\n".join(f"* {error}" for error in totals["harness"])]
    if totals["absent"]:
        lines = [f"* {kernel}: {reason}" for kernel, reason in totals["absent"].items()]
        parts += ["## Not here", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _bound(totals: dict[str, Any]) -> str:
    """Return a bound of the rate of false alarms where there was none, by the rule of three."""
    if totals["alarms"] or not totals["cases"]:
        return ""
    return f" So fewer than one in {totals['cases'] // 3:,} is a false alarm (95 %)."


def _table(
    title: str, counts: list[list[Any]], column: int, seeds: dict[str, int] | None = None
) -> str:
    """Return a table of cases by one column of the counts, and by status."""
    statuses: dict[str, Counter[str]] = {}
    for line in counts:
        statuses.setdefault(line[column], Counter())[line[3]] += line[4]
    head = [title, *(["plans"] if seeds else []), "cases", *_STATUSES]
    lines = [head, ["---", *["--:"] * (len(head) - 1)]]
    for name, by_status in sorted(statuses.items()):
        total = sum(by_status[status] for status in _STATUSES)
        plans = [str(seeds.get(name, 0))] if seeds else []
        lines.append([name, *plans, *map(str, (total, *(by_status[s] for s in _STATUSES)))])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _listed(alarms: list[dict[str, Any]]) -> Iterator[str]:
    for alarm in alarms[:_MOST_LISTED]:
        record = alarm["answer"]["record"]
        judgement = record.get("judgement") or {}
        reason = judgement.get("reason") or record.get("reason", "")
        rule = judgement.get("rule") or record["status"]
        case = json.dumps(record["case"], separators=(",", ":"))
        yield f"* {_short(alarm['unit']['kernel'])} ({rule}): {reason} `{case}`"
    if len(alarms) > _MOST_LISTED:
        yield f"* … and {len(alarms) - _MOST_LISTED} more: the JSON file has all"


def _short(kernel: str) -> str:
    """Return a kernel's name without its folder, which differs between machines."""
    file, _, name = kernel.replace("\\", "/").rpartition("/")[2].partition("::")
    if file != "known_good_kernels.py":
        return f"{file}::{name}" if name else file
    return f"{'ideal' if name.istitle() else 'torch'} {name}"


def _once(values: Iterable[Any]) -> list[Any]:
    distinct: list[Any] = []
    for value in values:
        if value not in distinct:
            distinct.append(value)
    return distinct
