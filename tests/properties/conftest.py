"""The properties and the planted kernels as objects, and the search for a Case that fails."""

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
def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"of_the_suite_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


class Suite:
    """What the tests of the suite need of it."""

    @property
    @cache  # noqa: B019  # one object, as long as the session
    def properties(self) -> dict[str, PropertySpec]:
        """What each property asks, by ``module.test`` without ``test_``."""
        found = {}
        for path in sorted((ROOT / "properties").glob("test_*.py")):
            for name, test in vars(_module(path)).items():
                marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == MARK]
                if name.startswith("test_") and marks:
                    short = f"{path.stem.removeprefix('test_')}.{name.removeprefix('test_')}"
                    found[short] = marks[0].args[0]
        return found

    def under_test(self, fault: str, family: str, dtype: str) -> UnderTest:
        """A planted kernel as the suite asks it."""
        subject = kernel(fault)
        return UnderTest(subject.name, subject, "cpu", dtype=dtype, family=family, tier=TIER)

    def failing(
        self, kernel: UnderTest, asked: PropertySpec, *, shrink: bool = False
    ) -> Case | None:
        """A Case that ``kernel`` fails, among as many as the tier draws; None if there is none."""
        phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
        try:
            return hypothesis.find(
                cases(kernel, asked),
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
        """Whether it does."""
        return kernel.answer(case).status in FAILED_STATUSES


@pytest.fixture(scope="session")
def suite():
    return Suite()
