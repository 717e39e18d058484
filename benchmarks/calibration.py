"""Right kernels on random problems: none may exceed a bound or fail, and how tight bounds are.

    python benchmarks/calibration.py [--backward] [--device cuda] [--problems FIRST END]
        [--kernels NAME ...] [--longest N] [--processes N] [--seconds N] [--json PATH]
        [--summary PATH] [--md PATH]
    python benchmarks/calibration.py --merge A.json B.json [--summary PATH] [--md PATH]

Problem n is ``random_problems.problem(n)``, with ``--backward`` ``gradient_problem(n)``: gradients
are judged beside out and LSE. The ideal kernel has a random tiling each time. A JSON
file that is there already is gone on with: its problems are not run again. ``flex`` on a GPU is
compiled for every shape, so it is asked about structures of one shape only. The JSON file has every
judgement, many megabytes of them; the summary and the page are what is worth keeping.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from calibration_page import page
from calibration_rows import crash, row
from calibration_summary import merged, summary
from in_processes import finished, write_json
from judged_record import judged_record
from random_problems import gradient_problem, problem, shaped, tiling

from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.capabilities.named_kernels import subject_named
from attncheck.subjects.ideal import Ideal
from attncheck.subjects.triton_flash import Flash2Atomic
from attncheck.verify.environment import default_device, environment, prepare
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.executor import Execution, Failure, InProcess

if TYPE_CHECKING:
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.subjects.capabilities.subject import Subject

# Without the naive one, which overflows where it says it does.
SOFTMAX: tuple[str, ...] = (
    "triton-softmax-safe",
    "triton-softmax-online",
    "triton-softmax-blocked",
)
SOFTMAX += ("torch-softmax",)
KERNELS = {
    "cpu": (
        *("ideal", "triton-flash2", "triton-flash1", "sdpa-math", "sdpa-flash", "flex"),
        *SOFTMAX,
    ),
    "cuda": (
        *("ideal", "triton-flash2", "triton-flash2-vt", "triton-flash2-fastacc", "triton-flash1"),
        *("sdpa-math", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "flex"),
        *SOFTMAX,
    ),
}
ATOMIC = "triton-flash2-atomic"  # a Subject, and no name for --kernel
BACKWARD = {
    "cpu": ("ideal", "triton-flash2", ATOMIC, "sdpa-math", "sdpa-flash", "flex"),
    "cuda": (
        *("ideal", "triton-flash2", ATOMIC, "sdpa-math", "sdpa-flash", "sdpa-efficient"),
        *("sdpa-cudnn", "flex"),
    ),
}
LONGEST = {"cpu": 512, "cuda": 4096}
MOST_SCORES = {"cpu": 2**17, "cuda": 2**24}
MOST_SCORES_BACKWARD = {"cpu": 2**16, "cuda": 2**22}  # a bound of gradients is many passes
PER_STRUCTURE = {"cpu": 10, "cuda": 100}  # a GPU's kernels are compiled, for seconds each
SAVE_EVERY = 15.0  # seconds
ENDS = {"json": ".json", "summary": "-summary.json", "md": ".md"}
# Kernels that differ little from another one: one problem in so many on a GPU.
ONE_IN = {"triton-flash2-vt": 5, "triton-flash1": 3, "triton-flash2-fastacc": 2, "sdpa-math": 2}
ONE_IN[ATOMIC] = 2
ONE_IN_INTERPRETED = {ATOMIC: 5}


@dataclass(frozen=True)
class Task:
    """Problems of one structure."""

    device: str
    numbers: tuple[int, ...]
    kernels: tuple[str, ...]
    longest: int
    most_scores: int
    per_structure: int
    until: float
    backward: bool


class Untimed(InProcess):
    """Calls a kernel once."""

    def run(self, subject: Subject, inputs: Inputs, **asked: Any) -> Execution | Failure:
        """As ``InProcess``, and never timed."""
        del asked
        return super().run(subject, inputs)


def work(task: Task) -> list[dict[str, Any]]:
    """A row for each problem and kernel; none for problems that time did not suffice for."""
    prepare(task.device)
    rows: list[dict[str, Any]] = []
    for number in task.numbers:
        if time.time() > task.until:
            break
        limits = {"longest": task.longest, "most_scores": task.most_scores}
        drawn = gradient_problem if task.backward else problem
        asked = drawn(number, **limits, per_structure=task.per_structure)
        rows += judged(number, asked, task)
    return rows


def judged(number: int, asked: Problem, task: Task) -> list[dict[str, Any]]:
    """Every kernel that takes the problem."""
    evidence, rows, begun = (
        EvidenceBuilder(Case(problem=asked), task.device),
        [],
        time.perf_counter(),
    )
    for name in task.kernels:
        subject = made(name, number)
        if not due(name, number, task) or not InProcess().concerns(subject, asked):
            continue
        try:
            record = judged_record(subject, evidence, Untimed(), brief=task.backward)
        except Exception as error:  # noqa: BLE001  # one problem must not end a run of thousands
            rows.append(crash(number, name, asked, error))
            continue
        rows.append(row(number, name, asked, record))
    if rows:
        rows[0]["seconds"] = round(time.perf_counter() - begun, 4)
    return rows


def due(name: str, number: int, task: Task) -> bool:
    """Whether a kernel's turn is at this problem; on a CPU it nearly always is."""
    if task.device == "cpu":
        return number % ONE_IN_INTERPRETED.get(name, 1) == 0
    if name == "flex":
        return shaped(number, task.per_structure)
    return number % ONE_IN.get(name, 1) == 0


def made(name: str, number: int) -> Subject:
    """A kernel; the ideal one with the tiling of this problem, in tf32 rounding either way."""
    if name == ATOMIC:
        return Flash2Atomic()
    if name != "ideal":
        return subject_named(name)
    return Ideal(tiling(number), tf32="truncate" if number % 2 else "nearest")


def tasks(asked: argparse.Namespace, done: set[int]) -> list[Task]:
    """Structures in order, without the problems that are done; a structure stays in one process."""
    until, found = time.time() + asked.seconds, []
    by_default = BACKWARD if asked.backward else KERNELS
    most = MOST_SCORES_BACKWARD if asked.backward else MOST_SCORES
    first, end = asked.problems
    each = PER_STRUCTURE[asked.device]
    for start in range(first - first % each, end, each):
        numbers = (n for n in range(start, start + each) if first <= n < end)
        left = tuple(n for n in numbers if n not in done)
        if left:
            kernels = tuple(asked.kernels or by_default[asked.device])
            longest = asked.longest or LONGEST[asked.device]
            limits = longest, most[asked.device], each
            found.append(Task(asked.device, left, kernels, *limits, until, asked.backward))
    return found


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """All the problems asked for, the JSON file written every twenty seconds."""
    prepare(asked.device)
    found = json.loads(asked.json.read_text()) if asked.json.exists() else {"runs": []}
    env = json.loads(msgspec.json.encode(environment(asked.device)))
    run: dict[str, Any] = {"environment": env, "rows": []}
    before = [one for one in found["runs"] if one["environment"] == env]
    run["rows"] = [row for one in before for row in one["rows"]]
    others = [one for one in found["runs"] if one["environment"] != env]
    merged_runs = {"runs": [*others, run]}
    todo = tasks(asked, {row["n"] for row in run["rows"]})
    saved = time.monotonic()
    parts = finished(work, todo, processes=asked.processes, seconds=asked.seconds)
    for done, part in enumerate(parts, 1):
        run["rows"] += part
        if time.monotonic() - saved > SAVE_EVERY or done == len(todo):
            alarms = sum(row["status"] in ("fail", "error") for row in run["rows"])
            problems = len({row["n"] for row in run["rows"]})
            said = f"{done}/{len(todo)} structures, {problems} problems, {alarms} alarms"
            print(said, file=sys.stderr, flush=True)
            write_json(asked.json, merged_runs)
            saved = time.monotonic()
    return merged_runs


def named(asked: argparse.Namespace) -> None:
    """Names of the files where none are given: of gradients others than of the forward."""
    stem = "reports/gradients-calibration" if asked.backward else "reports/calibration"
    for name, end in ENDS.items():
        if getattr(asked, name) is None:
            setattr(asked, name, Path(stem + end))


def main() -> None:
    """Measure, or read several files; then write the summary and the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backward", action="store_true", help="gradients beside out and LSE")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default_device())
    parser.add_argument(
        "--problems", type=int, nargs=2, default=(0, 1000), metavar=("FIRST", "END")
    )
    parser.add_argument("--kernels", nargs="*", help="default: all of the device")
    parser.add_argument("--longest", type=int, help="largest query and kv length")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after this")
    parser.add_argument("--merge", type=Path, nargs="*", help="JSON files, of which to make one")
    for name, end in ENDS.items():
        said = f"default: reports/[gradients-]calibration{end}"
        parser.add_argument(f"--{name}", type=Path, help=said)
    asked = parser.parse_args()
    named(asked)
    if asked.merge:
        files = [json.loads(path.read_text()) for path in asked.merge]
        found = {"runs": [run for file in files for run in file["runs"]]}
    else:
        found = measure(asked)
        write_json(asked.json, found)
    told = [summary(run) for run in merged(found["runs"])]
    write_json(asked.summary, told)
    asked.md.write_text(page(told))


if __name__ == "__main__":
    main()
