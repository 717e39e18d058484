"""The page of ``calibration.py``: how close right kernels come to each bound."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from calibration_summary import GRADIENT_RATIOS, RATIOS, STATUSES

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["page"]

_TITLES = {
    "out_over_bound": "out ÷ bound",
    "lse_over_bound": "LSE ÷ bound",
    "out_over_probable": "out ÷ probable",
    "lse_over_probable": "LSE ÷ probable",
    "dq_over_bound": "dQ ÷ bound",
    "dk_over_bound": "dK ÷ bound",
    "dv_over_bound": "dV ÷ bound",
    "dsink_over_bound": "dsink ÷ bound",
}
_ABOUT = """Made by `benchmarks/calibration.py`. A judgement's figure is its largest error ÷ bound
over all elements; columns show the largest, the 99th percentile and the median of those. Above 1 is
a kernel beyond the bound. *probable* is the probabilistic bound (p < 1e-6 a problem on generic
inputs; structured ones may exceed it). z, spread and residual: `docs/explanation/bounds.md`."""


def page(summaries: list[dict[str, Any]]) -> str:
    """Return the page for the summaries of one or more runs, as Markdown."""
    parts = ["# Calibration: right kernels on random problems", _ABOUT]
    for one in summaries:
        parts += [
            *_head(one),
            _statuses(one["groups"]),
            "### Largest / 99th percentile / median",
            _ratios(one["groups"], RATIOS),
            *_gradients(one["groups"]),
            "### What the problems were",
            _kinds(one["kinds"]),
            f"### Fails and errors: {one['alarms']}",
            _cases(one["listed"]),
            "### Warnings and what is inconclusive",
            _quiet(one["quiet"]),
            *_refused(one.get("refused", [])),
        ]
    return "\n\n".join(parts) + "\n"


def _head(one: dict[str, Any]) -> list[str]:
    env = one["environment"]
    versions = f"torch {env['torch']}, triton {env['triton'] or '–'}, Python {env['python']}"
    counted = f"{one['problems']} problems, {one['judgements']} judgements"
    if one["seconds"] is not None:
        mean, median = (1e3 * seconds for seconds in one["seconds"])
        counted += f"; {mean:.0f} ms a problem, median {median:.0f}"
    return [f"## {env['device']}", f"{versions}. {counted}."]


def _statuses(groups: list[dict[str, Any]]) -> str:
    lines = [
        [
            *(one["dtype"], one["kernel"], one["problems"]),
            *(one["statuses"][status] for status in STATUSES),
            *(one["rows"], one["rows_unbounded"], one["jumps"]),
        ]
        for one in groups
    ]
    head = ["dtype", "kernel", "problems", *STATUSES, "rows", "unbounded rows", "jumps"]
    return _table(head, lines, left=2)


def _ratios(groups: list[dict[str, Any]], names: tuple[str, ...]) -> str:
    lines = [
        [one["dtype"], one["kernel"], *(_numbers(one["ratios"].get(name)) for name in names)]
        for one in groups
    ]
    return _table(["dtype", "kernel", *(_TITLES.get(n, n) for n in names)], lines, left=2)


def _gradients(groups: list[dict[str, Any]]) -> list[str]:
    """Return the section on gradients if the run had any."""
    some = [one for one in groups if one["ratios"].get("dq_over_bound")]
    return ["### Gradients, likewise", _ratios(some, GRADIENT_RATIOS)] if some else []


def _refused(counted: list[list[Any]]) -> list[str]:
    """Return the section on problems that kernels do not take, with their reasons."""
    return ["### Not taken", _table(["what", "problems"], counted)] if counted else []


def _numbers(values: list[float] | None) -> str:
    return "–" if values is None else " / ".join(f"{value:.3g}" for value in values)


def _kinds(kinds: list[list[Any]]) -> str:
    lines = [
        [what, value, problems, *(_numbers(None if x is None else [x]) for x in worst)]
        for what, value, problems, *worst in kinds
    ]
    columns = [_TITLES[name] for name in (*RATIOS[:2], *GRADIENT_RATIOS)]
    width = max((len(line) for line in lines), default=0)  # of a forward no gradients
    return _table(["what", "which", "problems", *columns][:width], lines, left=2)


def _quiet(counted: list[list[Any]]) -> str:
    return _table(["what", "judgements"], counted) if counted else "None."


def _cases(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"* {row['kernel']} {row.get('tiling', '')} {row['dtype']} n={row['n']} "
        f"({row.get('rule') or row['status']}): {row.get('reason', '')} `{json.dumps(row['case'])}`"
        for row in rows
    ]
    return "\n".join(lines) or "None."


def _table(head: Iterable[str], lines: Iterable[Iterable[Any]], left: int = 1) -> str:
    head = list(head)
    rule = [*["---"] * left, *["--:"] * (len(head) - left)]
    cells = ([str(cell).replace("|", "\\|") for cell in line] for line in (head, rule, *lines))
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
