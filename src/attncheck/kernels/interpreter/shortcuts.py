"""Which of the interpreter's builtins have a shorter way, while a launch runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncheck.kernels.interpreter.accesses import indexed, loaded, selected, to_dtype
from attncheck.kernels.interpreter.operators import operators
from attncheck.kernels.interpreter.plans import Types

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["shortcuts"]


def shortcuts(interp: Any) -> Callable[[Any, str, Any], Any]:
    """(owner, name, the interpreter's own builtin) → what is to stand in its place."""
    types = Types(interp)
    of_tensors = operators(types)
    of_tensors["__getitem__"] = lambda stock: indexed(types, stock)
    of_tensors["to"] = lambda stock: to_dtype(types, stock)

    def load_array(*of: Any) -> Any:
        return interp._interpreter.load(*of)  # looked up each time: who watches accesses is in it

    of_language: dict[str, Callable[[Any], Any]] = {
        "where": lambda stock: selected(types, stock),
        "load": lambda stock: loaded(types, stock, load_array),
    }
    modules = (interp.tl, interp.tl.core)

    def shorter(owner: Any, name: str, stock: Any) -> Any:
        table = of_tensors if owner is types.tensor else {}
        if owner in modules:
            table = of_language
        return table[name](stock) if name in table else stock

    return shorter
