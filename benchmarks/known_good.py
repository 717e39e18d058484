"""Count the false alarms of a gate on right kernels, with other numbers each time.

    python benchmarks/known_good.py --seconds 500 --processes 16 --device cuda --out reports/h200

Each task is the plan of ``attncheck gate`` for one kernel with one seed, in random order, until the
time is over. The seed determines what the plan draws, and each question is asked ``--each`` times
with other numbers, by the seed of its Problem. Kernels run in their own processes, as in a gate. A
run resumes from existing files with the next seeds. An answer that fails a gate is a false alarm;
known failures of libraries, from ``properties/known_failures.toml``, are counted separately.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from in_processes import finished, write_json
from known_good_page import ALARMS, page, summary
from msgspec.structs import replace

from attncheck.cases.tier import TIERS
from attncheck.core.errors import ProblemError
from attncheck.faults.mutant_scoring import read_table
from attncheck.gate.gate_worker import GateWorker
from attncheck.gate.plan import describe_units
from attncheck.gate.planning import Choices, parse_stages
from attncheck.gate.property_stage import KNOWN
from attncheck.inputs.problem import Case
from attncheck.records.run_reports import STAGES, Stage
from attncheck.verify.environment import default_device, environment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.records.run_reports import Answer
    from attncheck.workers.units import Unit

__all__ = ["KERNELS", "Task", "main", "work"]

_HERE = Path(__file__).with_name("known_good_kernels.py")
IDEALS = ("ideal", *(f"{_HERE}::{name}" for name in ("Tiny", "Tall", "Reversed", "Lazy")))
_FUSED = tuple(
    f"{_HERE}::{name}"
    for name in (
        "of_torch",
        *(f"flash_attn_{of}" for of in ("func", "varlen_func", "with_kvcache")),
    )
)
_STRANGERS = _HERE.parents[1] / "examples" / "strangers"
# Kernels in other styles, of every convention.
OTHERS = (
    *_FUSED,
    *(f"{_HERE}::{name}" for name in ("eager", "flex_attention")),
    *(str(_STRANGERS / kernel) for kernel in read_table(_STRANGERS).kernels),
)
KERNELS = {
    "cpu": (*OTHERS, *IDEALS, "sdpa-math", "sdpa-flash", "triton-flash2"),
    "cuda": (
        *("triton-flash2", "sdpa-flash", "triton-varlen", "sdpa-efficient", "triton-decode"),
        *("triton-flash1", "triton-paged", "sdpa-math", "sdpa-cudnn", *IDEALS, "flex"),
    ),
}
# Slow kernels, interpreted or compiled for every shape, get every n-th seed.
ONE_IN = {"cpu": {"triton-flash2": 4}, "cuda": {"flex": 4}}
_SEEDS = 10_000
_SAVE_EVERY = 15.0  # seconds


@dataclass(frozen=True)
class Task:
    """One kernel's plan with one seed, until a time limit."""

    kernel: str
    seed: int
    device: str
    tier: str
    stages: tuple[Stage, ...]
    isolated: bool
    each: int
    until: float


def work(task: Task) -> dict[str, Any]:
    """Return the results of a task: a row for each answer, and the whole answer of alarms."""
    gate = GateWorker(
        Choices(tier=TIERS[task.tier], seed=task.seed, stages=task.stages, isolated=task.isolated)
    )
    result: dict[str, Any] = {"kernel": task.kernel, "seed": task.seed, "rows": [], "alarms": []}
    result["harness"] = []
    try:
        for unit, answer in _answers(gate, task, result):
            result["rows"].append(row := _row(unit, answer))
            if row[-1] in ALARMS:
                alarm = {"unit": msgspec.to_builtins(unit), "answer": msgspec.to_builtins(answer)}
                result["alarms"].append(alarm)
    finally:
        gate.close()
    return result


def _answers(gate: GateWorker, task: Task, result: dict[str, Any]) -> Iterator[tuple[Unit, Answer]]:
    """Yield every question's answer; add absent kernels and harness errors to ``result``."""
    order = random.Random(task.seed)  # noqa: S311  # an order
    (unit,) = describe_units([task.kernel], device=task.device, tier=task.tier, convention="")
    queue, seen = [unit], {unit.id}
    while queue and time.time() < task.until:
        unit = queue.pop()
        done = gate.do(unit)
        if done.facts.get("absent"):
            result["absent"] = done.facts["absent"]
        if done.harness:
            result["harness"].append(done.harness)
        if unit.kind == "ask":
            yield from ((unit, answer) for answer in done.answers)
        new = [copy for each in done.units for copy in _copies(each, task) if copy.id not in seen]
        seen.update(each.id for each in new)
        queue += new
        order.shuffle(queue)


def _copies(unit: Unit, task: Task) -> list[Unit]:
    """Return a question's unit ``task.each`` times with other numbers; no unit that shrinks."""
    if unit.kind == "shrink":
        return []
    if unit.kind != "ask":
        return [unit]
    case, copies = Case.from_json(unit.case), []
    for number in range(task.each):
        try:
            problem = case.problem.replace(seed=task.seed * task.each + number)
        except ProblemError:
            return [unit]
        other = Case(problem=problem, question=case.question, parameters=case.parameters)
        copies.append(replace(unit, case=other.to_json()))
    return copies


def _row(unit: Unit, answer: Answer) -> list[str]:
    """Return the unit, stage, question and status of an answer."""
    record = answer.record
    question = str(record.case.get("question", ""))
    # Torch's fused kernels add the mask to scores, whatever they are called here.
    is_torchs = unit.kernel in _FUSED and question.endswith("_huge") and record.status in ALARMS
    is_known = is_torchs or record.reason.startswith(KNOWN)
    return [unit.id, unit.stage, question, "known" if is_known else record.status]


def tasks(options: argparse.Namespace, begun: dict[str, int]) -> list[Task]:
    """Return tasks of all kernels round robin; ``begun`` has the next seed of each."""
    kernels = tuple(options.kernels or KERNELS[options.device])
    one_in = {} if options.kernels else ONE_IN[options.device]
    until = time.time() + options.seconds
    every = [
        Task(
            kernel=kernel,
            seed=turn // one_in.get(kernel, 1) + begun.get(kernel, 0),
            device=options.device,
            tier=options.tier,
            stages=parse_stages(options.stages or ()),
            isolated=not options.in_process,
            each=options.each,
            until=until,
        )
        for turn in range(_SEEDS)
        for kernel in kernels
        if turn % one_in.get(kernel, 1) == 0
    ]
    return sorted(every, key=lambda task: task.seed)  # kernels with the fewest seeds first


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the results of all tasks, also earlier ones; write them every fifteen seconds."""
    path = options.out / "known_good-rows.json"
    results: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    begun: dict[str, int] = {}
    for one in results:
        begun[one["kernel"]] = max(begun.get(one["kernel"], 0), one["seed"] + 1)
    where = msgspec.to_builtins(environment(options.device))
    started = saved = time.monotonic()
    todo = tasks(options, begun)
    for one in finished(work, todo, processes=options.processes, seconds=options.seconds):
        if not any(one.get(name) for name in ("rows", "absent", "harness")):
            continue  # the time was over before it began
        one["environment"], one["tier"] = where, options.tier
        results.append(one)
        if time.monotonic() - saved > _SAVE_EVERY:
            saved = time.monotonic()
            write_json(path, results)
            answers = sum(len(each["rows"]) for each in results)
            alarms = sum(len(each["alarms"]) for each in results)
            spent = saved - started
            print(f"{spent:.0f} s: {answers} answers, {alarms} alarms", file=sys.stderr, flush=True)
    write_json(path, results)
    return results


def main() -> None:
    """Run all tasks, and write the summary and the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default_device())
    parser.add_argument("--seconds", type=float, default=60.0, help="ask nothing after this")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--tier", choices=tuple(TIERS), default="smoke")
    parser.add_argument("--stages", nargs="*", choices=STAGES, help="default: all")
    parser.add_argument("--each", type=int, default=8, help="times that a question is asked")
    parser.add_argument("--kernels", nargs="*", help="default: all of the device")
    parser.add_argument(
        "--in-process", action="store_true", help="call kernels where they are judged"
    )
    parser.add_argument("--out", type=Path, default=Path("reports"))
    options = parser.parse_args()
    totals = summary(measure(options))
    write_json(options.out / "known_good.json", totals)
    (options.out / "known_good.md").write_text(page(totals))


if __name__ == "__main__":
    main()
