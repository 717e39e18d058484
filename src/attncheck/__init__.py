"""attncheck: is the difference between your kernel and exact attention only rounding?"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attncheck.recordings.recorder import capture

__all__ = ["__version__", "capture"]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """``capture``, imported when it is asked for: it needs torch, ``--help`` does not."""
    if name != "capture":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from attncheck.recordings.recorder import capture

    return capture
