"""What a mod is called in a message, and where in its text something happens."""

from __future__ import annotations

import functools
import linecache
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["calling_place", "described", "failed_at"]

# Frames of torch and of the modules that watch the mod are not the mod's.
_HERE = Path(__file__).parent
_WATCHING = ("agreement", "derivative", "expression", "places", "recording", "trace")
_NOT_THE_MOD = (
    str(Path(torch.__file__).parent),
    *(str(_HERE / f"{name}.py") for name in _WATCHING),
)


def described(what: str, mod: Any) -> str:
    """``mask 'name'``: a partial is called by its function, an object by its class."""
    while isinstance(mod, functools.partial):
        mod = mod.func
    return f"{what} {getattr(mod, '__name__', type(mod).__name__)!r}"


def calling_place() -> str:
    """The innermost line of the mod that is running: `` at file:line `text```, or nothing."""
    frame: FrameType | None = sys._getframe(1)
    place = ""
    while frame is not None and not place:
        place = _place(frame, frame.f_lineno)
        frame = frame.f_back
    return place


def failed_at(error: BaseException) -> str:
    """The innermost line of the mod that ``error`` passed."""
    place = ""
    traceback = error.__traceback__
    while traceback is not None:
        place = _place(traceback.tb_frame, traceback.tb_lineno) or place
        traceback = traceback.tb_next
    return place


def _place(frame: FrameType, line: int) -> str:
    file = frame.f_code.co_filename
    if file.startswith(_NOT_THE_MOD):
        return ""
    text = linecache.getline(file, line).strip()
    return f" at {Path(file).name}:{line}" + (f" `{text}`" if text else "")
