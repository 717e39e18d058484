"""Shorten the start and the end of this process, by up to a second each."""

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
"""Set once foreign code has been imported into this process."""


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector within the context, for imports.

    Imports leave hardly any garbage, but collections take a tenth of the time of torch's import,
    and a fifth of that of its compiler.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def end_process(code: int) -> NoReturn:
    """End this process like ``sys.exit``, but without freeing objects one by one.

    Threads are waited for, atexit functions run, and output is flushed. Python would then search
    some million objects of torch and Triton for garbage and free them, which takes up to a second.
    If foreign code has been imported, whose files may be written when they are closed, or a
    debugger or profiler is active, the process ends in the usual way.
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
