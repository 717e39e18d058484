"""A call on a stream of its own, while that stream is late, or all others are."""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from attncheck.examine.poison import fill_free

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs
    from attncheck.subjects.contract import Subject

__all__ = ["late_call"]

_LATE = 40_000_000  # cycles of a GPU, 13 ms or more: far longer than a launch
_STILL = 0.004  # seconds of this process during which a stream that waits surely does so still
_OF_INPUTS = 3  # waits before inputs are written: a kernel may not read them at once
_MOST = 200  # waits of one call: one that synchronises at every step ends, too


def late_call(subject: Subject, inputs: Inputs, turn: int) -> Outputs:
    """What ``subject`` gives on a stream of its own, by whose order alone it is asked and read.

    In odd turns that stream is late: its inputs hold other numbers until it has waited, and it
    waits anew wherever torch's operators come after that. Who launches on another stream, and does
    not wait for this one, reads the other numbers, and writes to what is filled afterwards.

    In even turns all other streams are late, as soon as they are switched to. Who launches on one
    for which this stream does not wait has written nothing when its outputs are read.

    Args:
        subject: The kernel.
        inputs: What it is to read; they are there when this is called.
        turn: Which further call it is, from 1 on.
    """
    device, others = inputs.device, turn % 2 == 0
    stream = _stream(device, turn)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        # From here on no memory has to be asked of the driver, which may wait for the GPU.
        fill_free(device, "pattern")
        given, late = inputs.clone(), _Late(stream, others=others)
        if not others:
            _written_late(given, inputs)
        with late:
            call = subject.prepare(given)
        if not others:
            torch.cuda.synchronize(device)  # what was prepared elsewhere may be joined by the call
            _written_late(given, inputs)
        with late:
            made = call()
        with _disable_current_modes():
            kept = {name: tensor.clone() for name, tensor in made.tensors().items()}
    torch.cuda.synchronize(device)
    return type(made)(**kept)


class _Late(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """While it is on, some streams are made to wait before what is queued on them.

    Seen are torch's operators, and that a stream is switched to (``torch.cuda.stream``). A host
    that synchronises sees a wait end; the next operator begins another.

    Args:
        stream: Of which streams there are.
        others: Whether all others are made to wait, and not this one.
    """

    supports_higher_order_operators = True

    def __init__(self, stream: torch.cuda.Stream, *, others: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._stream, self._others = stream, others
        self._since: dict[int, float] = {}
        self._waits = 0
        self._switched = contextlib.ExitStack()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As ``guard_bands.GuardBands`` does."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As ``guard_bands.GuardBands`` does."""
        return False

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


def _written_late(given: Inputs, inputs: Inputs) -> None:
    """Other numbers at once, and after a while those of ``inputs``."""
    for tensor in given.tensors().values():
        _spoil(tensor)
    torch.cuda.synchronize(inputs.device)
    for _ in range(_OF_INPUTS):
        _wait()
    for name, tensor in given.tensors().items():
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
