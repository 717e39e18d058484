"""How small a fault is still seen: by a tier of the gate, and by other projects' rules beside it.

Every question of the tier is asked of the same right kernel with a fault of some size in it. Sizes
are a fixed scale: quarters of an octave, or whole bits.
"""

from __future__ import annotations

import dataclasses
import heapq
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace

from attncheck import oracles
from attncheck.draws import Draws
from attncheck.errors import UsageError
from attncheck.examine.answer import answered
from attncheck.faults import gradient_peers, peers
from attncheck.faults.bisection import least
from attncheck.faults.continuous import Continuous, continuous_named
from attncheck.faults.planting import planted
from attncheck.gate.choices import Choices
from attncheck.gate.known import Known
from attncheck.gate.plan import describing, priority
from attncheck.gate.work import Gate
from attncheck.inputs import draw
from attncheck.probes import PROBES
from attncheck.problem import Case
from attncheck.record import WRONG
from attncheck.sensitivity_record import OURS, Seen
from attncheck.subjects.contract import Tiling
from attncheck.subjects.ideal import Ideal
from attncheck.subjects.load import load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.faults.bisection import Question
    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.runner.unit import Unit
    from attncheck.subjects.contract import Subject

__all__ = ["STAGES", "sensitivity"]

STAGES = ("probes", "bounds")
"""What is asked: the stages that judge rounding. Others ask for bits, or draw what these have."""

# Right kernels: what a rule says of a problem where it refuses one of them is chance. By numbers
# below those of sizes.
_RIGHT = tuple(
    Tiling(block_query=rows, block_kv=keys, reverse=reverse)
    for rows, keys, reverse in ((128, 64, False), (64, 32, False), (128, 128, True), (64, 16, True))
)
_OTHERWISE = 4  # right results that are rounded otherwise
_RIGHT_NUMBERS = tuple(range(-len(_RIGHT) - _OTHERWISE, 0))


def sensitivity(
    name: str, dtype: str, *, tier: str, device: str = "cpu", seed: int = 0, peer: bool = True
) -> Seen:
    """How small the fault ``name`` is still seen in ``dtype``: one piece of work.

    Args:
        name: One of ``continuous.CONTINUOUS``.
        dtype: In which the kernel is asked.
        tier: How hard.
        device: ``cpu`` or ``cuda``.
        seed: Which draw.
        peer: Whether other projects' rules are asked too.

    Raises:
        UnknownName: for a fault, dtype or tier that is not known.
        UsageError: where a question cannot be asked.
    """
    fault, start = continuous_named(name), time.perf_counter()
    choices = Choices.of(
        {
            "tier": tier,
            "isolated": False,
            "dtypes": dtype,
            "stages": ",".join(STAGES),
            "seed": seed,
        }
    )
    gate = Gate(choices, Known(()))
    try:
        units = list(_asked(gate, device, tier))
        with _Sizes(fault, dtype) as sizes:
            rules = {OURS: least([_ours(unit, sizes) for unit in units], sizes.scale)}
            plain = [_Plain(unit, sizes) for unit in units if _is_plain(unit)]
            for rule in peers.RULES if peer else ():
                fit = [one.question(rule) for one in plain if one.fits(rule)]
                found = least(fit, sizes.scale)
                rules[rule] = replace(found, unfit=len(plain) - len(fit))
    finally:
        gate.close()
    return Seen(
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


class _Sizes:
    """The ideal kernel with a fault, by the number of its size; planted when it is first asked for.

    Args:
        fault: Which.
        dtype: In which it is asked.

    Attributes:
        scale: Sizes, the largest first.
    """

    def __init__(self, fault: Continuous, dtype: str) -> None:
        self._fault, self.scale = fault, fault.sizes(dtype)
        self._planted: dict[int, str] = {}
        self._loaded: dict[int, Subject] = {}

    def __enter__(self) -> _Sizes:
        self._paths = list(sys.path)
        self._folder = tempfile.TemporaryDirectory(prefix="attncheck_sensitivity_")
        return self

    def __exit__(self, *_: object) -> None:
        sys.path[:] = self._paths
        label = f"planted_{self._fault.id}".replace("-", "_")
        for module in [module for module in sys.modules if module.startswith(label)]:
            del sys.modules[module]
        self._folder.cleanup()

    def kernel(self, number: int) -> str:
        """As ``load`` takes it."""
        if number not in self._planted:
            fault = self._fault.fault(self.scale[number])
            self._planted[number] = planted(fault, "ideal", Path(self._folder.name))
        return self._planted[number]

    def subject(self, number: int) -> Subject:
        """Itself; of a negative number one of ``_RIGHT``."""
        if number < 0:
            return Ideal(_RIGHT[number])
        if number not in self._loaded:
            self._loaded[number] = load(self.kernel(number))
        return self._loaded[number]


def _asked(gate: Gate, device: str, tier: str) -> Iterator[Unit]:
    """All questions of the tier to the ideal kernel, probes first: they are the most sensitive."""
    queue: list[tuple[tuple[int, ...], int, Unit]]
    queue = [((0,), 0, describing(["ideal"], device=device, tier=tier, convention="")[0])]
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


def _ours(unit: Unit, sizes: _Sizes) -> Question:
    """The verdict alone: nobody asks what is wrong with it, or what a pass could not show."""
    case = Case.from_json(unit.case)

    def sees(number: int) -> bool:
        kernel = sizes.subject(number)
        return answered(kernel, case, device=unit.device, brief=True).status in WRONG

    return _called(unit), sees


def _called(unit: Unit) -> str:
    return f"{unit.stage}: {Case.from_json(unit.case)}"


def _is_plain(unit: Unit) -> bool:
    """Whether it is one call, of attention, and what comes of it."""
    case = Case.from_json(unit.case)
    plain = case.question == "compare" or case.question in PROBES
    return plain and case.problem.operation == "attention"


class _Plain:
    """A question as other projects ask it: its tensors and the truth are kept for every size."""

    def __init__(self, unit: Unit, sizes: _Sizes) -> None:
        self._unit, self._sizes = unit, sizes
        self._kept: tuple[Inputs, peers.Given, Any] | None = None
        self._outputs: tuple[int, Outputs] | None = None

    def question(self, rule: str) -> Question:
        """Whether ``rule`` refuses the outputs, for ``least``."""
        return _called(self._unit), lambda number: self.refuses(rule, number)

    def fits(self, rule: str) -> bool:
        """Whether it accepts every right kernel."""
        return not any(self.refuses(rule, number) for number in _RIGHT_NUMBERS)

    def refuses(self, rule: str, number: int) -> bool:
        """Whether it does, of a size's number or a right kernel's."""
        inputs, forward, backward = self._given()
        if self._outputs is None or self._outputs[0] != number:
            own = number if number >= -len(_RIGHT) else -1
            found = self._sizes.subject(own).run(inputs)
            if own != number:
                found = _otherwise(found, forward.truth, inputs, number)
            self._outputs = number, found
        outputs = self._outputs[1]
        if not peers.RULES[rule](outputs, forward):
            return True
        return backward is not None and not gradient_peers.RULES[rule](outputs, backward)

    def _given(self) -> tuple[Inputs, peers.Given, gradient_peers.GivenGradients | None]:
        if self._kept is None:
            case = Case.from_json(self._unit.case)
            inputs = _inputs(case, self._unit.device)
            truth = oracles.truth(inputs)
            graded = inputs.problem.backward and not inputs.problem.formats.scaled
            backward = gradient_peers.GivenGradients(inputs, truth) if graded else None
            self._kept = inputs, peers.Given(inputs, truth), backward
        return self._kept


def _otherwise(found: Outputs, truth: Outputs, inputs: Inputs, number: int) -> Outputs:
    """``found`` with the exact out as P's rounding may have moved it, rounded.

    Each weight may be off by a unit roundoff, and so may out; which of two neighbours it is rounded
    to is chance.
    """
    drawn = Draws(-number).normal("otherwise", tuple(truth.out.shape))
    noise = torch.from_numpy(drawn).to(truth.out.device).clamp(-1.0, 1.0)
    moved = truth.out * (1.0 + noise * inputs.problem.formats.weights.unit_roundoff)
    return dataclasses.replace(found, out=moved.to(found.out.dtype))


def _inputs(case: Case, device: str) -> Inputs:
    """What a kernel is given: a probe's own, else what is drawn."""
    if case.question in PROBES:
        return PROBES[case.question].inputs(case.problem, case.parameters).to(device)
    return draw(case.problem, device)
