"""Whether our Triton kernels are compiled or interpreted, and which ptxas assembles them.

On Hopper the ptxas of CUDA 12.8, Triton 3.6's default, is replaced. It may give a wgmma whose
operand B is in shared memory a wrong descriptor. The descriptor's high half is a constant; ptxas
adds it to the low half in 64 bits, but takes the zero for the carry from a uniform register that
holds the warp's number. This was seen in the machine code of ``flash2_forward`` at value dims up to
16 (``UIADD3.X UR7, UR4, -0x3ffffff0`` behind ``R2UR UR4, <thread / 32>``), and on an H200: wrong
numbers that differ from run to run, and reads beyond shared memory (compute-sanitizer names that
instruction). The ptxas of CUDA 12.9, which Triton 3.6 carries for Blackwell, and 13.4 assemble the
same PTX correctly.

Other kernels of the process keep Triton's choice: attncheck judges them as their author runs them.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING

from attncheck.core.errors import InterpreterUnavailable

# Triton is imported inside functions: it must not be imported before ``prepare_triton``.
if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from triton import knobs

_ON = {"1", "true", "on", "yes", "y"}  # Values that Triton reads as true in the environment.


def prepare_triton(device: str) -> None:
    """Make Triton ready for kernels on ``device`` (``cpu`` or ``cuda``).

    Triton decides when a function is decorated whether it is compiled or interpreted, so a
    process can only do one of the two. Call this before anything imports triton.

    Raises:
        InterpreterUnavailable: if this process already does the other one.
    """
    from attncheck.kernels import interpreter

    if device == "cpu":
        interpreter.enable()
    elif interpreter.enabled() or os.environ.get("TRITON_INTERPRET", "0").lower() in _ON:
        raise InterpreterUnavailable(
            "Triton kernels are interpreted in this process: for the GPU start another one, "
            "without TRITON_INTERPRET."
        )


@cache
def on_hopper(device: torch.device) -> bool:
    """Return whether ``device`` is an available GPU of the Hopper generation."""
    import torch

    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability(device)[0] == _HOPPER
    )


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 1 for the interpreter."""
    import torch

    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


_HOPPER = 9  # Major compute capability.
_SOUND = (12, 9)  # First CUDA version whose ptxas does not have the bug.


def sound_assembler(device: str) -> AbstractContextManager[None]:
    """Compile kernels for ``device`` (``cpu`` or ``cuda``) by a ptxas without the bug while active.

    Changes nothing where the default is sound, where Triton came with no other ptxas, and where the
    user chose one (``TRITON_PTXAS_PATH``).
    """
    path = replacement_assembler() if device == "cuda" else None
    return _use_assembler(path) if path else nullcontext()


@contextmanager
def _use_assembler(path: str) -> Iterator[None]:
    from triton import knobs

    # Triton's own ``scope`` is not used: it reads and writes each of its environment variables,
    # which took longer than the launch of a compiled kernel.
    choices = vars(knobs.nvidia)
    saved = dict(choices)
    choices["ptxas"] = path
    try:
        yield
    finally:
        choices.clear()
        choices.update(saved)


@cache
def replacement_assembler() -> str | None:
    """Return the path of the ptxas for our kernels on this machine's GPU; None keeps the default.

    That is so where the default is sound, where there is no other, and where the user chose one.
    """
    from triton import knobs
    from triton.compiler import make_backend
    from triton.runtime import driver

    target = driver.active.get_current_target()
    hopper = target.backend == "cuda" and target.arch // 10 == _HOPPER
    if not hopper or "TRITON_PTXAS_PATH" in os.environ:
        return None
    # Let Triton hash its default ptxas first: its cache keys, read once, hold for all kernels.
    make_backend(target).hash()
    try:
        return choose_assembler(knobs.nvidia.ptxas, knobs.nvidia.ptxas_blackwell)
    except RuntimeError:  # Triton raises it for a tool that it did not bring
        return None


def choose_assembler(default: knobs.NvidiaTool, other: knobs.NvidiaTool) -> str | None:
    """Return the path of ``other`` where it is sound and ``default`` is not."""
    return other.path if _version(default) < _SOUND <= _version(other) else None


def _version(tool: knobs.NvidiaTool) -> tuple[int, ...]:
    return tuple(map(int, tool.version.split(".")))
