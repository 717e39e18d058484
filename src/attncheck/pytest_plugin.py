"""pytest plugin: which kernels the properties judge.

``--kernel NAME`` (repeatable) names a kernel of attncheck's or ``path/to/file.py::name``. A test
that asks for the fixture ``attncheck_kernel`` runs once for each. Nothing heavy is imported until
a test asks for it: this module is loaded by every pytest of the environment.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

    from attncheck.examine.under_test import UnderTest

__all__ = ["DEFAULT_KERNELS", "attncheck_kernel", "load_profile"]

DEFAULT_KERNELS = ("triton-flash2", "ideal")
_FIXTURE = "attncheck_kernel"
_LOADED = pytest.StashKey["dict[str, UnderTest]"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--kernel``."""
    parser.getgroup("attncheck").addoption(
        "--kernel",
        action="append",
        dest="attncheck_kernels",
        metavar="NAME",
        help="kernel that the properties judge: a name (attncheck list) or file.py::subject "
        f"(repeatable; default: {' and '.join(DEFAULT_KERNELS)})",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Loads the kernels that were asked for, so that a wrong name ends pytest at once."""
    config.stash[_LOADED] = {}
    for name in _asked(config):
        _load(config, name, required=True)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each kernel, its name in the test's id."""
    if _FIXTURE not in metafunc.fixturenames:
        return
    # Collected before any test runs: none has imported triton yet in a way that cannot be undone.
    _device()
    names = _asked(metafunc.config) or DEFAULT_KERNELS
    metafunc.parametrize(_FIXTURE, names, ids=map(_id, names), indirect=True, scope="session")


@pytest.fixture(scope="session")
def attncheck_kernel(request: pytest.FixtureRequest) -> UnderTest:
    """The kernel under test, on the GPU where there is one; else Triton is interpreted."""
    name: str = request.param
    return _load(request.config, name, required=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Says why nothing was tested, where a kernel takes none of the drawn problems."""
    try:
        return (yield)
    except Exception as error:
        kernel = getattr(item, "funcargs", {}).get(_FIXTURE)
        if kernel is None or not kernel.refused or not _found_no_example(error):
            raise
        message = f"nothing was tested: {kernel.name} takes no problem of this test"
        pytest.fail(f"{message} on {kernel.device}: {kernel.refused}.", pytrace=False)


def load_profile() -> None:
    """Registers the Hypothesis profiles and makes ``attncheck-dev`` the current one.

    ``--hypothesis-profile attncheck-ci`` chooses the other: no randomness, more examples.
    """
    from hypothesis import HealthCheck, Phase, settings

    common = settings(
        deadline=None,  # an interpreted kernel takes as long as it takes
        # A kernel that takes few problems leaves few examples, and none is reported as a failure.
        # Our own message explains; Hypothesis' needs as many runs again.
        phases=[phase for phase in Phase if phase is not Phase.explain],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    settings.register_profile("attncheck-dev", common, max_examples=60)
    settings.register_profile("attncheck-ci", common, max_examples=150, derandomize=True)
    settings.load_profile("attncheck-dev")


def _asked(config: pytest.Config) -> tuple[str, ...]:
    return tuple(dict.fromkeys(config.getoption("attncheck_kernels") or ()))


def _device() -> str:
    """Where kernels run, and Triton made ready for it."""
    from attncheck.examine.environment import default_device, prepare

    device = default_device()
    prepare(device)
    return device


def _load(config: pytest.Config, name: str, *, required: bool) -> UnderTest:
    """The kernel called ``name``, loaded once; an absent one that was not asked for is skipped."""
    loaded = config.stash[_LOADED]
    if name not in loaded:
        from attncheck.errors import UsageError
        from attncheck.examine.under_test import UnderTest
        from attncheck.subjects.load import load

        device = _device()
        try:
            subject = load(name)
        except UsageError as error:
            raise pytest.UsageError(f"--kernel: {error}") from None
        reason = subject.absent(device)
        if reason and required:
            raise pytest.UsageError(f"--kernel: {name} cannot run on {device}: {reason}.")
        if reason:
            pytest.skip(f"{name} cannot run on {device}: {reason}")
        loaded[name] = UnderTest(name, subject, device)
    return loaded[name]


def _id(name: str) -> str:
    """``wide`` of ``some/file.py`` is ``file.wide``: a ``::`` would cut the test's own id."""
    path, separator, subject = name.rpartition("::")
    return f"{Path(path).stem}.{subject}" if separator else name


def _found_no_example(error: Exception) -> bool:
    if "hypothesis" not in sys.modules:
        return False
    from hypothesis.errors import Unsatisfiable

    return isinstance(error, Unsatisfiable)
