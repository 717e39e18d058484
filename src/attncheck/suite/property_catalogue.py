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
from attncheck.suite.pytest_options import MARK

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from attncheck.suite.property_spec import PropertySpec

_PACKAGE = "attncheck_properties"
"""What they are imported as: pytest, which imports them too, has names of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Property:
    """One test of the suite."""

    id: str  # ``test_causal.py::test_attention_is_exact``
    spec: PropertySpec  # what it asks
    summary: str  # what must hold, in a line


def properties_folder() -> Path:
    """Return where the properties are: beside the package that is installed, else of the clone.

    Raises:
        AttncheckError: where they are in neither.
    """
    package = Path(__file__).parents[1]
    for folder in (package / "properties", package.parents[1] / "properties"):
        if (folder / "__init__.py").is_file():
            return folder
    raise AttncheckError(f"the properties are not here: {package} has none, nor its clone.")


@cache
def properties() -> tuple[Property, ...]:
    """Return all of them, in the order of files and of tests in each."""
    folder = properties_folder()
    _import_package(folder)
    return tuple(
        each
        for path in sorted(folder.glob("test_*.py"))
        for each in _of_module(importlib.import_module(f"{_PACKAGE}.{path.stem}"), path.name)
    )


def property_named(name: str) -> Property:
    """Return the property of this id.

    Raises:
        AttncheckError: where there is none: a plan of another version.
    """
    match = next((each for each in properties() if each.id == name), None)
    if match is None:
        raise AttncheckError(f"there is no property {name!r} in this version.")
    return match


def _import_package(folder: Path) -> None:
    """Import the package itself, from wherever it is."""
    if _PACKAGE in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Before it is executed: its files import one another from the package.
    sys.modules[_PACKAGE] = module
    spec.loader.exec_module(module)


def _of_module(module: ModuleType, file: str) -> Iterator[Property]:
    for name, test in vars(module).items():
        for mark in getattr(test, "pytestmark", ()):
            if mark.name == MARK:
                summary = (test.__doc__ or "").strip().partition("\n")[0]
                yield Property(id=f"{file}::{name}", spec=mark.args[0], summary=summary)
