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
def __getattr__(name: str) -> object:
    """Import and return a public name of this room."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "under_test" if name == "UnderTest" else "property_spec"
    return getattr(import_module(f"{__name__}.{module}"), name)
