"""Times calls, also in turns; every measurement uses this clock.

On a GPU a call is timed between two CUDA events, with other data in the L2 cache: as a caller in
Python observes it, including launches if they take longer than the kernels. A CUDA graph excludes
launches. On a CPU it is wall time.
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
"""Wall time on a CPU; CUDA events around the call; CUDA events around a graph of the call."""

# Bytes read to flush the L2 cache, which is smaller. Triton's do_bench writes them instead, and the
# write-back slows the call: by 10 µs on an H100 for any call that reads 60 MB or more.
_FLUSH_BYTES = 1 << 28
_BUDGET = 0.05  # Seconds in which a call's median is determined.
_MOST_REPEATS = 20
# This many calls suffice if their interquartile range is at most this part of the median.
_FEWEST_REPEATS = 5
_AGREEMENT = 0.01
_WARM_UPS = 3  # Calls before the captured one, in which allocators and libraries initialise.


class Stopwatch:
    """A call and its clock.

    Args:
        call: The call, which has been called before, so that nothing is left to compile.
        device: The device that it runs on.
        graph: Whether to capture it into a CUDA graph, if possible.
    """

    def __init__(
        self, call: Callable[[], object], device: torch.device, *, graph: bool = False
    ) -> None:
        self._call, self._device = call, device
        self.clock: Clock = "events" if device.type == "cuda" else "cpu"
        # Kept alive, because a graph uses the memory of its tensors without owning it.
        self._source = call
        if graph and self.clock == "events":
            captured = _captured(call)
            self._call, self.clock = (captured, "graph") if captured else (call, "events")

    def seconds(self) -> float:
        """Return the seconds of one more call, including the device's work."""
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
        """Return the median seconds of up to 20 calls in 0.05 s, or of fewer that agree."""
        seconds: list[float] = []
        while len(seconds) < _MOST_REPEATS and sum(seconds) < _BUDGET and not _agree(seconds):
            seconds.append(self.seconds())
        return statistics.median(seconds)


def _agree(seconds: list[float]) -> bool:
    """Return whether the times agree so well that more calls are not needed."""
    if len(seconds) < _FEWEST_REPEATS:
        return False
    first, median, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return third - first <= _AGREEMENT * median


def medians(
    calls: Mapping[str, Callable[[], object]], device: str, rounds: int, *, graph: bool = False
) -> dict[str, float]:
    """Return each call's median seconds over rounds of taking turns, after one discarded round."""
    watches = {name: Stopwatch(c, torch.device(device), graph=graph) for name, c in calls.items()}
    measured_rounds = [
        {name: watch.seconds() for name, watch in watches.items()} for _ in range(rounds + 1)
    ]
    return {name: statistics.median(one[name] for one in measured_rounds[1:]) for name in calls}


@functools.cache
def _flushed(device: torch.device) -> torch.Tensor:
    return torch.zeros(_FLUSH_BYTES // 4, device=device)


def _captured(call: Callable[[], object]) -> Callable[[], object] | None:
    """Return ``call`` captured as a CUDA graph; None if it cannot be captured."""
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
    except RuntimeError:  # For example, the call synchronises, which ends the capture.
        torch.cuda.synchronize()
        return None
    return graph.replay
