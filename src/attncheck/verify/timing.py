"""The time of a call, and calls that take turns: the one clock of every measurement.

On a GPU a call is timed between two CUDA events, its L2 cache full of something else: what a caller
in Python gets, launches included where they take longer than the kernels. In a CUDA graph it is
timed without them. On a CPU it is wall time.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Clock = Literal["cpu", "events", "graph"]
"""Wall time on a CPU; CUDA events around the call; the same around a graph of it."""

# Bytes, more than any L2. They are read: Triton's do_bench writes them, and what was written is
# written back while the call runs, 10 µs on an H100 of any call that reads 60 MB or more.
_FLUSHED = 1 << 28
_BUDGET = 0.05  # seconds in which a call's median is found
_MOST_REPEATS = 20
# So many calls are enough where the middle half of them lies within this part of the median.
_FEWEST_REPEATS = 5
_ALIKE = 0.01
_WARM_UPS = 3  # calls before one is captured: allocators and libraries set themselves up


class Stopwatch:
    """A call and its clock.

    Args:
        call: What is timed; it was called before, so that nothing is compiled any more.
        device: Where it runs.
        graph: Whether it is captured into a CUDA graph, if it lets itself be.
    """

    def __init__(
        self, call: Callable[[], object], device: torch.device, *, graph: bool = False
    ) -> None:
        self._call, self._device = call, device
        self.clock: Clock = "events" if device.type == "cuda" else "cpu"
        # A graph reads the memory of the call's tensors, and keeps none of them.
        self._source = call
        if graph and self.clock == "events":
            captured = _captured(call)
            self._call, self.clock = (captured, "graph") if captured else (call, "events")

    def seconds(self) -> float:
        """Seconds of one more call, the device's work included."""
        if self.clock == "cpu":
            start = time.perf_counter()
            self._call()
            return time.perf_counter() - start
        event: Any = torch.cuda.Event  # torch's own has no types
        start_event, end_event = (event(enable_timing=True) for _ in range(2))
        _flushed(self._device).sum()
        start_event.record()
        self._call()
        end_event.record()
        end_event.synchronize()
        return float(start_event.elapsed_time(end_event)) / 1e3

    def median(self) -> float:
        """Median seconds of up to 20 calls in a twentieth of a second, or of the first alike."""
        seconds: list[float] = []
        while len(seconds) < _MOST_REPEATS and sum(seconds) < _BUDGET and not _alike(seconds):
            seconds.append(self.seconds())
        return statistics.median(seconds)


def _alike(seconds: list[float]) -> bool:
    """Return whether more calls would say no more of their median."""
    if len(seconds) < _FEWEST_REPEATS:
        return False
    first, median, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return third - first <= _ALIKE * median


def medians(
    calls: Mapping[str, Callable[[], object]], device: str, rounds: int, *, graph: bool = False
) -> dict[str, float]:
    """Median seconds of each call over rounds in which they take turns, after one not kept."""
    watches = {name: Stopwatch(c, torch.device(device), graph=graph) for name, c in calls.items()}
    measured_rounds = [
        {name: watch.seconds() for name, watch in watches.items()} for _ in range(rounds + 1)
    ]
    return {name: statistics.median(one[name] for one in measured_rounds[1:]) for name in calls}


@functools.cache
def _flushed(device: torch.device) -> torch.Tensor:
    return torch.zeros(_FLUSHED // 4, device=device)


def _captured(call: Callable[[], object]) -> Callable[[], object] | None:
    """``call`` as a CUDA graph; None where it cannot be one."""
    try:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own gap
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:  # it waits for the device, say, which ends the capture
        torch.cuda.synchronize()
        return None
    return graph.replay
