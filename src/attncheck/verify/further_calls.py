"""The same call again: as it was, elsewhere in memory, or on a stream of its own."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Inputs
from attncheck.subjects.capabilities.subject import Call, Subject
from attncheck.verify.memory_patterns import QuietMode, fill_free

_LATE = 40_000_000  # cycles of a GPU, 13 ms or more: far longer than a launch
_STILL = 0.004  # seconds of this process during which a stream that waits surely does so still
_OF_INPUTS = 3  # waits before inputs are written: a kernel may not read them at once
_MOST = 200  # waits of one call: one that synchronises at every step ends, too


def late_call(subject: Subject, inputs: Inputs, turn: int) -> Outputs:
    """Return what ``subject`` gives on a stream of its own, which alone orders the call.

    In odd turns that stream is late: its inputs hold other numbers until it has waited, and it
    waits anew wherever torch's operators come after that. Who launches on another stream, and does
    not wait for this one, reads the other numbers, and writes to what is filled afterwards.

    In even turns all other streams are late, as soon as they are switched to. Who launches on one
    for which this stream does not wait has written nothing when its outputs are read.

    Args:
        inputs: What it is to read; they are there when this is called.
        turn: Which further call it is, from 1 on.
    """
    device, others = inputs.device, turn % 2 == 0
    stream = _stream(device, turn)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        # From here on no memory has to be asked of the driver, which may wait for the GPU.
        fill_free(device, "pattern")
        copies, late = inputs.clone(), _Late(stream, others=others)
        if not others:
            _written_late(copies, inputs)
        with late:
            call = subject.prepare(copies)
        if not others:
            torch.cuda.synchronize(device)  # what was prepared elsewhere may be joined by the call
            _written_late(copies, inputs)
        with late:
            made = call()
        with _disable_current_modes():
            tensors = {name: tensor.clone() for name, tensor in made.tensors().items()}
    torch.cuda.synchronize(device)
    return type(made)(**tensors)


class _Late(QuietMode):
    """While it is on, some streams are made to wait before what is queued on them.

    Seen are torch's operators, and that a stream is switched to (``torch.cuda.stream``). A host
    that synchronises sees a wait end; the next operator begins another.

    Args:
        others: Whether all others are made to wait, and not this one.
    """

    def __init__(self, stream: torch.cuda.Stream, *, others: bool) -> None:
        super().__init__()
        self._stream, self._others = stream, others
        self._since: dict[int, float] = {}
        self._waits = 0
        self._switched = contextlib.ExitStack()

    def __enter__(self) -> Any:
        """Also notice streams that are switched to."""
        self._switched.enter_context(self._noticed())
        return super().__enter__()  # type: ignore[no-untyped-call]  # torch's

    def __exit__(self, *about: Any) -> None:
        """Notice no more."""
        super().__exit__(*about)  # type: ignore[no-untyped-call]  # torch's
        self._switched.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operator's result; its stream waits first, if it is one that shall."""
        del types
        self.wait()
        return func(*args, **(kwargs or {}))

    def wait(self) -> None:
        """Make the current stream wait, if it is one that shall, and does not do so still."""
        stream = torch.cuda.current_stream(self._stream.device)
        if (stream == self._stream) == self._others or self._waits == _MOST:
            return
        if torch.cuda.is_current_stream_capturing():
            return  # a graph would wait in every replay
        now = time.monotonic()
        if now - self._since.get(stream.cuda_stream, -math.inf) > _STILL:
            self._since[stream.cuda_stream] = now
            self._waits += 1
            _wait()

    @contextlib.contextmanager
    def _noticed(self) -> Iterator[None]:
        """Within, ``torch.cuda.set_stream`` tells of it; ``torch.cuda.stream`` calls that."""
        before = torch.cuda.set_stream

        def set_stream(stream: torch.cuda.Stream) -> None:
            before(stream)
            self.wait()

        torch.cuda.set_stream = set_stream
        try:
            yield
        finally:
            torch.cuda.set_stream = before


def _stream(device: torch.device, turn: int) -> torch.cuda.Stream:
    """Another one each turn, and not in step with a kernel that makes one in each call.

    Streams that share one of a GPU's few queues wait for each other.
    """
    made = [
        torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]  # torch's
        for _ in range(turn)
    ]
    return made[-1]


def _written_late(copies: Inputs, inputs: Inputs) -> None:
    """Other numbers at once, and after a while those of ``inputs``."""
    for tensor in copies.tensors().values():
        _spoil(tensor)
    torch.cuda.synchronize(inputs.device)
    for _ in range(_OF_INPUTS):
        _wait()
    for name, tensor in copies.tensors().items():
        tensor.copy_(inputs.tensors()[name])


def _spoil(tensor: torch.Tensor) -> None:
    """NaN, or zeros: integers may be addresses, and that of page 0 is one."""
    if tensor.is_floating_point() and tensor.dim() and tensor.stride(-1) == 1:
        tensor.view(torch.uint8).fill_(0xFF)  # NaN in every format
    else:
        tensor.zero_()


def _wait() -> None:
    # torch's own tests make a stream wait by it.
    torch.cuda._sleep(_LATE)  # type: ignore[no-untyped-call]


_FORWARD = ("out", "lse")
_SPACER = 4_099  # bytes, a prime: addresses move by other amounts each time
_BUSY = 2_048  # side of the matrices that keep a GPU busy
_PRODUCTS = 24

# Bound before any kernel is loaded, which might bind the name to something else.
_equal = torch.equal


@dataclass(frozen=True, slots=True)
class RepeatedCall:
    """One further call."""

    outputs: Outputs  # what it gave
    forward: bool = False  # whether out or LSE had other bits than the first call's
    gradients: bool = False  # whether a gradient had; dcaptured aside
    where: str = ""


def repeat_calls(
    subject: Subject,
    call: Call,
    inputs: Inputs,
    first: Outputs,
    *,
    calls: int,
    elsewhere: bool = False,
    late: bool = False,
) -> Iterator[RepeatedCall]:
    """Each further call compared with the first.

    Args:
        call: As prepared for the first call.
        inputs: What it was prepared on, or what that is a copy of.
        calls: How many there are, the first included.
        elsewhere: Whether each is prepared anew, on a copy at other addresses, with other work on
            the GPU or another number of torch's threads.
        late: Whether each is on a stream of its own (``late_call``).
    """
    spacers = []  # held, so that no address comes again
    for turn in range(1, calls):
        if late:
            made = late_call(subject, inputs, turn)
        elif elsewhere:
            spacers.append(torch.empty(turn * _SPACER, dtype=torch.uint8, device=inputs.device))
            copies = inputs.clone()
            with _others_busy(inputs.device, turn):
                made = subject.prepare(copies)()
                synchronize(inputs.device)
            spacers.extend(copies.tensors().values())
        else:
            made = call()
        synchronize(inputs.device)
        yield compare_bits(made, first, turn)


def compare_bits(made: Outputs, first: Outputs, turn: int) -> RepeatedCall:
    """Return where call ``turn`` gave other bits than the first.

    Raises:
        ValueError: where it gave no tensors of the same kind at all.
    """
    tensors = made.tensors()
    for name, tensor in first.tensors().items():
        other = tensors.get(name)
        if other is None or (other.shape, other.dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(f"call {turn + 1} gave no {name} like the first call's")
    others = [
        name
        for name, tensor in first.tensors().items()
        if name != "dcaptured" and not _equal(element_bytes(tensors[name]), element_bytes(tensor))
    ]
    if not others:
        return RepeatedCall(made)
    where = _where(tensors[others[0]], first.tensors()[others[0]])
    return RepeatedCall(
        made,
        forward=not set(others).isdisjoint(_FORWARD),
        gradients=not set(others) <= set(_FORWARD),
        where=f"{others[0]}{where} in call {turn + 1}",
    )


def _where(other: torch.Tensor, tensor: torch.Tensor) -> str:
    """The first element that is other than it was."""
    at = (element_bytes(other) != element_bytes(tensor)).any(-1).nonzero()[0, 0]
    index = ", ".join(str(int(i)) for i in np.unravel_index(int(at), tensor.shape))
    was, now = (float(each.flatten()[at]) for each in (tensor, other))
    return f"[{index}] is {now:.9g} after {was:.9g}"


def element_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each element, ``(elements, bytes)``; as numbers NaN is not itself."""
    bits = tensor.detach().contiguous().flatten().view(torch.uint8)
    return bits.view(-1, tensor.element_size())


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


def synchronize(device: torch.device) -> None:
    """Wait for a GPU to have done what it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
