"""Repeats a call: unchanged, elsewhere in memory, or on a stream of its own."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from attncheck.core.outputs import Outputs
from attncheck.core.quiet_mode import QuietMode
from attncheck.inputs.input_tensors import Inputs
from attncheck.subjects.capabilities.subject import Call, Subject
from attncheck.verify.memory_patterns import fill_free

if TYPE_CHECKING:
    from attncheck.verify.call_conditions import CallConditions

_WAIT_CYCLES = 40_000_000  # GPU cycles of a wait, 13 ms or more: far longer than a launch.
_SURELY_WAITING = 0.004  # Seconds since a wait was queued, within which it has surely not ended.
_INPUT_WAITS = 3  # Waits before inputs are written, because a kernel may not read them at once.
_MOST_WAITS = 200  # Waits of one call, so that one that synchronises at every step ends.


def late_call(subject: Subject, inputs: Inputs, turn: int) -> Outputs:
    """Return the outputs of ``subject`` called on a stream of its own, with no other ordering.

    In odd turns that stream is delayed: its inputs hold other numbers until it has waited, and it
    waits again before later torch operators. A kernel that launches on another stream, and does not
    wait for this one, reads the other numbers, and writes to memory that is filled afterwards.

    In even turns all other streams are delayed, as soon as they are switched to. A kernel that
    launches on one for which this stream does not wait has written nothing when outputs are read.

    Args:
        inputs: Inputs, complete before this is called.
        turn: Number of the further call, from 1 on.
    """
    device, others = inputs.device, turn % 2 == 0
    stream = _stream(device, turn)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        # Afterwards no memory is requested from the driver, which may wait for the GPU.
        fill_free(device, "pattern")
        copies, delay = inputs.clone(), _Late(stream, others=others)
        if not others:
            _write_late(copies, inputs)
        with delay:
            call = subject.prepare(copies)
        if not others:
            torch.cuda.synchronize(device)  # Streams of the preparation may be joined in the call.
            _write_late(copies, inputs)
        with delay:
            outputs = call()
        with _disable_current_modes():
            outputs = copy_outputs(outputs)
    torch.cuda.synchronize(device)
    return outputs


def copy_outputs(outputs: Outputs) -> Outputs:
    """Return a copy of a call's outputs, which further calls do not overwrite."""
    return Outputs(**{name: tensor.clone() for name, tensor in outputs.tensors().items()})


class _Late(QuietMode):
    """A dispatch mode that delays streams: they wait before work is queued on them.

    Waits are queued before torch's operators, and when a stream is switched to
    (``torch.cuda.stream``). If the host synchronises, the next operator queues another wait.

    Args:
        others: Whether to delay all streams but ``stream``, in place of ``stream``.
    """

    def __init__(self, stream: torch.cuda.Stream, *, others: bool) -> None:
        super().__init__()
        self._stream, self._others = stream, others
        self._since: dict[int, float] = {}
        self._waits = 0
        self._set_stream = torch.cuda.set_stream

    def __enter__(self) -> Any:
        """Also wrap ``torch.cuda.set_stream``, which ``torch.cuda.stream`` calls."""
        torch.cuda.set_stream = self._switch
        return super().__enter__()  # type: ignore[no-untyped-call]  # torch's

    def __exit__(self, *about: Any) -> None:
        """Restore ``torch.cuda.set_stream``."""
        super().__exit__(*about)  # type: ignore[no-untyped-call]  # torch's
        torch.cuda.set_stream = self._set_stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the operator's result; its stream waits first, if it is to be delayed."""
        del types
        self.wait()
        return func(*args, **(kwargs or {}))

    def wait(self) -> None:
        """Make the current stream wait, if it is to be delayed and is not surely waiting still."""
        stream = torch.cuda.current_stream(self._stream.device)
        if (stream == self._stream) == self._others or self._waits == _MOST_WAITS:
            return
        if torch.cuda.is_current_stream_capturing():
            return  # The graph would wait in every replay.
        now = time.monotonic()
        if now - self._since.get(stream.cuda_stream, -math.inf) > _SURELY_WAITING:
            self._since[stream.cuda_stream] = now
            self._waits += 1
            _wait()

    def _switch(self, stream: torch.cuda.Stream) -> None:
        self._set_stream(stream)
        self.wait()


def _stream(device: torch.device, turn: int) -> torch.cuda.Stream:
    """Return the last of ``turn`` new streams.

    Streams that share one of a GPU's few queues wait for each other. The number varies, so that the
    queue is not in step with a kernel that creates one stream in each call.
    """
    streams = [
        torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]  # torch's
        for _ in range(turn)
    ]
    return streams[-1]


def _write_late(copies: Inputs, inputs: Inputs) -> None:
    """Overwrite ``copies`` at once, and queue the numbers of ``inputs`` behind some waits."""
    for tensor in copies.tensors().values():
        _spoil(tensor)
    torch.cuda.synchronize(inputs.device)
    for _ in range(_INPUT_WAITS):
        _wait()
    for name, tensor in copies.tensors().items():
        tensor.copy_(inputs.tensors()[name])


def _spoil(tensor: torch.Tensor) -> None:
    """Fill contiguous floats with NaN, others with 0, because page numbers must be valid."""
    if tensor.is_floating_point() and tensor.dim() and tensor.stride(-1) == 1:
        tensor.view(torch.uint8).fill_(0xFF)  # NaN in every format
    else:
        tensor.zero_()


def _wait() -> None:
    # torch's own tests use it to delay a stream.
    torch.cuda._sleep(_WAIT_CYCLES)  # type: ignore[no-untyped-call]


_FORWARD = ("out", "lse")
_SPACER = 4_099  # Bytes; a prime, so that addresses move by a different amount each time.
_BUSY_SIDE = 2_048  # Rows and columns of the matrices whose products keep a GPU busy.
_PRODUCTS = 24

# Bound before any kernel is loaded, since a kernel may replace ``torch.equal``.
_equal = torch.equal


@dataclass(frozen=True, slots=True)
class RepeatedCall:
    """A further call, compared with the first."""

    outputs: Outputs
    forward: bool = False  # whether bits of out or LSE differ from the first call's
    gradients: bool = False  # whether bits of a gradient other than dcaptured differ
    where: str = ""  # the first element that differs


def repeat_calls(
    subject: Subject,
    call: Call,
    inputs: Inputs,
    first: Outputs,
    under: CallConditions,
) -> Iterator[RepeatedCall]:
    """Yield each further call, compared with the first.

    Args:
        call: The call prepared for the first time.
        inputs: The inputs it was prepared on, or the originals of a copy.
        under: Its conditions, of which ``calls``, ``elsewhere`` and ``late`` are about these calls.
    """
    spacers = []  # Kept, so that no address is reused.
    for turn in range(1, under.calls):
        if under.late:
            outputs = late_call(subject, inputs, turn)
        elif under.elsewhere:
            spacers.append(torch.empty(turn * _SPACER, dtype=torch.uint8, device=inputs.device))
            copies = inputs.clone()
            with _other_work(inputs.device, turn):
                outputs = subject.prepare(copies)()
                synchronize(inputs.device)
            spacers.extend(copies.tensors().values())
        else:
            outputs = call()
        synchronize(inputs.device)
        yield compare_bits(outputs, first, turn)


def compare_bits(made: Outputs, first: Outputs, turn: int) -> RepeatedCall:
    """Return the outputs of further call ``turn``, with where their bits differ from the first's.

    Raises:
        ValueError: if an output is missing or has another shape or dtype.
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
    """Describe the first element that differs."""
    at = (element_bytes(other) != element_bytes(tensor)).any(-1).nonzero()[0, 0]
    index = ", ".join(str(int(i)) for i in np.unravel_index(int(at), tensor.shape))
    was, now = (float(each.flatten()[at]) for each in (tensor, other))
    return f"[{index}] is {now:.9g} after {was:.9g}"


def element_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each element, ``(elements, bytes)``, in which NaNs compare equal."""
    bits = tensor.detach().contiguous().flatten().view(torch.uint8)
    return bits.view(-1, tensor.element_size())


@contextlib.contextmanager
def _other_work(device: torch.device, turn: int) -> Iterator[None]:
    """Keep the GPU busy in the context; on a CPU change the number of torch threads."""
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
    """Queue products of matrices on ``stream``, as unrelated work of the GPU."""
    with torch.cuda.stream(stream):
        side = torch.ones((_BUSY_SIDE, _BUSY_SIDE), dtype=torch.float16, device=device)
        for _ in range(_PRODUCTS):
            side = side @ side


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has completed all queued work; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
