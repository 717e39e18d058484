"""A pytest plugin that replaces a function of somebody's module on import.

``pytest -p attncheck.faults.replacement_plugin`` with ATTNCHECK_REPLACED naming a file that
``Replacement`` was written to. Whoever imports the function gets ours, before or after; not who had
it before pytest began, nor what the module itself made of it while it was imported.
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
_FAILURES = 3  # that are named


class Replacement(msgspec.Struct, frozen=True, kw_only=True):
    """Names of a function and of the kernel in its place."""

    module: str  # where the function is
    name: str  # its name there
    kernel: str  # what ``subjects.load.load`` takes
    right: str  # the same without a fault; empty where nothing is to be compared
    convention: str  # how the function is called; empty for what it shows
    log: str  # file that gets what happened, a JSON line each time something is new


class _EventLog:
    """Logs each event once; several processes may write to one file."""

    def __init__(self, file: str) -> None:
        self._file, self._logged = file, set[tuple[str, str]]()

    def __call__(self, kind: str, of: str = "") -> None:
        if (kind, of) in self._logged:
            return
        self._logged.add((kind, of))
        line = json.dumps({"kind": kind, "of": of}) + "\n"
        # One write of one line, appended: processes of a suite do not mix theirs.
        file = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)


class _Finder(MetaPathFinder):
    """Finds the module as others do, and has ``replace`` called on it once it is executed."""

    def __init__(self, name: str, replace: Callable[[ModuleType], None]) -> None:
        self._name, self._replace = name, replace

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The one of the next finder that knows it."""
        # Every other module is found as it would be without us.
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
    """Another loader, but for what comes after."""

    def __init__(self, loader: Any, replace: Callable[[ModuleType], None]) -> None:
        self._loader, self._replace = loader, replace

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return what the other loader does."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Execute as the other loader does; then replace the function."""
        self._loader.exec_module(module)
        self._replace(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _replacing(replacement: Replacement, log: _EventLog) -> Callable[[ModuleType], None]:
    def replace(module: ModuleType) -> None:
        function = getattr(module, replacement.name, None)
        # Calling a class gives an object, for which no kernel can stand in.
        if not callable(function) or isinstance(function, type):
            log("absent", "" if function is None else type(function).__name__)
            return
        ours = _make_shim(function, replacement, log)
        setattr(module, replacement.name, ours)
        _everywhere(function, ours)
        log("replaced")

    return replace


def _make_shim(function: Callable[..., Any], replacement: Replacement, log: _EventLog) -> Any:
    from attncheck.faults.kernel_shim import ShimSettings, make_shim
    from attncheck.subjects.conventions import declarations
    from attncheck.subjects.conventions.declarations import READERS
    from attncheck.subjects.load import load_subject

    shown = [name for name in READERS if declarations.CONVENTIONS[name].claims(function)]
    return make_shim(
        function,
        ShimSettings(
            kernel=load_subject(replacement.kernel),
            right=load_subject(replacement.right) if replacement.right else None,
            convention=replacement.convention or (*shown, "sdpa")[0],
            log_event=log,
        ),
    )


def _everywhere(function: Callable[..., Any], ours: Any) -> None:
    """Replace it where it was imported already, but in attncheck's and torch's own modules."""
    for name, module in [*sys.modules.items()]:
        # Ours would replace the function by itself, and torch's own stays what it is.
        if name.partition(".")[0] in {"attncheck", "torch"} or name.startswith("planted_"):
            continue
        for key, value in [*getattr(module, "__dict__", {}).items()]:
            if value is function:
                setattr(module, key, ours)


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Replace before anything of the project is imported, and after its folders can be."""
    with open(os.environ[VARIABLE], "rb") as file:  # noqa: PTH123  # before pathlib is needed
        replacement = msgspec.json.decode(file.read(), type=Replacement)
    log = _EventLog(replacement.log)
    replace = _replacing(replacement, log)
    if replacement.module in sys.modules:
        replace(sys.modules[replacement.module])
    else:
        sys.meta_path.insert(0, _Finder(replacement.module, replace))
        importlib.invalidate_caches()
    early_config.pluginmanager.register(_Failures(log))


class _Failures:
    """Names the first tests that fail."""

    def __init__(self, log: _EventLog) -> None:
        self._log, self._left = log, _FAILURES

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a test."""
        self._name(report.nodeid, failed=report.failed)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported, say."""
        self._name(report.nodeid, failed=report.failed)

    def _name(self, test: str, *, failed: bool) -> None:
        if failed and self._left:
            self._left -= 1
            self._log("failed", test)
