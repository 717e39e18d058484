"""This process: what Python does at its start and end and need not, a second or two of each."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect no garbage within, where modules are imported.

    They leave next to none, and Python would look through all that is there over and over: a sixth
    of the time that torch's import takes, and a quarter of that of its compiler.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def end_process(code: int) -> NoReturn:
    """End this process as Python does, but take nothing down.

    Threads are waited for, and what is registered for the end runs. Python would then look through
    some million objects of torch and Triton for garbage, and free them one by one: a second, and
    the end of the process frees them anyway.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # nothing public does either
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # closed, or nobody reads
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # what a kernel in C has printed
    os._exit(code)
