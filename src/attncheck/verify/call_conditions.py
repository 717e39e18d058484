"""Conditions under which a kernel is called, and what was seen around the call."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack

from attncheck.core import strided_alloc
from attncheck.core.outputs import Outputs
from attncheck.core.tensor_names import TensorName
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Case
from attncheck.probes import PROBES
from attncheck.subjects.capabilities.subject import Call, Subject
from attncheck.subjects.conventions.function_subject import LEAVES_MODES, REFILLED
from attncheck.verify.further_calls import compare_bits, repeat_calls
from attncheck.verify.memory_patterns import (
    BEYOND,
    Fill,
    GuardBands,
    Placed,
    Primed,
    allocator_filled,
    count_bytes,
    gone,
    pattern,
    primed,
    weakly,
)
from attncheck.verify.process_effects import (
    State,
    changed_parts,
    process_state,
    resource_leaks,
    restore_process,
)

# Ordinary numbers, others in their place, NaN, or half of a format's largest.
Contents = Literal["numbers", "others", "nan", "huge"]

_BAND = 1 << 16  # bytes before and after: more than a tile of a small problem's rows
_ALIGNED = 4096
_VECTOR = 16  # bytes: the widest load of a GPU's thread, and what TMA wants strides to be made of
_AXES = 4  # of a tensor with rows: (batch, heads, length, dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Memory that is no part of the inputs: around them, and between the elements of a view."""

    # What lies there, beside the inputs that ``of`` names; beside all others ``numbers``.
    contents: Contents = "numbers"
    of: str = ""  # names of inputs with commas between them; empty for all
    # Name of an input whose rows lie further apart, with its heads beside each other within a
    # row; empty for none. What is between them is no part of it either.
    apart: str = ""


Band = tuple[str, torch.Tensor, torch.Tensor]
"""Where memory beside an input lies, in words; its bytes, and what they were."""


def place_among(inputs: Inputs, by: Surroundings, bands: list[Band] | None = None) -> Inputs:
    """The same numbers, each input in memory of its own with ``by`` around it.

    Strides stay, but those of ``by.apart``. Of what lies spread over gibibytes nothing is filled.

    Args:
        bands: Gets the memory before and after each input: nobody may write there.
    """
    bands = [] if bands is None else bands
    named = by.of.split(",") if by.of else list(inputs.tensors())
    tensors = {
        name: _placed(
            _apart(tensor) if name == by.apart else tensor,
            by.contents if name in named else "numbers",
            name,
            bands,
        )
        for name, tensor in inputs.tensors().items()
    }
    return Inputs.of(inputs.problem, tensors)


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """Laid out as ``strides_far`` does it, and near: rows with all their heads, and 16 bytes."""
    if tensor.dim() != _AXES:
        return tensor
    batch, heads, length, dim = tensor.shape
    vector = _VECTOR // tensor.element_size()
    wide = -(-dim // vector) * vector
    row = batch * heads * wide + vector
    memory = torch.zeros(max(length * row, 1), dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, (heads * wide, wide, row, 1)).copy_(tensor)


def _placed(tensor: torch.Tensor, contents: Contents, name: str, bands: list[Band]) -> torch.Tensor:
    size = tensor.untyped_storage().nbytes()
    if not size or not tensor.numel():
        return tensor.clone()
    if strided_alloc.has_far_rows(tensor):
        return strided_alloc.copy_far_rows(tensor)
    band = max(_BAND, -(-size // _ALIGNED) * _ALIGNED)
    memory = torch.empty(band + size + band + _ALIGNED, dtype=torch.uint8, device=tensor.device)
    start = band + -(memory.data_ptr() + band) % _ALIGNED
    for part in (memory[start - band : start], memory[start : start + size + _BAND]):
        _fill(part[: len(part) // tensor.element_size() * tensor.element_size()], tensor, contents)
    before, after = memory[start - band : start], memory[start + size : start + size + _BAND]
    bands += [(f"before its input {name}", before, before.clone())]
    bands += [(f"after its input {name}", after, after.clone())]
    # Through DLPack the view knows of no more memory than the input had.
    alone = from_dlpack(torch._C._to_dlpack(memory[start : start + size])).view(tensor.dtype)
    # A stride of 0 leads to one element over and over, which is written once.
    once = [1 if step == 0 else n for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    at = (tensor.stride(), tensor.storage_offset())
    alone.as_strided(once, *at).copy_(tensor.as_strided(once, *at))
    return alone.as_strided(tensor.shape, *at)


def _fill(part: torch.Tensor, like: torch.Tensor, contents: Contents) -> None:
    memory = part.view(like.dtype)
    if contents in {"nan", "huge"}:
        large = torch.finfo(like.dtype).max / 2 if like.is_floating_point() else 0
        value = large if contents == "huge" else math.nan
        memory.copy_(torch.full((1,), value, device=memory.device).to(like.dtype))
        return
    fill: Literal["pattern", "inverse"] = "pattern" if contents == "numbers" else "inverse"
    hashed = pattern(len(memory), len(memory), memory.device, fill).float()
    memory.copy_((hashed / 32 - 4).to(like.dtype))  # −4 to 4: what a score or a value may be


@dataclass(frozen=True, slots=True, kw_only=True)
class CallConditions:
    """Under which a call is made, in numbers, words and flags alone: it travels as JSON."""

    # What lies in memory that the kernel allocates, and in the guard bands around it: one of two
    # patterns of which no byte agrees; empty for whatever is there.
    fill: Fill = ""
    # Whether there are narrow guard bands on a CPU where ``fill`` is empty: what is written past a
    # tensor breaks the heap there, which ends the process in whatever call comes later.
    guarded: bool = False
    # How often it is called; the bits of each further call are compared with the first's.
    calls: int = 1
    # Whether each further call is on a copy at another address, with other work on the GPU or
    # another number of torch's threads.
    elsewhere: bool = False
    # Whether each further call is on a stream of its own, ordered by it alone; in turns that
    # stream is late, and all others are. Of a GPU alone.
    late: bool = False
    # Whether what the last call gave is what the execution gives, in place of the first's.
    last: bool = False
    state: bool = False  # whether what a further call changes in its process is looked at
    window: int = 0  # calls in a window in which leaks are looked for; 0 where they are not
    # What lies beside its inputs, in place of guard bands; None for nothing in particular.
    surroundings: Surroundings | None = None
    # Which call of a sequence it is, from 1 on: what is free of the memory of the calls before is
    # filled and given away again, and what they returned must stay what it is. 0 for a call by
    # itself.
    turn: int = 0


PLAIN_CALL = CallConditions()
_MOST_SURROUNDED = 1 << 23  # numbers of q, k and v: memory is filled on both sides of each


def judged_conditions(case: Case) -> CallConditions:
    """Return the conditions of a call that is judged by its numbers.

    Beside inputs, unless they are large, lies NaN in a comparison and huge numbers in a probe.
    """
    problem = case.problem
    widest = max(problem.head_dim, problem.value_dim, 1)
    numbers = problem.batch * problem.heads * (problem.query + problem.kv) * widest
    if problem.operation == "softmax" or numbers > _MOST_SURROUNDED:
        return PLAIN_CALL
    return CallConditions(
        guarded=True,
        surroundings=Surroundings(contents="huge" if case.question in PROBES else "nan"),
    )


_RETURNED: set[StorageWeakRef] = set()


@dataclass(slots=True, kw_only=True)
class CallNotes:
    """Observations around a call that only who made it could make: words and numbers alone."""

    wrong: str = ""  # what is wrong, in one line, with the rule it breaks; empty where nothing
    rule: str = ""  # a name of ``judgement.Rule``
    unchecked: str = ""  # why something could not be looked at, in one line; empty where all was
    unguarded: str = ""  # names of outputs with no guard bands around them, separated by commas
    # The same of outputs that may have held anything before the kernel wrote them.
    unpoisoned: str = ""
    further: int = 0  # calls that were compared with the first
    differing: int = 0  # of these those with other bits of out or LSE
    # Of these those with other bits of gradients; of dcaptured nothing is said, which kernels add
    # up in whatever order.
    gradients_differing: int = 0
    where: str = ""  # the first element that differed, in one line
    remark: str = ""  # what is odd, and breaks no rule


@dataclass(slots=True)
class EarlierCalls:
    """What earlier calls of a sequence leave to the next ones."""

    memory: list[Placed] = field(default_factory=list)
    passed: list[torch.Tensor] = field(default_factory=list)  # to the last one: see ``REFILLED``
    # What each returned, held as its caller may hold it, and a copy made at once.
    returned: list[tuple[Outputs, Outputs]] = field(default_factory=list)

    def overwritten(self) -> str:
        """Return what of that has changed since; empty where nothing."""
        for number, (its, copy) in enumerate(self.returned, 1):
            changed = compare_bits(its, copy, len(self.returned)).where
            if changed:
                where = changed.rpartition(" in ")[0]
                return f"writes over what call {number} had returned: {where}"
        return ""

    def add(self, outputs: Outputs) -> None:
        """Hold what one more call returned."""
        tensors = {name: tensor.clone() for name, tensor in outputs.tensors().items()}
        self.returned.append((outputs, type(outputs)(**tensors)))


class ConditionedCall:
    """One call with what is arranged around it; the executor tells it how far it is.

    Attributes:
        notes: What was seen so far.
    """

    def __init__(
        self,
        under: CallConditions,
        device: torch.device,
        first: State | None = None,
        earlier: EarlierCalls | None = None,
    ) -> None:
        self.notes, self._first = CallNotes(), first
        self._under, self._device = under, device
        self._calls = earlier if under.turn else None
        memory = self._calls.memory if self._calls else None
        guarded = under.fill or (under.guarded and device.type == "cpu")
        self._guards = GuardBands(under.fill, device, memory) if guarded else None
        self._primed: Primed | None = None
        self._allocator = False
        self._bands: list[Band] = []
        # A kernel may return the memory of an earlier call, which that call wrote to.
        self._earlier = {each for each in _RETURNED if not gone(each)}
        self._before: State = {}

    @contextlib.contextmanager
    def on(self) -> Iterator[ConditionedCall]:
        """While its calls are made; what they changed in the process is then made what it was."""
        with contextlib.ExitStack() as stack:
            if self._under.state:
                stack.callback(restore_process, process_state(self._device), self._device)
                if self._first is not None:  # what earlier calls set may be what this one sets
                    restore_process(self._first, self._device)
                self._before = process_state(self._device)
            if self._calls is not None:
                stack.callback(REFILLED.reset, REFILLED.set(self._calls.passed))
            # A GPU's allocator has no such flag: what it has free is filled instead.
            if self._device.type == "cpu":
                self._allocator = stack.enter_context(allocator_filled(self._under.fill))
            self._primed = primed(self._device, self._under.fill)
            if self._primed is not None:
                stack.callback(self._primed.close)
            if self._guards is not None:
                stack.enter_context(self._guards)
            yield self

    def copied(self, inputs: Inputs) -> Inputs:
        """Return what the kernel is to read: the same numbers, laid out alike, in other memory."""
        if self._under.surroundings is not None:
            return place_among(inputs, self._under.surroundings, self._bands)
        # A copy in any case: what the kernel writes must not change what the judge reads.
        return inputs.clone() if self._guards is None else self._guards.copied(inputs)

    def returned(self, outputs: Outputs) -> None:
        """Look at the memory of what the first call gave."""
        tensors = outputs.tensors()
        if self._calls is not None:
            self._wrong("alias", self._calls.overwritten())
            self._calls.add(outputs)
        if self._guards is None:
            _remember(tensors)
            self._look()
            return
        unguarded: list[str] = []
        unpoisoned: list[str] = []
        for name, tensor in tensors.items():
            placed = self._guards.place_of(name, tensor)
            if placed is None or placed.late:
                unguarded.append(name)
                # What was copied from where torch allocates holds what that was filled with.
                known = self._allocator if placed else self._filled(tensor)
                unpoisoned += [] if known else [name]
        self.notes.unguarded = ", ".join(unguarded)
        self.notes.unpoisoned = ", ".join(unpoisoned)
        _remember(tensors)
        self._look()

    def again(self, subject: Subject, call: Call, inputs: Inputs, first: Outputs) -> Outputs:
        """Call it ``calls`` times in all; return what it gave first or, with ``last``, last.

        Args:
            call: As prepared on what ``copied`` gave.
            inputs: What that is a copy of.
            first: What the first call gave, in memory of its own.
        """
        under, notes, outputs = self._under, self.notes, first
        for repeat in repeat_calls(
            subject,
            call,
            inputs,
            first,
            calls=under.calls,
            elsewhere=under.elsewhere,
            late=under.late,
        ):
            notes.further += 1
            notes.differing += repeat.forward
            notes.gradients_differing += repeat.gradients
            if repeat.forward and notes.differing == 1:
                notes.where = repeat.where  # rather than that of a gradient
            notes.where = notes.where or repeat.where
            outputs = repeat.outputs if under.last else outputs
            self._look()
        if under.state:
            self._changed(call)
        if under.window:
            self._leaked(call)
        return outputs

    def _filled(self, tensor: torch.Tensor) -> bool:
        """Return whether memory that C++ allocated was certainly filled when it did."""
        if weakly(tensor) in self._earlier:
            return False  # what it keeps from call to call holds what the call before wrote
        if self._primed is not None:
            return self._primed.has(tensor)
        # Another allocator's memory is not resizable.
        return self._allocator and tensor.untyped_storage().resizable()

    def _look(self) -> None:
        for where, band, before in self._bands:
            if bool((band != before).any()):  # torch.equal may be the kernel's own
                self._wrong("memory", f"{BEYOND}: {count_bytes((band, before))} {where}")
        if self._guards is not None:
            self._wrong("memory", self._guards.look())
            self.notes.unchecked = self.notes.unchecked or self._guards.unchecked

    def _changed(self, call: Call) -> None:
        """Compare the process around a further call; the first one may import and compile.

        All is made what it was before the first: what is set to the same by every call is seen.
        """
        first = changed_parts(self._before, process_state(self._device))
        stuck: list[str] = []
        changed: list[str] = []
        token = LEAVES_MODES.set(True)
        try:
            for _ in range(2):  # in other modes a call may compile once more, and the next does not
                restore_process(self._before, self._device)
                before = process_state(self._device)
                # What cannot be put right, such as a mode that was entered, is changed too.
                stuck = changed_parts(self._before, before)
                call()
                changed = changed_parts(before, process_state(self._device))
                if not changed:
                    break
        finally:
            LEAVES_MODES.reset(token)
        changed = [*stuck, *changed]
        self._wrong("state", f"changed {', '.join(changed)}" if changed else "")
        once = ", ".join(name for name in first if name not in changed)
        if once:
            self.notes.remark = f"its first call changed {once}, and a further one did not"

    def _leaked(self, call: Call) -> None:
        leaks, uncounted = resource_leaks(call, self._under.window, self._device)
        self._wrong(
            "leak", f"holds more after every {self._under.window} calls: {leaks}" if leaks else ""
        )
        self.notes.unchecked = f"not counted here: {uncounted}" if uncounted else ""

    def _wrong(self, rule: str, message: str) -> None:
        # The first fault is told: later ones may follow from it.
        if message and not self.notes.wrong:
            self.notes.wrong, self.notes.rule = message, rule


def _remember(tensors: Mapping[TensorName, torch.Tensor]) -> None:
    """Memory that a call gave and that is there still is known to the next one."""
    _RETURNED.difference_update([each for each in _RETURNED if gone(each)])
    _RETURNED.update(map(weakly, tensors.values()))


@contextlib.contextmanager
def under_conditions(
    under: CallConditions,
    device: torch.device,
    first: State | None = None,
    earlier: EarlierCalls | None = None,
) -> Iterator[ConditionedCall]:
    """Within, calls are made ``under`` these conditions; what was seen is in its ``notes``.

    Args:
        first: What the process was before the first of all calls; where it is None, what it is now.
        earlier: Of a sequence, what its calls before this one left.
    """
    with ConditionedCall(under, device, first, earlier).on() as around:
        yield around
