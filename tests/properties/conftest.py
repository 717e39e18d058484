"""The properties and the planted kernels as objects, and the search for a failing Case."""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import NoSuchExample
from tests.planted_kernels import kernel

from attncheck.cases.tier import TIERS
from attncheck.inputs.problem import Case
from attncheck.records.record import FAILED_STATUSES
from attncheck.suite.property_spec import PropertySpec, cases
from attncheck.suite.pytest_options import MARK
from attncheck.suite.under_test import UnderTest

ROOT = Path(__file__).parents[2]
TIER = TIERS["pr"]


@cache
def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"of_the_suite_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Suite:
    """The property suite: its properties, kernels under test, and searches for failing Cases."""

    @property
    @cache  # noqa: B019  # one object, as long as the session
    def properties(self) -> dict[str, PropertySpec]:
        """The PropertySpec of each property, by ``module.test`` without ``test_``."""
        specs = {}
        for path in sorted((ROOT / "properties").glob("test_*.py")):
            for name, test in vars(_load(path)).items():
                marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == MARK]
                if name.startswith("test_") and marks:
                    short = f"{path.stem.removeprefix('test_')}.{name.removeprefix('test_')}"
                    specs[short] = marks[0].args[0]
        return specs

    def under_test(self, fault: str, family: str, dtype: str) -> UnderTest:
        """A planted kernel, as the suite tests it."""
        subject = kernel(fault)
        return UnderTest(subject.name, subject, "cpu", dtype=dtype, family=family, tier=TIER)

    def find_failure(
        self, kernel: UnderTest, spec: PropertySpec, *, shrink: bool = False
    ) -> Case | None:
        """A Case that ``kernel`` fails, of as many as the tier draws; None if it fails none."""
        phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
        try:
            return hypothesis.find(
                cases(kernel, spec),
                lambda case: self.fails(kernel, case),
                settings=settings(
                    max_examples=TIER.examples,
                    derandomize=True,
                    database=None,
                    deadline=None,
                    phases=phases,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        except NoSuchExample:
            return None

    def fails(self, kernel: UnderTest, case: Case) -> bool:
        """Whether ``kernel`` fails ``case``."""
        return kernel.answer(case).status in FAILED_STATUSES


@pytest.fixture(scope="session")
def suite():
    return Suite()
