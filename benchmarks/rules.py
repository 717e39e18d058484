"""How many planted faults each rule catches, and how many right kernels it rejects.

    python benchmarks/rules.py [--device cuda] [--lengths N ...] [--dtypes NAME ...] [--seeds N]
        [--processes N] [--seconds N] [--only inputs|probes] [--json PATH] [--md PATH]
    python benchmarks/rules.py --merge A.json B.json [--json PATH] [--md PATH]

Every fault of ``planted.py`` is judged on random inputs by attncheck and by the rules of
``peers.py``; then the same kernels on attncheck's exact probes. A fault whose outputs have the bits
of the right kernel's is no fault there and does not count. A fault is *hidden* if it differs less
from the right kernel than right kernels differ from each other: a rule about elements or norms that
rejects it also rejects right kernels.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from in_processes import finished, write_json
from judged_record import judged_record
from peers import PEERS, PeerReference
from planted import DTYPES, FAULTS, MASKS, TILING, Fault
from rules_page import page
from spread import Spread, difference

from attncheck.inputs.problem import Case, Problem
from attncheck.probes import PROBES, cases
from attncheck.subjects.capabilities.named_kernels import subject_named
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal
from attncheck.verify.environment import default_device, environment, prepare
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.executor import Execution, Failure, InProcess

if TYPE_CHECKING:
    from attncheck.core.outputs import Outputs
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.records.record import Record
    from attncheck.subjects.capabilities.subject import Subject

LENGTHS = {"cpu": (250, 1000), "cuda": (4096,)}
# Normal inputs with a scale that is a power of two and with another one; then other distributions.
DRAWS = (
    ("normal", 64),
    ("normal", 80),
    ("uniform", 128),
    ("large_logits", 96),
    ("outliers", 64),
    ("negative_logits", 80),
    ("sink", 128),
    ("constant_rows", 96),
)
TILINGS = {
    "ideal 64×64": TILING,
    "ideal 128×128": Tiling(block_query=128, block_kv=128),
    "ideal 32×16": Tiling(block_query=32, block_kv=16),
    "ideal reverse": Tiling(block_query=64, block_kv=32, reverse=True),
    "ideal lazy": Tiling(block_query=64, block_kv=64, lazy_rescale=8.0),
    "ideal flash1": Tiling(block_query=64, block_kv=64, recurrence="flash1"),
}
OTHERS = {
    "cpu": ("triton-flash2", "sdpa-math", "sdpa-flash"),
    "cuda": ("triton-flash2", "sdpa-flash", "sdpa-efficient"),
}
INTERPRETED_LONGEST = 128
LONGEST_PROBED = {"cpu": 300, "cuda": 1024}
MOST_ROUNDS = 2  # parameters of one probe
SAVE_EVERY = 10.0  # seconds
CHUNK = 128  # query rows, at the end: a fault of one key is a small share of a long row


@dataclass(frozen=True)
class Task:
    """One problem for all its kernels; with ``probes``, its probes instead."""

    device: str
    dtype: str
    length: int
    seed: int
    mask: str
    heads: tuple[int, int]
    probes: bool

    @property
    def problem(self) -> Problem:
        """The last rows of a sequence; all rows with a window, which is aligned top-left."""
        distribution, dim = DRAWS[self.seed % len(DRAWS)]
        rows = self.length if self.mask == "window" else max(1, min(CHUNK, self.length // 2))
        return Problem(
            heads=self.heads[0],
            kv_heads=self.heads[1],
            query=rows,
            kv=self.length,
            head_dim=dim,
            dtype=self.dtype,
            mask=MASKS[self.mask](self.length),
            distribution=distribution,
            seed=self.seed,
        )

    @property
    def faults(self) -> list[Fault]:
        """The faults that this problem is for."""
        kind = self.mask, self.heads
        return [f for f in FAULTS if (f.mask, f.heads) == kind and self.dtype in f.dtypes]


class Keeping(InProcess):
    """Keeps a kernel's last outputs for the peers' rules."""

    last: Execution | Failure | None = None

    def run(self, subject: Subject, inputs: Inputs, **options: Any) -> Execution | Failure:
        """Run ``subject`` without the options of timing, and keep the result."""
        del options
        self.last = super().run(subject, inputs)
        return self.last


def right_kernels(problem: Problem, device: str) -> dict[str, Subject]:
    """Return the right kernels by their names on the page."""
    kernels: dict[str, Subject] = {name: Ideal(tiling) for name, tiling in TILINGS.items()}
    if problem.dtype == "tf32":  # tensor cores truncate, which is as right as rounding to nearest
        kernels["ideal truncating"] = Ideal(TILING, tf32="truncate")
    for name in OTHERS[device]:
        subject = subject_named(name)
        slow = subject.triton and device == "cpu" and problem.kv > INTERPRETED_LONGEST
        if not slow and not InProcess().refusal(subject, problem, device):
            kernels[name] = subject
    return kernels


def work(task: Task) -> list[dict[str, Any]]:
    """Return the rows of one task."""
    prepare(task.device)
    try:
        return probed(task) if task.probes else compared(task)
    except Exception as error:  # noqa: BLE001  # one problem must not end a run of hundreds
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        facts = {"kind": "crash", "name": "the judge", "status": "error", "reason": reason}
        return [{**asdict(task), **facts, "case": task.problem.to_json()}]


def compared(task: Task) -> list[dict[str, Any]]:
    """Apply every rule to every kernel, the right kernels first; return a row for each kernel."""
    evidence, executor = EvidenceBuilder(Case(problem=task.problem), task.device), Keeping()
    reference = PeerReference(evidence.inputs, evidence.truth)
    rows, right = [], {}
    for name, subject in right_kernels(task.problem, task.device).items():
        row = _row(task, "right", name, judged_record(subject, evidence, executor))
        rows.append(row | _peers(executor, reference))
        if isinstance(executor.last, Execution):
            right[name] = executor.last.outputs
    spread = Spread(list(right.values()))
    for fault in task.faults:
        row = _row(task, "fault", fault.name, judged_record(fault.kernel(), evidence, executor))
        if isinstance(executor.last, Execution):
            row["effect"] = spread.effect(executor.last.outputs, right[_twin(fault)])
        rows.append(row | _peers(executor, reference))
    return rows


def _peers(executor: Keeping, reference: PeerReference) -> dict[str, Any]:
    if not isinstance(executor.last, Execution):
        return {}
    outputs = executor.last.outputs
    return {"peers": {name: accepts(outputs, reference) for name, accepts in PEERS.items()}}


def _row(task: Task, kind: str, name: str, record: Record) -> dict[str, Any]:
    row = {"kind": kind, "name": name, **asdict(task), "status": record.status}
    row["distribution"] = task.problem.distribution
    judgement = record.judgement
    row["rule"] = judgement.rule if judgement else ""
    if record.status == "error" or (kind == "right" and record.status == "fail"):
        row |= {"case": record.case, "reason": judgement.reason if judgement else record.reason}
    return row


def probed(task: Task) -> list[dict[str, Any]]:
    """Run every probe with its parameters on every kernel; return a row for each run."""
    problem = task.problem.replace(distribution="normal")
    fit = [name for name in PROBES if PROBES[name].unfit(problem) is None]
    rows = []
    for name in fit:
        for case in cases(name, problem)[:MOST_ROUNDS]:
            rows += [row | {"probe": name} for row in _probed(task, case)]
    return rows


def _probed(task: Task, case: Case) -> list[dict[str, Any]]:
    evidence, executor, rows, right = EvidenceBuilder(case, task.device), Keeping(), [], {}

    def ask(kind: str, name: str, subject: Subject) -> Outputs | None:
        executor.last = None
        record = judged_record(subject, evidence, executor)
        rows.append(_row(task, kind, name, record))
        return executor.last.outputs if isinstance(executor.last, Execution) else None

    for name, subject in right_kernels(case.problem, task.device).items():
        right[name] = ask("right", name, subject)
    for fault in task.faults:
        outputs, twin = ask("fault", fault.name, fault.kernel()), right[_twin(fault)]
        if outputs is not None and twin is not None:
            rows[-1]["effect"] = sum(difference(outputs, twin))
    return rows


def _twin(fault: Fault) -> str:
    """Return the right kernel that differs from the fault's only by the fault."""
    return "ideal lazy" if fault.kernel.lazy else "ideal 64×64"


def tasks(options: argparse.Namespace) -> list[Task]:
    """Return problems of the first draw, then probes at two lengths, then the other draws."""
    kinds = sorted({(fault.mask, fault.heads) for fault in FAULTS})
    lengths = sorted(options.lengths or LENGTHS[options.device])
    plain = [
        Task(options.device, dtype, length, seed, mask, heads, probes=False)
        for seed in range(options.seeds)
        for length in lengths
        for dtype in options.dtypes
        for mask, heads in kinds
    ]
    # Two seeds, whose draws have head dims with and without a scale that is a power of two.
    probed_lengths = [n for n in lengths if n <= LONGEST_PROBED[options.device]] or lengths[:1]
    probes = [
        Task(options.device, dtype, length, seed, mask, heads, probes=True)
        for seed, length in enumerate((lengths[0], max(probed_lengths)))
        for dtype in options.dtypes
        for mask, heads in kinds
    ]
    if options.only:
        return plain if options.only == "inputs" else probes
    of_one_draw = len(plain) // options.seeds
    return [*plain[:of_one_draw], *probes, *plain[of_one_draw:]]


def measure(options: argparse.Namespace, todo: list[Task]) -> dict[str, Any]:
    """Return the rows of all tasks, and write the JSON file every ten seconds."""
    saved = time.monotonic()
    prepare(options.device)
    env = json.loads(msgspec.json.encode(environment(options.device)))
    complete: dict[str, Any] = {"environments": [env], "done": 0, "of": len(todo), "rows": []}
    rows = complete["rows"]
    parts = finished(work, todo, processes=options.processes, seconds=options.seconds)
    for done, part in enumerate(parts, 1):
        rows += part
        complete["done"] = done
        if time.monotonic() - saved > SAVE_EVERY or done == len(todo):
            print(f"{done}/{len(todo)} problems, {len(rows)} rows", file=sys.stderr, flush=True)
            write_json(options.json, complete)
            saved = time.monotonic()
    return complete


def merged(paths: list[Path]) -> dict[str, Any]:
    """Merge several files, with every row once."""
    files = [json.loads(path.read_text()) for path in paths]
    rows = {json.dumps(row, sort_keys=True): row for file in files for row in file["rows"]}
    environments = {json.dumps(env): env for file in files for env in file["environments"]}
    counts = {name: sum(file[name] for file in files) for name in ("done", "of")}
    return {"environments": list(environments.values()), **counts, "rows": list(rows.values())}


def main() -> None:
    """Measure or merge, and write the JSON file and the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default_device())
    parser.add_argument("--lengths", type=int, nargs="*")
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--seeds", type=int, default=len(DRAWS), help="draws of each problem")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after this")
    parser.add_argument("--json", type=Path, default=Path("reports/rules.json"))
    parser.add_argument("--md", type=Path, default=Path("reports/rules.md"))
    parser.add_argument("--merge", type=Path, nargs="*", help="only the page, of these files")
    parser.add_argument("--only", choices=("inputs", "probes"))
    options = parser.parse_args()
    result = merged(options.merge) if options.merge else measure(options, tasks(options))
    write_json(options.json, result)
    options.md.write_text(page(result))


if __name__ == "__main__":
    main()
