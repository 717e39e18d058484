"""This process: what Python does at its start and end and need not, up to a second of each."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator


FOREIGN_CODE = threading.Event()
"""Set once somebody's code has been imported here."""


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect no garbage within, where modules are imported.

    They leave next to none, and Python would look through all that is there over and over: a tenth
    of the time that torch's import takes, and a fifth of that of its compiler.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def end_process(code: int) -> NoReturn:
    """End this process as Python does, but take nothing down where all that is there is ours.

    Threads are waited for, what is registered for the end runs, and what was printed is written.
    Python would then look through some million objects of torch and Triton for garbage, and free
    them one by one: up to a second, and the end of the process frees them anyway. Not so somebody's
    code, of which a file is written when it is closed, nor what a debugger or profiler waits for.
    """
    if FOREIGN_CODE.is_set() or _is_watched():
        sys.exit(code)
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # nothing public does either
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # closed, or nobody reads
                stream.flush()
    finally:
        os._exit(code)


def _is_watched() -> bool:
    """Return whether a debugger, a profiler or coverage runs this program."""
    monitoring = getattr(sys, "monitoring", None)  # since Python 3.12
    tools = monitoring is not None and any(map(monitoring.get_tool, range(6)))
    return bool(tools or sys.gettrace() or sys.getprofile() or sys.flags.inspect)
