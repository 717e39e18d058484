"""Calls a kernel: everything that runs one goes through here.

In this process for now. Whatever it raises or returns comes back as data, so that an isolated
worker can take this place with nothing else to change.
"""

from __future__ import annotations

import statistics
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from attncheck.outputs import Outputs

if TYPE_CHECKING:
    from attncheck.inputs import Inputs
    from attncheck.subjects.contract import Call, Subject

__all__ = ["Execution", "Executor", "Failure", "InProcess"]

_TIMING_BUDGET = 0.25  # seconds a kernel is called again to find its median time
_MOST_REPEATS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What a kernel gave, and the median seconds of one call (None when it was not timed)."""

    outputs: Outputs
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why there are no outputs.

    Attributes:
        kind: ``error`` when the kernel raised, ``contract`` when what it returned is not what
            was asked for.
        message: One line.
        trace: The traceback, for who asks for it.
    """

    kind: str
    message: str
    trace: str = ""


class Executor(Protocol):
    """How a kernel is called."""

    def run(self, subject: Subject, inputs: Inputs, *, timed: bool = False) -> Execution | Failure:
        """``subject`` on ``inputs``; never raises what the kernel raised."""
        ...


class InProcess:
    """Calls the kernel in this very process: quick, and only as safe as the kernel."""

    def run(self, subject: Subject, inputs: Inputs, *, timed: bool = False) -> Execution | Failure:
        """``subject`` on ``inputs``; with ``timed``, again until the median is known."""
        try:
            call = subject.prepare(inputs)
            outputs, first = _once(call, inputs.q.device)
            broken = _contract(outputs, inputs)
            if broken:
                return Failure(kind="contract", message=broken)
            seconds = _median(call, first, inputs.q.device) if timed else None
        except Exception as error:  # noqa: BLE001  # a foreign kernel may raise anything
            return Failure(kind="error", message=_one_line(error), trace=traceback.format_exc())
        return Execution(outputs=outputs, seconds=seconds)


def _once(call: Call, device: torch.device) -> tuple[Outputs, float]:
    """One call and its seconds, the device's work included."""
    _synchronize(device)
    start = time.perf_counter()
    outputs = call()
    _synchronize(device)
    return outputs, time.perf_counter() - start


def _median(call: Call, first: float, device: torch.device) -> float:
    """Median seconds; the first call counts only where it compiled nothing and was long."""
    if device.type == "cpu" and first > _TIMING_BUDGET:
        return first
    seconds: list[float] = []
    while len(seconds) < _MOST_REPEATS and sum(seconds) < _TIMING_BUDGET:
        seconds.append(_once(call, device)[1])
    return statistics.median(seconds)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _contract(outputs: object, inputs: Inputs) -> str:
    """What is wrong with the shapes, dtypes or device of ``outputs``; empty when nothing is."""
    if not isinstance(outputs, Outputs):
        return f"returned {type(outputs).__name__}, but should return Outputs."
    problem = inputs.problem
    rows = (problem.batch, problem.heads, problem.query)
    wrong = _tensor("out", outputs.out, (*rows, problem.value_dim), inputs)
    dtype = problem.formats.output.torch_dtype
    if not wrong and outputs.out.dtype != dtype:
        wrong = f"out.dtype={outputs.out.dtype}, but should be {dtype}."
    if not wrong and outputs.lse is not None:
        wrong = _tensor("lse", outputs.lse, rows, inputs)
    return wrong


def _tensor(name: str, value: object, shape: tuple[int, ...], inputs: Inputs) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{name} is {type(value).__name__}, but should be a tensor."
    if tuple(value.shape) != shape:
        return f"{name}.shape={tuple(value.shape)}, but should be {shape}."
    if value.device != inputs.q.device:
        return f"{name}.device={value.device}, but should be {inputs.q.device}."
    return ""


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
