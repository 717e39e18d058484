"""The same call again: as it was, elsewhere in memory, or on a stream of its own."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from attncheck.examine.late_streams import late_call

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.subjects.contract import Call, Subject

__all__ = ["Again", "again", "differing"]

_FORWARD = ("out", "lse")
_SPACER = 4_099  # bytes, a prime: addresses move by other amounts each time
_BUSY = 2_048  # side of the matrices that keep a GPU busy
_PRODUCTS = 24

# Bound before any kernel is loaded, which might bind the name to something else.
_equal = torch.equal


@dataclass(frozen=True, slots=True)
class Again:
    """One further call.

    Attributes:
        outputs: What it gave.
        forward: Whether out or LSE had other bits than the first call's.
        gradients: Whether a gradient had; dcaptured aside.
        where: The first element that had, in one line; empty where none.
    """

    outputs: Outputs
    forward: bool = False
    gradients: bool = False
    where: str = ""


def again(
    subject: Subject,
    call: Call,
    inputs: Inputs,
    first: Outputs,
    *,
    calls: int,
    elsewhere: bool = False,
    late: bool = False,
) -> Iterator[Again]:
    """Each further call compared with the first.

    Args:
        subject: The kernel.
        call: As prepared for the first call.
        inputs: What it was prepared on, or what that is a copy of.
        first: What it gave.
        calls: How many there are, the first included.
        elsewhere: Whether each is prepared anew, on a copy at other addresses, with other work on
            the GPU or another number of torch's threads.
        late: Whether each is on a stream of its own (``late_streams``).
    """
    spacers = []  # held, so that no address comes again
    for turn in range(1, calls):
        if late:
            made = late_call(subject, inputs, turn)
        elif elsewhere:
            spacers.append(torch.empty(turn * _SPACER, dtype=torch.uint8, device=inputs.device))
            given = inputs.clone()
            with _others_busy(inputs.device, turn):
                made = subject.prepare(given)()
                _synchronize(inputs.device)
            spacers.extend(given.tensors().values())
        else:
            made = call()
        _synchronize(inputs.device)
        yield differing(made, first, turn)


def differing(made: Outputs, first: Outputs, turn: int) -> Again:
    """Where call ``turn`` gave other bits than the first.

    Raises:
        ValueError: where it gave no tensors of the same kind at all.
    """
    given = made.tensors()
    for name, tensor in first.tensors().items():
        other = given.get(name)
        if other is None or (other.shape, other.dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(f"call {turn + 1} gave no {name} like the first call's")
    others = [
        name
        for name, tensor in first.tensors().items()
        if name != "dcaptured" and not _equal(_bits(given[name]), _bits(tensor))
    ]
    if not others:
        return Again(made)
    where = _where(given[others[0]], first.tensors()[others[0]])
    return Again(
        made,
        forward=not set(others).isdisjoint(_FORWARD),
        gradients=not set(others) <= set(_FORWARD),
        where=f"{others[0]}{where} in call {turn + 1}",
    )


def _where(other: torch.Tensor, tensor: torch.Tensor) -> str:
    """The first element that is other than it was."""
    size = tensor.element_size()
    at = (_bits(other).view(-1, size) != _bits(tensor).view(-1, size)).any(-1).nonzero()[0, 0]
    index = ", ".join(str(int(i)) for i in np.unravel_index(int(at), tensor.shape))
    was, now = (float(each.flatten()[at]) for each in (tensor, other))
    return f"[{index}] is {now:.9g} after {was:.9g}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


@contextlib.contextmanager
def _others_busy(device: torch.device, turn: int) -> Iterator[None]:
    """Within, other work is on the GPU; on the CPU torch has another number of threads."""
    if device.type == "cuda":
        _multiply(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]  # torch's
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1 + turn % 2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _multiply(device: torch.device, stream: torch.cuda.Stream) -> None:
    """Products on ``stream`` that nobody reads: what else a GPU has to do."""
    with torch.cuda.stream(stream):
        side = torch.ones((_BUSY, _BUSY), dtype=torch.float16, device=device)
        for _ in range(_PRODUCTS):
            side = side @ side


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
