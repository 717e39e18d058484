"""Right kernels asked what a gate asks, with other numbers each time: how many false alarms?

    python benchmarks/known_good.py --seconds 500 --processes 16 --device cuda --out reports/h200

Each task is the plan of ``attncheck gate`` for one kernel with one seed, in random order, until the
time is over: what the plan draws is drawn by that seed, and each question is asked ``--each`` times
with other numbers, by the seed of its Problem. Kernels run in processes of their own, as in a gate.
The files that are there already are gone on with, by the next seeds. An answer that fails a gate is
a false alarm; what ``properties/known_failures.toml`` knows of a library is counted apart.
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
# Somebody else's, in every convention.
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
# Interpreted, or compiled for every shape: a plan of one seed in so many.
ONE_IN = {"cpu": {"triton-flash2": 4}, "cuda": {"flex": 4}}
_SEEDS = 10_000
_SAVE_EVERY = 15.0  # seconds


@dataclass(frozen=True)
class Task:
    """One kernel's plan with one seed, until a time is over."""

    kernel: str
    seed: int
    device: str
    tier: str
    stages: tuple[Stage, ...]
    isolated: bool
    each: int
    until: float


def work(task: Task) -> dict[str, Any]:
    """A row for each answer: what was asked, and what became of it; failures whole."""
    gate = GateWorker(
        Choices(tier=TIERS[task.tier], seed=task.seed, stages=task.stages, isolated=task.isolated)
    )
    found: dict[str, Any] = {"kernel": task.kernel, "seed": task.seed, "rows": [], "alarms": []}
    found["harness"] = []
    try:
        for unit, answer in _answers(gate, task, found):
            found["rows"].append(row := _row(unit, answer))
            if row[-1] in ALARMS:
                kept = {"unit": msgspec.to_builtins(unit), "answer": msgspec.to_builtins(answer)}
                found["alarms"].append(kept)
    finally:
        gate.close()
    return found


def _answers(gate: GateWorker, task: Task, found: dict[str, Any]) -> Iterator[tuple[Unit, Answer]]:
    """Every question's answer, as it comes; what the plan leaves out is no question."""
    chance = random.Random(task.seed)  # noqa: S311  # an order
    (unit,) = describe_units([task.kernel], device=task.device, tier=task.tier, convention="")
    queue, seen = [unit], {unit.id}
    while queue and time.time() < task.until:
        unit = queue.pop()
        done = gate.do(unit)
        if done.facts.get("absent"):
            found["absent"] = done.facts["absent"]
        if done.harness:
            found["harness"].append(done.harness)
        if unit.kind == "ask":
            yield from ((unit, answer) for answer in done.answers)
        new = [again for each in done.units for again in _again(each, task) if again.id not in seen]
        seen.update(each.id for each in new)
        queue += new
        chance.shuffle(queue)


def _again(unit: Unit, task: Task) -> list[Unit]:
    """The same question with other numbers, as often as it is asked; nothing is made smaller."""
    if unit.kind == "shrink":
        return []
    if unit.kind != "ask":
        return [unit]
    case, found = Case.from_json(unit.case), []
    for number in range(task.each):
        try:
            problem = case.problem.replace(seed=task.seed * task.each + number)
        except ProblemError:
            return [unit]
        other = Case(problem=problem, question=case.question, parameters=case.parameters)
        found.append(replace(unit, case=other.to_json()))
    return found


def _row(unit: Unit, answer: Answer) -> list[str]:
    """What is kept of every answer: the unit, stage, question and status."""
    record = answer.record
    question = str(record.case.get("question", ""))
    # Torch's fused kernels add the mask to scores, under whatever name they are called.
    of_torch = unit.kernel in _FUSED and question.endswith("_huge") and record.status in ALARMS
    known = of_torch or record.reason.startswith(KNOWN)
    return [unit.id, unit.stage, question, "known" if known else record.status]


def tasks(asked: argparse.Namespace, begun: dict[str, int]) -> list[Task]:
    """Each kernel in turn with its next seed; ``begun``: how many each has had."""
    kernels = tuple(asked.kernels or KERNELS[asked.device])
    one_in = {} if asked.kernels else ONE_IN[asked.device]
    until = time.time() + asked.seconds
    every = [
        Task(
            kernel=kernel,
            seed=turn // one_in.get(kernel, 1) + begun.get(kernel, 0),
            device=asked.device,
            tier=asked.tier,
            stages=parse_stages(asked.stages or ()),
            isolated=not asked.in_process,
            each=asked.each,
            until=until,
        )
        for turn in range(_SEEDS)
        for kernel in kernels
        if turn % one_in.get(kernel, 1) == 0
    ]
    return sorted(every, key=lambda task: task.seed)  # those that have had fewest go on first


def measure(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """What every task found, the earlier ones too, on the disk every fifteen seconds."""
    path = asked.out / "known_good-rows.json"
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    begun: dict[str, int] = {}
    for one in found:
        begun[one["kernel"]] = max(begun.get(one["kernel"], 0), one["seed"] + 1)
    where = msgspec.to_builtins(environment(asked.device))
    started = saved = time.monotonic()
    todo = tasks(asked, begun)
    for one in finished(work, todo, processes=asked.processes, seconds=asked.seconds):
        if not any(one.get(name) for name in ("rows", "absent", "harness")):
            continue  # its time was over before it began
        one["environment"], one["tier"] = where, asked.tier
        found.append(one)
        if time.monotonic() - saved > _SAVE_EVERY:
            saved = time.monotonic()
            write_json(path, found)
            answers = sum(len(each["rows"]) for each in found)
            alarms = sum(len(each["alarms"]) for each in found)
            spent = saved - started
            print(f"{spent:.0f} s: {answers} answers, {alarms} alarms", file=sys.stderr, flush=True)
    write_json(path, found)
    return found


def main() -> None:
    """Ask, count, write."""
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
    asked = parser.parse_args()
    told = summary(measure(asked))
    write_json(asked.out / "known_good.json", told)
    (asked.out / "known_good.md").write_text(page(told))


if __name__ == "__main__":
    main()
