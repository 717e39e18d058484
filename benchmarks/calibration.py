"""Right kernels on random problems: none may exceed a bound or fail, and how tight bounds are.

    python benchmarks/calibration.py [--backward] [--device cuda] [--problems FIRST END]
        [--kernels NAME ...] [--longest N] [--processes N] [--seconds N] [--json PATH]
        [--summary PATH] [--md PATH]
    python benchmarks/calibration.py --merge A.json B.json [--summary PATH] [--md PATH]

Problem n is ``random_problems.problem(n)``, with ``--backward`` ``gradient_problem(n)``: gradients
are judged beside out and LSE. The ideal kernel has a random tiling each time. A run resumes from an
existing JSON file: its problems are not run again. ``flex`` on a GPU is compiled for every shape,
so it only gets structures of one shape. The JSON file has every judgement, which takes many
megabytes; keep the summary and the page.
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

# Without the naive softmax, whose overflows are known.
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
ATOMIC = "triton-flash2-atomic"  # a Subject without a name for --kernel
BACKWARD = {
    "cpu": ("ideal", "triton-flash2", ATOMIC, "sdpa-math", "sdpa-flash", "flex"),
    "cuda": (
        *("ideal", "triton-flash2", ATOMIC, "sdpa-math", "sdpa-flash", "sdpa-efficient"),
        *("sdpa-cudnn", "flex"),
    ),
}
LONGEST = {"cpu": 512, "cuda": 4096}
MOST_SCORES = {"cpu": 2**17, "cuda": 2**24}
MOST_SCORES_BACKWARD = {"cpu": 2**16, "cuda": 2**22}  # bounds of gradients take many passes
PER_STRUCTURE = {"cpu": 10, "cuda": 100}  # on a GPU, compiling takes seconds for each structure
SAVE_EVERY = 15.0  # seconds
ENDS = {"json": ".json", "summary": "-summary.json", "md": ".md"}
# Kernels that differ little from another one get every n-th problem on a GPU.
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
    """Calls a kernel once, untimed."""

    def run(self, subject: Subject, inputs: Inputs, **options: Any) -> Execution | Failure:
        """Run ``subject`` without the options of timing."""
        del options
        return super().run(subject, inputs)


def work(task: Task) -> list[dict[str, Any]]:
    """Return a row for each kernel and problem that was reached in time."""
    prepare(task.device)
    rows: list[dict[str, Any]] = []
    for number in task.numbers:
        if time.time() > task.until:
            break
        limits = {"longest": task.longest, "most_scores": task.most_scores}
        draw = gradient_problem if task.backward else problem
        drawn = draw(number, **limits, per_structure=task.per_structure)
        rows += judge_kernels(number, drawn, task)
    return rows


def judge_kernels(number: int, drawn: Problem, task: Task) -> list[dict[str, Any]]:
    """Return a row for every kernel that takes the problem."""
    evidence = EvidenceBuilder(Case(problem=drawn), task.device)
    rows, begun = [], time.perf_counter()
    for name in task.kernels:
        subject = make_kernel(name, number)
        if not is_due(name, number, task) or not InProcess().concerns(subject, drawn):
            continue
        try:
            record = judged_record(subject, evidence, Untimed(), brief=task.backward)
        except Exception as error:  # noqa: BLE001  # one problem must not end a run of thousands
            rows.append(crash(number, name, drawn, error))
            continue
        rows.append(row(number, name, drawn, record))
    if rows:
        rows[0]["seconds"] = round(time.perf_counter() - begun, 4)
    return rows


def is_due(name: str, number: int, task: Task) -> bool:
    """Return whether a kernel gets this problem; on a CPU nearly every kernel does."""
    if task.device == "cpu":
        return number % ONE_IN_INTERPRETED.get(name, 1) == 0
    if name == "flex":
        return shaped(number, task.per_structure)
    return number % ONE_IN.get(name, 1) == 0


def make_kernel(name: str, number: int) -> Subject:
    """Return a kernel; the ideal one with the problem's tiling, and either rounding of tf32."""
    if name == ATOMIC:
        return Flash2Atomic()
    if name != "ideal":
        return subject_named(name)
    return Ideal(tiling(number), tf32="truncate" if number % 2 else "nearest")


def tasks(options: argparse.Namespace, done: set[int]) -> list[Task]:
    """Return a task for each structure in order, without the problems that are done."""
    until, result = time.time() + options.seconds, []
    default_kernels = BACKWARD if options.backward else KERNELS
    most = MOST_SCORES_BACKWARD if options.backward else MOST_SCORES
    first, end = options.problems
    each = PER_STRUCTURE[options.device]
    for start in range(first - first % each, end, each):
        numbers = (n for n in range(start, start + each) if first <= n < end)
        left = tuple(n for n in numbers if n not in done)
        if left:
            kernels = tuple(options.kernels or default_kernels[options.device])
            longest = options.longest or LONGEST[options.device]
            limits = longest, most[options.device], each
            result.append(Task(options.device, left, kernels, *limits, until, options.backward))
    return result


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all problems of the options, and write the JSON file every fifteen seconds."""
    prepare(options.device)
    previous = json.loads(options.json.read_text())["runs"] if options.json.exists() else []
    env = json.loads(msgspec.json.encode(environment(options.device)))
    same = [one for one in previous if one["environment"] == env]
    others = [one for one in previous if one["environment"] != env]
    run = {"environment": env, "rows": [row for one in same for row in one["rows"]]}
    runs = {"runs": [*others, run]}
    todo = tasks(options, {row["n"] for row in run["rows"]})
    saved = time.monotonic()
    parts = finished(work, todo, processes=options.processes, seconds=options.seconds)
    for done, part in enumerate(parts, 1):
        run["rows"] += part
        if time.monotonic() - saved > SAVE_EVERY or done == len(todo):
            alarms = sum(row["status"] in ("fail", "error") for row in run["rows"])
            problems = len({row["n"] for row in run["rows"]})
            line = f"{done}/{len(todo)} structures, {problems} problems, {alarms} alarms"
            print(line, file=sys.stderr, flush=True)
            write_json(options.json, runs)
            saved = time.monotonic()
    return runs


def set_default_paths(options: argparse.Namespace) -> None:
    """Name the files that have no path; those of gradients get other names."""
    stem = "reports/gradients-calibration" if options.backward else "reports/calibration"
    for name, end in ENDS.items():
        if getattr(options, name) is None:
            setattr(options, name, Path(stem + end))


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
        default = f"default: reports/[gradients-]calibration{end}"
        parser.add_argument(f"--{name}", type=Path, help=default)
    options = parser.parse_args()
    set_default_paths(options)
    if options.merge:
        files = [json.loads(path.read_text()) for path in options.merge]
        result = {"runs": [run for file in files for run in file["runs"]]}
    else:
        result = measure(options)
        write_json(options.json, result)
    summaries = [summary(run) for run in merged(result["runs"])]
    write_json(options.summary, summaries)
    options.md.write_text(page(summaries))


if __name__ == "__main__":
    main()
