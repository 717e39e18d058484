"""Which names of a module are FlexAttention mods: told by their signatures."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

__all__ = ["Kind", "defined_at", "kind_of_mod", "mods_in"]

Kind = Literal["mask", "score mod"]
_KINDS: dict[int, Kind] = {4: "mask", 5: "score mod"}


def mods_in(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """The mask and score mods of ``module`` by name, in the order in which they are bound.

    Those are its public callables that take exactly four or five positional arguments, whatever
    made them: a ``def``, a factory, ``functools.partial``. What was imported from elsewhere by its
    own name is not the module's; ``__all__``, where there is one, says what is public.
    """
    public = getattr(module, "__all__", None)
    return {
        name: value
        for name, value in vars(module).items()
        if (name in public if public is not None else not name.startswith("_"))
        and kind_of_mod(value)
        and not _imported(value, module)
    }


def kind_of_mod(value: object) -> Kind | None:
    """``mask`` for four positional arguments, ``score mod`` for five, None for anything else."""
    if not callable(value) or inspect.isclass(value):
        return None
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):  # one that is written in C says nothing
        return None
    given = [p for p in parameters if p.default is p.empty]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if any(p.kind not in positional for p in given):
        return None
    return _KINDS.get(len(given))


def defined_at(value: object) -> int | None:
    """The line of its file where a mod is defined; None where nothing says so."""
    while hasattr(value, "func"):  # a functools.partial, perhaps of another
        value = value.func
    code = getattr(value, "__code__", None) or getattr(type(value).__call__, "__code__", None)
    line: int | None = getattr(code, "co_firstlineno", None)
    return line


def _imported(value: object, module: ModuleType) -> bool:
    home = getattr(value, "__module__", module.__name__)
    # What a factory of another module makes is this module's own.
    made = "<locals>" in getattr(value, "__qualname__", "")
    function = inspect.isfunction(value)
    return function and home != module.__name__ and not made
