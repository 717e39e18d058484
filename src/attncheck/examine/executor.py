"""Calls a kernel: everything that runs one goes through here.

In this process for now. Whatever it raises or returns comes back as data, so that an isolated
worker can take this place with nothing else to change.
"""

from __future__ import annotations

import contextlib
import statistics
import time
import traceback
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from attncheck.judge.arithmetic import Arithmetic
from attncheck.mods.leaves import captured_tensors
from attncheck.outputs import Outputs
from attncheck.subjects.contract import Refused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.inputs import Inputs
    from attncheck.problem import Problem
    from attncheck.subjects.contract import Call, Subject, Tiling

__all__ = ["Execution", "Executor", "Failure", "InProcess", "out_of_memory"]

_TIMING_BUDGET = 0.25  # seconds a kernel is called again to find its median time
_MOST_REPEATS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What a kernel gave.

    Attributes:
        outputs: Of its first call.
        seconds: Median time of one call; None when it was not timed.
        tiling: What it declares of its tiles.
        arithmetic: The arithmetic that it declares, or that is assumed of it.
    """

    outputs: Outputs
    seconds: float | None
    tiling: Tiling | None
    arithmetic: Arithmetic


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why there are no outputs.

    Attributes:
        kind: ``error`` when the kernel raised, ``contract`` when what it returned is not what
            was asked for, or it wrote to its inputs; ``refused`` when it said, only as it was
            called, that it does not take them (``contract.Refused``).
        message: One line.
        trace: The traceback, for who asks for it.
    """

    kind: str
    message: str
    trace: str = ""


class Executor(Protocol):
    """How a kernel is asked and called."""

    def absence(self, subject: Subject, device: str) -> str | None:
        """Why ``subject`` can run nothing on ``device``; None if it can, or raises when asked."""
        ...

    def concerns(self, subject: Subject, problem: Problem) -> bool:
        """Whether ``problem`` is a question for ``subject`` at all."""
        ...

    def refusal(self, subject: Subject, problem: Problem, device: str) -> str | Failure | None:
        """Why ``subject`` does not take ``problem``; None if it does."""
        ...

    def run(self, subject: Subject, inputs: Inputs, *, timed: bool = False) -> Execution | Failure:
        """``subject`` on ``inputs``; never raises what the kernel raised."""
        ...


_NO_CAPTURED = "it gives no gradients of the tensors that a score mod reads"


class InProcess:
    """Calls the kernel in this very process: quick, and only as safe as the kernel."""

    def absence(self, subject: Subject, device: str) -> str | None:
        """Why ``subject`` can run nothing here; what asking raises, ``refusal`` says in a cell."""
        try:
            return subject.absent(device)
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001  # foreign code may raise anything
            return None

    def concerns(self, subject: Subject, problem: Problem) -> bool:
        """Whether to ask ``subject``; also where it cannot even say so, and ``refusal`` tells."""
        try:
            return subject.concerns(problem)
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001  # foreign code may raise anything
            return True

    def refusal(self, subject: Subject, problem: Problem, device: str) -> str | Failure | None:
        """Why ``subject`` does not take ``problem``; a Failure when even asking raises."""
        try:
            lacks = _NO_CAPTURED if problem.dcaptured and not subject.captured else None
            return subject.absent(device) or lacks or subject.unsupported(problem, device)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  # foreign code may raise anything
            return _failure(error)

    def run(self, subject: Subject, inputs: Inputs, *, timed: bool = False) -> Execution | Failure:
        """``subject`` on a copy of ``inputs``; with ``timed``, until the median is known.

        What it warns of is no failure, also where the caller made errors of warnings.
        """
        device, given = inputs.device, inputs.clone()
        try:
            with _warnings():
                call = subject.prepare(given)
                outputs = call()
                _synchronize(device)
                broken = _contract(outputs, inputs)
                outputs = outputs if broken else _kept(outputs)  # further calls may use them anew
                seconds = _median_seconds(call, device) if timed and not broken else None
                tiling = subject.tiling(inputs.problem, device.type)
                arithmetic = subject.arithmetic(inputs.problem, device.type)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  # foreign code may raise anything
            return _failure(error)
        broken = broken or _written_to(given, inputs) or _declared(arithmetic, inputs)
        if broken:
            return Failure(kind="contract", message=broken)
        return Execution(outputs=outputs, seconds=seconds, tiling=tiling, arithmetic=arithmetic)


@contextlib.contextmanager
def _warnings() -> Iterator[None]:
    """Where the caller makes errors of some warnings, they are shown and raise nothing.

    torch's own come from any of its threads, once in a process: cuBLAS says in the first backward
    that its thread had no CUDA context (torch 2.11), in whichever test that happens to be.
    """
    filters = list(warnings.filters)
    if all(action != "error" for action, *_ in filters):
        yield  # to enter and leave forgets which warnings were shown once
        return
    with warnings.catch_warnings():
        warnings.resetwarnings()  # and nothing is remembered of the filters there were
        for action, *rest in reversed(filters):
            shown = "default" if action == "error" else action
            warnings.filters.insert(0, (shown, *rest))  # type: ignore[attr-defined]  # it is a list
        yield


def _kept(outputs: Outputs) -> Outputs:
    """The same numbers in memory of their own."""
    return Outputs(**{name: tensor.clone() for name, tensor in outputs.tensors().items()})


def out_of_memory(error: Exception) -> bool:
    """Whether ``error`` says that an allocation failed, on the host or on a GPU."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    # torch has no class of its own for a failed allocation on the CPU.
    return known or (isinstance(error, RuntimeError) and "allocate memory" in str(error))


def _median_seconds(call: Call, device: torch.device) -> float:
    """Median seconds of further calls, the device's work included.

    The call before them, which may have compiled and imported, does not count.
    """
    seconds: list[float] = []
    while len(seconds) < _MOST_REPEATS and sum(seconds) < _TIMING_BUDGET:
        start = time.perf_counter()
        call()
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
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
    columns = problem.kv if problem.operation == "softmax" else problem.value_dim
    wrong = _tensor("out", outputs.out, (*rows, columns), inputs)
    dtype = problem.formats.output.torch_dtype
    if not wrong and outputs.out.dtype != dtype:
        wrong = f"out.dtype={outputs.out.dtype}, but should be {dtype}."
    if not wrong and outputs.lse is not None:
        wrong = _tensor("lse", outputs.lse, rows, inputs)
        if not wrong and outputs.lse.dtype != torch.float32:
            wrong = f"lse.dtype={outputs.lse.dtype}, but should be torch.float32."
    return wrong or _gradients(outputs, inputs)


def _gradients(outputs: Outputs, inputs: Inputs) -> str:
    """The same of its gradients: each like what it is of."""
    if not inputs.problem.backward:
        return ""
    like = {"dq": inputs.q, "dk": inputs.k, "dv": inputs.v, "dsink": inputs.sink}
    for name, given in like.items():
        if given is None:
            continue
        found = getattr(outputs, name)
        wrong = _tensor(name, found, tuple(given.shape), inputs)
        if not wrong and found.dtype != given.dtype:
            wrong = f"{name}.dtype={found.dtype}, but should be {given.dtype}."
        if wrong:
            return wrong
    return _captured(outputs, inputs) if inputs.problem.dcaptured else ""


def _captured(outputs: Outputs, inputs: Inputs) -> str:
    """The same of its gradients of what the score mod reads, which are fp32."""
    mod = inputs.problem.score_mod(str(inputs.device))
    numbers = sum(tensor.numel() for tensor in captured_tensors(mod, inputs.device))
    wrong = _tensor("dcaptured", outputs.dcaptured, (numbers,), inputs)
    if not wrong and outputs.dcaptured is not None and outputs.dcaptured.dtype != torch.float32:
        wrong = f"dcaptured.dtype={outputs.dcaptured.dtype}, but should be torch.float32."
    return wrong


def _tensor(name: str, value: object, shape: tuple[int, ...], inputs: Inputs) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{name} is {type(value).__name__}, but should be a tensor."
    if tuple(value.shape) != shape:
        return f"{name}.shape={tuple(value.shape)}, but should be {shape}."
    if value.device != inputs.device:
        return f"{name}.device={value.device}, but should be {inputs.device}."
    if value.layout != torch.strided:
        return f"{name}.layout={value.layout}, but should be torch.strided."
    return ""


def _written_to(given: Inputs, inputs: Inputs) -> str:
    """Which of its inputs a kernel changed; empty when none."""
    for name, mine in inputs.tensors().items():
        its = given.tensors()[name]
        if not torch.equal(*(t.contiguous().view(torch.uint8) for t in (mine, its))):
            return f"wrote to its input {name}."
    return ""


def _declared(arithmetic: object, inputs: Inputs) -> str:
    """What is wrong with the arithmetic a kernel declares; empty when nothing is."""
    if not isinstance(arithmetic, Arithmetic):
        return f"arithmetic() returned {type(arithmetic).__name__}, but should return Arithmetic."
    output = inputs.problem.formats.output
    if arithmetic.output != output:
        said = getattr(arithmetic.output, "name", arithmetic.output)
        return f"arithmetic().output is {said}, but should be {output.name}."
    return ""


def _failure(error: BaseException) -> Failure:
    if isinstance(error, Refused):
        return Failure(kind="refused", message=str(error))
    try:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001  # somebody's __str__
        lines = []
    name = type(error).__name__
    message = f"{name}: {lines[0]}" if lines else name
    trace = "".join(traceback.format_exception(error))
    return Failure(kind="error", message=message, trace=trace)
