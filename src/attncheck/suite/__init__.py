"""The property suite under pytest: properties, kernels under test, and options."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attncheck.suite.property_spec import PropertySpec, asks, cases
    from attncheck.suite.under_test import UnderTest

__all__ = ["PropertySpec", "UnderTest", "asks", "cases"]

# Imported lazily: pytest's plugin reads its options from this room, and must not make every pytest
# in the environment load torch and Hypothesis.
_MODULES = {
    "PropertySpec": "attncheck.suite.property_spec",
    "UnderTest": "attncheck.suite.under_test",
    "asks": "attncheck.suite.property_spec",
    "cases": "attncheck.suite.property_spec",
}


def __getattr__(name: str) -> object:
    """Import and return a public name of this room."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
