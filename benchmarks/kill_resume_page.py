"""The page of ``kill_resume.py``."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from typing import Any

__all__ = ["page", "summary"]

_COUNTED = {
    "kills": "SIGKILL to the process",
    "lane_kills": "SIGKILL to a child of it",
    "sessions": "sessions",
    "results": "results",
    "acknowledged": "acknowledged",
    "lost": "of these lost",
    "doubled": "done twice",
    "different": "other than undisturbed",
    "hit_twice": "given up: hit twice",
    "orphans": "processes left",
}
_TITLES = {
    "right": "right",
    "hasty": "planted: acknowledges before it writes",
    "forgetful": "planted: forgets what it resumes",
}
_ABOUT = """Made by `benchmarks/kill_resume.py`. Each run does 6–50 units without a kernel, in one
process or two beside its own. It is killed at a random moment (one run of eight at two), in every
third case after one of its children, and resumed until it has finished. Every result that it was
heard to have is looked for in the journal at the end, and all results are compared with those of
the same plan undisturbed. A unit that two kills hit is given up, as one that takes the machine down
would be; it is not compared. The journals with a planted fault show that this sees one. For speed,
the processes are copies of one that has imported everything; a run is otherwise as for users."""


def summary(journal: str, runs: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Return the sums of all runs with one journal."""
    moments = [part for one in runs for part in one["at"]]
    return {
        "journal": journal,
        "runs": len(runs),
        **{name: sum(one[name] for one in runs) for name in _COUNTED},
        "broken": sum(bool(one["broken"]) for one in runs),
        "why_broken": sorted({one["broken"] for one in runs} - {""})[:5],
        "killed_before_any": sum(part == 0 for part in moments),
        "killed_between": sum(0 < part < 1 for part in moments),
        "killed_after_all": sum(part >= 1 for part in moments),
        "seconds": round(seconds, 1),
        "environment": {
            "python": platform.python_version(),
            "attncheck": version("attncheck"),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
        },
    }


def page(summaries: list[dict[str, Any]]) -> str:
    """Return a page with a column for each journal, as Markdown."""
    env = summaries[0]["environment"]
    head = ["", *(_TITLES[one["journal"]] for one in summaries)]
    rows = [["runs", *(one["runs"] for one in summaries)]]
    rows += [[title, *(one[name] for one in summaries)] for name, title in _COUNTED.items()]
    rows.append(["journals that cannot be read", *(one["broken"] for one in summaries)])
    lines = [head, ["---", *("---:" for _ in summaries)], *rows]
    right = summaries[0]
    where = f"Python {env['python']}, {env['machine']}, {env['cores']} cores; {right['seconds']} s."
    when = (
        f"The kills of the right journal: {right['killed_before_any']} before its first result, "
        f"{right['killed_between']} between, {right['killed_after_all']} after its last."
    )
    return (
        "\n\n".join(
            [
                "# Killed and resumed",
                _ABOUT,
                where,
                "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines),
                when,
            ]
        )
        + "\n"
    )
