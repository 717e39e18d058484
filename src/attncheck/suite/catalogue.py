"""The properties as data: found and imported without pytest running them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from attncheck.core.errors import AttncheckError
from attncheck.suite.marks import MARK

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from attncheck.suite.asking import Asked

__all__ = ["Property", "folder", "properties", "property_named"]

_PACKAGE = "attncheck_properties"
"""What they are imported as: pytest, which imports them too, has names of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Property:
    """One test of the suite.

    Attributes:
        id: ``test_causal.py::test_attention_is_exact``.
        asked: What it asks.
        summary: What must hold, in a line.
    """

    id: str
    asked: Asked
    summary: str


def folder() -> Path:
    """Where the properties are: beside the package that is installed, else of the clone.

    Raises:
        AttncheckError: where they are in neither.
    """
    package = Path(__file__).parents[1]
    for found in (package / "properties", package.parents[1] / "properties"):
        if (found / "__init__.py").is_file():
            return found
    raise AttncheckError(f"the properties are not here: {package} has none, nor its clone.")


@cache
def properties() -> tuple[Property, ...]:
    """All of them, in the order of files and of tests in each."""
    found = folder()
    _package(found)
    return tuple(
        each
        for path in sorted(found.glob("test_*.py"))
        for each in _of_module(importlib.import_module(f"{_PACKAGE}.{path.stem}"), path.name)
    )


def property_named(name: str) -> Property:
    """The property of this id.

    Raises:
        AttncheckError: where there is none: a plan of another version.
    """
    found = next((each for each in properties() if each.id == name), None)
    if found is None:
        raise AttncheckError(f"there is no property {name!r} in this version.")
    return found


def _package(found: Path) -> None:
    """Import the package itself, from wherever it is."""
    if _PACKAGE in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, found / "__init__.py", submodule_search_locations=[str(found)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE] = module
    spec.loader.exec_module(module)


def _of_module(module: ModuleType, file: str) -> Iterator[Property]:
    for name, test in vars(module).items():
        for mark in getattr(test, "pytestmark", ()):
            if mark.name == MARK:
                said = (test.__doc__ or "").strip().partition("\n")[0]
                yield Property(id=f"{file}::{name}", asked=mark.args[0], summary=said)
