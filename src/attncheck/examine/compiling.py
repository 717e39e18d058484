"""How many seconds this process spent compiling kernels: Triton's, and those of torch.compile."""

from __future__ import annotations

import sys
import time
from typing import Any

__all__ = ["Compiling"]

_MICROSECONDS = 1e-6


class Compiling:
    """A clock that runs while Triton or torch.compile compiles; started once a process.

    Triton tells afterwards how long it took (``knobs.compilation.listener``, from 3.6 on);
    torch.compile when it starts and ends. Triton within torch.compile counts once. A cache hit
    costs what it costs: reading it. Interpreted kernels compile nothing.

    Attributes:
        seconds: So far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since: float | None = None
        self._before: Any = None
        self._triton = self._torch = False

    def listen(self) -> None:
        """Start listening to what has been imported by now; again for what was imported since."""
        if "triton" in sys.modules and not self._triton:
            self._triton = True
            self._listen_to_triton()
        if "torch._dynamo" in sys.modules and not self._torch:
            self._torch = True
            from torch._dynamo.callback import callback_handler

            callback_handler.register_start_callback(self._started)
            callback_handler.register_end_callback(self._ended)

    def _listen_to_triton(self) -> None:
        from triton import knobs

        self._before = knobs.compilation.listener
        knobs.compilation.listener = self._compiled

    def _compiled(self, *, times: Any, **more: Any) -> None:
        if self._since is None:  # else it is part of what torch.compile does
            self.seconds += times.total * _MICROSECONDS
        if self._before is not None:
            self._before(times=times, **more)

    def _started(self, _: object) -> None:
        self._since = time.perf_counter()

    def _ended(self, _: object) -> None:
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
        self._since = None
