"""How many planted faults of a backward each rule catches, and how many right ones it refuses.

    python benchmarks/gradient_rules.py [--device cuda] [--lengths N ...] [--dtypes NAME ...]
        [--seeds N] [--processes N] [--seconds N] [--json PATH] [--md PATH]
    python benchmarks/gradient_rules.py --merge A.json B.json [--json PATH] [--md PATH]

As ``rules.py`` does for the forward: every fault of ``planted_gradients.py`` on random inputs,
judged by attncheck and by the rules of ``peers.py`` on dQ, dK and dV. A fault whose
gradients are the right kernel's own, bit by bit, is no fault there and does not count. One whose
difference from its right twin is less than what right kernels differ by among themselves is
*hidden*. About three minutes on two cores with what is asked by default.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from gradient_rules_page import page
from in_processes import write_json
from judged_record import judged_record
from peers import GRADIENT_PEERS, PeerReference
from planted_gradients import DTYPES, FAULTS, KINDS, GradientFault
from rules import Keeping
from rules_run import measure, merged, parser
from spread import Spread
from wrong_structure import TILING

from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.capabilities.named_kernels import subject_named
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal
from attncheck.verify import judging
from attncheck.verify.allowances import GradientAllowance, gradient_allowance
from attncheck.verify.environment import prepare
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.executor import Execution, InProcess

if TYPE_CHECKING:
    import argparse

    from attncheck.core.declared_arithmetic import Arithmetic
    from attncheck.core.outputs import Outputs
    from attncheck.records.record import Record
    from attncheck.subjects.capabilities.subject import Subject
    from attncheck.verify.evidence import Evidence

LENGTHS = {"cpu": (70, 250), "cuda": (1000, 2000)}
# The ordinary case and what shows most that it does not; then scales that are powers of two.
DRAWS = (
    ("normal", 80),
    ("large_logits", 96),
    ("normal", 64),
    ("negative_logits", 80),
    ("outliers", 64),
    ("uniform", 128),
)
TILINGS = {
    "ideal 64×64": TILING,
    "ideal 128×128": Tiling(block_query=128, block_kv=128),
    "ideal 32×16": Tiling(block_query=32, block_kv=16),
    "ideal reverse": Tiling(block_query=64, block_kv=32, reverse=True),
}
TWIN = "ideal 64×64"
OTHERS = {
    "cpu": ("triton-flash2", "sdpa-math", "sdpa-flash"),
    "cuda": ("triton-flash2", "sdpa-math", "sdpa-flash", "sdpa-efficient"),
}
INTERPRETED_LONGEST = 128
INTERPRETED = ("full", "causal", "sink")  # seconds each; the calibration asks many more


@dataclass(frozen=True)
class Task:
    """One problem with every kernel that it concerns."""

    device: str
    dtype: str
    length: int
    seed: int
    kind: str

    @property
    def problem(self) -> Problem:
        """Of two query heads to each of two key heads."""
        distribution, dim = DRAWS[self.seed % len(DRAWS)]
        given: dict[str, Any] = {"query": self.length, "distribution": distribution}
        given |= KINDS[self.kind](self.length)
        if given.pop("wide", False):
            given["value_dim"] = 2 * dim
        return Problem(
            heads=4,
            kv_heads=2,
            kv=self.length,
            head_dim=dim,
            dtype=self.dtype,
            backward=True,
            seed=self.seed,
            **given,
        )

    @property
    def faults(self) -> list[GradientFault]:
        """Those that this problem concerns."""
        return [f for f in FAULTS if f.kind == self.kind and self.dtype in f.dtypes]


def right_kernels(task: Task) -> dict[str, Subject]:
    """Kernels that are right, by the names that the page gives them."""
    problem, device = task.problem, task.device
    found: dict[str, Subject] = {name: Ideal(tiling) for name, tiling in TILINGS.items()}
    if problem.dtype == "tf32":  # as right as rounding to nearest, and what tensor cores do
        found["ideal truncating"] = Ideal(TILING, tf32="truncate")
    for name in OTHERS[device]:
        subject = subject_named(name)
        slow = subject.triton and device == "cpu" and not _interpreted(task)
        asked = not slow and InProcess().concerns(subject, problem)
        if asked and not InProcess().refusal(subject, problem, device):
            found[name] = subject
    return found


def _interpreted(task: Task) -> bool:
    return task.seed == 0 and task.length <= INTERPRETED_LONGEST and task.kind in INTERPRETED


class Remembered:
    """The judge's bounds of gradients, once for a forward: all planted kernels have the same one.

    They depend on a kernel's out and LSE and on what it declares, and are most of a judgement.
    """

    def __init__(self) -> None:
        self.known: list[tuple[Arithmetic, Outputs, GradientAllowance]] = []

    def __call__(
        self, evidence: Evidence, arithmetic: Arithmetic, outputs: Outputs, *known: Any
    ) -> GradientAllowance:
        """As ``gradient_allowance``, of one Case."""
        for declared, forward, found in self.known:
            if declared == arithmetic and _same_forward(forward, outputs):
                return found
        found = gradient_allowance(evidence, arithmetic, outputs, *known)
        self.known.append((arithmetic, outputs, found))
        return found


def _same_forward(one: Outputs, other: Outputs) -> bool:
    pairs = ((one.out, other.out), (one.lse, other.lse))
    return all(
        mine is its or (mine is not None and its is not None and torch.equal(mine, its))
        for mine, its in pairs
    )


def work(task: Task) -> list[dict[str, Any]]:
    """Rows of one task."""
    prepare(task.device)
    try:
        with mock.patch.object(judging, "gradient_allowance", Remembered()):
            return compared(task)
    except Exception as error:  # noqa: BLE001  # one problem must not end a run of hundreds
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        facts = {"what": "crash", "name": "the judge", "status": "error", "reason": reason}
        return [{**asdict(task), **facts, "case": task.problem.to_json()}]


def compared(task: Task) -> list[dict[str, Any]]:
    """Every rule on every kernel, right ones first."""
    evidence, executor = EvidenceBuilder(Case(problem=task.problem), task.device), Keeping()
    reference = PeerReference(evidence.inputs, evidence.truth)
    rows, right = [], {}
    for name, subject in right_kernels(task).items():
        row = _row(task, "right", name, judged_record(subject, evidence, executor, brief=True))
        rows.append(row | _peers(executor, reference))
        if isinstance(executor.last, Execution):
            right[name] = executor.last.outputs
    spread = Spread(list(right.values()))
    for fault in task.faults:
        row = _row(
            task, "fault", fault.name, judged_record(fault.kernel(), evidence, executor, brief=True)
        )
        if isinstance(executor.last, Execution):
            row["effect"] = spread.effect(executor.last.outputs, right[TWIN])
        rows.append(row | _peers(executor, reference))
    return rows


def _peers(executor: Keeping, reference: PeerReference) -> dict[str, Any]:
    if not isinstance(executor.last, Execution):
        return {}
    outputs = executor.last.outputs
    return {
        "peers": {name: accepts(outputs, reference) for name, accepts in GRADIENT_PEERS.items()}
    }


def _row(task: Task, what: str, name: str, record: Record) -> dict[str, Any]:
    row = {"what": what, "name": name, **asdict(task), "status": record.status}
    row["distribution"] = task.problem.distribution
    said = record.judgement
    row["rule"] = said.rule if said else ""
    if said is not None and isinstance(said.gradients_over_bound, dict):
        shares = said.gradients_over_bound
        row["shares"] = {tensor: float(f"{share:.4g}") for tensor, share in shares.items()}
    if record.status == "error" or (what == "right" and record.status == "fail"):
        row |= {"case": record.case, "reason": said.reason if said else record.reason}
    return row


def tasks(asked: argparse.Namespace) -> list[Task]:
    """One draw after the other, the shortest first."""
    lengths = sorted(asked.lengths or LENGTHS[asked.device])
    return [
        Task(asked.device, dtype, length, seed, kind)
        for seed in range(asked.seeds)
        for length in lengths
        for dtype in asked.dtypes
        for kind in KINDS
    ]


def main() -> None:
    """Run what is asked, writing the JSON file over and over as rows come in; the page at last."""
    options = parser(__doc__ or "", "gradient-rules", DTYPES, 2)
    asked = options.parse_args()
    found = merged(asked.merge) if asked.merge else measure(asked, tasks(asked), work)
    write_json(asked.json, found)
    asked.md.write_text(page(found))


if __name__ == "__main__":
    main()
