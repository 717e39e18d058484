"""The property suite as pytest runs it: what is asked of which kernel, how hard, what is kept."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attncheck.suite.property_session import PropertySpec, UnderTest, asks, cases

__all__ = ["PropertySpec", "UnderTest", "asks", "cases"]

# Imported when they are asked for: pytest's plugin reads its options from this room, and must not
# make every pytest of the environment load torch and Hypothesis.
_MODULES = {
    "PropertySpec": "attncheck.suite.property_session",
    "UnderTest": "attncheck.suite.property_session",
    "asks": "attncheck.suite.property_session",
    "cases": "attncheck.suite.property_session",
}


def __getattr__(name: str) -> object:
    """What this room shows of its modules."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
