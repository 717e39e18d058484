"""What there is to say of a calibration's judgements, in a file small enough to be kept."""

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
    """Runs of one environment as one; a judgement that is in several of them is taken once."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        rows = found.setdefault(repr(run["environment"]), {**run, "rows": {}})["rows"]
        rows |= {(row["n"], row["kernel"]): row for row in run["rows"]}
    return [{**run, "rows": list(run["rows"].values())} for run in found.values()]


def summary(run: dict[str, Any]) -> dict[str, Any]:
    """Counts and ratios of one run; whole Cases of what failed."""
    refusals = [row for row in run["rows"] if row["status"] == "unsupported"]
    refused = Counter(f"{row['kernel']}: {_worded(row['reason'])}" for row in refusals)
    rows: list[Row] = [row for row in run["rows"] if row["status"] != "unsupported"]
    taken = sorted(row["seconds"] for row in run["rows"] if "seconds" in row)
    alarms = [row for row in rows if row["status"] in ("fail", "error")]
    odd = [row for row in rows if row["status"] in ("warn", "inconclusive") or _silent(row)]
    quiet = Counter(_words(row) for row in odd)
    return {
        "environment": run["environment"],
        "problems": len({row["n"] for row in rows}),
        "judgements": len(rows),
        "seconds": [sum(taken) / len(taken), _at(taken, 0.5)] if taken else None,
        "groups": [_group(*group) for group in _groups(rows)],
        "kinds": _kinds(rows),
        "alarms": len(alarms),
        "listed": alarms[:_MOST_LISTED],
        "quiet": quiet.most_common(_MOST_LISTED),
        "refused": refused.most_common(_MOST_LISTED),
    }


def _silent(row: Row) -> bool:
    """A pass that has something to say all the same: that not all of it was judged."""
    return bool(row["status"] == "pass" and row.get("warnings"))


def _groups(rows: list[Row]) -> list[tuple[str, str, list[Row]]]:
    """Rows of each dtype and kernel, in the order in which they are shown."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["dtype"], row["kernel"]), []).append(row)
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    order = sorted(found, key=lambda key: (DTYPES.index(key[0]), kernels.index(key[1])))
    return [(*key, found[key]) for key in order]


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
    """Largest, 99th percentile and median."""
    known = sorted(value for value in values if value is not None)
    return [known[-1], _at(known, 0.99), _at(known, 0.5)] if known else None


def _at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def _kinds(rows: list[Row]) -> list[list[Any]]:
    """Problems of each distribution, mask, score mod and loss, and the largest shares of bounds."""
    found = []
    gradients = any("dq_over_bound" in row for row in rows)
    columns = (*RATIOS[:2], *(GRADIENT_RATIOS if gradients else ()))
    for what in ("distribution", "mask", "score", "loss"):
        for value in sorted({row[what] for row in rows if what in row}):
            some = [row for row in rows if row.get(what) == value]
            worst = [_three(row.get(name) for row in some) for name in columns]
            problems = len({row["n"] for row in some})
            found.append([what, value, problems, *(three[0] if three else None for three in worst)])
    return found


def _words(row: Row) -> str:
    """Kernel, dtype and the sentence without its numbers: like ones are counted together."""
    text = row.get("reason") or "; ".join(row.get("warnings", ())) or row["status"]
    return f"{row['kernel']} {row['dtype']} {row['status']}: {_worded(text)}"


def _worded(text: str) -> str:
    return " ".join("…" if any(c.isdigit() for c in word) else word for word in text.split())
