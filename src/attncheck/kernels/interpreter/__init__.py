"""Triton's CPU interpreter, repaired so that it computes what a GPU computes.

The stock interpreter computes with bf16 and fp8 bit patterns as if they were integers, rounds casts
wrongly and has no tf32. ``enable()`` repairs that in this process; the import changes nothing.

Remaining differences from a GPU: exp, log, sin, division and their like are correctly rounded or
nearly so, where a GPU approximates; ``a*b + c`` is not fused; sums run in another order; fp8
products accumulate in full fp32; zeros have no order under min and max; programs run one after
the other; nothing checks bounds. Two casts of Triton 3.6 on an H200 are not followed: e5m2 to
bf16 reads inf and NaN as 2**16 and more, and fp32 to e5m2 toward zero overflows to infinity. The
older fp8 formats (e4b15, e4b8, e5b16) and ``tl.dot_scaled`` are not repaired.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attncheck.core.errors import InterpreterUnavailable
from attncheck.kernels.interpreter.gpu_arithmetic import lookup

if TYPE_CHECKING:
    from attncheck.kernels.interpreter.gpu_arithmetic import Repair

__all__ = ["enable", "enabled", "repairs", "stock"]

_PRECISIONS = ("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6")
_STOCK: dict[str, Any] = {}
_INSTALLED: list[str] = []


def _repairs() -> tuple[Repair, ...]:
    # Imported here since only a process that uses the interpreter needs numpy and ml_dtypes.
    from attncheck.kernels.interpreter import gpu_arithmetic, speedups

    return (
        gpu_arithmetic.CASTS,
        gpu_arithmetic.VALUES,
        gpu_arithmetic.PRODUCTS,
        gpu_arithmetic.REDUCTIONS,
        speedups.LAUNCHES,
    )


def _import_interpreter() -> Any:
    """Import the interpreter's module in interpreter mode, or raise InterpreterUnavailable."""
    imported = sys.modules.get("triton.language")
    if imported is not None and isinstance(
        imported.sum, importlib.import_module("triton.runtime.jit").JITFunction
    ):
        raise InterpreterUnavailable(
            "triton was imported in compiled mode before the interpreter was asked for: set "
            "TRITON_INTERPRET=1 in the environment, or call enable() before triton is imported."
        )
    old_value = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        interp = importlib.import_module("triton.runtime.interpreter")
    except ImportError as error:
        if old_value is None:
            del os.environ["TRITON_INTERPRET"]
        raise InterpreterUnavailable(
            f"triton's interpreter cannot be imported ({error}): pip install 'triton>=3.6'."
        ) from error
    knobs = getattr(sys.modules["triton"], "knobs", None)
    if knobs is not None:
        knobs.runtime.interpret = True
    return interp


def enable() -> None:
    """Switch this process to Triton's CPU interpreter and repair it; a second call does nothing.

    Sets TRITON_INTERPRET=1 and imports triton. All repairs go in or, if one cannot, none.

    Raises:
        InterpreterUnavailable: triton is missing, was imported in compiled mode before, or lacks
            a name that a repair needs.
    """
    if _INSTALLED:
        return
    interp = _import_interpreter()
    planned = {repair.description: repair.replacements(interp) for repair in _repairs()}
    for methods in planned.values():
        for name, replacement in methods.items():
            owner, _, attribute = name.rpartition(".")
            _STOCK[name] = lookup(interp, name)
            setattr(lookup(interp, owner) if owner else interp, attribute, replacement)
    builder = interp.interpreter_builder
    builder.options = replace(
        builder.options, sanitize_overflow=False, allowed_dot_input_precisions=_PRECISIONS
    )
    _INSTALLED.extend(planned)


def enabled() -> bool:
    """Return whether this process runs Triton kernels in the repaired interpreter."""
    return bool(_INSTALLED)


def repairs() -> tuple[str, ...]:
    """Return what is repaired in this process, for a report; empty if ``enable`` was not called."""
    return tuple(_INSTALLED)


def stock(name: str) -> Any:
    """Return the interpreter's function ``name`` from before the repair, e.g. ``"_convert_float"``.

    Tests use it to show that their checks of the repair can fail. Raises KeyError for a name that
    no repair replaced.
    """
    return _STOCK[name]
