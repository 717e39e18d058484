"""The choice of this process, made once: compile Triton kernels, or interpret them."""

from __future__ import annotations

import os

from attncheck.core.errors import InterpreterUnavailable

__all__ = ["prepare_triton"]


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


_ON = {"1", "true", "on", "yes", "y"}  # as Triton reads its switches
