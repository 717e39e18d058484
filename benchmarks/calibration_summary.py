"""The summary of a calibration's judgements, small enough to be kept."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["GRADIENT_RATIOS", "RATIOS", "STATUSES", "merged", "summary"]

Row = dict[str, Any]
DTYPES = ("fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2")
RATIOS = (
    *("out_over_bound", "lse_over_bound", "out_over_probable", "lse_over_probable"),
    *("z", "spread", "residual"),
)
GRADIENT_RATIOS = ("dq_over_bound", "dk_over_bound", "dv_over_bound", "dsink_over_bound")
STATUSES = ("pass", "warn", "inconclusive", "fail", "error")
_MOST_LISTED = 60


def merged(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the runs of each environment, with every judgement once."""
    by_environment: dict[str, dict[str, Any]] = {}
    for run in runs:
        rows = by_environment.setdefault(repr(run["environment"]), {**run, "rows": {}})["rows"]
        rows |= {(row["n"], row["kernel"]): row for row in run["rows"]}
    return [{**run, "rows": list(run["rows"].values())} for run in by_environment.values()]


def summary(run: dict[str, Any]) -> dict[str, Any]:
    """Return counts and ratios of one run, and the Cases of failures."""
    refusals = [row for row in run["rows"] if row["status"] == "unsupported"]
    refused = Counter(f"{row['kernel']}: {_without_numbers(row['reason'])}" for row in refusals)
    rows: list[Row] = [row for row in run["rows"] if row["status"] != "unsupported"]
    seconds = sorted(row["seconds"] for row in run["rows"] if "seconds" in row)
    alarms = [row for row in rows if row["status"] in ("fail", "error")]
    doubtful = [
        row for row in rows if row["status"] in ("warn", "inconclusive") or _has_warnings(row)
    ]
    quiet = Counter(_sentence(row) for row in doubtful)
    return {
        "environment": run["environment"],
        "problems": len({row["n"] for row in rows}),
        "judgements": len(rows),
        "seconds": [sum(seconds) / len(seconds), _at(seconds, 0.5)] if seconds else None,
        "groups": [_group(*group) for group in _groups(rows)],
        "kinds": _kinds(rows),
        "alarms": len(alarms),
        "listed": alarms[:_MOST_LISTED],
        "quiet": quiet.most_common(_MOST_LISTED),
        "refused": refused.most_common(_MOST_LISTED),
    }


def _has_warnings(row: Row) -> bool:
    """Return whether a pass has warnings, for example that not all elements were judged."""
    return bool(row["status"] == "pass" and row.get("warnings"))


def _groups(rows: list[Row]) -> list[tuple[str, str, list[Row]]]:
    """Return the rows of each dtype and kernel, in the order in which they are shown."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["dtype"], row["kernel"]), []).append(row)
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    order = sorted(groups, key=lambda key: (DTYPES.index(key[0]), kernels.index(key[1])))
    return [(*key, groups[key]) for key in order]


def _group(dtype: str, kernel: str, rows: list[Row]) -> dict[str, Any]:
    counts = Counter(row["status"] for row in rows)
    return {
        "dtype": dtype,
        "kernel": kernel,
        "problems": len(rows),
        "statuses": {status: counts[status] for status in STATUSES},
        **{name: sum(row.get(name) or 0 for row in rows) for name in _COUNTED},
        "ratios": {
            name: _three(row.get(name) for row in rows) for name in (*RATIOS, *GRADIENT_RATIOS)
        },
    }


_COUNTED = ("rows", "rows_unbounded", "jumps")


def _three(values: Iterable[float | None]) -> list[float] | None:
    """Return the largest value, the 99th percentile and the median."""
    known = sorted(value for value in values if value is not None)
    return [known[-1], _at(known, 0.99), _at(known, 0.5)] if known else None


def _at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def _kinds(rows: list[Row]) -> list[list[Any]]:
    """Count problems by distribution, mask, score mod and loss, with their largest ratios."""
    kinds = []
    gradients = any("dq_over_bound" in row for row in rows)
    columns = (*RATIOS[:2], *(GRADIENT_RATIOS if gradients else ()))
    for what in ("distribution", "mask", "score", "loss"):
        for value in sorted({row[what] for row in rows if what in row}):
            some = [row for row in rows if row.get(what) == value]
            worst = [_three(row.get(name) for row in some) for name in columns]
            problems = len({row["n"] for row in some})
            kinds.append([what, value, problems, *(three[0] if three else None for three in worst)])
    return kinds


def _sentence(row: Row) -> str:
    """Return kernel, dtype, status and reason without numbers, to count equal ones."""
    text = row.get("reason") or "; ".join(row.get("warnings", ())) or row["status"]
    return f"{row['kernel']} {row['dtype']} {row['status']}: {_without_numbers(text)}"


def _without_numbers(text: str) -> str:
    return " ".join("…" if any(c.isdigit() for c in word) else word for word in text.split())
