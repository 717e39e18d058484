"""attncheck: is the difference between your kernel and exact attention only rounding?"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from attncheck.core import VERSION

if TYPE_CHECKING:
    from attncheck.cases.strategies.problems import problems
    from attncheck.inputs.capture import capture
    from attncheck.suite.python_api import assert_attention_close, check, given
    from attncheck.verify.environment import repair_interpreter

__all__ = [
    "__version__",
    "assert_attention_close",
    "capture",
    "check",
    "given",
    "problems",
    "repair_interpreter",
]

__version__ = VERSION

# Imported on first use, since torch and Hypothesis, which they need, would slow down ``--help``.
_MODULES = {
    "assert_attention_close": "attncheck.suite.python_api",
    "capture": "attncheck.inputs.capture",
    "check": "attncheck.suite.python_api",
    "given": "attncheck.suite.python_api",
    "problems": "attncheck.cases.strategies.problems",
    "repair_interpreter": "attncheck.verify.environment",
}


def __getattr__(name: str) -> object:
    """Import a public name from its module and return it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """Return the public names, including those not imported yet."""
    return __all__
