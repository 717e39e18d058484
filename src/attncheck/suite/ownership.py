"""Whose a test's argument is: the names ``kernel`` and ``problem`` are not ours alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

__all__ = ["is_ours"]

_PLUGIN = "attncheck.pytest_plugin"


def is_ours(metafunc: pytest.Metafunc, name: str) -> bool:
    """Whether the argument ``name`` is the plugin's fixture, and nobody has parametrised it.

    A fixture of the same name in a conftest, a class or a module is its author's.
    """
    definitions = getattr(metafunc, "_arg2fixturedefs", {}).get(name)
    if not definitions or getattr(definitions[-1].func, "__module__", "") != _PLUGIN:
        return False
    if any(name in _names(mark) for mark in metafunc.definition.iter_markers("parametrize")):
        return False
    return not any(name in call.params for call in getattr(metafunc, "_calls", ()))


def _names(mark: Any) -> list[str]:
    """Argument names of ``@pytest.mark.parametrize``."""
    names = mark.args[0] if mark.args else mark.kwargs.get("argnames", ())
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
