"""Which names of a module are FlexAttention mods: told by their signatures."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attncheck.errors import UsageError

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

    Raises:
        UsageError: where ``__all__`` is no list or tuple.
    """
    public = vars(module).get("__all__")
    if public is not None and not isinstance(public, list | tuple):
        kind = type(public).__name__
        raise UsageError(f"__all__ of {_file_of(module)} is {kind}: it must be a list of names.")
    return {
        name: value
        for name, value in vars(module).items()
        if (name in public if public is not None else not name.startswith("_"))
        and kind_of_mod(value)
        and not _imported(value, module)
    }


def kind_of_mod(value: object) -> Kind | None:
    """``mask`` for four positional arguments, ``score mod`` for five, None for anything else."""
    try:
        if not callable(value) or inspect.isclass(value):
            return None
        parameters = inspect.signature(value).parameters.values()
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001  # in C, or somebody's own __signature__: it says nothing
        return None
    given = [p for p in parameters if p.default is p.empty]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if any(p.kind not in positional for p in given):
        return None
    return _KINDS.get(len(given))


def defined_at(value: object) -> int | None:
    """The line of its file where a mod is defined; None where nothing says so."""
    while isinstance(value, functools.partial):
        value = value.func
    if not inspect.isfunction(value):  # a method of its own, or of its class's
        value = value if inspect.ismethod(value) else type(value).__call__
    code = getattr(value, "__code__", None)
    line: int | None = getattr(code, "co_firstlineno", None)
    return line


def _imported(value: object, module: ModuleType) -> bool:
    if not inspect.isfunction(value):
        return False
    # What a factory of another module makes is this module's own.
    return value.__module__ != module.__name__ and "<locals>" not in value.__qualname__


def _file_of(module: ModuleType) -> str:
    return Path(module.__file__).name if module.__file__ else module.__name__
