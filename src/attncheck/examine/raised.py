"""What somebody's code raised, or what else came of it in place of outputs, as data."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

import torch

from attncheck.subjects.contract import Broken, Refused

__all__ = ["Failure", "failure", "out_of_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why there are no outputs.

    Attributes:
        kind: ``error`` when the kernel raised; ``refused`` when it said, only as it was called,
            that it does not take its inputs (``contract.Refused``); ``contract`` when what it
            returned is not what was asked for, ``alias`` when that lies in the memory of its
            inputs, ``mutation`` when it wrote to them; ``oom`` when no memory was left; ``crash``
            and ``timeout`` when its process died or did not answer in time.
        message: One line.
        trace: The traceback, for who asks for it.
    """

    kind: str
    message: str
    trace: str = ""


def out_of_memory(error: Exception) -> bool:
    """Whether ``error`` says that an allocation failed, on the host or on a GPU."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    # torch has no class of its own for a failed allocation on the CPU, nor for one by the driver.
    said = str(error) if isinstance(error, RuntimeError) else ""
    return known or "allocate memory" in said or "CUDA error: out of memory" in said


def failure(error: BaseException) -> Failure:
    """What somebody's code raised, as data."""
    if isinstance(error, Refused):
        return Failure(kind="refused", message=str(error))
    try:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001  # somebody's __str__
        lines = []
    if isinstance(error, Broken):
        return Failure(kind=error.rule, message=f"{lines[0]}." if lines else error.rule)
    name = type(error).__name__
    message = f"{name}: {lines[0]}" if lines else name
    trace = "".join(traceback.format_exception(error))
    lacks = bool(lines) and isinstance(error, Exception) and out_of_memory(error)
    lacks = lacks or isinstance(error, MemoryError)  # Python's says nothing
    return Failure(kind="oom" if lacks else "error", message=message, trace=trace)
