"""The properties as data, and Cases of a property drawn without asking them."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import FailedHealthCheck, Unsatisfiable

from attncheck.core.errors import AttncheckError
from attncheck.suite.property_session import UnderTest, cases
from attncheck.suite.pytest_options import MARK, settings_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from attncheck.inputs.problem import Case, Problem
    from attncheck.suite.property_session import PropertySpec

__all__ = [
    "DrawingKernel",
    "Property",
    "draw_property_cases",
    "properties",
    "properties_folder",
    "property_named",
]


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
    asked: PropertySpec
    summary: str


def properties_folder() -> Path:
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
    found = properties_folder()
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


_PATIENCE = 1500  # questions without a Case; the nearest that is taken may be the 500th


class _NothingTakenError(BaseException):
    """No Exception, which Hypothesis would keep for a failure of the test."""


class DrawingKernel(UnderTest):
    """A kernel that is asked what it takes; where it never takes anything, not for ever."""

    waited = 0

    def supports(self, problem: Problem) -> bool:
        """As of every kernel."""
        self.waited += 1
        if self.waited > _PATIENCE:
            raise _NothingTakenError
        return super().supports(problem)


def draw_property_cases(
    kernel: DrawingKernel, asked: PropertySpec, test: str, count: int, *, seed: int = 0
) -> list[Case]:
    """``count`` Cases of a property for the kernel's dtype and family; fewer where it takes fewer.

    They follow from the arguments and from what the kernel takes: each kernel, dtype and family
    has Cases of its own, and the same ones next time, on any machine.

    Args:
        kernel: Which Problems it takes is asked of it, and nothing else.
        asked: The property.
        test: Its id.
        count: How many at most. Hypothesis' first is the plainest there is, and stands for itself
            only where it draws no other.
        seed: Which draw.

    Returns:
        None where the kernel takes none; ``kernel.refused`` says why.
    """
    kernel.begin()
    kernel.waited = 0
    found: dict[str, Case] = {}

    def collect(case: Case) -> None:
        kernel.waited = 0
        found.setdefault(case.id, case)

    patient = settings(
        settings_of(),
        database=None,
        phases=[Phase.generate],
        max_examples=count + 1,
        # Hundreds more would be drawn until Hypothesis gave up.
        suppress_health_check=set(HealthCheck) - {HealthCheck.filter_too_much},
    )
    chosen = f"{seed} {test} {_called(kernel.name)} {kernel.dtype} {kernel.family}"
    number = int.from_bytes(hashlib.sha256(chosen.encode()).digest()[:8], "big")
    # Where of the first few dozen most are refused, those that are not are asked.
    with suppress(FailedHealthCheck, Unsatisfiable, _NothingTakenError):
        hypothesis.seed(number)(patient(given(case=cases(kernel, asked))(collect)))()
    those = list(found.values())
    return those[1 : count + 1] or those


def _called(name: str) -> str:
    """``file.py::function`` wherever the file lies: a draw is the same in every clone."""
    file, mark, function = name.rpartition("::")
    return f"{PurePath(file).name}{mark}{function}"
