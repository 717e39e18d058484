"""Measure the smallest fault that is still detected.

Every question of the tier is asked of the ideal kernel with a fault of some size in it. Sizes form
a fixed scale: quarters of an octave, or whole bits.
"""

from __future__ import annotations

import dataclasses
import heapq
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cache, cached_property

import torch
from msgspec.structs import replace

from attncheck import oracles
from attncheck.core.draws import Draws
from attncheck.core.errors import UsageError
from attncheck.core.outputs import Outputs
from attncheck.faults.continuous_faults import continuous_fault_named
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
"""A name, and whether the question detects the fault at an index of the sizes; 0 is the largest."""


def smallest_detected(questions: Sequence[Question], sizes: Sequence[float]) -> SmallestFault:
    """Return the smallest of ``sizes`` that any question detects, with as few calls as possible.

    Each question in turn is asked about the next size below the smallest one detected so far. If it
    detects that, it goes on in doubling steps, then bisects between detected and undetected sizes.
    The search ends once no question detects the size below: both ends are confirmed, whatever the
    order. Detection need not be monotone: sizes below ``below`` that a question may detect again
    are not searched.

    Args:
        questions: The most sensitive ones first, only for speed.
        sizes: From the largest fault to the smallest.
    """
    # ``best`` is an index of ``sizes``, −1 for none.
    best, best_question, count = -1, "", 0
    queue = deque(questions)
    waiting = len(queue)
    while waiting and best + 1 < len(sizes):
        name, detects = queue[0]
        count += 1
        if not detects(best + 1):
            queue.rotate(-1)
            waiting -= 1
            continue
        best, more = _find_edge(detects, best + 1, len(sizes))
        best_question, count = name, count + more
        queue.rotate(-1)
        waiting = len(queue) - (more > 0)  # Its search ended on the size below.
    return SmallestFault(
        size=sizes[best] if best >= 0 else None,
        below=sizes[best + 1] if best + 1 < len(sizes) else None,
        question=best_question,
        asked=count,
    )


def _find_edge(detects: Callable[[int], bool], detected: int, end: int) -> tuple[int, int]:
    """Return an index from ``detected`` on that a question detects while it misses the next.

    ``end`` is the number of sizes. The second result is the number of calls.
    """
    # Doubling steps, then bisection: few calls wherever the edge is.
    step, questions, missed = 1, 0, end
    while detected + step < end:
        questions += 1
        if not detects(detected + step):
            missed = detected + step
            break
        detected, step = detected + step, 2 * step
    while missed - detected > 1:
        middle = (detected + missed) // 2
        questions += 1
        if detects(middle):
            detected = middle
        else:
            missed = middle
    return detected, questions


STAGES: tuple[Stage, ...] = ("probes", "bounds")
"""The stages that judge rounding; others compare bits, or draw problems like those of these."""

# Right kernels, at negative indices: a rule that rejects one of them on a problem does not fit it.
_RIGHT = tuple(
    Tiling(block_query=rows, block_kv=keys, reverse=reverse)
    for rows, keys, reverse in ((128, 64, False), (64, 32, False), (128, 128, True), (64, 16, True))
)
_OTHERWISE = 4  # right results with other roundings
_RIGHT_NUMBERS = tuple(range(-len(_RIGHT) - _OTHERWISE, 0))


def measure_sensitivity(
    name: str, dtype: str, *, tier: str, device: str = "cpu"
) -> FaultSensitivity:
    """Measure the smallest size of fault ``name`` that is still detected in ``dtype``.

    Raises:
        UnknownName: for an unknown fault, dtype or tier.
        UsageError: where a question cannot be asked.
    """
    fault, start = continuous_fault_named(name), time.perf_counter()
    choices = Choices.of_tier(tier, isolated=False, dtypes=(dtype,), stages=STAGES)
    sizes = fault.sizes(dtype)

    @cache
    def kernel(number: int) -> Ideal:
        """Return the ideal kernel with the fault of a size; at negative indices a right one."""
        return fault.kernel(sizes[number]) if number >= 0 else Ideal(_RIGHT[number])

    # No failure counts as known: known failures of a right kernel would hide the fault.
    with closing(GateWorker(choices, KnownFailures(()))) as gate:
        units = list(_gate_questions(gate, device, tier))
        verdicts = [_verdict_question(unit, kernel) for unit in units]
        rules = {ATTNCHECK_RULE: smallest_detected(verdicts, sizes)}
        # Other projects test no relations: their rules apply to single calls only.
        cases = [(unit, Case.from_json(unit.case)) for unit in units]
        plain = [_PeerQuestion(unit, case, kernel) for unit, case in cases if is_plain(case)]
        for rule in FAULT_RULES:
            fit = [each.question(rule) for each in plain if each.fits(rule)]
            smallest = smallest_detected(fit, sizes)
            rules[rule] = replace(smallest, unfit=len(plain) - len(fit))
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


def _gate_questions(gate: GateWorker, device: str, tier: str) -> Iterator[Unit]:
    """Yield all questions of the tier to the ideal kernel, the probes, most sensitive, first."""
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


def _verdict_question(unit: Unit, kernel: Callable[[int], Ideal]) -> Question:
    """Return attncheck's verdict on a unit as a Question, without diagnosis or details."""
    case = Case.from_json(unit.case)

    def detects(number: int) -> bool:
        record = run_case(kernel(number), case, device=unit.device, brief=True)
        return record.status in FAILED_STATUSES

    return f"{unit.stage}: {case}", detects


class _PeerQuestion:
    """A question under other projects' rules; its tensors and truth are shared by all sizes."""

    def __init__(self, unit: Unit, case: Case, kernel: Callable[[int], Ideal]) -> None:
        self._unit, self._case, self._kernel = unit, case, kernel
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
        """Return the Question whether ``rule`` rejects the outputs, for ``smallest_detected``."""
        name = f"{self._unit.stage}: {self._case}"
        return name, lambda number: self.refuses(rule, number)

    def fits(self, rule: str) -> bool:
        """Return whether ``rule`` accepts every right kernel."""
        return not any(self.refuses(rule, number) for number in _RIGHT_NUMBERS)

    def refuses(self, rule: str, number: int) -> bool:
        """Return whether ``rule`` rejects the outputs of the kernel at index ``number``."""
        reference = self._reference
        # Only the last result is kept: those of all sizes would fill the memory.
        if self._outputs is None or self._outputs[0] != number:
            # Indices below those of tilings are the last tiling's result with other roundings.
            own = number if number >= -len(_RIGHT) else -1
            outputs = self._kernel(own).run(reference.inputs)
            if own != number:
                outputs = _with_other_rounding(outputs, reference, number)
            self._outputs = number, outputs
        outputs = self._outputs[1]
        return RULES[rule].refuses(outputs, reference)


def _with_other_rounding(outputs: Outputs, reference: PeerReference, number: int) -> Outputs:
    """Return ``outputs`` with an out that P's rounding may have given instead.

    Each weight may be off by a unit roundoff, and so may the exact out: it gets random errors of
    that size before it is rounded.
    """
    exact = reference.truth.out
    noise = torch.from_numpy(Draws(-number).normal("otherwise", tuple(exact.shape)))
    unit = reference.inputs.problem.formats.weights.unit_roundoff
    moved = exact * (1.0 + noise.to(exact.device).clamp(-1.0, 1.0) * unit)
    return dataclasses.replace(outputs, out=moved.to(outputs.out.dtype))
