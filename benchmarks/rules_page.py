"""The page of ``rules.py``: the share of faults that each rule catches, and its false alarms."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from peers import PEERS
from planted import DTYPES, FAULTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["page"]

Row = dict[str, Any]
Problem = tuple[Any, ...]
RULES = ("attncheck", *PEERS)
_MOST_LISTED = 40


def page(result: dict[str, Any]) -> str:
    """Return the page for the rows of ``rules.py``, as Markdown."""
    rows: list[Row] = result["rows"]
    on_inputs = [row for row in rows if "probe" not in row]
    on_probes = [row for row in rows if "probe" in row]
    parts = [
        "# Planted faults: what each rule catches",
        _measured(result),
        _ABOUT,
        "## In sum",
        _summary(on_inputs),
        "## False alarms by dtype",
        "Right kernels refused, of those compared.",
        _false_alarms(on_inputs),
        "## Faults on random inputs",
        _ABOUT_FAULTS,
        _faults(on_inputs, on_probes),
        "## Faults by dtype",
        _dtypes(on_inputs),
        "## Probes",
        _probes(on_probes),
        *_lists(rows, on_inputs),
    ]
    return "\n\n".join(parts) + "\n"


_ABOUT = """Rules as `benchmarks/peers.py` has them; faults as `benchmarks/planted.py`. attncheck's
figure is the share with status `fail`; a warning counts as accepted. A fault is *told* where a rule
refuses it and accepts every right kernel on the same problem: a rule that refuses everything
catches all and tells nothing."""

_ABOUT_FAULTS = """In percent: *told (caught)*. *Hidden*: the difference from the right twin is
within what right kernels differ by among themselves, so that no rule of elements or norms can
refuse it and accept them. *Probes*: share of the fault's kernels that at least one exact probe
fails, with the best probe. *Standing* compares what attncheck tells on these inputs with the best
of the peers."""


def _judged(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["status"] not in ("error", "unsupported")]


def _real(rows: Iterable[Row]) -> list[Row]:
    """Return the judged rows of faults that changed the outputs."""
    return [row for row in _judged(rows) if row["kind"] == "fault" and row.get("effect") != 0]


def _right(rows: Iterable[Row]) -> list[Row]:
    return [row for row in _judged(rows) if row["kind"] == "right"]


def _share(rows: list[Row], test: Callable[[Row], bool]) -> float | None:
    return sum(map(test, rows)) / len(rows) if rows else None


def _by_rule(rows: list[Row]) -> dict[str, float | None]:
    return {rule: _share(rows, lambda row, rule=rule: _rejects(row, rule)) for rule in RULES}


def _summary(rows: list[Row]) -> str:
    faults, right = _real(rows), _right(rows)
    caught, alarms = _by_rule(faults), _by_rule(right)
    everything = _Standing(rows=faults, alarmed=_alarmed(rows), probes=[])
    lines = [
        [rule, *map(_percent, (everything.told(rule), caught[rule], alarms[rule]))]
        for rule in RULES
    ]
    hidden = f"hidden {_percent(everything.hidden)} %"
    counts = f"{len(faults)} runs of faults ({hidden}), {len(right)} of right kernels."
    head = ["rule", "told %", "caught %", "false alarms % (of kernels)"]
    return counts + "\n\n" + _table(head, lines)


def _false_alarms(rows: list[Row]) -> str:
    lines = []
    for dtype in DTYPES:
        some = _right(row for row in rows if row["dtype"] == dtype)
        if some:
            counts = [str(sum(_rejects(row, rule) for row in some)) for rule in RULES]
            lines.append([dtype, str(len(some)), *counts])
    return _table(["dtype", "runs", *RULES], lines)


def _dtypes(rows: list[Row]) -> str:
    lines = []
    for dtype in DTYPES:
        some = _real(row for row in rows if row["dtype"] == dtype)
        if some:
            lines.append([dtype, str(len(some)), *map(_percent, _by_rule(some).values())])
    return _table(["dtype", "runs", *RULES], lines)


@dataclass
class _Standing:
    """How the rules compare on one fault: its line of the table."""

    rows: list[Row]
    alarmed: dict[str, set[Problem]]
    probes: list[Row]

    @property
    def hidden(self) -> float | None:
        return _share(self.rows, lambda row: row["effect"] <= 1)

    def told(self, rule: str) -> float | None:
        """Return the share rejected on problems where the rule accepts every right kernel."""
        alarmed = self.alarmed[rule]
        return _share(self.rows, lambda row: _rejects(row, rule) and _problem(row) not in alarmed)

    @property
    def probed(self) -> tuple[float | None, str]:
        """The share of kernels that a probe fails, and the probe that fails most of them."""
        kernels: dict[tuple[Any, ...], bool] = defaultdict(bool)
        best: dict[str, int] = defaultdict(int)
        for row in _real(self.probes):
            failed = row["status"] == "fail"
            kernels[row["dtype"], row["length"], row["seed"]] |= failed
            best[row["probe"]] += failed
        share = sum(kernels.values()) / len(kernels) if kernels else None
        return share, max(best, key=lambda name: best[name]) if any(best.values()) else ""

    def verdict(self) -> str:
        """Return whether attncheck is ahead of the peers, and what it missed."""
        if not self.rows:
            return "no effect on these inputs"
        ours, best = self.told("attncheck") or 0.0, max(self.told(rule) or 0.0 for rule in PEERS)
        if ours == 1:
            return "all told"
        missed = [row for row in self.rows if not _rejects(row, "attncheck")]
        visible = sum(row["effect"] > 1 for row in missed)
        why = f"{visible} of {len(missed)} missed are visible" if visible else "missed are hidden"
        share, probe = self.probed
        why += f"; the probe {probe} tells" if share == 1 else ""
        return f"{'ahead' if ours > best else 'level' if ours == best else 'BEHIND'}; {why}"


def _problem(row: Row) -> Problem:
    numbers = row["length"], row["seed"], *row["heads"]
    return row["device"], row["dtype"], row["mask"], *numbers


def _alarmed(rows: list[Row]) -> dict[str, set[Problem]]:
    """Return the problems on which each rule rejects a right kernel."""
    return {rule: {_problem(row) for row in _right(rows) if _rejects(row, rule)} for rule in RULES}


def _faults(rows: list[Row], probes: list[Row]) -> str:
    lines, alarmed = [], _alarmed(rows)
    for fault in FAULTS:
        line = _Standing(
            rows=_real(row for row in rows if row["name"] == fault.name),
            alarmed=alarmed,
            probes=[row for row in probes if row["name"] == fault.name],
        )
        share, best = line.probed
        caught = _by_rule(line.rows)
        shares = [f"{_percent(line.told(rule))} ({_percent(caught[rule])})" for rule in RULES]
        probed = f"{_percent(share)} {best}".rstrip()
        facts = [_percent(line.hidden), probed, line.verdict()]
        lines.append([fault.name, str(len(line.rows)), *shares, *facts])
    return _table(["fault", "runs", *RULES, "hidden", "probes", "standing"], lines)


def _probes(rows: list[Row]) -> str:
    """Return a table of the share of kernels that each probe fails: each fault, right kernels."""
    names = list(dict.fromkeys(row["probe"] for row in rows))
    if not names:
        return "None run."
    lines = []
    for kind in [*(fault.name for fault in FAULTS), "right kernels"]:
        right = kind == "right kernels"
        some = _right(rows) if right else _real(row for row in rows if row["name"] == kind)
        by_probe = ([row for row in some if row["probe"] == name] for name in names)
        shares = [_percent(_share(each, lambda row: row["status"] == "fail")) for each in by_probe]
        lines.append([kind, str(len(some)), *shares])
    return _table(["in percent", "runs", *names], lines)


def _lists(rows: list[Row], on_inputs: list[Row]) -> list[str]:
    """Return sections on false alarms, errors, and visible faults that attncheck missed."""
    alarms = [row for row in _right(rows) if row["status"] == "fail"]
    errors = [row for row in rows if row["status"] == "error"]
    missed = [
        row for row in _real(on_inputs) if row["effect"] > 1 and not _rejects(row, "attncheck")
    ]
    missed.sort(key=lambda row: -row["effect"])
    parts = ["## Right kernels that attncheck fails", _cases(alarms)]
    parts += ["## Errors", _cases(errors)] if errors else []
    lines = [
        [
            row["name"],
            row["dtype"],
            str(row["length"]),
            f"{row['distribution']} seed {row['seed']}",
            row["status"],
            f"{row['effect']:.3g}",
        ]
        for row in missed[:_MOST_LISTED]
    ]
    heads = ["fault", "dtype", "length", "inputs", "status", "difference ÷ spread"]
    title = f"## Visible and not caught on random inputs: {len(missed)}"
    return [*parts, title, _table(heads, lines) if lines else "None."]


def _cases(rows: list[Row]) -> str:
    if not rows:
        return "None."
    return "\n".join(
        f"* {row['name']} ({row.get('rule', row['status'])}): {row.get('reason', '')} "
        f"`{json.dumps(row.get('case'))}`"
        for row in rows[:_MOST_LISTED]
    )


def _measured(result: dict[str, Any]) -> str:
    """Return a paragraph on the machine, the number of problems and the lengths."""
    lines = [
        f"{env['device']}: torch {env['torch']}, triton {env['triton'] or '–'}, "
        f"Python {env['python']}."
        for env in result["environments"]
    ]
    done = f"{result['done']} of {result['of']} problems, {len(result['rows'])} judgements."
    lengths = sorted({row["length"] for row in result["rows"]})
    return "\n".join([*lines, done, f"Lengths {', '.join(map(str, lengths))}."])


def _rejects(row: Row, rule: str) -> bool:
    """Return whether the rule rejects the row's kernel; attncheck's rule is the status ``fail``."""
    if rule == "attncheck":
        return bool(row["status"] == "fail")
    return not row["peers"][rule]


def _percent(share: float | None) -> str:
    """Format as whole percent, with one decimal where that would wrongly read 0 or 100."""
    if share is None:
        return "–"
    text = f"{100 * share:.0f}"
    return text if text not in {"0", "100"} or share in {0.0, 1.0} else f"{100 * share:.1f}"


def _table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown, its first column left-aligned."""
    head = list(head)
    rule = ["---", *["--:"] * (len(head) - 1)]
    cells = [
        [cell.replace("|", "\\|") for cell in line] for line in [head, rule, *map(list, lines)]
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
