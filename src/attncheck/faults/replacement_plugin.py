"""A pytest plugin that replaces a function of a user's module on import.

``pytest -p attncheck.faults.replacement_plugin`` reads a ``Replacement`` from the file that
ATTNCHECK_REPLACED names. Every import of the function gets the replacement. It is not replaced in
objects made before pytest began, nor in those that its module derived from it on import.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    import pytest

VARIABLE = "ATTNCHECK_REPLACED"
_FAILURES = 3  # failing tests that are logged


class Replacement(msgspec.Struct, frozen=True, kw_only=True):
    """Names of a function and of the kernel that takes its place."""

    module: str  # where the function is
    name: str  # its name there
    kernel: str  # the kernel's name for ``subjects.load.load``
    right: str  # the kernel without a fault, to compare with; empty to compare nothing
    convention: str  # how the function is called; empty to infer it from the function
    log: str  # file for events, a JSON line for each new one


class _EventLog:
    """Logs each event once; several processes may write to one file."""

    def __init__(self, file: str) -> None:
        self._file, self._logged = file, set[tuple[str, str]]()

    def __call__(self, kind: str, of: str = "") -> None:
        if (kind, of) in self._logged:
            return
        self._logged.add((kind, of))
        line = json.dumps({"kind": kind, "of": of}) + "\n"
        # Append each line with a single write, so that lines of several processes do not mix.
        file = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)


class _Finder(MetaPathFinder):
    """Finds the module through other finders; ``replace`` is called on it after its execution."""

    def __init__(self, name: str, replace: Callable[[ModuleType], None]) -> None:
        self._name, self._replace = name, replace

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the next finder that knows the module, with a wrapped loader."""
        # All other modules are left to the other finders.
        if fullname != self._name:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._replace)
                return spec
        return None


class _Loader(Loader):
    """Wraps a loader, and replaces the function after the module's execution."""

    def __init__(self, loader: Any, replace: Callable[[ModuleType], None]) -> None:
        self._loader, self._replace = loader, replace

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as the wrapped loader does."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module as the wrapped loader does, then replace the function."""
        self._loader.exec_module(module)
        self._replace(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _make_replace(replacement: Replacement, log: _EventLog) -> Callable[[ModuleType], None]:
    def replace(module: ModuleType) -> None:
        function = getattr(module, replacement.name, None)
        # A class cannot be replaced: calling it gives an object, and not outputs.
        if not callable(function) or isinstance(function, type):
            log("absent", "" if function is None else type(function).__name__)
            return
        ours = _make_shim(function, replacement, log)
        setattr(module, replacement.name, ours)
        _replace_imported(function, ours)
        log("replaced")

    return replace


def _make_shim(function: Callable[..., Any], replacement: Replacement, log: _EventLog) -> Any:
    from attncheck.faults.kernel_shim import ShimSettings, make_shim
    from attncheck.subjects.conventions import declarations
    from attncheck.subjects.conventions.declarations import READERS
    from attncheck.subjects.load import load_subject

    claiming = [name for name in READERS if declarations.CONVENTIONS[name].claims(function)]
    return make_shim(
        function,
        ShimSettings(
            kernel=load_subject(replacement.kernel),
            right=load_subject(replacement.right) if replacement.right else None,
            convention=replacement.convention or (*claiming, "sdpa")[0],
            log_event=log,
        ),
    )


def _replace_imported(function: Callable[..., Any], ours: Any) -> None:
    """Replace the function in modules that have imported it, except attncheck's and torch's."""
    for name, module in [*sys.modules.items()]:
        # In attncheck the kernel would call itself; torch's own modules stay unchanged.
        if name.partition(".")[0] in {"attncheck", "torch"} or name.startswith("planted_"):
            continue
        for key, value in [*getattr(module, "__dict__", {}).items()]:
            if value is function:
                setattr(module, key, ours)


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Replace the function before the project is imported, but once its folders are importable."""
    with open(os.environ[VARIABLE], "rb") as file:  # noqa: PTH123  # before pathlib is needed
        replacement = msgspec.json.decode(file.read(), type=Replacement)
    log = _EventLog(replacement.log)
    replace = _make_replace(replacement, log)
    if replacement.module in sys.modules:
        replace(sys.modules[replacement.module])
    else:
        sys.meta_path.insert(0, _Finder(replacement.module, replace))
        importlib.invalidate_caches()
    early_config.pluginmanager.register(_Failures(log))


class _Failures:
    """Logs the names of the first tests that fail."""

    def __init__(self, log: _EventLog) -> None:
        self._log, self._remaining = log, _FAILURES

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Log a test if a phase of it failed."""
        self._name(report.nodeid, failed=report.failed)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Log a collector that failed, such as a file that cannot be imported."""
        self._name(report.nodeid, failed=report.failed)

    def _name(self, test: str, *, failed: bool) -> None:
        if failed and self._remaining:
            self._remaining -= 1
            self._log("failed", test)
