"""The command lines of ``rules.py`` and ``gradient_rules.py``, and rows that are gathered."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from in_processes import finished, write_json

from attncheck.verify.environment import default_device, environment, prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["measure", "merged", "parser"]

SAVE_EVERY = 10.0  # seconds


def parser(about: str, name: str, dtypes: Sequence[str], seeds: int) -> argparse.ArgumentParser:
    """What both may be asked; their files are ``reports/NAME.json`` and ``.md``."""
    found = argparse.ArgumentParser(description=about.splitlines()[0])
    found.add_argument("--device", choices=("cpu", "cuda"), default=default_device())
    found.add_argument("--lengths", type=int, nargs="*")
    found.add_argument("--dtypes", nargs="*", default=list(dtypes), choices=dtypes)
    found.add_argument("--seeds", type=int, default=seeds, help="draws of each problem")
    found.add_argument("--processes", type=int, default=1)
    found.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after this")
    found.add_argument("--json", type=Path, default=Path(f"reports/{name}.json"))
    found.add_argument("--md", type=Path, default=Path(f"reports/{name}.md"))
    found.add_argument("--merge", type=Path, nargs="*", help="only the page, of these files")
    return found


def measure(
    asked: argparse.Namespace, todo: Sequence[Any], work: Callable[[Any], list[dict[str, Any]]]
) -> dict[str, Any]:
    """Rows of all the tasks; the JSON file is written every ten seconds."""
    saved = time.monotonic()
    prepare(asked.device)
    env = json.loads(msgspec.json.encode(environment(asked.device)))
    complete: dict[str, Any] = {"environments": [env], "done": 0, "of": len(todo), "rows": []}
    rows = complete["rows"]
    parts = finished(work, todo, processes=asked.processes, seconds=asked.seconds)
    for done, part in enumerate(parts, 1):
        rows += part
        complete["done"] = done
        if time.monotonic() - saved > SAVE_EVERY or done == len(todo):
            print(f"{done}/{len(todo)} problems, {len(rows)} rows", file=sys.stderr, flush=True)
            write_json(asked.json, complete)
            saved = time.monotonic()
    return complete


def merged(paths: list[Path]) -> dict[str, Any]:
    """Several files as one; a row that is in two of them is taken once."""
    files = [json.loads(path.read_text()) for path in paths]
    rows = {json.dumps(row, sort_keys=True): row for file in files for row in file["rows"]}
    found = {json.dumps(env): env for file in files for env in file["environments"]}
    counts = {name: sum(file[name] for file in files) for name in ("done", "of")}
    return {"environments": list(found.values()), **counts, "rows": list(rows.values())}
