"""Measure how small a fault is still seen.

Every question of the tier is asked of the same right kernel with a fault of some size in it. Sizes
are a fixed scale: quarters of an octave, or whole bits.
"""

from __future__ import annotations

import dataclasses
import heapq
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from msgspec.structs import replace

from attncheck import oracles
from attncheck.capabilities.subject import Tiling
from attncheck.core.draws import Draws
from attncheck.core.errors import UnknownName, UsageError
from attncheck.core.formats import DTYPES, FORMATS
from attncheck.faults import peer_rules
from attncheck.faults.fault import Edit, Fault, Host
from attncheck.faults.planting import plant
from attncheck.gate.choices import Choices
from attncheck.gate.known import Known
from attncheck.gate.plan import describing, priority
from attncheck.gate.work import Gate
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case
from attncheck.probes import PROBES
from attncheck.records.fault_scores import ATTNCHECK_RULE, FaultSensitivity, SmallestFault
from attncheck.records.record import FAILED_STATUSES
from attncheck.subjects.ideal import Ideal
from attncheck.subjects.load import load_subject
from attncheck.verify.run_case import run_case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from attncheck.capabilities.subject import Subject
    from attncheck.core.outputs import Outputs
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.workers.units import Unit

__all__ = [
    "CONTINUOUS_FAULTS",
    "STAGES",
    "ContinuousFault",
    "Question",
    "continuous_fault_named",
    "measure_sensitivity",
    "smallest_seen",
]


Question = tuple[str, "Callable[[int], bool]"]
"""What it is called, and whether it sees the fault of a number of the scale: 0 is the largest."""


def smallest_seen(questions: Sequence[Question], sizes: Sequence[float]) -> SmallestFault:
    """The smallest of ``sizes`` that a question sees, by asking as few as possible.

    Each question in turn is asked about the next size below the smallest one seen so far. One that
    sees it is asked on: twice as far each time, then by bisection between what it sees and what it
    does not. This ends once every question has been asked about the size below and sees nothing:
    both ends are confirmed, whatever the order. Seeing need not be monotone: smaller sizes than
    ``below`` that somebody sees again are not looked for.

    Args:
        questions: The most sensitive ones first, for speed alone.
        sizes: From the largest fault to the smallest.
    """
    best, who, asked = -1, "", 0
    left = deque(questions)
    waiting = len(left)
    while waiting and best + 1 < len(sizes):
        name, sees = left[0]
        asked += 1
        if not sees(best + 1):
            left.rotate(-1)
            waiting -= 1
            continue
        best, more = _lowest(sees, best + 1, len(sizes))
        who, asked = name, asked + more
        left.rotate(-1)
        waiting = len(left) - (more > 0)  # it has been asked about the size below
    return SmallestFault(
        size=sizes[best] if best >= 0 else None,
        below=sizes[best + 1] if best + 1 < len(sizes) else None,
        question=who,
        asked=asked,
    )


def _lowest(sees: Callable[[int], bool], seen: int, end: int) -> tuple[int, int]:
    """The number from ``seen`` on that a question sees, and not the next; how often it was asked.

    ``end`` is the first that there is not.
    """
    step, asked, unseen = 1, 0, end
    while seen + step < end:
        asked += 1
        if not sees(seen + step):
            unseen = seen + step
            break
        seen, step = seen + step, 2 * step
    while unseen - seen > 1:
        middle = (seen + unseen) // 2
        asked += 1
        if sees(middle):
            seen = middle
        else:
            unseen = middle
    return seen, asked


_STEPS = 4  # of an octave
_SMALLEST = 30  # octaves below 1: fp32 has 24
_ATTENTION = "subjects.ideal_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuousFault:
    """A fault of any size.

    Attributes:
        id: Words with hyphens.
        summary: What the kernel does wrong, in one line.
        unit: ``ε``, which is larger where the fault is; or ``bits``, of which fewer are worse.
        edits: Of a size, what is done to a copy of the ideal kernel.
    """

    id: str
    summary: str
    unit: Literal["ε", "bits"]
    edits: Callable[[float], tuple[Edit, ...]]

    def sizes(self, dtype: str) -> tuple[float, ...]:
        """From the largest fault to the smallest: quarters of an octave from 1, or whole bits.

        Bits as far as there is something to lose: of P fewer than the dtype's product reads, of an
        accumulator fewer than fp32's.
        """
        if self.unit == "ε":
            return tuple(2.0 ** (-n / _STEPS) for n in range(_SMALLEST * _STEPS))
        kept = DTYPES[dtype].weights if self.id == _WEIGHTS else FORMATS["fp32"]
        return tuple(range(1, kept.significand))

    def fault(self, size: float) -> Fault:
        """The fault of one size, for ``planted``."""
        said = f"{size:g}".replace(".", "p").replace("-", "m").replace("+", "")
        return Fault(
            id=f"{self.id}-{said}",
            category="precision",
            summary=f"{self.summary}: {self.unit} = {size:g}",
            when="always",
            seen="an error as large as that",
            sources=("by construction",),
            hosts={"ideal": Host(kernel="ideal", edits=self.edits(size))},
            discrete=False,
        )


_WEIGHTS = "weights-of-few-bits"


def _scale(size: float) -> tuple[Edit, ...]:
    return tuple(
        Edit(module=_ATTENTION, old=old, new=old.replace("scale *", f"scale * {1 + size!r} *"))
        for old in ("self.scale = problem.scale * products", "fp32(problem.scale * kernel.log2_e)")
    )


def _one_key(size: float) -> tuple[Edit, ...]:
    tiles = "        for keys in self.key_tiles():\n            seen, at = self.seen(rows, keys)\n"
    weights = "        p = self._weights(s, maximum)\n"
    factor = f"            p[..., :1] = p[..., :1] * {1 + size!r}\n"
    return (
        Edit(
            module=_ATTENTION,
            old=tiles,
            new=f"{tiles}            self.has_first_key = keys.start == 0\n",
        ),
        Edit(
            module=_ATTENTION,
            old=weights,
            new=f"{weights}        if self.has_first_key:\n{factor}",
        ),
    )


def _rounded(name: str, bits: float) -> str:
    """A statement that rounds ``name`` to so many bits (Veltkamp 1968); not what is not finite."""
    wide = f"({name}.double() * {2.0 ** (53 - bits) + 1!r})"
    value = f"({wide} - ({wide} - {name})).float()"
    return f"        {name} = torch.where({name}.isfinite(), {value}, {name})\n"


def _few_bits_of_weights(bits: float) -> tuple[Edit, ...]:
    old = (
        "        p = self.kernel.operand(p * self.factors.weights, self.problem.formats.weights)\n"
    )
    return (Edit(module=_ATTENTION, old=old, new=_rounded("p", bits) + old),)


def _few_bits_of_sums(bits: float) -> tuple[Edit, ...]:
    old = "        run.out = self.kernel.added(out, self._weighted(p, seen, v))\n"
    added = old.replace("run.out", "out")
    return (
        Edit(
            module=_ATTENTION,
            old=old,
            new=added + _rounded("out", bits) + "        run.out = out\n",
        ),
    )


CONTINUOUS_FAULTS = {
    one.id: one
    for one in (
        ContinuousFault(
            id="scale-off",
            summary="the softmax scale is 1 + ε times its own",
            unit="ε",
            edits=_scale,
        ),
        ContinuousFault(
            id="first-key-heavier",
            summary="the first key's weight is 1 + ε times its own",
            unit="ε",
            edits=_one_key,
        ),
        ContinuousFault(
            id=_WEIGHTS,
            summary="P has few bits as P·V reads it",
            unit="bits",
            edits=_few_bits_of_weights,
        ),
        ContinuousFault(
            id="sums-of-few-bits",
            summary="O has few bits after each tile of keys",
            unit="bits",
            edits=_few_bits_of_sums,
        ),
    )
}
"""By id."""


def continuous_fault_named(name: str) -> ContinuousFault:
    """The one called ``name``; raises UnknownName with the valid ones."""
    if name not in CONTINUOUS_FAULTS:
        raise UnknownName("continuous fault", name, CONTINUOUS_FAULTS)
    return CONTINUOUS_FAULTS[name]


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


def measure_sensitivity(
    name: str, dtype: str, *, tier: str, device: str = "cpu", seed: int = 0, peer: bool = True
) -> FaultSensitivity:
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
    fault, start = continuous_fault_named(name), time.perf_counter()
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
            rules = {
                ATTNCHECK_RULE: smallest_seen([_ours(unit, sizes) for unit in units], sizes.scale)
            }
            plain = [_Plain(unit, sizes) for unit in units if _is_plain(unit)]
            for rule in peer_rules.FORWARD_RULES if peer else ():
                fit = [one.question(rule) for one in plain if one.fits(rule)]
                found = smallest_seen(fit, sizes.scale)
                rules[rule] = replace(found, unfit=len(plain) - len(fit))
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


class _Sizes:
    """The ideal kernel with a fault, by the number of its size; planted when it is first asked for.

    Args:
        fault: Which.
        dtype: In which it is asked.

    Attributes:
        scale: Sizes, the largest first.
    """

    def __init__(self, fault: ContinuousFault, dtype: str) -> None:
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
            self._planted[number] = plant(fault, "ideal", Path(self._folder.name))
        return self._planted[number]

    def subject(self, number: int) -> Subject:
        """Itself; of a negative number one of ``_RIGHT``."""
        if number < 0:
            return Ideal(_RIGHT[number])
        if number not in self._loaded:
            self._loaded[number] = load_subject(self.kernel(number))
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
        return run_case(kernel, case, device=unit.device, brief=True).status in FAILED_STATUSES

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
        self._kept: tuple[Inputs, peer_rules.PeerReference, Any] | None = None
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
        if not peer_rules.FORWARD_RULES[rule](outputs, forward):
            return True
        return backward is not None and not peer_rules.GRADIENT_RULES[rule](outputs, backward)

    def _given(self) -> tuple[Inputs, peer_rules.PeerReference, peer_rules.PeerGradients | None]:
        if self._kept is None:
            case = Case.from_json(self._unit.case)
            inputs = _inputs(case, self._unit.device)
            truth = oracles.truth(inputs)
            graded = inputs.problem.backward and not inputs.problem.formats.scaled
            backward = peer_rules.PeerGradients(inputs, truth) if graded else None
            self._kept = inputs, peer_rules.PeerReference(inputs, truth), backward
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
    return draw_inputs(case.problem, device)
