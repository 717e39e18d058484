"""The page of ``known_good.py``: how many questions, and every false alarm."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from attncheck.records.record import FAILED_STATUSES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["ALARMS", "page", "summary"]

ALARMS = frozenset({*FAILED_STATUSES, "flaky", "oracle disagrees"})
"""What fails a gate, or does not let it pass."""

_STATUSES = ("pass", "warn", "inconclusive", "known", "alarm")
_MOST_LISTED = 50
_ABOUT = """Made by `benchmarks/known_good.py`. Right kernels are asked the questions of
`attncheck gate`, with other numbers for every seed, each kernel in a process of its own. A case is
one question to one kernel, counted once however often it was asked. *known* is a failure that
`properties/known_failures.toml` has, of a library and not of the judge. An alarm is any other
answer that would not let a gate pass: a failure, an error, a lost process, a flaky answer."""


def summary(tasks: list[dict[str, Any]]) -> dict[str, Any]:
    """What all tasks have shown: counts by kernel, question and status, and every alarm."""
    cases: dict[tuple[str, str], tuple[str, str, str]] = {}
    for one in tasks:
        for unit, stage, question, status in one["rows"]:
            said = "alarm" if status in ALARMS else status
            before = cases.get((one["kernel"], unit))
            if before is None or said == "alarm":
                cases[one["kernel"], unit] = stage, question, said
    counted = Counter((_short(kernel), *found) for (kernel, _), found in cases.items())
    return {
        "environments": _once(one["environment"] for one in tasks),
        "tiers": sorted({one["tier"] for one in tasks}),
        "seeds": dict(Counter(_short(one["kernel"]) for one in tasks)),
        "answers": sum(len(one["rows"]) for one in tasks),
        "cases": sum(n for (*_, status), n in counted.items() if status != "unsupported"),
        "counts": [[*key, n] for key, n in sorted(counted.items())],
        "absent": {_short(one["kernel"]): one["absent"] for one in tasks if one.get("absent")},
        "harness": _once(said for one in tasks for said in one["harness"]),
        "alarms": [kept for one in tasks for kept in one["alarms"]],
    }


def page(told: dict[str, Any]) -> str:
    """Markdown."""
    parts = ["# Known-good kernels: false alarms of the gate", _ABOUT]
    parts += [f"{env['device']}; torch {env['torch']}." for env in told["environments"]]
    alarms = len(told["alarms"])
    parts.append(
        f"**{told['cases']:,} cases, {alarms} alarm{'' if alarms == 1 else 's'}.** "
        f"Tier {', '.join(told['tiers'])}.{_bound(told)}"
    )
    parts += ["## Kernels", _table("kernel", told["counts"], 0, told["seeds"])]
    parts += ["## Stages", _table("stage", told["counts"], 1)]
    parts += ["## Questions", _table("question", told["counts"], 2)]
    parts += ["## Alarms", "\n".join(_listed(told["alarms"])) or "None."]
    if told["harness"]:
        parts += ["## Of the gate itself", "\n".join(f"* {said}" for said in told["harness"])]
    if told["absent"]:
        lines = [f"* {kernel}: {said}" for kernel, said in told["absent"].items()]
        parts += ["## Not here", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _bound(told: dict[str, Any]) -> str:
    """What so many cases without an alarm show: the rule of three."""
    if told["alarms"] or not told["cases"]:
        return ""
    return f" So fewer than one in {told['cases'] // 3:,} is a false alarm (95 %)."


def _table(
    title: str, counts: list[list[Any]], column: int, seeds: dict[str, int] | None = None
) -> str:
    """Cases by one column of the counts, and by status."""
    found: dict[str, Counter[str]] = {}
    for line in counts:
        found.setdefault(line[column], Counter())[line[3]] += line[4]
    head = [title, *(["plans"] if seeds else []), "cases", *_STATUSES]
    lines = [head, ["---", *["--:"] * (len(head) - 1)]]
    for name, by_status in sorted(found.items()):
        asked = sum(by_status[status] for status in _STATUSES)
        own = [str(seeds.get(name, 0))] if seeds else []
        lines.append([name, *own, *map(str, (asked, *(by_status[s] for s in _STATUSES)))])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _listed(alarms: list[dict[str, Any]]) -> Iterator[str]:
    for kept in alarms[:_MOST_LISTED]:
        record = kept["answer"]["record"]
        judgement = record.get("judgement") or {}
        said = judgement.get("reason") or record.get("reason", "")
        rule = judgement.get("rule") or record["status"]
        case = json.dumps(record["case"], separators=(",", ":"))
        yield f"* {_short(kept['unit']['kernel'])} ({rule}): {said} `{case}`"
    if len(alarms) > _MOST_LISTED:
        yield f"* … and {len(alarms) - _MOST_LISTED} more: the JSON file has all"


def _short(kernel: str) -> str:
    """Without the folder, which differs from machine to machine."""
    file, _, name = kernel.replace("\\", "/").rpartition("/")[2].partition("::")
    if file != "known_good_kernels.py":
        return f"{file}::{name}" if name else file
    return f"{'ideal' if name.istitle() else 'torch'} {name}"


def _once(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found
