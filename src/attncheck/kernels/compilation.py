"""Compilation of our Triton kernels: compiled or interpreted, and by which ptxas.

On Hopper that is not the ptxas of CUDA 12.8, Triton 3.6's default. It may give a wgmma whose
operand B is in shared memory a wrong descriptor. Its high half is a constant; ptxas adds it to the
low half in 64 bits and takes the carry's zero from a uniform register that holds the warp's number
instead. Seen in the machine code of ``flash2_forward`` at value dims up to 16
(``UIADD3.X UR7, UR4, -0x3ffffff0`` behind ``R2UR UR4, <thread / 32>``), and on an H200: wrong
numbers that differ from run to run, and reads beyond shared memory (compute-sanitizer names that
instruction). The ptxas of CUDA 12.9, which Triton 3.6 carries for Blackwell, and 13.4 make right
code of the same PTX.

Other kernels of the process are assembled as ever: what attncheck judges is what its author runs.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING

from attncheck.core.errors import InterpreterUnavailable

# Triton is imported inside functions: it must not be there before ``prepare_triton``.
if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from triton import knobs

_ON = {"1", "true", "on", "yes", "y"}  # as Triton reads its switches


def prepare_triton(device: str) -> None:
    """Make Triton ready for kernels on ``device`` (``cpu`` or ``cuda``).

    Triton decides when a function is decorated whether it is compiled or interpreted, so one
    process does one of the two. Call this before anything imports triton.

    Raises:
        InterpreterUnavailable: when this process already does the other one.
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
    """Return whether ``device`` is a GPU of that generation, and there."""
    import torch

    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability(device)[0] == _HOPPER
    )


@cache
def multiprocessors(device: torch.device) -> int:
    """Return how many a GPU has; the interpreter has one."""
    import torch

    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


_HOPPER = 9
_SOUND = (12, 9)


def sound_assembler(device: str) -> AbstractContextManager[None]:
    """Compile kernels for ``device`` (``cpu`` or ``cuda``) by a ptxas without that bug, within it.

    Changes nothing where the default is sound, where no other ptxas came with Triton, and where
    somebody chose one (``TRITON_PTXAS_PATH``).
    """
    path = replacement_assembler() if device == "cuda" else None
    return _use_assembler(path) if path else nullcontext()


@contextmanager
def _use_assembler(path: str) -> Iterator[None]:
    from triton import knobs

    # Not by Triton's own ``scope``: it reads and writes each variable of the environment that it
    # knows, which took longer than the launch of a compiled kernel.
    choices = vars(knobs.nvidia)
    before = dict(choices)
    choices["ptxas"] = path
    try:
        yield
    finally:
        choices.clear()
        choices.update(before)


@cache
def replacement_assembler() -> str | None:
    """Return the ptxas that our kernels get on this machine's GPU; None where the default is sound.

    None as well where there is no other, and where somebody chose one.
    """
    from triton import knobs
    from triton.compiler import make_backend
    from triton.runtime import driver

    target = driver.active.get_current_target()
    hopper = target.backend == "cuda" and target.arch // 10 == _HOPPER
    if not hopper or "TRITON_PTXAS_PATH" in os.environ:
        return None
    # Triton asks once a process which ptxas there is, for the names of its cache: of everybody's.
    make_backend(target).hash()
    try:
        return choose_assembler(knobs.nvidia.ptxas, knobs.nvidia.ptxas_blackwell)
    except RuntimeError:  # Triton's own word for a tool that it did not bring
        return None


def choose_assembler(default: knobs.NvidiaTool, other: knobs.NvidiaTool) -> str | None:
    """Return the path of ``other`` where it is sound and ``default`` is not."""
    return other.path if _version(default) < _SOUND <= _version(other) else None


def _version(tool: knobs.NvidiaTool) -> tuple[int, ...]:
    return tuple(map(int, tool.version.split(".")))
