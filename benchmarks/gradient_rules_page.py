"""The page of ``gradient_rules.py``: what each rule catches of each fault in each dtype."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from peers import GRADIENT_PEERS as PEERS
from planted_gradients import DTYPES, FAULTS
from rule_tables import Row, measured, percent, refused, table

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

__all__ = ["page"]

Problem = tuple[Any, ...]
RULES = ("attncheck", *PEERS)
_MOST_LISTED = 40
_ABOUT = """Rules as `benchmarks/peers.py` has them, of dQ, dK and dV; faults as
`benchmarks/planted_gradients.py`, each behind a right forward. attncheck's figure counts the status
`fail` alone. Runs in which a fault changed no bit do not count. A fault is *told* where a rule
refuses it and accepts every right kernel on the same problem. *Hidden*: the difference from the
right twin is within what right kernels differ by among themselves."""


def page(found: dict[str, Any]) -> str:
    """Markdown of what ``gradient_rules.py`` found."""
    rows: list[Row] = found["rows"]
    alarms = [row for row in _right(rows) if row["status"] == "fail"]
    errors = [row for row in rows if row["status"] == "error"]
    parts = [
        "# Planted faults of a backward: what each rule catches",
        measured(found),
        _ABOUT,
        "## In sum",
        _summary(rows),
        "## Faults",
        "attncheck's in each dtype, *caught of runs*; then in percent of all runs.",
        _faults(rows),
        *(part for dtype in DTYPES for part in _of_dtype(rows, dtype)),
        f"## Right kernels that attncheck fails: {len(alarms)}",
        _cases(alarms),
        *([f"## Errors: {len(errors)}", _cases(errors)] if errors else []),
        "## Never caught by attncheck",
        _never(rows),
        *_missed(rows),
    ]
    return "\n\n".join(parts) + "\n"


def _right(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["what"] == "right" and row["status"] != "error"]


def _real(rows: Iterable[Row]) -> list[Row]:
    """Faults that changed a bit."""
    faults = (row for row in rows if row["what"] == "fault" and row["status"] != "error")
    return [row for row in faults if row.get("effect") != 0]


def _count(rows: list[Row], rule: str) -> int:
    return sum(refused(row, rule) for row in rows)


def _problem(row: Row) -> Problem:
    return tuple(row[name] for name in ("device", "dtype", "length", "seed", "kind"))


def _alarmed(right: list[Row], rule: str) -> set[Problem]:
    """Problems on which a rule refuses a right kernel."""
    return {_problem(row) for row in right if refused(row, rule)}


def _percent(rows: list[Row], rule: str, alarmed: Collection[Problem] = ()) -> str:
    told = [row for row in rows if _problem(row) not in alarmed]
    return percent(_count(told, rule) / len(rows) if rows else None)


def _hidden(rows: list[Row]) -> str:
    return f"{100 * sum(row['effect'] <= 1 for row in rows) / len(rows):.0f}" if rows else "–"


def _summary(rows: list[Row]) -> str:
    """Faults caught and right kernels refused, by dtype and in all."""
    lines = []
    for dtype in (*DTYPES, "all"):
        some = [row for row in rows if dtype in (row["dtype"], "all")]
        faults, right = _real(some), _right(some)
        if faults:
            caught = (_percent(faults, rule) for rule in RULES)
            lines.append([f"{dtype}: faults caught %", str(len(faults)), *caught])
            told = (_percent(faults, rule, _alarmed(right, rule)) for rule in RULES)
            lines.append([f"{dtype}: faults told %", str(len(faults)), *told])
            alarms = (str(_count(right, rule)) for rule in RULES)
            lines.append([f"{dtype}: right kernels refused", str(len(right)), *alarms])
    return table(["what", "runs", *RULES], lines)


def _faults(rows: list[Row]) -> str:
    lines = []
    for fault in FAULTS:
        mine = _real(row for row in rows if row["name"] == fault.name)
        cells = []
        for dtype in DTYPES:
            some = [row for row in mine if row["dtype"] == dtype]
            cells.append(f"{_count(some, 'attncheck')} of {len(some)}" if some else "–")
        shares = (_percent(mine, rule) for rule in RULES)
        lines.append([fault.name, *cells, *shares, _hidden(mine), _word(fault.kind, mine)])
    return table(["fault", *DTYPES, *RULES, "hidden", "problem"], lines)


def _word(kind: str, rows: list[Row]) -> str:
    return kind if rows else f"{kind}: no effect"


def _of_dtype(rows: list[Row], dtype: str) -> list[str]:
    """Every rule's count in one dtype."""
    lines = []
    for fault in FAULTS:
        some = _real(r for r in rows if (r["name"], r["dtype"]) == (fault.name, dtype))
        if some:
            counts = (str(_count(some, rule)) for rule in RULES)
            lines.append([fault.name, str(len(some)), *counts, _hidden(some)])
    head = ["caught", "runs", *RULES, "hidden %"]
    return [f"## In {dtype}", table(head, lines)] if lines else []


def _never(rows: list[Row]) -> str:
    """Faults of which no run failed, with the dtypes where that is so."""
    lines = []
    for fault in FAULTS:
        mine = _real(row for row in rows if row["name"] == fault.name)
        ran = {row["dtype"] for row in mine}
        caught = {row["dtype"] for row in mine if refused(row, "attncheck")}
        if ran - caught:
            where = ", ".join(dtype for dtype in DTYPES if dtype in ran - caught)
            lines.append(f"* {fault.name}: {where}")
    return "\n".join(lines) or "None."


def _missed(rows: list[Row]) -> list[str]:
    """What attncheck missed though it is visible: what to look at next."""
    missed = [row for row in _real(rows) if row["effect"] > 1 and not refused(row, "attncheck")]
    missed.sort(key=lambda row: -row["effect"])
    lines = [
        [
            *(row["name"], row["dtype"], str(row["length"])),
            *(f"{row['distribution']} seed {row['seed']}", row["status"]),
            ", ".join(f"{n} {share:.3g}" for n, share in row.get("shares", {}).items()),
            f"{row['effect']:.3g}",
        ]
        for row in missed[:_MOST_LISTED]
    ]
    heads = ["fault", "dtype", "length", "inputs", "status", "error ÷ bound", "÷ spread"]
    title = f"## Visible and not caught: {len(missed)}"
    return [title, table(heads, lines) if lines else "None."]


def _cases(rows: list[Row]) -> str:
    if not rows:
        return "None."
    return "\n".join(
        f"* {row['name']} ({row.get('rule') or row['status']}): {row.get('reason', '')} "
        f"`{json.dumps(row.get('case'))}`"
        for row in rows[:_MOST_LISTED]
    )
