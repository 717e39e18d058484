"""Conditions under which a kernel is called, and observations around the call."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack

from attncheck.core import strided_alloc
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Case
from attncheck.probes import PROBES
from attncheck.subjects.capabilities.subject import Call, Subject
from attncheck.subjects.conventions.function_subject import LEAVES_MODES, REUSED_TENSORS
from attncheck.verify.further_calls import compare_bits, copy_outputs, repeat_calls
from attncheck.verify.memory_patterns import (
    ALIGNED,
    BEYOND,
    Fill,
    GuardBands,
    Placed,
    Primed,
    allocator_filled,
    count_bytes,
    gone,
    pattern,
    round_up,
    weak_ref,
)
from attncheck.verify.process_effects import (
    State,
    changed_parts,
    process_state,
    resource_leaks,
    restore_process,
)

# Ordinary numbers, other ordinary numbers, NaN, or half of the format's largest number.
Contents = Literal["numbers", "others", "nan", "huge"]

_BAND = 1 << 16  # Bytes before and after an input: more than a tile of a small problem's rows.
_VECTOR = 16  # Bytes: the widest load of a GPU thread, and the unit of strides that TMA requires.
_AXES = 4  # (batch, heads, length, dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Contents of the memory around the inputs, and in the gaps between elements of a view."""

    # Contents around the inputs that ``of`` names; around all others it is ``numbers``.
    contents: Contents = "numbers"
    of: str = ""  # names of inputs, separated by commas; empty for all
    # Name of an input to lay out with gaps between its rows, each row holding that of every head;
    # empty for none. The gaps get ``contents`` too.
    apart: str = ""


Band = tuple[str, torch.Tensor, torch.Tensor]
"""(place, bytes, copy): memory before or after an input, in words, and a copy of its bytes."""


def place_among(inputs: Inputs, by: Surroundings, bands: list[Band] | None = None) -> Inputs:
    """Return a copy of ``inputs``, each in memory of its own surrounded ``by`` given contents.

    Strides stay, except those of ``by.apart``. Inputs spread over gibibytes get no surroundings.

    Args:
        bands: The memory before and after each input, which must not change, is appended to it.
    """
    bands = [] if bands is None else bands
    named = by.of.split(",") if by.of else list(inputs.tensors())
    tensors = {
        name: _place(
            _with_row_gaps(tensor) if name == by.apart else tensor,
            by.contents if name in named else "numbers",
            name,
            bands,
        )
        for name, tensor in inputs.tensors().items()
    }
    return Inputs.of(inputs.problem, tensors)


def _with_row_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with memory order (length, batch, heads, dim) and 16 bytes after each row."""
    if tensor.dim() != _AXES:
        return tensor
    batch, heads, length, dim = tensor.shape
    vector = _VECTOR // tensor.element_size()
    padded_dim = -(-dim // vector) * vector
    row = batch * heads * padded_dim + vector
    memory = torch.zeros(max(length * row, 1), dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, (heads * padded_dim, padded_dim, row, 1)).copy_(tensor)


def _place(tensor: torch.Tensor, contents: Contents, name: str, bands: list[Band]) -> torch.Tensor:
    size = tensor.untyped_storage().nbytes()
    if not size or not tensor.numel():
        return tensor.clone()
    if strided_alloc.has_far_rows(tensor):
        return strided_alloc.copy_far_rows(tensor)
    band = max(_BAND, round_up(size))
    memory = torch.empty(band + size + band + ALIGNED, dtype=torch.uint8, device=tensor.device)
    start = band + -(memory.data_ptr() + band) % ALIGNED
    for part in (memory[start - band : start], memory[start : start + size + _BAND]):
        _fill(part[: len(part) // tensor.element_size() * tensor.element_size()], tensor, contents)
    before, after = memory[start - band : start], memory[start + size : start + size + _BAND]
    bands += [(f"before its input {name}", before, before.clone())]
    bands += [(f"after its input {name}", after, after.clone())]
    # DLPack gives the view a storage that excludes the bands.
    inner = from_dlpack(torch._C._to_dlpack(memory[start : start + size])).view(tensor.dtype)
    # An axis of stride 0 repeats one element, which is copied once.
    once = [1 if step == 0 else n for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    at = (tensor.stride(), tensor.storage_offset())
    inner.as_strided(once, *at).copy_(tensor.as_strided(once, *at))
    return inner.as_strided(tensor.shape, *at)


def _fill(part: torch.Tensor, like: torch.Tensor, contents: Contents) -> None:
    memory = part.view(like.dtype)
    if contents in {"nan", "huge"}:
        large = torch.finfo(like.dtype).max / 2 if like.is_floating_point() else 0
        value = large if contents == "huge" else math.nan
        memory.copy_(torch.full((1,), value, device=memory.device).to(like.dtype))
        return
    fill: Literal["pattern", "inverse"] = "pattern" if contents == "numbers" else "inverse"
    hashed = pattern(len(memory), len(memory), memory.device, fill).float()
    memory.copy_((hashed / 32 - 4).to(like.dtype))  # In −4 to 4, as ordinary values.


@dataclass(frozen=True, slots=True, kw_only=True)
class CallConditions:
    """Conditions of a call. Fields are numbers, strings and flags, because they travel as JSON."""

    # Pattern of the memory that the kernel allocates and of the guard bands around it; empty to
    # leave memory as it is.
    fill: Fill = ""
    # Whether a CPU has narrow guard bands where ``fill`` is empty: a write past a tensor corrupts
    # the heap, which ends the process only in some later call.
    guarded: bool = False
    # Number of calls; the bits of each further call are compared with the first's.
    calls: int = 1
    timed: bool = False  # whether it is called until its median time is known
    # Whether each further call runs on a copy at another address, with other work on the GPU or
    # another number of torch threads.
    elsewhere: bool = False
    # Whether each further call runs on a stream of its own, with no other ordering; alternately
    # that stream is delayed, and all others are. GPU only.
    late: bool = False
    # Whether the execution's outputs are those of the last call, not of the first.
    last: bool = False
    state: bool = False  # whether to check what a further call changes in its process
    window: int = 0  # calls per window in which leaks are counted; 0 to not count
    # Contents around the inputs, in place of guard bands; None to leave memory as it is.
    surroundings: Surroundings | None = None
    # Number of the call in a sequence, from 1 on: free memory of earlier calls is filled and
    # reused, and what they returned must not change. 0 for a call outside a sequence.
    turn: int = 0


PLAIN_CALL = CallConditions()
_MOST_SURROUNDED = 1 << 23  # Numbers in q, k and v up to which memory around them is filled.


def judged_conditions(case: Case) -> CallConditions:
    """Return the conditions of a call whose outputs are judged.

    Unless inputs are large, NaN surrounds them in a comparison, and huge numbers in a probe.
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


_RETURNED: set[StorageWeakRef] = set()  # Memory of earlier calls' outputs that still exists.


@dataclass(slots=True, kw_only=True)
class CallNotes:
    """Observations around a call, made in the process of the call; they travel as JSON."""

    wrong: str = ""  # the first fault, in one line; empty if none
    rule: str = ""  # name of the ``judgement.Rule`` that the fault breaks
    unchecked: str = ""  # why something could not be checked, in one line; empty if all was
    unguarded: str = ""  # names of outputs without guard bands, separated by commas
    # Names of outputs whose memory is not known to have been filled before the kernel wrote it.
    unpoisoned: str = ""
    further: int = 0  # calls that were compared with the first
    differing: int = 0  # further calls with other bits of out or LSE
    # Further calls with other bits of gradients, except dcaptured, which kernels may sum in any
    # order.
    gradients_differing: int = 0
    where: str = ""  # the first element that differed, in one line
    remark: str = ""  # something odd that breaks no rule


@dataclass(slots=True)
class EarlierCalls:
    """Memory, arguments and outputs of the earlier calls of a sequence."""

    memory: list[Placed] = field(default_factory=list)
    passed: list[torch.Tensor] = field(default_factory=list)  # arguments: see ``REUSED_TENSORS``
    # The outputs of each call, as a caller may keep them, with a copy made right after the call.
    returned: list[tuple[Outputs, Outputs]] = field(default_factory=list)

    def overwritten(self) -> str:
        """Return the first earlier output that has changed since, in one line; empty if none."""
        for number, (outputs, copy) in enumerate(self.returned, 1):
            changed = compare_bits(outputs, copy, len(self.returned)).where
            if changed:
                where = changed.rpartition(" in ")[0]
                return f"writes over what call {number} had returned: {where}"
        return ""

    def add(self, outputs: Outputs) -> None:
        """Keep the outputs of one more call, and a copy."""
        self.returned.append((outputs, copy_outputs(outputs)))


class ConditionedCall:
    """A call under conditions; the executor calls its methods in the order of the call's steps.

    Args:
        first: The state of the process before the first of all calls.
        earlier: Earlier calls of the sequence.

    Attributes:
        notes: Observations so far.
    """

    def __init__(
        self, under: CallConditions, device: torch.device, first: State, earlier: EarlierCalls
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
        """Apply the conditions within the context; afterwards restore the process's state."""
        with contextlib.ExitStack() as stack:
            if self._under.state:
                stack.callback(restore_process, process_state(self._device), self._device)
                # Earlier calls may have set what this one sets.
                restore_process(self._first, self._device)
                self._before = process_state(self._device)
            if self._calls is not None:
                stack.callback(REUSED_TENSORS.reset, REUSED_TENSORS.set(self._calls.passed))
            # A GPU's allocator has no fill flag: its free memory is filled instead.
            if self._device.type == "cpu":
                self._allocator = stack.enter_context(allocator_filled(self._under.fill))
            elif self._under.fill:
                self._primed = Primed(self._device, self._under.fill)
                stack.callback(self._primed.close)
            if self._guards is not None:
                stack.enter_context(self._guards)
            yield self

    def copied(self, inputs: Inputs) -> Inputs:
        """Return a copy of ``inputs`` for the kernel, laid out alike in conditioned memory."""
        if self._under.surroundings is not None:
            return place_among(inputs, self._under.surroundings, self._bands)
        # Always a copy: a kernel's write to its inputs must not change what the judge reads.
        return inputs.clone() if self._guards is None else self._guards.copied(inputs)

    def returned(self, outputs: Outputs) -> None:
        """Check the memory of the first call's outputs."""
        tensors = outputs.tensors()
        if self._calls is not None:
            self._report("alias", self._calls.overwritten())
            self._calls.add(outputs)
        if self._guards is not None:
            unguarded: list[str] = []
            unpoisoned: list[str] = []
            for name, tensor in tensors.items():
                placed = self._guards.place_of(name, tensor)
                if placed is None or placed.late:
                    unguarded.append(name)
                    # A late copy holds what torch's own allocator filled the memory with.
                    is_filled = self._allocator if placed else self._was_filled(tensor)
                    unpoisoned += [] if is_filled else [name]
            self.notes.unguarded = ", ".join(unguarded)
            self.notes.unpoisoned = ", ".join(unpoisoned)
        # Remembered for as long as the memory of these outputs exists.
        _RETURNED.difference_update([each for each in _RETURNED if gone(each)])
        _RETURNED.update(map(weak_ref, tensors.values()))
        self._check_bands()

    def again(self, subject: Subject, call: Call, inputs: Inputs, first: Outputs) -> Outputs:
        """Make the further calls; return the outputs of the first call or, with ``last``, the last.

        Args:
            call: The call prepared on the result of ``copied``.
            inputs: The inputs that were copied.
            first: Outputs of the first call, in memory of their own.
        """
        under, notes, outputs = self._under, self.notes, first
        for repeat in repeat_calls(subject, call, inputs, first, under):
            notes.further += 1
            notes.differing += repeat.forward
            notes.gradients_differing += repeat.gradients
            if repeat.forward and notes.differing == 1:
                notes.where = repeat.where  # It takes precedence over a gradient's.
            notes.where = notes.where or repeat.where
            outputs = repeat.outputs if under.last else outputs
            self._check_bands()
        if under.state:
            self._check_state(call)
        if under.window:
            self._check_leaks(call)
        return outputs

    def _was_filled(self, tensor: torch.Tensor) -> bool:
        """Return whether the memory of an unguarded output was certainly filled beforehand."""
        if weak_ref(tensor) in self._earlier:
            return False  # It is reused from call to call, and holds an earlier call's output.
        if self._primed is not None:
            return self._primed.has(tensor)
        # A storage that is not resizable comes from another allocator.
        return self._allocator and tensor.untyped_storage().resizable()

    def _check_bands(self) -> None:
        for where, band, before in self._bands:
            if bool((band != before).any()):  # The kernel may have replaced torch.equal.
                self._report("memory", f"{BEYOND}: {count_bytes((band, before))} {where}")
        if self._guards is not None:
            self._report("memory", self._guards.look())
            self.notes.unchecked = self.notes.unchecked or self._guards.unchecked

    def _check_state(self, call: Call) -> None:
        """Compare the process's state around a further call; a first one imports and compiles.

        The state before the first call is restored, to see also what every call sets alike.
        """
        first = changed_parts(self._before, process_state(self._device))
        not_restored: list[str] = []
        changed: list[str] = []
        token = LEAVES_MODES.set(True)
        try:
            for _ in range(2):  # In restored modes the first of these may compile once more.
                restore_process(self._before, self._device)
                before = process_state(self._device)
                # A change that cannot be undone, such as an entered mode, counts too.
                not_restored = changed_parts(self._before, before)
                call()
                changed = changed_parts(before, process_state(self._device))
                if not changed:
                    break
        finally:
            LEAVES_MODES.reset(token)
        changed = [*not_restored, *changed]
        self._report("state", f"changed {', '.join(changed)}" if changed else "")
        only_first = ", ".join(name for name in first if name not in changed)
        if only_first:
            self.notes.remark = f"its first call changed {only_first}, and a further one did not"

    def _check_leaks(self, call: Call) -> None:
        leaks, uncounted = resource_leaks(call, self._under.window, self._device)
        self._report(
            "leak", f"holds more after every {self._under.window} calls: {leaks}" if leaks else ""
        )
        self.notes.unchecked = f"not counted here: {uncounted}" if uncounted else ""

    def _report(self, rule: str, message: str) -> None:
        # Only the first fault is reported: later ones may follow from it.
        if message and not self.notes.wrong:
            self.notes.wrong, self.notes.rule = message, rule
