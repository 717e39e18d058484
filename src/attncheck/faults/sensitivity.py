"""Measure how small a fault is still seen.

Every question of the tier is asked of the same right kernel with a fault of some size in it. Sizes
are a fixed scale: quarters of an octave, or whole bits.
"""

from __future__ import annotations

import dataclasses
import heapq
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch
from msgspec.structs import replace

from attncheck import oracles
from attncheck.core.draws import Draws
from attncheck.core.errors import UsageError
from attncheck.core.outputs import Outputs
from attncheck.faults.continuous_faults import ContinuousFault, continuous_fault_named
from attncheck.faults.peer_rules import FAULT_RULES, RULES, PeerReference, is_plain
from attncheck.gate.gate_worker import GateWorker
from attncheck.gate.plan import describe_units, priority
from attncheck.gate.planning import Choices
from attncheck.gate.property_stage import KnownFailures
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case
from attncheck.probes import PROBES
from attncheck.records.fault_scores import ATTNCHECK_RULE, FaultSensitivity, SmallestFault
from attncheck.records.record import FAILED_STATUSES
from attncheck.records.run_reports import Stage
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal
from attncheck.verify.run_case import run_case
from attncheck.workers.units import Unit

Question = tuple[str, "Callable[[int], bool]"]
"""What it is called, and whether it sees the fault of a number of the scale: 0 is the largest."""


def smallest_seen(questions: Sequence[Question], sizes: Sequence[float]) -> SmallestFault:
    """Return the smallest of ``sizes`` that a question sees, by asking as few as possible.

    Each question in turn is asked about the next size below the smallest one seen so far. One that
    sees it is asked on: twice as far each time, then by bisection between what it sees and what it
    does not. This ends once every question has been asked about the size below and sees nothing:
    both ends are confirmed, whatever the order. Seeing need not be monotone: smaller sizes than
    ``below`` that somebody sees again are not looked for.

    Args:
        questions: The most sensitive ones first, for speed alone.
        sizes: From the largest fault to the smallest.
    """
    # Numbers of sizes, −1 for none: the scale is searched by number.
    best, who, count = -1, "", 0
    left = deque(questions)
    waiting = len(left)
    while waiting and best + 1 < len(sizes):
        name, sees = left[0]
        count += 1
        if not sees(best + 1):
            left.rotate(-1)
            waiting -= 1
            continue
        best, more = _lowest(sees, best + 1, len(sizes))
        who, count = name, count + more
        left.rotate(-1)
        waiting = len(left) - (more > 0)  # it has been asked about the size below
    return SmallestFault(
        size=sizes[best] if best >= 0 else None,
        below=sizes[best + 1] if best + 1 < len(sizes) else None,
        question=who,
        asked=count,
    )


def _lowest(sees: Callable[[int], bool], seen: int, end: int) -> tuple[int, int]:
    """The number from ``seen`` on that a question sees, and not the next; how often it was asked.

    ``end`` is the first that there is not.
    """
    # Twice as far each time, then by halves: few questions wherever the edge is.
    step, questions, unseen = 1, 0, end
    while seen + step < end:
        questions += 1
        if not sees(seen + step):
            unseen = seen + step
            break
        seen, step = seen + step, 2 * step
    while unseen - seen > 1:
        middle = (seen + unseen) // 2
        questions += 1
        if sees(middle):
            seen = middle
        else:
            unseen = middle
    return seen, questions


STAGES: tuple[Stage, ...] = ("probes", "bounds")
"""What is asked: the stages that judge rounding. Others ask for bits, or draw what these have."""

# Right kernels: what a rule says of a problem where it refuses one of them is chance. By numbers
# below those of sizes.
_RIGHT = tuple(
    Tiling(block_query=rows, block_kv=keys, reverse=reverse)
    for rows, keys, reverse in ((128, 64, False), (64, 32, False), (128, 128, True), (64, 16, True))
)
_OTHERWISE = 4  # right results that are rounded otherwise
_RIGHT_NUMBERS = tuple(range(-len(_RIGHT) - _OTHERWISE, 0))


def measure_sensitivity(
    name: str, dtype: str, *, tier: str, device: str = "cpu"
) -> FaultSensitivity:
    """Measure how small the fault ``name`` is still seen in ``dtype``: one piece of work.

    Raises:
        UnknownName: for a fault, dtype or tier that is not known.
        UsageError: where a question cannot be asked.
    """
    fault, start = continuous_fault_named(name), time.perf_counter()
    choices = Choices.of_tier(tier, isolated=False, dtypes=(dtype,), stages=STAGES)
    # No failure counts as known: what excuses a right kernel would hide the fault.
    gate = GateWorker(choices, KnownFailures(()))
    try:
        units = list(_gate_questions(gate, device, tier))
        kernels = _Kernels(fault, dtype)
        verdicts = [_verdict_question(unit, kernels) for unit in units]
        rules = {ATTNCHECK_RULE: smallest_seen(verdicts, kernels.sizes)}
        # Other projects ask no relations: their rules see single calls alone.
        cases = [(unit, Case.from_json(unit.case)) for unit in units]
        plain = [_PeerQuestion(unit, case, kernels) for unit, case in cases if is_plain(case)]
        for rule in FAULT_RULES:
            fit = [each.question(rule) for each in plain if each.fits(rule)]
            smallest = smallest_seen(fit, kernels.sizes)
            rules[rule] = replace(smallest, unfit=len(plain) - len(fit))
    finally:
        gate.close()
    return FaultSensitivity(
        fault=name,
        summary=fault.summary,
        unit=fault.unit,
        dtype=dtype,
        tier=tier,
        device=device,
        questions=len(units),
        plain=len(plain),
        rules=rules,
        seconds=round(time.perf_counter() - start, 1),
    )


class _Kernels:
    """The ideal kernel with a fault, by the number of its size; of a negative number a right one.

    Attributes:
        sizes: The largest first.
    """

    def __init__(self, fault: ContinuousFault, dtype: str) -> None:
        self._fault, self.sizes = fault, fault.sizes(dtype)
        self._kernels: dict[int, Ideal] = {}

    def __getitem__(self, number: int) -> Ideal:
        if number not in self._kernels:
            faulty = number >= 0
            self._kernels[number] = (
                self._fault.kernel(self.sizes[number]) if faulty else Ideal(_RIGHT[number])
            )
        return self._kernels[number]


def _gate_questions(gate: GateWorker, device: str, tier: str) -> Iterator[Unit]:
    """All questions of the tier to the ideal kernel, probes first: they are the most sensitive."""
    queue: list[tuple[tuple[int, ...], int, Unit]]
    queue = [((0,), 0, describe_units(["ideal"], device=device, tier=tier, convention="")[0])]
    number, seen = 1, set[str]()
    while queue:
        *_, unit = heapq.heappop(queue)
        if unit.kind == "ask":
            yield unit
            continue
        done = gate.do(unit)
        if done.harness:
            raise UsageError(done.harness)
        for each in done.units:
            if each.id not in seen:
                seen.add(each.id)
                heapq.heappush(queue, (priority(each), number, each))
                number += 1


def _verdict_question(unit: Unit, kernels: _Kernels) -> Question:
    """The verdict alone: nobody asks what is wrong with it, or what a pass could not show."""
    case = Case.from_json(unit.case)

    def sees(number: int) -> bool:
        record = run_case(kernels[number], case, device=unit.device, brief=True)
        return record.status in FAILED_STATUSES

    return f"{unit.stage}: {case}", sees


class _PeerQuestion:
    """A question as other projects ask it: its tensors and the truth are kept for every size."""

    def __init__(self, unit: Unit, case: Case, kernels: _Kernels) -> None:
        self._unit, self._case, self._kernels = unit, case, kernels
        self._outputs: tuple[int, Outputs] | None = None

    @cached_property
    def _reference(self) -> PeerReference:
        case, device = self._case, self._unit.device
        if case.question in PROBES:
            inputs = PROBES[case.question].inputs(case.problem, case.parameters).to(device)
        else:
            inputs = draw_inputs(case.problem, device)
        return PeerReference(inputs, oracles.truth(inputs))

    def question(self, rule: str) -> Question:
        """Return whether ``rule`` refuses the outputs, for ``smallest_seen``."""
        name = f"{self._unit.stage}: {self._case}"
        return name, lambda number: self.refuses(rule, number)

    def fits(self, rule: str) -> bool:
        """Return whether it accepts every right kernel."""
        return not any(self.refuses(rule, number) for number in _RIGHT_NUMBERS)

    def refuses(self, rule: str, number: int) -> bool:
        """Return whether it does, of a size's number or a right kernel's."""
        reference = self._reference
        # The last result alone is kept: those of all sizes would fill the memory.
        if self._outputs is None or self._outputs[0] != number:
            # Numbers below those of tilings are the first tiling's result, rounded otherwise.
            own = number if number >= -len(_RIGHT) else -1
            outputs = self._kernels[own].run(reference.inputs)
            if own != number:
                outputs = _rounded_otherwise(outputs, reference, number)
            self._outputs = number, outputs
        outputs = self._outputs[1]
        return RULES[rule].refuses(outputs, reference)


def _rounded_otherwise(outputs: Outputs, reference: PeerReference, number: int) -> Outputs:
    """``outputs`` with the exact out as P's rounding may have moved it, rounded.

    Each weight may be off by a unit roundoff, and so may out; which of two neighbours it is rounded
    to is chance.
    """
    exact = reference.truth.out
    noise = torch.from_numpy(Draws(-number).normal("otherwise", tuple(exact.shape)))
    unit = reference.inputs.problem.formats.weights.unit_roundoff
    moved = exact * (1.0 + noise.to(exact.device).clamp(-1.0, 1.0) * unit)
    return dataclasses.replace(outputs, out=moved.to(outputs.out.dtype))
