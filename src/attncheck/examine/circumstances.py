"""How a kernel is called, beside on what: what lies around its memory, and who else is busy."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.multiprocessing.reductions import StorageWeakRef

from attncheck.examine.further_calls import again
from attncheck.examine.guard_bands import GuardBands
from attncheck.examine.keepings import growing
from attncheck.examine.poison import Fill, allocator_filled, primed
from attncheck.examine.process_state import changes, restore, state
from attncheck.examine.surroundings import Surroundings, surrounded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from attncheck.examine.poison import Primed
    from attncheck.examine.process_state import State
    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.subjects.contract import Call, Subject
    from attncheck.tensor_names import TensorName

__all__ = ["PLAIN", "Arranged", "Circumstances", "Noted", "arranged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """Under which a call is made, in numbers, words and flags alone: it travels as JSON.

    Attributes:
        fill: What lies in memory that the kernel allocates, and in the guard bands around it: one
            of two patterns of which no byte agrees; empty for whatever is there.
        calls: How often it is called; the bits of each further call are compared with the first's.
        elsewhere: Whether each further call is on a copy at another address, with other work on the
            GPU or another number of torch's threads.
        late: Whether each further call is on a stream of its own, ordered by it alone; in turns
            that stream is late, and all others are. Of a GPU alone.
        last: Whether what the last call gave is what the execution gives, in place of the first's.
        state: Whether what a further call changes in its process is looked at.
        window: Calls in a window in which leaks are looked for; 0 where they are not.
        beside: What lies beside its inputs, in place of guard bands; None for nothing in
            particular.
    """

    fill: Fill = ""
    calls: int = 1
    elsewhere: bool = False
    late: bool = False
    last: bool = False
    state: bool = False
    window: int = 0
    beside: Surroundings | None = None


PLAIN = Circumstances()
_RETURNED: set[StorageWeakRef] = set()


@dataclass(slots=True, kw_only=True)
class Noted:
    """What was seen around a call that only who made it could see: words and numbers alone.

    Attributes:
        wrong: What is wrong, in one line, with the rule it breaks; empty where nothing.
        rule: A name of ``judgement.Rule``.
        unchecked: Why something could not be looked at, in one line; empty where all was.
        unguarded: Names of outputs with no guard bands around them, separated by commas.
        unpoisoned: The same of outputs that may have held anything before the kernel wrote them.
        further: Calls that were compared with the first.
        differing: Of these those with other bits of out or LSE.
        gradients_differing: Of these those with other bits of gradients; of dcaptured nothing is
            said, which kernels add up in whatever order.
        where: The first element that differed, in one line.
        remark: What is odd, and breaks no rule.
    """

    wrong: str = ""
    rule: str = ""
    unchecked: str = ""
    unguarded: str = ""
    unpoisoned: str = ""
    further: int = 0
    differing: int = 0
    gradients_differing: int = 0
    where: str = ""
    remark: str = ""


class Arranged:
    """One call with what is arranged around it; the executor tells it how far it is.

    Attributes:
        noted: What was seen so far.
    """

    def __init__(
        self, under: Circumstances, device: torch.device, first: State | None = None
    ) -> None:
        self.noted, self._first = Noted(), first
        self._under, self._device = under, device
        self._guards = GuardBands(under.fill, device) if under.fill else None
        self._primed: Primed | None = None
        self._allocator = False
        self._earlier = {each for each in _RETURNED if not _gone(each)}
        self._before: State = {}

    @contextlib.contextmanager
    def on(self) -> Iterator[Arranged]:
        """While its calls are made; what they changed in the process is then made what it was."""
        with contextlib.ExitStack() as stack:
            if self._under.state:
                stack.callback(restore, state(self._device), self._device)
                if self._first is not None:  # what earlier calls set may be what this one sets
                    restore(self._first, self._device)
                self._before = state(self._device)
            if self._device.type == "cpu":
                self._allocator = stack.enter_context(allocator_filled(self._under.fill))
            self._primed = primed(self._device, self._under.fill)
            if self._primed is not None:
                stack.callback(self._primed.close)
            if self._guards is not None:
                stack.enter_context(self._guards)
            yield self

    def copied(self, inputs: Inputs) -> Inputs:
        """What the kernel is to read: the same numbers, laid out alike, in memory of their own."""
        if self._under.beside is not None:
            return surrounded(inputs, self._under.beside)
        return inputs.clone() if self._guards is None else self._guards.copied(inputs)

    def returned(self, outputs: Outputs) -> None:
        """Look at the memory of what the first call gave."""
        tensors = outputs.tensors()
        if self._guards is None:
            _remember(tensors)
            return
        unguarded = [name for name, tensor in tensors.items() if not self._guards.holds(tensor)]
        self.noted.unguarded = ", ".join(unguarded)
        self.noted.unpoisoned = ", ".join(
            name for name in unguarded if not self._filled(tensors[name])
        )
        _remember(tensors)
        self._look()

    def again(self, subject: Subject, call: Call, inputs: Inputs, first: Outputs) -> Outputs:
        """Call it as often as is asked; what it gave first or, where that is asked, last.

        Args:
            subject: The kernel.
            call: As prepared on what ``copied`` gave.
            inputs: What that is a copy of.
            first: What the first call gave, in memory of its own.
        """
        under, noted, given = self._under, self.noted, first
        for found in again(
            subject,
            call,
            inputs,
            first,
            calls=under.calls,
            elsewhere=under.elsewhere,
            late=under.late,
        ):
            noted.further += 1
            noted.differing += found.forward
            noted.gradients_differing += found.gradients
            if found.forward and noted.differing == 1:
                noted.where = found.where  # rather than that of a gradient
            noted.where = noted.where or found.where
            given = found.outputs if under.last else given
            self._look()
        if under.state:
            self._changed(call)
        if under.window:
            self._leaked(call)
        return given

    def _filled(self, tensor: torch.Tensor) -> bool:
        """Whether memory that C++ allocated was certainly filled when it did."""
        if _weakly(tensor) in self._earlier:
            return False  # what it keeps from call to call holds what the call before wrote
        if self._primed is not None:
            return self._primed.has(tensor)
        return (
            self._allocator and tensor.untyped_storage().resizable()
        )  # another allocator's memory is not

    def _look(self) -> None:
        if self._guards is not None:
            self._wrong("memory", self._guards.look())
            self.noted.unchecked = self.noted.unchecked or self._guards.unchecked

    def _changed(self, call: Call) -> None:
        """Compare the process around a further call; the first one may import and compile.

        All is made what it was before the first: what is set to the same by every call is seen.
        """
        first = changes(self._before, state(self._device))
        restore(self._before, self._device)
        before = state(self._device)
        call()
        found = changes(before, state(self._device))
        self._wrong("state", f"changed {', '.join(found)}" if found else "")
        once = ", ".join(name for name in first if name not in found)
        if once:
            self.noted.remark = f"its first call changed {once}, and a further one did not"

    def _leaked(self, call: Call) -> None:
        found, uncounted = growing(call, self._under.window, self._device)
        self._wrong(
            "leak", f"holds more after every {self._under.window} calls: {found}" if found else ""
        )
        self.noted.unchecked = f"not counted here: {uncounted}" if uncounted else ""

    def _wrong(self, rule: str, message: str) -> None:
        if message and not self.noted.wrong:
            self.noted.wrong, self.noted.rule = message, rule


def _remember(tensors: Mapping[TensorName, torch.Tensor]) -> None:
    """Memory that a call gave and that is there still is known to the next one."""
    gone = {each for each in _RETURNED if _gone(each)}
    _RETURNED.difference_update(gone)
    _RETURNED.update(map(_weakly, tensors.values()))


def _weakly(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch's


def _gone(memory: StorageWeakRef) -> bool:
    return bool(memory.expired())  # type: ignore[no-untyped-call]  # torch's


@contextlib.contextmanager
def arranged(
    under: Circumstances, device: torch.device, first: State | None = None
) -> Iterator[Arranged]:
    """Within, calls are made ``under`` these circumstances; what was seen is in its ``noted``.

    Args:
        under: The circumstances.
        device: Where the kernel runs.
        first: What the process was before the first of all calls; where it is None, what it is now.
    """
    with Arranged(under, device, first).on() as around:
        yield around
