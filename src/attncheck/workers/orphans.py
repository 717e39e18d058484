"""No process outlives its run: workers and what they start carry a name, by which they are killed.

A process group does not do: what a kernel starts may be a session of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

TYPE_CHECKING = False  # this file is a program too, which starts with every run: it imports little
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["Guard", "end"]

_ROUNDS, _BETWEEN = 100, 0.02


def end(name: str, value: str) -> None:
    """SIGKILL to every process whose environment variable ``name`` begins with ``value``.

    Not to this one. Returns when none is left; after two seconds where one cannot be ended.
    """
    mark = f"{name}={value}".encode()
    for _ in range(_ROUNDS):
        found = [number for number in _processes() if _has(number, mark)]
        if not found:
            return
        for number in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(number, signal.SIGKILL)
        time.sleep(_BETWEEN)  # one that is ending has no environment


def _processes() -> list[int]:
    with suppress(OSError):
        found = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208
        return [number for number in found if number != os.getpid()]
    return []


def _has(number: int, mark: bytes) -> bool:
    with suppress(OSError):
        with open(f"/proc/{number}/environ", "rb") as file:  # noqa: PTH123
            environment = file.read()
        return environment.startswith(mark) or b"\0" + mark in environment
    return False


class Guard:
    """A small process that does ``end(name, value)`` when this one is gone, however it went."""

    def __init__(self, name: str, value: str) -> None:
        """It begins to wait."""
        import subprocess

        self._process = subprocess.Popen(  # noqa: S603  # our own file
            [sys.executable, "-I", "-S", __file__, name, value],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """All are ended now."""
        assert self._process.stdin is not None, "it was asked for"
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


if __name__ == "__main__":  # of a Guard
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end(*sys.argv[1:])
